"""Writes and reads `tokens/`, the values that train steps computed for their tokens (`run.keep: tokens`).

`step-NNNNNN.safetensors` has the batch of a train step with its columns, written before the update;
`update-NNNNNN.safetensors` has the columns of each token in the first pass of the step's updates.

Legend: L tokens of a sequence.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from trivium.buffers.step_log import StepLog
from trivium.foundation.atomic import atomic_write
from trivium.foundation.errors import DataError
from trivium.types import AnyArray, Batch, Group

TOKENS = "tokens"
_FORMAT = "trivium-tokens-1"
MASK = "response_mask"
Columns = Mapping[str, AnyArray]
"""Arrays of one sequence by name, leading axis L."""


@dataclass(frozen=True)
class StepFiles:
    """Records the groups that train steps take. With `keeps_updates`, also writes their computed values: `run.keep:
    tokens`."""

    run_dir: Path
    log: StepLog
    keeps_updates: bool

    def step(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Records a step; writes its values (`keep_tokens`)."""
        if self.keeps_updates:
            keep_tokens(self.run_dir, step, groups, batch)
        self.log.took(step, groups)

    def updates(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Writes `tokens/update-NNNNNN.safetensors`: columns of each token in the first pass of its updates."""
        _keep(tokens_file(self.run_dir, step, "update"), groups, batch)


def keep_tokens(run_dir: Path, step: int, groups: Sequence[Group], batch: Batch) -> None:
    """Writes `tokens/step-NNNNNN.safetensors`: the batch of a train step with its columns. `groups` are all groups that
    the step took."""
    _keep(tokens_file(run_dir, step), groups, batch)


def _keep(path: Path, groups: Sequence[Group], batch: Batch) -> None:
    """Writes the columns of a batch, its sequences one after another in one tensor for each column. The metadata maps
    each sequence to its rollout."""
    by_id = {group.group_id: group for group in groups}
    rows: list[list[int]] = []
    for e in batch.experiences:
        group = by_id[e.group_id]
        rows.append([group.slot, group.attempt, e.index, len(e)])
    arrays: dict[str, Sequence[AnyArray]] = {MASK: [e.response_mask for e in batch.experiences], **batch.columns}
    tensors = {name: np.concatenate(parts) for name, parts in arrays.items() if len(parts)}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, save(tensors, {"format": _FORMAT, "sequences": json.dumps(rows)}))


def tokens_file(run_dir: Path, step: int, when: str = "step") -> Path:
    """The file of the kept columns of a train step; with `when="update"`, of the first pass of its updates."""
    return run_dir / TOKENS / f"{when}-{step:06d}.safetensors"


def kept_values(run_dir: Path, step: int, group: Group, index: int) -> tuple[Columns, ...]:
    """The values that a train step computed for a member of a group, before its updates (`kept_columns`) and in their
    first pass (`types.AT_UPDATE`)."""
    before = kept_columns(run_dir, step, group, index)
    at_update = kept_columns(run_dir, step, group, index, when="update")
    at_update = at_update if len(at_update) == len(before) else ({},) * len(before)
    # A column in both files has the value of `before`.
    return tuple({**later, **columns} for columns, later in zip(before, at_update, strict=True))


def kept_columns(run_dir: Path, step: int, group: Group, index: int, *, when: str = "step") -> tuple[Columns, ...]:
    """The values that a train step computed for a member of a group before its updates (`when="step"`) or in their
    first pass (`"update"`), for each sequence of the member. Empty if the step left the member out, or kept nothing."""
    tokens = _tokens_in(tokens_file(run_dir, step, when))
    places = () if tokens is None else tokens.places.get((group.slot, group.attempt, index), ())
    return tuple(tokens.columns(start, stop) for start, stop in places) if tokens is not None else ()


def kept_means(run_dir: Path, step: int, name: str) -> Mapping[tuple[int, int, int], float]:
    """(slot, attempt, index) -> the mean of a column over the trained tokens, for each rollout in a train step's batch.
    Empty if the column was not kept."""
    path = tokens_file(run_dir, step)
    return _means(path, path.stat().st_mtime_ns, name) if path.is_file() else {}


@lru_cache(maxsize=8)
def _means(path: Path, written_ns: int, name: str) -> Mapping[tuple[int, int, int], float]:
    tokens = _opened(path, written_ns)
    if name not in tokens.names:
        return {}
    mask = tokens.file.get_tensor(MASK)
    sums = np.concatenate([[0.0], np.cumsum(np.where(mask, tokens.file.get_tensor(name), 0.0), dtype=np.float64)])
    counts = np.concatenate([[0], np.cumsum(mask)])
    means: dict[tuple[int, int, int], float] = {}
    for place, spans in tokens.places.items():
        count = sum(int(counts[stop] - counts[start]) for start, stop in spans)
        means[place] = sum(float(sums[stop] - sums[start]) for start, stop in spans) / max(1, count)
    return means


def kept_steps(run_dir: Path) -> list[int]:
    """The train steps whose tokens were kept, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (run_dir / TOKENS).glob("step-*.safetensors"))


@dataclass(frozen=True, slots=True)
class _TokensFile:
    """An open file of kept tokens."""

    file: Any
    names: frozenset[str]
    places: Mapping[tuple[int, int, int], tuple[tuple[int, int], ...]]
    """(slot, attempt, index) -> [start, stop) of each of its sequences."""

    def columns(self, start: int, stop: int) -> Columns:
        return {name: self.file.get_slice(name)[start:stop] for name in sorted(self.names)}


def _tokens_in(path: Path) -> _TokensFile | None:
    """The open file, or None if nothing was kept."""
    return _opened(path, path.stat().st_mtime_ns) if path.is_file() else None


@lru_cache(maxsize=8)
def _opened(path: Path, written_ns: int) -> _TokensFile:
    """Opens the file. `written_ns` is part of the cache key, because a resumed run may write the file again."""
    del written_ns
    places, start = defaultdict[tuple[int, int, int], tuple[tuple[int, int], ...]](tuple), 0
    for slot, attempt, index, length in json.loads(_metadata(path)["sequences"]):
        places[slot, attempt, index] += ((start, start + length),)
        start += length
    file: Any = safe_open(path, framework="numpy")
    return _TokensFile(file, frozenset(file.keys()), dict(places))


def _metadata(path: Path) -> Mapping[str, str]:
    with safe_open(path, framework="numpy") as file:
        metadata: Mapping[str, str] = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise DataError(f"the tokens of a train step in {path}", f"the format {metadata.get('format')!r}", "remove it")
    return metadata
