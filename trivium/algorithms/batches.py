"""Builds batches from groups, and converts a batch's ragged arrays to padded tensors and back.

Legend: B sequences, L tokens of the longest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trivium.foundation.errors import DataError
from trivium.foundation.randomness import stream, uniforms
from trivium.models.late import torch
from trivium.types import EXPERT_VERSION, AnyArray, Batch, Experience, Group, Trajectory, experiences_of

if TYPE_CHECKING:
    from torch import Tensor


def batch_of(groups: Sequence[Group]) -> Batch:
    """The experiences of the groups' successful members, in order."""
    return Batch(tuple(e for group in groups for member in group.alive for e in experiences_of(group, member)))


def pair_of(group: Group) -> tuple[Trajectory, Trajectory] | None:
    """(best, worst) successful member with a completion, the first among equals. Returns None if no reward differs."""
    candidates = [member for member in group.alive if member.turns]
    best, worst = (pick(candidates, key=lambda member: member.reward, default=None) for pick in (max, min))
    return (best, worst) if best and worst and best.reward > worst.reward else None


def labelled(group: Group, column: str) -> tuple[Trajectory | None, Trajectory | None]:
    """(member, None) if the only member of a group is desirable, (None, member) if not.

    `column` of the task has the label: true or false, 1 or 0. Raises DataError for anything else.
    """
    label = group.task.columns.get(column)
    if label not in (0, 1):
        raise DataError(
            f"whether the completion of task {group.task.task_id!r} is desirable",
            f"column {column!r} is {label!r:.80}; the columns are {sorted(group.task.columns)}",
            "give each row true or false there, or name another column with algorithm.label",
        )
    (member,) = group.trajectories
    return (member, None) if label else (None, member)


def batch_of_pairs(groups: Sequence[Group], label: str = "label", *, mismatched: bool = False) -> Batch:
    """Two rows for each group that has a pair: the chosen one, the rejected one. A group with one member has a row
    without trained tokens in place of the other (`labelled`).

    With `mismatched`, two rows with a negative `index` follow each pair: the prompt of each of its rows with a
    completion of the next group that has another prompt, or of the next group if no prompt differs. They are cut to the
    length of the longest row of all pairs.

    Raises DataError for a trajectory whose turns rewrote history: it consists of several sequences, and only a single
    sequence has one probability.
    """
    pairs: list[tuple[Experience, ...]] = []
    for group in groups:
        chosen, rejected = (labelled(group, label) if len(group.trajectories) == 1 else pair_of(group)) or (None, None)
        if chosen or rejected:
            pairs.append(tuple(_single(group, member) if member else _missing(group) for member in (chosen, rejected)))
    longest = max((len(row) for pair in pairs for row in pair), default=0)
    rows: list[Experience] = []
    for number, pair in enumerate(pairs):
        rows += pair
        if mismatched:
            others = [*pairs[number + 1 :], *pairs[:number]]
            rows += _mismatched_pair(pair, others, longest)
    return Batch(tuple(rows))


def _mismatched_pair(
    pair: Sequence[Experience], others: Sequence[Sequence[Experience]], longest: int
) -> list[Experience]:
    """The prompts of a pair's rows, each with a completion of the first pair in `others` that has another prompt, or of
    the first pair if no prompt differs. A row without trained tokens, or without a pair in `others`, becomes blank."""
    own_prompt = next(_prompt_of(row) for row in pair if row.response_mask.any())
    ways = ([row for row in other if row.response_mask.any()] for other in others)
    others = [rows for rows in ways if rows]
    source = next((rows for rows in others if _prompt_of(rows[0]) != own_prompt), others[0] if others else [])
    rows: list[Experience] = []
    for row in pair:
        num_matched = sum(bool(partner.response_mask.any()) for partner in rows)
        whole = source and row.response_mask.any()
        # A source with one completion, of a row with a label, lends it to both rows.
        rows.append(_mismatched(row, source[num_matched % len(source)], longest) if whole else _blank(row.group_id, -1))
    return rows


def _prompt_of(row: Experience) -> tuple[bytes, tuple[str, ...]]:
    start = int(row.response_mask.argmax())
    return row.tokens[:start].tobytes(), tuple(item.sha256 for item in row.media)


def _mismatched(row: Experience, other: Experience, longest: int) -> Experience:
    """The prompt of one sequence with the completion of another, at most `longest` tokens."""
    start, begin = int(row.response_mask.argmax()), int(other.response_mask.argmax())
    moved = [item.at(item.span[0] - begin + start, item.span[1] - begin + start) for item in other.media if item.span]
    # Pictures of the other row's own prompt move to a place before the completion, and stay out.
    moved = [item for item in moved if item.span and item.span[0] >= start]
    # A picture's tokens and pixels go together: a cut inside it moves back to where it begins.
    end = min([longest, *(item.span[0] for item in moved if item.span and item.span[1] > longest)])
    end = min(end, start + len(other) - begin)
    completion = slice(begin, begin + end - start)
    prompt_media = [item for item in row.media if item.span and item.span[1] <= start]
    return Experience(
        np.concatenate([row.tokens[:start], other.tokens[completion]]),
        np.concatenate([np.zeros(start, np.bool_), other.response_mask[completion]]),
        np.zeros(end, np.float32),
        np.full(end, EXPERT_VERSION, np.int32),
        row.group_id,
        -1,
        media=(*prompt_media, *(item for item in moved if item.span and item.span[1] <= end)),
    )


def _blank(group_id: str, index: int) -> Experience:
    """A row without a trained token."""
    return Experience(
        np.zeros(1, np.int32),
        np.zeros(1, np.bool_),
        np.zeros(1, np.float32),
        np.full(1, EXPERT_VERSION, np.int32),
        group_id,
        index,
    )


def _missing(group: Group) -> Experience:
    """A row without trained tokens, in place of a missing completion."""
    return _blank(group.group_id, 1)


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
    if length:
        result[np.arange(length) < np.array([*map(len, arrays)])[:, None]] = np.concatenate(arrays)
    return torch.from_numpy(result)  # pyright: ignore[reportUnknownMemberType]


def ragged(values: Tensor, batch: Batch) -> list[AnyArray]:
    """The inverse of `padded` for the experiences of a batch."""
    grid = values.numpy()
    grid.setflags(write=False)  # slices of it become columns, and columns copy writable arrays
    return [row[:length] for row, length in zip(grid, batch.lengths, strict=True)]


def column(batch: Batch, name: str) -> Tensor:
    """A column of the batch as a tensor (B, L). Raises DataError if it is missing."""
    if name not in batch.columns:
        raise DataError(
            f"the column {name!r} of a batch",
            f"only {', '.join(sorted(batch.columns)) or 'none'}",
            "let the train engine score the batch with everything in algorithm.needs before asking for advantages",
        )
    return padded(batch.columns[name])


def token_uniforms(batch: Batch, *address: int | str) -> Tensor:
    """(B, L) float64 in [0, 1): a number for each token, derived from the address, the trajectory and the token's
    position. It does not depend on the rest of the batch."""
    part: Counter[tuple[str, int]] = Counter()
    rows: list[AnyArray] = []
    for e in batch.experiences:
        # A trajectory that rewrote its history has several sequences, each with numbers of its own.
        digest = np.uint64(stream(*address, e.group_id, e.index, part[e.group_id, e.index]))
        part[e.group_id, e.index] += 1
        rows.append(uniforms(digest, np.arange(len(e))))
    return padded(rows)


def numbered(names: Sequence[object]) -> npt.NDArray[np.int64]:
    """0, 1, ... in order of first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
