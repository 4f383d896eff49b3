"""The state of a CheckpointMonitor: its savers, and the incomplete steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CHECKPOINT, STATE_DICT = "checkpoint", "state_dict"
"""The two kinds of saves: the complete training state, and the policy alone."""
_MAX_REMEMBERED = 64
"""The number of listed steps that cannot become complete."""


@dataclass
class Saver:
    """A process or thread that writes or is queued."""

    place: str
    """Savers with the same place may write at the same time."""
    name: str
    writing: bool = False


@dataclass
class StepSaves:
    """The saves of an incomplete step."""

    counts: dict[str, int] = field(default_factory=lambda: {CHECKPOINT: 0, STATE_DICT: 0})
    """Savers that have not finished, by kind; below 0 if savers finish before they are registered."""
    registered: list[str] = field(default_factory=list[str])
    announced: list[str] = field(default_factory=list[str])

    def complete(self) -> list[str]:
        """Returns the kinds that are announced and whose savers have all finished. A checkpoint contains the state
        dict."""
        kinds: list[str] = []
        if self.counts[STATE_DICT] == 0:
            if STATE_DICT in self.announced or (CHECKPOINT in self.announced and STATE_DICT in self.registered):
                kinds.append(STATE_DICT)
            if CHECKPOINT in self.announced and self.counts[CHECKPOINT] == 0:
                kinds.append(CHECKPOINT)
        return kinds


@dataclass
class SaveState:
    """The state that the processes of one monitor share."""

    savers: dict[int, Saver] = field(default_factory=dict[int, Saver])
    """By ticket, in order of arrival."""
    steps: dict[int, StepSaves] = field(default_factory=dict[int, StepSaves])
    broken: list[int] = field(default_factory=list[int])
    """Steps that cannot become complete, oldest first."""
    tickets: int = 0

    # ------------------------------------------------------------------ savers

    def enqueue(self, saver: Saver) -> int:
        """Adds a saver to the queue. Returns its ticket."""
        self.tickets += 1
        saver.place = saver.place or f"ticket {self.tickets}"
        self.savers[self.tickets] = saver
        return self.tickets

    def may_write(self, ticket: int) -> bool:
        """Whether this saver may write: all writing savers have its place or, if no saver writes, the first in the
        queue has it."""
        mine = self.savers[ticket]
        writing = {saver.place for saver in self.savers.values() if saver.writing}
        return mine.writing or mine.place in (writing or {next(iter(self.savers.values())).place})

    def admit(self, ticket: int) -> bool:
        """Admits a saver if it may write. Returns whether it may."""
        self.savers[ticket].writing = self.may_write(ticket)
        return self.savers[ticket].writing

    def remove_oldest(self) -> None:
        """Removes the saver that has written longest."""
        for ticket in [ticket for ticket, saver in self.savers.items() if saver.writing][:1]:
            del self.savers[ticket]

    # ------------------------------------------------------------------ steps

    def step(self, step: int) -> StepSaves:
        return self.steps.setdefault(step, StepSaves())

    def register(self, step: int, counts: Mapping[str, int]) -> None:
        """Adds savers of a step, by kind."""
        if step in self.broken:
            return
        entry = self.step(step)
        for kind, count in counts.items():
            entry.counts[kind] += count
            if count and kind not in entry.registered:
                entry.registered.append(kind)

    def announce(self, step: int, kind: str) -> None:
        """Records that all savers of this save are registered."""
        if step not in self.broken and kind not in self.step(step).announced:
            self.step(step).announced.append(kind)

    def finish(self, step: int, kind: str) -> None:
        """Records that a saver has finished."""
        if step not in self.broken:
            self.step(step).counts[kind] -= 1
        self.remove_oldest()

    def give_up(self, step: int) -> None:
        """Records that the step cannot become complete."""
        # Its savers report later than this, and must not count for a step that begins anew.
        self.broken = [*self.broken, step][-_MAX_REMEMBERED:]
        self.steps.pop(step, None)

    def complete(self, step: int) -> list[str]:
        """Returns the complete kinds of this step."""
        return self.steps[step].complete() if step in self.steps else []

    def forget(self, step: int, kinds: Iterable[str]) -> None:
        """Forgets complete saves of a step, and the step itself if it has no more unfinished savers or
        announcements."""
        if (entry := self.steps.get(step)) is None:
            return
        entry.registered = [kind for kind in entry.registered if kind not in kinds]
        entry.announced = [kind for kind in entry.announced if kind not in kinds]
        if not any(entry.counts.values()) and not entry.announced:
            del self.steps[step]

    def describe(self) -> str:
        """Describes the state in the error of a wait."""
        writing = [saver.name for saver in self.savers.values() if saver.writing]
        missing = {step: entry.counts for step, entry in self.steps.items()}
        return f"writing: {', '.join(writing) or 'no saver'}; still to finish: {missing or 'nothing'}"
