"""The components between explorers and trainer: the buffer, the sample strategy, the operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trivium.types import Group, Lease, Sample


class Buffer(Protocol):
    """Issues slots, stores finished groups, and gives them to the trainer. Journals a group before it counts it.

    Any number of explorers lease and put, one trainer takes; they may be in other processes. A buffer that several
    processes use (`shared`) loses no group and gives none out twice, even if one of them dies at any moment.
    """

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        """Leases a slot to roll out with the version that `owner` has loaded. Waits for a free slot; without `wait`,
        returns None if none is free. Where `Schedule.equal_parts` is true, an explorer leases at most an equal part
        of the slots that may be in progress, so that all explorers which have loaded a version work.

        Raises StopAsyncIteration once the buffer is closed.
        """
        ...

    async def put(self, owner: str, group: Group) -> None:
        """Stores a finished group, failures included; journals it before it counts. Counts a `dropped` group, gives up
        its slot and issues another slot instead. Ignores the group of a cancelled attempt.

        Raises DataError if `owner` never held that slot and attempt, or has already put it."""
        ...

    async def release(self, owner: str) -> int:
        """Reissues the leases of an owner that died or left. Returns their number."""
        ...

    async def cancelled_leases(self, owner: str) -> Sequence[Lease]:
        """Waits until leases of `owner` are cancelled because their groups would be too stale, and returns them. The
        slot may already be leased again, with a higher `attempt`, even to the same owner."""
        ...

    async def take(self, count: int, version: int) -> list[Group]:
        """Waits for `count` groups to train version `version` on. Evicts groups that became too stale, and cancels
        leases whose groups would be too stale.

        Raises StopAsyncIteration once the buffer is closed.
        """
        ...

    async def refuse(self, count: int) -> None:
        """Issues `count` further slots for the same version: that many of the groups taken last are not trained on, or
        the step needs that many more than the schedule has. Called between two `take` of one step."""
        ...

    async def retry_on_resume(self, slots: Sequence[int]) -> None:
        """Records that the failures of these slots' groups end the run. From the lowest of these slots, or of the slots
        not trained on, the next `restore` frees those whose groups have failures that a retry may avert
        (`buffers.slots`). If only rewards failed, the new lease has the group as `Lease.recorded`."""
        ...

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        """Unchanged groups that were taken before, by slot."""
        ...

    async def drain(self, version: int) -> None:
        """Waits until any explorer has rolled out every slot that `version` admits, except for slots whose groups would
        be too stale for the current train step."""
        ...

    async def advance(self, owner: str, version: int) -> None:
        """Records that the explorer `owner` adopted `version`, which may admit more slots."""
        ...

    async def counts(self) -> Mapping[str, int]:
        """Counts of groups so far: `evicted` as too stale, `called_off` (cancelled) during their rollout, `given_up`
        after `max_attempts`, `dropped` by the experience pipeline, and `refused` by the trainer. The schedule counts
        those that another slot replaces (`schedule.num_replaced`)."""
        ...

    async def state(self) -> dict[str, Any]:
        """State for a checkpoint; JSON values."""
        ...

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version`, or from the start of the stage if `state` is None."""
        ...

    async def discard(self, version: int) -> int:
        """Removes the groups of an earlier session that were sampled with `version` or a newer one and are not trained
        on yet, because this session's weights of that version differ. Reissues their slots and returns their number.

        Called before `take` for `version`."""
        ...

    async def close(self) -> None:
        """Wakes every waiter. Afterwards `lease` and `take` raise StopAsyncIteration."""
        ...


class SampleStrategy(Protocol):
    """Selects the groups of a train step from the buffer, replayed groups and expert completions."""

    async def sample(self, count: int, version: int) -> Sample:
        """`count` groups to train version `version` on. Raises StopAsyncIteration at the end of the data."""
        ...

    async def refuse(self, count: int) -> None:
        """See `Buffer.refuse`."""
        ...

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; JSON values."""
        ...

    async def restore(self, state: Mapping[str, Any]) -> None: ...


class Operator(Protocol):
    """One step of the experience pipeline, without side effects: returns the group unchanged, changed or dropped."""

    def __call__(self, group: Group) -> Group:
        """`group.refused("why")` drops it."""
        ...
