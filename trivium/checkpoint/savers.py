"""The savers of a CheckpointMonitor and what is missing of which step: JSON values, which its board holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from trivium.board import Values
from trivium.concurrency import ProcessLife

CHECKPOINT, STATE_DICT = "step", "weights"
"""The two kinds of saves, as in the names of their directories: everything training needs, and the policy alone."""
_MAX_REMEMBERED = 64
"""How many of the steps that will not be complete are listed."""


@dataclass
class Saver:
    """A process or thread that writes, or is queued."""

    place: str
    """Savers of the same place may write at the same time."""
    name: str
    step: int | None
    kind: str
    alive: ProcessLife
    heartbeat_s: float | None
    """It is dead after so long without a beat, once it has one or writes: a queued saver may have no ticket to beat
    with."""
    beats: int = 0
    writing: bool = False


@dataclass
class StepSaves:
    """The state of the saves of a step that is not complete."""

    counts: dict[str, int] = field(default_factory=lambda: {CHECKPOINT: 0, STATE_DICT: 0})
    """Savers that have not finished, by kind; below 0 where one finished before it was registered."""
    registered: list[str] = field(default_factory=list[str])
    announced: list[str] = field(default_factory=list[str])
    registered_by: list[ProcessLife] = field(default_factory=list[ProcessLife])

    def complete(self) -> list[str]:
        """The kinds that are announced and of which every saver has finished. A checkpoint holds the state dict."""
        kinds: list[str] = []
        if self.counts[STATE_DICT] == 0:
            if STATE_DICT in self.announced or (CHECKPOINT in self.announced and STATE_DICT in self.registered):
                kinds.append(STATE_DICT)
            if CHECKPOINT in self.announced and self.counts[CHECKPOINT] == 0:
                kinds.append(CHECKPOINT)
        return kinds

    def forget(self, kind: str) -> None:
        """Neither registered nor announced any more."""
        self.registered = [each for each in self.registered if each != kind]
        self.announced = [each for each in self.announced if each != kind]


@dataclass
class SaveState:
    """Everything that the processes of one monitor share."""

    savers: dict[int, Saver] = field(default_factory=dict[int, Saver])
    """By ticket, in order of arrival."""
    steps: dict[int, StepSaves] = field(default_factory=dict[int, StepSaves])
    committing: dict[str, ProcessLife] = field(default_factory=dict[str, ProcessLife])
    """Who commits a save, by the name of its directory."""
    broken: dict[int, str] = field(default_factory=dict[int, str])
    """Why a step will never be complete, unless its save begins anew."""
    tickets: int = 0

    # ------------------------------------------------------------------ as values of a board

    @classmethod
    def of(cls, values: Values) -> Self:
        """The state on a board."""
        savers = {
            int(ticket): Saver(**{**saver, "alive": ProcessLife(**saver["alive"])})
            for ticket, saver in values.get("savers", {}).items()
        }
        return cls(
            dict(sorted(savers.items())),
            {int(step): _step_of(entry) for step, entry in values.get("steps", {}).items()},
            {name: ProcessLife(**life) for name, life in values.get("committing", {}).items()},
            {int(step): cause for step, cause in values.get("broken", {}).items()},
            values.get("tickets", 0),
        )

    def values(self) -> Values:
        """JSON values."""
        return {
            "savers": {str(ticket): asdict(saver) for ticket, saver in self.savers.items()},
            "steps": {str(step): asdict(entry) for step, entry in self.steps.items()},
            "committing": {name: asdict(life) for name, life in self.committing.items()},
            "broken": {str(step): cause for step, cause in [*self.broken.items()][-_MAX_REMEMBERED:]},
            "tickets": self.tickets,
        }

    # ------------------------------------------------------------------ savers

    def enqueue(self, saver: Saver) -> int:
        """Its ticket."""
        self.tickets += 1
        saver.place = saver.place or f"ticket {self.tickets}"
        self.savers[self.tickets] = saver
        return self.tickets

    def may_write(self, ticket: int) -> bool:
        """Whether those that write are of the saver's own place, first come, first served. True also for one that was
        removed."""
        mine = self.savers.get(ticket)
        if mine is None:
            return True
        writing = {saver.place for saver in self.savers.values() if saver.writing}
        return mine.writing or mine.place in (writing or {next(iter(self.savers.values())).place})

    def admit(self, ticket: int) -> bool | None:
        """Lets a saver write, if it may; None for one that was removed."""
        if (mine := self.savers.get(ticket)) is None:
            return None
        mine.writing = self.may_write(ticket)
        return mine.writing

    def remove(self, step: int, kind: str, caller: ProcessLife) -> int | None:
        """Removes the saver that has finished this save, and returns its ticket: the one that has written longest at
        it, or at an unnamed one; one of the caller's process where there is any."""
        writing = {t: saver for t, saver in self.savers.items() if saver.writing}
        same = [t for t, saver in writing.items() if (saver.step, saver.kind) == (step, kind)]
        candidates = [*same, *(t for t, saver in writing.items() if saver.step is None)]
        own = [ticket for ticket in candidates if writing[ticket].alive == caller]
        ticket = next(iter([*own, *candidates]), None)
        if ticket is not None:
            del self.savers[ticket]
        return ticket

    def remove_dead(self, causes: Mapping[int, tuple[int, str]], lost: Iterable[str]) -> list[tuple[str, str]]:
        """Removes the savers that died, by ticket with their count of beats then and the cause, and the commits whose
        process is gone; returns (name, cause) of the savers. Their steps will not be complete."""
        removed: list[tuple[str, str]] = []
        for ticket, (beats, cause) in causes.items():
            saver = self.savers.get(ticket)
            if saver is not None and saver.beats == beats:
                del self.savers[ticket]
                removed.append((saver.name, cause))
                for step in self._steps_of(saver):
                    self.give_up(step, f"the saver {saver.name} died: {cause}")
        for name in lost:
            if self.committing.pop(name, None) is not None:
                self.give_up(int(name.rpartition("-")[2]), "the process that committed it is gone")
        return removed

    def _steps_of(self, saver: Saver) -> list[int]:
        """What a saver was saving, as far as is known: without a step of its own, the steps that its process has
        registered savers for."""
        if saver.step is not None:
            return [saver.step]
        return [
            step
            for step, entry in self.steps.items()
            if saver.alive in entry.registered_by and max(entry.counts.values()) > 0
        ]

    # ------------------------------------------------------------------ steps

    def step(self, step: int) -> StepSaves:
        return self.steps.setdefault(step, StepSaves())

    def register(self, step: int, counts: Mapping[str, int], caller: ProcessLife) -> None:
        """Adds savers, by kind."""
        if step in self.broken:
            return
        entry = self.step(step)
        for kind, count in counts.items():
            entry.counts[kind] += count
            if count and kind not in entry.registered:
                entry.registered.append(kind)
        if caller not in entry.registered_by:
            entry.registered_by.append(caller)

    def announce(self, step: int, kind: str) -> None:
        """All savers of this save are registered."""
        if step not in self.broken and kind not in self.step(step).announced:
            self.step(step).announced.append(kind)

    def supersede(self, step: int, kind: str) -> None:
        """Forgets an earlier save of this step, its savers included."""
        self.broken.pop(step, None)
        self.savers = {t: saver for t, saver in self.savers.items() if (saver.step, saver.kind) != (step, kind)}
        if step in self.steps:
            self.steps[step].counts[kind] = 0
            self.steps[step].forget(kind)

    def give_up(self, step: int, cause: str) -> None:
        """The step will not be complete."""
        self.broken[step] = cause
        self.steps.pop(step, None)

    def complete(self, step: int) -> list[str]:
        """The kinds of this step that have become complete, each once; forgets a step of which nothing is missing."""
        entry = self.steps.get(step)
        if entry is None:
            return []
        kinds = entry.complete()
        for kind in kinds:
            entry.forget(kind)
        if not any(entry.counts.values()) and not entry.announced:
            del self.steps[step]
        return kinds

    def describe(self) -> str:
        """For the error of a wait."""
        writing = [saver.name for saver in self.savers.values() if saver.writing]
        missing = {step: entry.counts for step, entry in self.steps.items()}
        return f"writing: {', '.join(writing) or 'no saver'}; still to finish: {missing or 'nothing'}"


def _step_of(entry: Mapping[str, Any]) -> StepSaves:
    return StepSaves(
        dict(entry["counts"]),
        [*entry["registered"]],
        [*entry["announced"]],
        [ProcessLife(**life) for life in entry["registered_by"]],
    )
