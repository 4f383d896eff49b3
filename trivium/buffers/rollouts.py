"""Reads the rollouts of a run directory: what the policy was asked, what it wrote, what it earned, token by token.

    for rollout in read_rollouts(Path("runs/sums"), step=12):
        print(rollout.group.task.task_id, rollout.trajectory.completion, rollout.trajectory.rewards)
        for sequence in rollout.sequences:
            print(sequence.tokens, sequence.log_prob, sequence.columns.get("advantages"))

Values alone: reading changes no file, and a run may be in progress. `tokens/`, which `run.keep: tokens` adds to the run
directory, holds what each train step computed for its tokens: one file per step, written before the update.

Legend: L tokens of a sequence.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save

from trivium.buffers.journal import read_recorded
from trivium.checkpoint.atomic import atomic_write
from trivium.errors import DataError, RunDirError
from trivium.schedule import Schedule
from trivium.types import (
    AnyArray,
    Batch,
    BoolArray,
    Experience,
    FloatArray,
    Group,
    IntArray,
    Trajectory,
    TurnSpan,
    experiences_of,
)

_FORMAT = "trivium-tokens-1"
_MASK = "response_mask"
Attempt = tuple[int, int, int]
"""(stage, slot, attempt): what identifies a group of a run."""
Columns = Mapping[str, AnyArray]
"""Arrays of one sequence by name, leading axis L."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A trainable sequence of L tokens; index t of every array is about `tokens[t]`."""

    tokens: IntArray
    response_mask: BoolArray
    """True where the policy sampled the token and, where that was kept, it was trained on."""
    log_prob: FloatArray
    """Log-probability under the distribution that the token was sampled from; 0 where it was not sampled."""
    policy_version: IntArray
    """The weights that sampled it; -1 for context."""
    turns: tuple[TurnSpan, ...]
    """Where the turns' own tokens are."""
    columns: Columns = field(default_factory=dict[str, AnyArray])
    """What the train step computed, where it was kept: `advantages`, `returns`, `old_log_prob`, `ref_log_prob`,
    `values`, ... Leading axis L."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at a task, as it was recorded."""

    stage: int
    planned_step: int | None
    """The train step that its slot was issued for. None: a resumed run replaced it, because its failure had ended the
    run."""
    group: Group
    trajectory: Trajectory
    kept: Mapping[int, tuple[Columns, ...]] = field(default_factory=dict[int, tuple[Columns, ...]])
    """Train step that took its group -> what it computed for each sequence, nothing where it left the rollout out.
    Empty where nothing was kept."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The train steps that took it, where that was kept; else the one that it was planned for."""
        return tuple(self.kept) or (() if self.planned_step is None else (self.planned_step,))

    @property
    def greedy(self) -> bool:
        """Whether it is the group's greedy rollout, which is never trained on."""
        return self.trajectory is self.group.greedy

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Its tokens as the trainer sees them, with what the first train step that took it computed."""
        parts = experiences_of(self.group, self.trajectory)
        columns = next((each for each in self.kept.values() if each), ({},) * len(parts))
        return tuple(_sequence(part, dict(each)) for part, each in zip(parts, columns, strict=True))


def _sequence(part: Experience, columns: dict[str, AnyArray]) -> TokenSequence:
    mask = columns.pop(_MASK, part.response_mask)
    return TokenSequence(part.tokens, mask, part.rollout_log_prob, part.policy_version, part.turns, columns)


def read_rollouts(
    run_dir: Path, *, step: int | None = None, task: str | None = None, failed: bool = False
) -> Iterator[Rollout]:
    """The rollouts of a run in the order in which their groups were finished, stage by stage.

    With `step` those that this train step took, and those that were planned for it and not taken by another; `task` is
    a task's id; `failed` leaves out rollouts that did not fail. Raises RunDirError for a directory without recorded
    rollouts, DataError for a damaged file.
    """
    kept = _KeptTokens.of(run_dir)
    for stage, planned, path in _journals(run_dir):
        if step not in (None, planned) and (stage, planned) not in kept.planned.get(step, ()):
            continue
        for _, group in read_recorded(path):
            takers = () if planned is None else kept.takers.get((stage, group.slot, group.attempt), ())
            if task not in (None, group.task.task_id) or step not in (None, *(takers or (planned,))):
                continue
            for each in group.rollouts:
                if failed and each.failure is None:
                    continue
                places = () if each is group.greedy else takers
                columns = {taker: kept.read(taker, group.slot, group.attempt, each.index) for taker in places}
                yield Rollout(stage, planned, group, each, columns)


def planned_steps(run_dir: Path) -> list[int]:
    """The train steps that have recorded rollouts, in order. Raises RunDirError for a directory without any."""
    return sorted({planned for _, planned, _ in _journals(run_dir) if planned is not None})


def _journals(run_dir: Path) -> list[tuple[int, int | None, Path]]:
    """(stage, planned step, file) of every journal file, in order."""
    paths = [path for path in (run_dir / "rollouts").glob("stage-*/*.msgpack") if path.stat().st_size]
    if not paths:
        raise RunDirError(
            f"the rollouts of {run_dir}",
            "no rollouts/stage-*/step-*.msgpack there" if run_dir.is_dir() else "no such directory",
            "name the directory of a run that explored with buffer.kind memory: rows of files are not recorded, and "
            "buffer.kind sql keeps its groups in the database",
        )
    numbered: list[tuple[int, int | None, Path]] = []
    for path in paths:
        number = path.stem.removeprefix("step-")
        planned = int(number) if number.isdecimal() else None
        numbered.append((int(path.parent.name.removeprefix("stage-")), planned, path))
    return sorted(numbered, key=lambda entry: (entry[0], entry[1] is None, entry[1] or 0))


# --------------------------------------------------------------------------- per-token values of train steps


def keep_tokens(run_dir: Path, schedule: Schedule, step: int, groups: Sequence[Group], batch: Batch) -> None:
    """Writes `tokens/step-NNNNNN.safetensors`: the batch that a train step learns from, with its columns. `groups` are
    all that the step took."""
    by_id = {group.group_id: group for group in groups}
    rows: list[list[int]] = []
    for e in batch.experiences:
        group = by_id[e.group_id]
        rows.append([group.slot, group.attempt, e.index, len(e)])
    arrays: dict[str, Sequence[AnyArray]] = {_MASK: [e.response_mask for e in batch.experiences], **batch.columns}
    tensors = {name: np.concatenate(parts) for name, parts in arrays.items() if len(parts)}
    taken = [[group.slot, group.attempt, schedule.step_of(group.slot)] for group in groups]
    about = {"stage": str(schedule.stage), "groups": json.dumps(taken), "sequences": json.dumps(rows)}
    path = _tokens_file(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, save(tensors, {"format": _FORMAT, **about}))


def _tokens_file(run_dir: Path, step: int) -> Path:
    return run_dir / "tokens" / f"step-{step:06d}.safetensors"


@dataclass(frozen=True, slots=True)
class _KeptTokens:
    """What the files under `tokens/` say about which step took which group."""

    run_dir: Path
    takers: Mapping[Attempt, Sequence[int]]
    """Group -> the steps that took it."""
    planned: Mapping[int, frozenset[tuple[int, int]]]
    """Step -> (stage, planned step) of what it took."""

    @classmethod
    def of(cls, run_dir: Path) -> _KeptTokens:
        takers, planned = defaultdict[Attempt, list[int]](list), dict[int, frozenset[tuple[int, int]]]()
        for path in sorted((run_dir / "tokens").glob("step-*.safetensors")):
            step, metadata = int(path.stem.removeprefix("step-")), _metadata(path)
            stage, groups = int(metadata["stage"]), json.loads(metadata["groups"])
            for slot, attempt, _ in groups:
                takers[stage, slot, attempt].append(step)
            planned[step] = frozenset((stage, at) for _, _, at in groups)
        return cls(run_dir, takers, planned)

    def read(self, step: int, slot: int, attempt: int, index: int) -> tuple[Columns, ...]:
        """What the step computed for a member of a group; empty where it left the member out."""
        path = _tokens_file(self.run_dir, step)
        return _columns(path, path.stat().st_mtime_ns).get((slot, attempt, index), ())


@lru_cache(maxsize=4)
def _columns(path: Path, written_ns: int) -> Mapping[tuple[int, int, int], tuple[Columns, ...]]:
    """(slot, attempt, index) -> the columns of its sequences. A resumed run may write the file again."""
    del written_ns
    tensors, start = load_file(path), 0
    columns = defaultdict[tuple[int, int, int], tuple[Columns, ...]](tuple)
    for slot, attempt, index, length in json.loads(_metadata(path)["sequences"]):
        columns[slot, attempt, index] += ({name: array[start : start + length] for name, array in tensors.items()},)
        start += length
    return dict(columns)


def _metadata(path: Path) -> Mapping[str, str]:
    with safe_open(path, framework="numpy") as file:
        metadata: Mapping[str, str] = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise DataError(f"the tokens of a train step in {path}", f"the format {metadata.get('format')!r}", "remove it")
    return metadata
