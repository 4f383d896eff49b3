"""Reads the rollouts of a run directory: prompts, completions and rewards, token by token.

    for rollout in read_rollouts(Path("runs/sums"), step=12):
        print(rollout.group.task.task_id, rollout.trajectory.completion, rollout.trajectory.rewards)
        for sequence in rollout.sequences:
            print(sequence.tokens, sequence.log_prob, sequence.columns.get("advantages"))

Reading changes no file, and the run may be in progress. `tokens/`, which `run.keep: tokens` adds to the run directory,
contains the values that each train step computed for its tokens: one file per step, written before the update.

Legend: L tokens of a sequence.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from trivium.buffers.journal import read_record, read_recorded
from trivium.buffers.step_log import StepLog, Taken, read_steps
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
"""(stage, slot, attempt): identifies a group of a run."""
Columns = Mapping[str, AnyArray]
"""Arrays of one sequence by name, leading axis L."""


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
    kept: Mapping[int, tuple[Columns, ...]] = field(default_factory=dict[int, tuple[Columns, ...]])
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
        columns = next((each for each in self.kept.values() if each), ({},) * len(parts))
        return tuple(_sequence(part, dict(each)) for part, each in zip(parts, columns, strict=True))


def _sequence(part: Experience, columns: dict[str, AnyArray]) -> TokenSequence:
    mask = columns.pop(_MASK, part.response_mask)
    return TokenSequence(part.tokens, mask, part.rollout_log_prob, part.policy_version, part.turns, columns)


def read_rollouts(
    run_dir: Path, *, step: int | Collection[int] | None = None, task: str | None = None, failed: bool = False
) -> Iterator[Rollout]:
    """The rollouts of a run in the order in which their groups were finished, stage by stage.

    With `step`, only those that this train step (or one of several) took, and those planned for it that no other step
    took. `task` selects one task by id; `failed` selects failed rollouts. Raises RunDirError for a directory without
    recorded rollouts, DataError for a damaged file.
    """
    steps, wanted = _Steps.of(run_dir), {step} if isinstance(step, int) else None if step is None else set(step)
    files = {place for each in wanted or () for place in steps.planned.get(each, ())}
    for stage, planned, path in _journals(run_dir):
        if wanted is not None and planned not in wanted and (stage, planned) not in files:
            continue
        for _, group in read_recorded(path):
            takers = () if planned is None else steps.takers.get((stage, group.slot, group.attempt), ())
            if task not in (None, group.task.task_id):
                continue
            if wanted is not None and wanted.isdisjoint(takers or (planned,)):
                continue
            for each in group.rollouts:
                if failed and each.failure is None:
                    continue
                places = () if each is group.greedy else [taker for taker in takers if taker in steps.kept]
                columns = {taker: kept_values(run_dir, taker, group, each.index) for taker in places}
                yield Rollout(stage, planned, group, each, columns, () if each is group.greedy else tuple(takers))


def read_groups(run_dir: Path, stage: int, groups: Iterable[Taken]) -> list[Group]:
    """Recorded groups of a stage, in the order of `groups`, with the bytes of their media. Raises DataError if one is
    missing."""
    wanted = list(groups)
    recorded: dict[tuple[int, int], Group] = {}
    for planned in sorted({each.planned_step for each in wanted}):
        path = run_dir / "rollouts" / f"stage-{stage}" / f"step-{planned:06d}.msgpack"
        slots = {(each.slot, each.attempt) for each in wanted if each.planned_step == planned}
        for offset, group in read_recorded(path) if path.is_file() else ():
            if (place := (group.slot, group.attempt)) in slots:
                recorded[place] = read_record(path, offset)
    lost = [each for each in wanted if (each.slot, each.attempt) not in recorded]
    if lost:
        raise DataError(
            f"{len(wanted)} group(s) of stage {stage} that a train step took",
            f"rollouts/stage-{stage} of {run_dir} lacks {len(lost)} of them, the first one of slot {lost[0].slot}, "
            f"attempt {lost[0].attempt}, in step-{lost[0].planned_step:06d}.msgpack",
            "put the file back: without it neither the step nor what follows from it can be computed again",
        )
    return [recorded[each.slot, each.attempt] for each in wanted]


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


def keep_step(run_dir: Path, log: StepLog, step: int, groups: Sequence[Group], batch: Batch, *, tokens: bool) -> None:
    """Records the groups that a train step took. With `tokens`, also writes their computed values (`keep_tokens`)."""
    if tokens:
        keep_tokens(run_dir, log.schedule, step, groups, batch)
    log.took(step, groups)


def keep_tokens(run_dir: Path, schedule: Schedule, step: int, groups: Sequence[Group], batch: Batch) -> None:
    """Writes `tokens/step-NNNNNN.safetensors`: the batch of a train step with its columns. `groups` are all groups that
    the step took."""
    _keep(_tokens_file(run_dir, step), schedule, groups, batch)


def keep_updates(run_dir: Path, schedule: Schedule, step: int, groups: Sequence[Group], batch: Batch) -> None:
    """Writes `tokens/update-NNNNNN.safetensors`: the columns of each token in the first pass of a step's updates."""
    _keep(_tokens_file(run_dir, step, "update"), schedule, groups, batch)


def _keep(path: Path, schedule: Schedule, groups: Sequence[Group], batch: Batch) -> None:
    by_id = {group.group_id: group for group in groups}
    rows: list[list[int]] = []
    for e in batch.experiences:
        group = by_id[e.group_id]
        rows.append([group.slot, group.attempt, e.index, len(e)])
    arrays: dict[str, Sequence[AnyArray]] = {_MASK: [e.response_mask for e in batch.experiences], **batch.columns}
    tensors = {name: np.concatenate(parts) for name, parts in arrays.items() if len(parts)}
    taken = [[group.slot, group.attempt, schedule.step_of(group.slot)] for group in groups]
    about = {"stage": str(schedule.stage), "groups": json.dumps(taken), "sequences": json.dumps(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, save(tensors, {"format": _FORMAT, **about}))


def _tokens_file(run_dir: Path, step: int, when: str = "step") -> Path:
    return run_dir / "tokens" / f"{when}-{step:06d}.safetensors"


def kept_values(run_dir: Path, step: int, group: Group, index: int) -> tuple[Columns, ...]:
    """The values that a train step computed for a member of a group, before its updates (`kept_columns`) and in their
    first pass (`types.AT_UPDATE`)."""
    before = kept_columns(run_dir, step, group, index)
    seen = kept_columns(run_dir, step, group, index, when="update")
    seen = seen if len(seen) == len(before) else ({},) * len(before)
    return tuple({**later, **columns} for columns, later in zip(before, seen, strict=True))


def kept_columns(run_dir: Path, step: int, group: Group, index: int, *, when: str = "step") -> tuple[Columns, ...]:
    """The values that a train step computed for a member of a group before its updates. Empty if the step left the
    member out, or nothing was kept."""
    kept = _kept(_tokens_file(run_dir, step, when))
    places = () if kept is None else kept.places.get((group.slot, group.attempt, index), ())
    return tuple(kept.columns(start, stop) for start, stop in places) if kept is not None else ()


def kept_means(
    run_dir: Path, step: int, name: str, groups: Collection[tuple[int, int]] | None = None
) -> Mapping[tuple[int, int, int], float]:
    """(slot, attempt, index) -> the mean of a column over the trained tokens, for each rollout in a train step's batch.
    Empty if the column was not kept. With `groups`, (slot, attempt) pairs, reads only the values of these groups."""
    path = _tokens_file(run_dir, step)
    kept = _kept(path)
    if kept is None or name not in kept.names:
        return {}
    if groups is None:
        return _all_means(path, path.stat().st_mtime_ns, name)
    wanted = frozenset(groups)
    return {place: kept.mean(name, spans) for place, spans in kept.places.items() if place[:2] in wanted}


@lru_cache(maxsize=8)
def _all_means(path: Path, written_ns: int, name: str) -> Mapping[tuple[int, int, int], float]:
    kept = _opened(path, written_ns)
    mask = kept.file.get_tensor(_MASK)
    sums = np.concatenate([[0.0], np.cumsum(np.where(mask, kept.file.get_tensor(name), 0.0), dtype=np.float64)])
    counts = np.concatenate([[0], np.cumsum(mask)])
    means: dict[tuple[int, int, int], float] = {}
    for place, spans in kept.places.items():
        count = sum(int(counts[stop] - counts[start]) for start, stop in spans)
        means[place] = sum(float(sums[stop] - sums[start]) for start, stop in spans) / max(1, count)
    return means


@dataclass(frozen=True, slots=True)
class _Steps:
    """The groups that each step took, according to `tokens/` and `steps.jsonl`."""

    takers: Mapping[Attempt, Sequence[int]]
    """Group -> the steps that took the group."""
    planned: Mapping[int, frozenset[tuple[int, int]]]
    """Step -> (stage, planned step) of the groups it took."""
    kept: frozenset[int]
    """The steps whose tokens were kept."""

    @classmethod
    def of(cls, run_dir: Path) -> _Steps:
        kept = kept_steps(run_dir)
        taken = {record.step: (record.stage, record.taken) for record in read_steps(run_dir).values() if record.taken}
        taken |= kept
        takers = defaultdict[Attempt, list[int]](list)
        for step, (stage, groups) in sorted(taken.items()):
            for each in groups:
                takers[stage, each.slot, each.attempt].append(step)
        planned = {
            step: frozenset((stage, each.planned_step) for each in groups) for step, (stage, groups) in taken.items()
        }
        return cls(takers, planned, frozenset(kept))


def kept_steps(run_dir: Path) -> dict[int, tuple[int, tuple[Taken, ...]]]:
    """Train step -> (stage, the groups it took), of every step whose tokens were kept."""
    steps: dict[int, tuple[int, tuple[Taken, ...]]] = {}
    for path in sorted((run_dir / "tokens").glob("step-*.safetensors")):
        metadata = _metadata(path)
        taken = tuple(Taken(*each) for each in json.loads(metadata["groups"]))
        steps[int(path.stem.removeprefix("step-"))] = int(metadata["stage"]), taken
    return steps


@dataclass(frozen=True, slots=True)
class _Kept:
    """An open file of kept tokens."""

    file: Any
    names: frozenset[str]
    places: Mapping[tuple[int, int, int], tuple[tuple[int, int], ...]]
    """(slot, attempt, index) -> [start, stop) of each of its sequences."""

    def mean(self, name: str, spans: Sequence[tuple[int, int]]) -> float:
        """The mean of a column over the trained tokens of some sequences."""
        numbers, masks = (
            np.concatenate([self.file.get_slice(each)[start:stop] for start, stop in spans]) for each in (name, _MASK)
        )
        return float(np.where(masks, numbers, 0.0).sum(dtype=np.float64)) / max(1, int(masks.sum()))

    def columns(self, start: int, stop: int) -> Columns:
        return {name: self.file.get_slice(name)[start:stop] for name in sorted(self.names)}


def _kept(path: Path) -> _Kept | None:
    """The open file, or None if nothing was kept."""
    return _opened(path, path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=8)
def _opened(path: Path, written_ns: int) -> _Kept:
    """Opens the file. `written_ns` is part of the cache key, because a resumed run may write the file again."""
    del written_ns
    places, start = defaultdict[tuple[int, int, int], tuple[tuple[int, int], ...]](tuple), 0
    for slot, attempt, index, length in json.loads(_metadata(path)["sequences"]):
        places[slot, attempt, index] += ((start, start + length),)
        start += length
    file: Any = safe_open(path, framework="numpy")
    return _Kept(file, frozenset(file.keys()), dict(places))


def _metadata(path: Path) -> Mapping[str, str]:
    with safe_open(path, framework="numpy") as file:
        metadata: Mapping[str, str] = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise DataError(f"the tokens of a train step in {path}", f"the format {metadata.get('format')!r}", "remove it")
    return metadata
