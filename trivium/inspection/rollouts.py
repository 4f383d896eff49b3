"""Reads the recorded rollouts of a run directory: prompts, completions and rewards, token by token.

    for rollout in read_rollouts(Path("runs/sums"), step=12):
        print(rollout.group.task.task_id, rollout.trajectory.completion, rollout.trajectory.rewards)
        for sequence in rollout.sequences:
            print(sequence.tokens, sequence.log_prob, sequence.columns.get("advantages"))

`read_rollouts` reads whole journal files. `RecordedGroups` finds groups by the headers of their records and reads them
one by one, for pages that show a few. Reading changes no file, and the run may be in progress.

Legend: L tokens of a sequence.
"""

from __future__ import annotations

import mmap
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from trivium.buffers.journal import read_record, read_recorded
from trivium.buffers.step_log import STEPS, StepRecord, Taken, read_steps
from trivium.buffers.step_tokens import (
    MASK,
    Columns,
    kept_steps,
    kept_values,
)
from trivium.foundation.errors import DataError, RunDirError
from trivium.inspection.changing_files import cached_while_unchanged
from trivium.types import (
    AnyArray,
    BoolArray,
    Experience,
    FloatArray,
    Group,
    IntArray,
    Trajectory,
    TurnSpan,
    experiences_of,
)

_HEADER = struct.Struct("<II")
_PEEK = 96
"""Bytes of a record that contain its slot and its attempt."""
Attempt = tuple[int, int, int]
"""(stage, slot, attempt): identifies a group of a run."""
Member = tuple[int, int, int]
"""(slot, attempt, index): identifies a rollout of a train step."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A trainable sequence of L tokens; index t of every array is about `tokens[t]`."""

    tokens: IntArray
    response_mask: BoolArray
    """True for tokens that the policy sampled. If the step's tokens were kept, only for those that were trained on."""
    log_prob: FloatArray
    """Log-probability under the distribution that the token was sampled from; 0 for tokens that were not sampled."""
    policy_version: IntArray
    """The version of the weights that sampled the token; -1 for context."""
    turns: tuple[TurnSpan, ...]
    """The spans of the turns' completion tokens."""
    columns: Columns = field(default_factory=dict[str, AnyArray])
    """Values that the train step computed, if they were kept: `advantages`, `returns`, `old_log_prob`, `ref_log_prob`,
    `values`, ... Leading axis L."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One recorded attempt at a task."""

    stage: int
    planned_step: int | None
    """The train step that its slot was issued for. None if its failure ended the run, and the resumed run replaced
    it."""
    group: Group
    trajectory: Trajectory
    values_by_step: Mapping[int, tuple[Columns, ...]] = field(default_factory=dict[int, tuple[Columns, ...]])
    """Train step that took its group -> the values that it computed for each sequence; no values if the step left the
    rollout out. Empty if nothing was kept."""
    taken_by: tuple[int, ...] = ()
    """The train steps that took its group; empty if that was not recorded, or no step took it."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The train steps that took it. If none is known, the step that it was planned for."""
        return self.taken_by or (() if self.planned_step is None else (self.planned_step,))

    @property
    def greedy(self) -> bool:
        """Whether it is the group's greedy rollout, which is never trained on."""
        return self.trajectory is self.group.greedy

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Its tokens as the trainer sees them, with the values from the first train step that computed any."""
        parts = experiences_of(self.group, self.trajectory)
        columns = next(
            (sequence_columns for sequence_columns in self.values_by_step.values() if sequence_columns),
            ({},) * len(parts),
        )
        return tuple(
            _sequence(part, dict(sequence_columns)) for part, sequence_columns in zip(parts, columns, strict=True)
        )


def _sequence(part: Experience, columns: dict[str, AnyArray]) -> TokenSequence:
    mask = columns.pop(MASK, part.response_mask)
    return TokenSequence(part.tokens, mask, part.rollout_log_prob, part.policy_version, part.turns, columns)


# --------------------------------------------------------------------------- whole files


def read_rollouts(
    run_dir: Path, *, step: int | Collection[int] | None = None, task: str | None = None, failed: bool = False
) -> Iterator[Rollout]:
    """The rollouts of a run in the order in which their groups were finished, stage by stage.

    With `step`, only those that this train step (or one of several) took, and those planned for it that no other step
    took. `task` selects one task by id; `failed` selects failed rollouts. Raises RunDirError for a directory without
    recorded rollouts, DataError for a damaged file.
    """
    wanted = {step} if isinstance(step, int) else None if step is None else set(step)
    takers, steps_with_values = _takers(run_dir), {*kept_steps(run_dir)}
    for stage, planned, path in _journals_of(run_dir, _recorded_journals(run_dir), wanted):
        for _, group in read_recorded(path):
            by = () if planned is None else takers.get((stage, group.slot, group.attempt), ())
            if task not in (None, group.task.task_id):
                continue
            if wanted is not None and wanted.isdisjoint(by or (planned,)):
                continue
            for trajectory in group.rollouts:
                if failed and trajectory.failure is None:
                    continue
                trained = () if trajectory is group.greedy else by
                columns = {
                    taker: kept_values(run_dir, taker, group, trajectory.index)
                    for taker in trained
                    if taker in steps_with_values
                }
                yield Rollout(stage, planned, group, trajectory, columns, trained)


def read_groups(run_dir: Path, stage: int, groups: Iterable[Taken]) -> list[Group]:
    """Recorded groups of a stage, in the order of `groups`, with the bytes of their media. Raises DataError if one is
    missing."""
    wanted = list(groups)
    recorded: dict[tuple[int, int], Group] = {}
    for planned in sorted({entry.planned_step for entry in wanted}):
        path = run_dir / "rollouts" / f"stage-{stage}" / f"step-{planned:06d}.msgpack"
        slots = {(entry.slot, entry.attempt) for entry in wanted if entry.planned_step == planned}
        for offset, group in read_recorded(path) if path.is_file() else ():
            if (place := (group.slot, group.attempt)) in slots:
                recorded[place] = read_record(path, offset)
    lost = [entry for entry in wanted if (entry.slot, entry.attempt) not in recorded]
    if lost:
        raise DataError(
            f"{len(wanted)} group(s) of stage {stage} that a train step took",
            f"rollouts/stage-{stage} of {run_dir} lacks {len(lost)} of them, the first one of slot {lost[0].slot}, "
            f"attempt {lost[0].attempt}, in step-{lost[0].planned_step:06d}.msgpack",
            "put the file back: without it neither the step nor what follows from it can be computed again",
        )
    return [recorded[entry.slot, entry.attempt] for entry in wanted]


def planned_steps(run_dir: Path) -> list[int]:
    """The train steps that have recorded rollouts, in order. Raises RunDirError for a directory without any."""
    return sorted({planned for _, planned, _ in _recorded_journals(run_dir) if planned is not None})


# --------------------------------------------------------------------------- one group at a time


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a recorded group."""

    stage: int
    planned_step: int | None
    path: Path
    offset: int
    slot: int
    attempt: int
    checksum: int
    takers: tuple[int, ...] = ()
    """The train steps that took it."""

    @property
    def record(self) -> tuple[Path, int, int]:
        """(file, offset, checksum): identifies the content of the group."""
        return self.path, self.offset, self.checksum


class RecordedGroups:
    """The recorded groups of a run directory, by train step. A run may be in progress."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def steps(self) -> list[int]:
        """Returns the train steps that took groups or for which groups were planned, in order."""
        planned = {step for _, step, _ in journals(self.run_dir) if step is not None}
        return sorted(planned | _taken(self.run_dir).keys())

    def of_step(self, step: int) -> list[Place]:
        """Returns the groups that a train step took, in the order of its batch, followed by those planned for it that
        no step took.

        Raises RunDirError if the step has no groups.
        """
        stage, groups = _taken(self.run_dir).get(step, (None, ()))
        places: dict[Attempt, Place] = {}
        for place in self._places(_journals_of(self.run_dir, journals(self.run_dir), {step})):
            if step in place.takers or (place.planned_step == step and not place.takers):
                places[place.stage, place.slot, place.attempt] = place
        order = {(stage, group.slot, group.attempt): n for n, group in enumerate(groups)}
        chosen = sorted(places.items(), key=lambda item: (order.get(item[0], len(order)), item[0]))
        if not chosen:
            raise RunDirError(f"the rollouts of step {step} of {self.run_dir}", "none", "choose another step")
        return [place for _, place in chosen]

    def of_run(self) -> Iterator[Place]:
        """Yields every group that a train step took or that is planned for one, file by file."""
        return self._places(entry for entry in journals(self.run_dir) if entry[1] is not None)

    def _places(self, files: Iterable[Journal]) -> Iterator[Place]:
        takers = _takers(self.run_dir)
        for stage, number, path in files:
            for offset, slot, attempt, checksum in _records(path):
                by = takers.get((stage, slot, attempt), ())
                yield Place(stage, number, path, offset, slot, attempt, checksum, by)

    def group(self, place: Place) -> Group:
        """Reads a recorded group; its media contain only their hashes."""
        return read_record(place.path, place.offset, media=False)

    def place(self, step: int, stage: int, slot: int, attempt: int) -> Place:
        """Returns a group of a step. Raises RunDirError if the step does not have it."""
        wanted = stage, slot, attempt
        for place in self.of_step(step):
            if (place.stage, place.slot, place.attempt) == wanted:
                return place
        raise RunDirError(
            f"the group of slot {slot}, attempt {attempt}, of stage {stage} in step {step} of {self.run_dir}",
            "no such group",
            "choose one of the step's list",
        )


# --------------------------------------------------------------------------- journals, and which step took which group

Journal = tuple[int, int | None, Path]
"""(stage, planned step, file) of a journal file; the planned step is None for groups that a resumed run replaced."""


def journals(run_dir: Path) -> list[Journal]:
    """Returns every journal file with a record, in order."""
    files: list[Journal] = []
    for path in (run_dir / "rollouts").glob("stage-*/*.msgpack"):
        number = path.stem.removeprefix("step-")
        if path.stat().st_size:
            stage = int(path.parent.name.removeprefix("stage-"))
            files.append((stage, int(number) if number.isdecimal() else None, path))
    return sorted(files, key=lambda entry: (entry[0], entry[1] is None, entry[1] or 0))


def _recorded_journals(run_dir: Path) -> list[Journal]:
    """Returns the journal files. Raises RunDirError if there are none."""
    if not (files := journals(run_dir)):
        raise RunDirError(
            f"the rollouts of {run_dir}",
            "no rollouts/stage-*/step-*.msgpack there" if run_dir.is_dir() else "no such directory",
            "name the directory of a run that explored with buffer.kind memory: rows of files are not recorded, and "
            "buffer.kind sql keeps its groups in the database",
        )
    return files


def _journals_of(run_dir: Path, files: Iterable[Journal], steps: Collection[int] | None) -> Iterator[Journal]:
    """Yields the files that hold groups of these train steps: those planned for one, and those that one took."""
    taken_by_step = [_taken(run_dir).get(step, (0, ())) for step in steps or ()]
    holding = {(stage, group.planned_step) for stage, groups in taken_by_step for group in groups}
    return (journal for journal in files if steps is None or journal[1] in steps or journal[:2] in holding)


@cached_while_unchanged(STEPS)
def step_records(run_dir: Path) -> Mapping[int, StepRecord]:
    """The record of each train step (`steps.jsonl`)."""
    return read_steps(run_dir)


def taken_groups(run_dir: Path, step: int) -> tuple[Taken, ...]:
    """The groups that a train step took, in the order of its batch, replayed groups and expert data included; empty if
    that was not recorded."""
    return _taken(run_dir).get(step, (0, ()))[1]


@cached_while_unchanged(STEPS)
def _taken(run_dir: Path) -> Mapping[int, tuple[int, tuple[Taken, ...]]]:
    """Returns train step -> (stage, the groups it took), by steps.jsonl."""
    return {step: (record.stage, record.taken) for step, record in step_records(run_dir).items() if record.taken}


@cached_while_unchanged(STEPS)
def _takers(run_dir: Path) -> Mapping[Attempt, tuple[int, ...]]:
    """Returns the train steps that took each group, in order."""
    takers = defaultdict[Attempt, tuple[int, ...]](tuple)
    for step, (stage, groups) in _taken(run_dir).items():
        for group in groups:
            takers[stage, group.slot, group.attempt] += (step,)
    return dict(takers)


@cached_while_unchanged(maxsize=4096)
def _records(path: Path) -> list[tuple[int, int, int, int]]:
    """Returns (offset, slot, attempt, checksum) of every whole record of a journal file. Reads only the headers."""
    size = path.stat().st_size
    records, offset = list[tuple[int, int, int, int]](), 0
    if not size:
        return records
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
        while offset + _HEADER.size <= size:
            length, checksum = _HEADER.unpack_from(data, offset)
            start = offset + _HEADER.size
            # The run is writing this record.
            if start + length > size:
                break
            slot, attempt = _identity(data[start : start + min(length, _PEEK)])
            records.append((offset, slot, attempt, checksum))
            offset = start + length
    return records


def _identity(beginning: bytes) -> tuple[int, int]:
    """Returns (slot, attempt) of a packed group, which are among its first entries."""
    # Unpacked entry by entry: the beginning of a record is no complete map.
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(beginning)
    unpacker.read_map_header()
    entries: dict[str, int] = {}
    while not {"slot", "attempt"} <= entries.keys():
        name: str = unpacker.unpack()
        entries[name] = unpacker.unpack()
    return entries["slot"], entries["attempt"]
