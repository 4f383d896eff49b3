"""From groups to a batch, and from a batch's ragged arrays to padded tensors and back.

Legend: B sequences, L tokens of the longest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.errors import DataError
from trivium.randomness import stream, uniforms
from trivium.types import EXPERT_VERSION, AnyArray, Batch, Experience, Group, Trajectory, experiences_of


def batch_of(groups: Sequence[Group]) -> Batch:
    """The experiences of the groups' living members, in order."""
    return Batch(tuple(e for group in groups for member in group.alive for e in experiences_of(group, member)))


def pair_of(group: Group) -> tuple[Trajectory, Trajectory] | None:
    """(the best, the worst) living member with a completion, of equals the first; None where none is better."""
    candidates = [member for member in group.alive if member.turns]
    best, worst = (pick(candidates, key=lambda member: member.reward, default=None) for pick in (max, min))
    return (best, worst) if best and worst and best.reward > worst.reward else None


def labelled(group: Group, column: str) -> tuple[Trajectory | None, Trajectory | None]:
    """(the completion if it is desirable, the completion if it is not) of a group with one member, by a column of its
    task: true or false, 1 or 0. Raises DataError for anything else."""
    label = group.task.columns.get(column)
    if label not in (0, 1):
        raise DataError(
            f"whether the completion of task {group.task.task_id!r} is desirable",
            f"column {column!r} is {label!r:.80}; the columns are {sorted(group.task.columns)}",
            "give each row true or false there, or name another column with algorithm.label",
        )
    (member,) = group.trajectories
    return (member, None) if label else (None, member)


def batch_of_pairs(groups: Sequence[Group], label: str = "label") -> Batch:
    """Two rows for each group that has a pair: the chosen one, the rejected one. A group with one member has a row
    without trained tokens in place of the other (`labelled`).

    Raises DataError for a trajectory whose turns rewrote history: it is more than one sequence, and only a single
    sequence has one probability.
    """
    rows: list[Experience] = []
    for group in groups:
        chosen, rejected = (labelled(group, label) if len(group.trajectories) == 1 else pair_of(group)) or (None, None)
        if chosen or rejected:
            rows += [_single(group, each) if each else _missing(group) for each in (chosen, rejected)]
    return Batch(tuple(rows))


def _missing(group: Group) -> Experience:
    """The row of a completion that there is not."""
    return Experience(
        np.zeros(1, np.int32),
        np.zeros(1, np.bool_),
        np.zeros(1, np.float32),
        np.full(1, EXPERT_VERSION, np.int32),
        group.group_id,
        index=1,
    )


def _single(group: Group, member: Trajectory) -> Experience:
    experiences = experiences_of(group, member)
    if len(experiences) != 1:
        raise DataError(
            "a pair of two sequences",
            f"trajectory {member.index} of group {group.group_id!r} is {len(experiences)}: a turn rewrote its history",
            "use a workflow whose turns extend one another, or an algorithm without pairs",
        )
    return experiences[0]


def padded(arrays: Sequence[AnyArray]) -> Tensor:
    """Arrays with a ragged leading axis as one tensor (B, L, ...), zeros on the right."""
    length = max((len(array) for array in arrays), default=0)
    dtype, trailing = (arrays[0].dtype, arrays[0].shape[1:]) if arrays else (np.dtype(np.float32), ())
    result = np.zeros((len(arrays), length, *trailing), dtype)
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(result)  # pyright: ignore[reportUnknownMemberType]


def ragged(values: Tensor, batch: Batch) -> list[AnyArray]:
    """The inverse of `padded` for the experiences of a batch."""
    return [row[: len(e)].numpy() for row, e in zip(values, batch.experiences, strict=True)]


def column(batch: Batch, name: str) -> Tensor:
    """A column of the batch as a tensor (B, L); raises DataError where it is missing."""
    if name not in batch.columns:
        raise DataError(
            f"the column {name!r} of a batch",
            f"only {', '.join(sorted(batch.columns)) or 'none'}",
            "let the train engine score the batch with everything in algorithm.needs before asking for advantages",
        )
    return padded(batch.columns[name])


def token_uniforms(batch: Batch, *address: int | str) -> Tensor:
    """(B, L) float64 in [0, 1): a number for each token that depends on the address and on which token it is, and on
    nothing else in the batch."""
    part: Counter[tuple[str, int]] = Counter()
    rows: list[AnyArray] = []
    for e in batch.experiences:
        digest = np.uint64(stream(*address, e.group_id, e.index, part[e.group_id, e.index]))
        part[e.group_id, e.index] += 1
        rows.append(uniforms(digest, np.arange(len(e))))
    return padded(rows)


def numbered(names: Sequence[object]) -> npt.NDArray[np.int64]:
    """0, 1, ... in order of first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
