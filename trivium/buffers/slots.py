"""The rules of slots, once for every buffer that issues them: admission, attempts, staleness, what a resumed run keeps.

Pure functions of the schedule and a few counts; the buffers store slots and groups.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trivium.concurrency import Waiting
from trivium.errors import DataError, RunDirError
from trivium.schedule import Schedule
from trivium.types import SERVED, Group, Trajectory

_log = logging.getLogger("trivium")
COUNTERS: tuple[str, ...] = ("given_up", "refused", "evicted", "called_off", "dropped")
"""What a buffer counts: slots given up after `max_attempts`; groups that were taken and are to be replaced; groups
evicted as too stale; leases cancelled because their groups would be; groups that the pipeline dropped."""


def admitted(schedule: Schedule, counts: Mapping[str, int], version: int) -> int:
    """The number of slots that `version` admits. A slot without a group to train on admits another in its place."""
    return schedule.admitted(version) + counts["given_up"] + counts["dropped"] + counts["refused"]


def bound(schedule: Schedule, counts: Mapping[str, int], trains: int, loaded: int | None) -> int:
    """The slots below it may be issued to an explorer that has loaded the version `loaded`; 0 where its groups could
    only be too stale for `trains`, the version that the next groups are for."""
    if loaded is None or loaded < oldest_version(schedule, trains):
        return 0
    return admitted(schedule, counts, loaded)


def drained(schedule: Schedule, counts: Mapping[str, int], trains: int, version: int, lowest: int) -> bool:
    """Whether no explorer rolls out anything more with `version`; `lowest` is the lowest slot that is leased or free.
    Where its groups could only be too stale, none does, though groups of later slots that were dropped admit more."""
    return version < oldest_version(schedule, trains) or lowest >= admitted(schedule, counts, version)


def oldest_version(schedule: Schedule, trains: int) -> int:
    """The oldest version of groups that the step from version `trains` may train on."""
    return trains - schedule.max_staleness


def next_attempt(schedule: Schedule, attempt: int) -> int | None:
    """The attempt after one that failed; None if the slot is given up."""
    return attempt + 1 if attempt + 1 < schedule.max_attempts else None


# --------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class SlotsState:
    """What a checkpoint knows of the slots: which are consumed (trained on, dropped or given up), and the attempts of
    those that are not."""

    consumed_below: int
    consumed: frozenset[int]
    """The consumed slots from `consumed_below` on."""
    attempts: dict[int, int]
    counts: dict[str, int]

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> SlotsState:
        """From a checkpoint; None is the start of a stage."""
        if state is None:
            return cls(0, frozenset(), {}, dict.fromkeys(COUNTERS, 0))
        below, consumed = state["consumed_below"], frozenset(state["consumed"])
        attempts = {int(slot): attempt for slot, attempt in state["attempts"].items()}
        attempts = {slot: attempt for slot, attempt in attempts.items() if slot >= below and slot not in consumed}
        return cls(below, consumed, attempts, {name: state[name] for name in COUNTERS})

    def to_json(self) -> dict[str, Any]:
        return {
            "consumed_below": self.consumed_below,
            "consumed": sorted(self.consumed),
            "attempts": {str(slot): attempt for slot, attempt in sorted(self.attempts.items()) if attempt},
            **self.counts,
        }


class StoredGroup(NamedTuple):
    """The properties of a stored group that decide whether a resumed run keeps it."""

    slot: int
    attempt: int
    newest_version: int
    dropped: bool
    taskset: str
    task_id: str

    @classmethod
    def of(cls, group: Group) -> StoredGroup:
        task = group.task
        return cls(group.slot, group.attempt, group.newest_version, bool(group.dropped), task.taskset, task.task_id)


def kept_on_resume(schedule: Schedule, state: SlotsState, version: int, group: StoredGroup) -> bool:
    """Whether a run that resumes at `version` keeps a group. Raises RunDirError where the group is of another task."""
    slot = group.slot
    if slot < state.consumed_below or slot in state.consumed or group.attempt < state.attempts.get(slot, 0):
        return False
    # An unordered run will not sample newer versions again as the lost run did: their rollouts are of no policy that
    # will exist. In slot order it will; but a dropped group would already admit another slot, to older versions.
    if group.newest_version > version and (group.dropped or not schedule.ordered):
        return False
    expected = schedule.at(slot).task.task_id
    if group.task_id != expected and group.taskset != SERVED:
        raise RunDirError(
            f"continue slot {slot}",
            f"its stored rollouts are of task {group.task_id!r}, the schedule says {expected!r}",
            "the taskset changed: start another run.dir, or restore the tasks; where no step was trained yet, removing "
            "`rollouts` in the run directory is enough",
        )
    return True


# --------------------------------------------------------------------------- failures that ended the run


def retried(schedule: Schedule, groups: Sequence[Group], from_slot: int) -> list[tuple[Group, bool]]:
    """The groups from a slot on that do not count after failures ended the run: (group, whether it is enough to compute
    its rewards again).

    In slot order, a slot that was issued in place of a dropped group was sampled with the version of that group: where
    the dropped one is rolled out again, all later ones are.
    """
    later = [group for group in groups if group.slot >= from_slot]
    dropped = [group.slot for group in later if group.dropped and _may_succeed(schedule, group.rollouts)]
    limit = min(dropped, default=math.inf) if schedule.ordered else math.inf
    return [
        (group, group.slot < limit and may_be_judged_again(schedule, group))
        for group in later
        if group.slot > limit or _may_succeed(schedule, group.rollouts)
    ]


def log_retries(failed: Sequence[tuple[Group, bool]]) -> None:
    """Logs the number of groups that `retried` names."""
    judged = sum(judged for _, judged in failed)
    _log.warning(
        "failures ended this run before: %d group(s) are retried; of %d only rewards failed", len(failed), judged
    )


def may_be_judged_again(schedule: Schedule, group: Group) -> bool:
    """Whether nothing but rewards failed that a retry may get. What agents rolled out is theirs to roll out again."""
    rest = [t for t in group.rollouts if t.failure is None or not t.failure.of_rewards]
    return not (group.dropped or group.task.taskset == SERVED or _may_succeed(schedule, rest))


def _may_succeed(schedule: Schedule, rollouts: Iterable[Trajectory]) -> bool:
    """Whether some that failed may succeed in a retry. Not those whose prompt is too long or that an operator refused,
    nor, in a deterministic run, those that met their deadline: there it is a recorded outcome."""
    final = {"prompt", "operator", *(["deadline"] if schedule.deterministic else [])}
    return any(t.failure is not None and (t.failure.of_rewards or t.failure.side not in final) for t in rollouts)


# --------------------------------------------------------------------------- messages


def not_leased(owner: str, group: Group, state: str) -> DataError:
    """The error of a `put` without a lease."""
    return DataError(
        f"put slot {group.slot}, attempt {group.attempt}",
        f"{owner!r} holds no lease of it{state}",
        "lease a slot before its rollouts, and put their group once",
    )


def waiting_explorer(owner: str, loaded: int | None, next_slot: int) -> Waiting:
    return Waiting(f"explorer {owner!r} (version {loaded})", f"the trainer to take groups (next slot {next_slot})")


def waiting_trainer(version: int, count: int, finished: int, leased: int) -> Waiting:
    whom = f"{count} groups from the explorers ({finished} finished, {leased} in progress)"
    return Waiting(f"the trainer (version {version})", whom)


def waiting_drain(version: int, leased: int) -> Waiting:
    return Waiting("the next version", f"the slots of version {version} ({leased} in progress)")
