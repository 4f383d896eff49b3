"""What keeps groups between explorers and trainer, and chooses those of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trivium.types import Group, Lease, Sample


class Buffer(Protocol):
    """Issues slots, keeps finished groups, gives them to the trainer. Journals before it counts.

    Any number of explorers lease and put, one trainer takes; they may be in other processes. A buffer that several
    processes reach (`shared`) loses no group and gives none out twice when one of them dies at any moment.
    """

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        """The right to roll out a slot with the version that `owner` has loaded. Waits for one; without `wait`, returns
        None where none is free.

        Raises StopAsyncIteration once the buffer is closed.
        """
        ...

    async def put(self, owner: str, group: Group) -> None:
        """A finished group, failures included. Journaled before it counts. One that was `dropped` is counted and its
        slot given up: another is issued for it. One of an attempt that was cancelled is forgotten.

        Raises DataError where `owner` never held that slot and attempt, or put it before."""
        ...

    async def release(self, owner: str) -> int:
        """Reissues the leases of an owner that died or left; returns their number."""
        ...

    async def cancelled_leases(self, owner: str) -> Sequence[Lease]:
        """Waits until leases of `owner` are cancelled (their groups would be too stale); returns them. The slot may
        have been leased again, with a higher `attempt`, even to the same owner."""
        ...

    async def take(self, count: int, version: int) -> list[Group]:
        """Waits for `count` groups to train version `version` on; evicts groups that became too stale, and cancels
        leases whose groups would be too stale.

        Raises StopAsyncIteration once the buffer is closed.
        """
        ...

    async def refuse(self, count: int) -> None:
        """So many of the groups taken last will not be trained on, or the step needs so many more than the schedule
        says: that many further slots are issued for the same version. Called between two `take` of one step."""
        ...

    async def retry_on_resume(self, slots: Sequence[int]) -> None:
        """The failures of these slots' groups end the run. The next `restore` frees the slots from the lowest of these,
        or of those not trained on, whose groups hold failures that a retry may avert (`buffers.slots`); where only
        rewards failed, with the group as `Lease.recorded`."""
        ...

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        """Groups that were taken before, by slot, as they were."""
        ...

    async def drain(self, version: int) -> None:
        """Waits until every slot that `version` admits is rolled out, by any explorer, or its groups would be too stale
        for the current train step."""
        ...

    async def advance(self, owner: str, version: int) -> None:
        """The explorer `owner` adopted `version`: more slots may be admitted."""
        ...

    async def counts(self) -> Mapping[str, int]:
        """Groups so far that were `evicted` as too stale, `called_off` (cancelled) during their rollout, `given_up`
        after `max_attempts`, or `dropped` by the experience pipeline."""
        ...

    async def state(self) -> dict[str, Any]:
        """State for a checkpoint; JSON values."""
        ...

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Continues from a checkpoint of `version`, or from the start of the stage where there is none."""
        ...

    async def discard(self, version: int) -> int:
        """Removes the groups of an earlier session that were sampled with `version` or a newer one and are not trained
        on yet: the weights of that version are not those of this session. Reissues their slots; returns their number.

        Called before `take` for `version`."""
        ...

    async def close(self) -> None:
        """Wakes every waiter; `lease` and `take` raise StopAsyncIteration from now on."""
        ...


class SampleStrategy(Protocol):
    """Chooses the groups of a train step: from the buffer, from replayed groups, from experts' completions."""

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
    """One step of the experience pipeline: returns the group as it is, changed or dropped. Without side effects."""

    def __call__(self, group: Group) -> Group:
        """`group.refused("why")` drops it."""
        ...
