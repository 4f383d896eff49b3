"""The rules of slots: admission, attempts, staleness, and what a resumed run keeps.

Pure functions of the schedule, a few counts and rows. `trivium.buffers.slot_machine` applies them to the rows of a
buffer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trivium.foundation.errors import RunDirError
from trivium.schedule import Schedule, num_replaced
from trivium.types import SERVED, Group, Trajectory

_log = logging.getLogger("trivium")
COUNTERS: tuple[str, ...] = ("given_up", "refused", "evicted", "called_off", "dropped")
"""What a buffer counts: slots given up after `max_attempts`; groups that were taken and are to be replaced; groups
evicted as too stale; leases cancelled because their groups would be; groups that the pipeline dropped."""


class SlotState(StrEnum):
    """The state of an attempt at a slot.

    FREE -> LEASED -> FINISHED -> CONSUMED             the usual case; a released lease is FREE again
                               -> EVICTED              became too stale before it was taken
                   -> DROPPED                          dropped by the experience pipeline
                   -> CANCELLED -> CANCELLED_TOLD      could only become too stale; its owner has been told
    """

    FREE = "free"
    LEASED = "leased"
    FINISHED = "finished"
    CONSUMED = "consumed"
    EVICTED = "evicted"
    DROPPED = "dropped"
    CANCELLED = "off"
    CANCELLED_TOLD = "called_off"


OPEN = (SlotState.FREE, SlotState.LEASED, SlotState.FINISHED)
"""The states of an attempt that has not ended."""


@dataclass(slots=True)
class Row:
    """One attempt at a slot.

    The next attempt is a FREE row of its own. A slot without rows was never issued; one without an open row is
    consumed. A FREE or LEASED row with an arrival has a group, whose rewards are to be computed again.
    """

    slot: int
    attempt: int = 0
    state: SlotState = SlotState.FREE
    owner: str | None = None
    """The explorer that leased it last."""
    version: int | None = None
    """The version that the owner had loaded: no token of the group is older."""
    arrival: int | None = None
    """The number of its group in order of arrival; None without a group."""
    oldest: int = 0
    """The oldest and the newest version that sampled a token of the group; 0 without a group."""
    newest: int = 0
    taskset: str = ""
    task: str = ""
    dropped: bool = False
    consumed_at: int | None = None
    """The version that was trained on the group."""
    group: Group | None = None
    """The group, where the store holds groups in memory."""


def about(group: Group) -> dict[str, Any]:
    """The columns of a row that describe its group."""
    return {
        "oldest": group.oldest_version,
        "newest": group.newest_version,
        "taskset": group.task.taskset,
        "task": group.task.task_id,
        "dropped": bool(group.dropped),
    }


def admitted(schedule: Schedule, counts: Mapping[str, int], version: int) -> int:
    """The number of slots that `version` admits. A slot without a group to train on admits another in its place."""
    return schedule.admitted(version) + num_replaced(counts)


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


def kept_on_resume(schedule: Schedule, state: SlotsState, version: int, row: Row) -> bool:
    """Whether a run that resumes at `version` keeps the group of a row. Raises RunDirError for a group of another
    task."""
    slot = row.slot
    if slot < state.consumed_below or slot in state.consumed or row.attempt < state.attempts.get(slot, 0):
        return False
    # An unordered run will not sample newer versions again as the lost run did: their rollouts are of no policy that
    # will exist. In slot order it will; but a dropped group would already admit another slot, to older versions.
    if row.newest > version and (row.dropped or not schedule.ordered):
        return False
    if row.taskset != SERVED and not schedule.may_have(slot, row.task):
        raise RunDirError(
            f"continue slot {slot}",
            f"its stored rollouts are of task {row.task!r}, which the schedule does not have there",
            "the taskset changed: start another run.dir, or restore the tasks; where no step was trained yet, removing "
            "`rollouts` in the run directory is enough",
        )
    return True


# --------------------------------------------------------------------------- failures that ended the run


def retried(schedule: Schedule, later: Sequence[Group]) -> list[tuple[Group, bool]]:
    """Those of the groups from the first failed slot on that do not count after failures ended the run: (group, whether
    it is enough to compute its rewards again).

    In slot order, a slot that was issued in place of a dropped group was sampled with the version of that group: where
    the dropped one is rolled out again, all later ones are.
    """
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
