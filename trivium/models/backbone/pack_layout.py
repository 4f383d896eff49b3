"""The layout of a pack: the rows of each sequence, and the dense grids of attention (`packed`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trivium.models.backbone.prefix_attention import TreeRows, Trunk
from trivium.models.backbone.prefixes import Segment, Tree
from trivium.models.placement import sent

_FILL = 0.75
"""The length of the shortest sequence of a dense grid, as a part of the longest."""

_CLUMP = 96
"""The most tokens of a clump. In larger ones, masked pairs of tokens cost more than the saved calls."""

_COPIED, _FEW = 0.4, 64
"""Tokens are copied up to this many for each token that follows them, or up to `_FEW` in any case. Measured on CPUs,
a separate attention call is slower below these bounds: up to 1.6 times as slow as attention without sharing."""


def clumps_of(tree: Tree, starts: npt.NDArray[np.int64]) -> tuple[Tree, npt.NDArray[np.int64], list[bool]]:
    """(the tree with each small subtree, a clump, as one segment; the first row of each segment; which are clumps).

    The tokens of a clump share one row of an attention grid with a mask: on CPUs, groups of short sequences took five
    times as long with each sequence in a row of its own.
    """
    totals = _totals(tree)
    segments: list[Segment] = []
    first_rows: list[int] = []
    clumps: list[bool] = []
    number: dict[int, int] = {}
    behind_clump = 0
    for here, segment in enumerate(tree.segments):
        start, length = int(starts[here]), segment.stop - segment.first
        if start < behind_clump:
            continue
        is_clump = length < totals[here] <= _CLUMP
        if is_clump:
            length = totals[here]
            behind_clump = start + length
        number[here] = len(segments)
        stop, parent = segment.first + length, number.get(segment.parent, -1)
        segments.append(segment._replace(stop=stop, parent=parent))
        first_rows.append(start)
        clumps.append(is_clump)
    return Tree(tuple(segments), ()), np.array(first_rows), clumps


def seen_until(tree: Tree, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(T,): for each token, the first later row that does not attend to it."""
    sizes = [segment.stop - segment.first for segment in tree.segments]
    return np.repeat(starts + _totals(tree), sizes)


def _totals(tree: Tree) -> list[int]:
    """The number of tokens of each segment and its continuations."""
    totals = [segment.stop - segment.first for segment in tree.segments]
    for here, segment in reversed([*enumerate(tree.segments)]):
        if segment.parent >= 0:
            totals[segment.parent] += totals[here]
    return totals


def copied_of(tree: Tree) -> list[bool]:
    """For each segment, whether every continuation attends to its own copy of it. For few tokens, copies are faster
    than one attention call of all continuations to the segment."""
    count = len(tree.segments)
    behind, paths = [0] * count, [0] * count  # tokens of the continuations, and the copies that they need
    # A path of copies (`paths_of`) ends at a trunk, a segment with continuations that is not copied: tokens behind it
    # would not attend to a copy above it.
    copied, above_trunk = [False] * count, [False] * count
    for here, segment in reversed([*enumerate(tree.segments)]):
        length, parent = segment.stop - segment.first, segment.parent
        if behind[here]:
            copied[here] = not above_trunk[here] and (paths[here] - 1) * length <= max(_FEW, _COPIED * behind[here])
        paths[here] = paths[here] if copied[here] else paths[here] + 1
        if parent >= 0:
            behind[parent] += behind[here] + length
            paths[parent] += paths[here]
            above_trunk[parent] |= above_trunk[here] or (behind[here] > 0 and not copied[here])
    return copied


def paths_of(tree: Tree, starts: npt.NDArray[np.int64], copied: Sequence[bool]) -> list[npt.NDArray[np.int64]]:
    """For each segment that is not copied, its rows after those of the copied segments before it."""
    paths: list[npt.NDArray[np.int64]] = []
    for here in range(len(tree.segments)):
        if not copied[here]:
            parts = [_rows(tree, starts, here)]
            above = tree.segments[here].parent
            while above >= 0 and copied[above]:
                parts.append(_rows(tree, starts, above))
                above = tree.segments[above].parent
            paths.append(np.concatenate(parts[::-1]))
    return paths


def _rows(tree: Tree, starts: npt.NDArray[np.int64], here: int) -> npt.NDArray[np.int64]:
    segment = tree.segments[here]
    return starts[here] + np.arange(segment.stop - segment.first)


def rows_of(
    leaf: int, tree: Tree, starts: npt.NDArray[np.int64], row_of_end: Mapping[int, int]
) -> npt.NDArray[np.int64]:
    """The rows of the sequence whose last segment is `leaf`. `row_of_end` has the rows of last tokens that are not in
    the tree."""
    parts = [np.array([row_of_end[leaf]])] if leaf in row_of_end else list[npt.NDArray[np.int64]]()
    while leaf >= 0:
        parts.append(_rows(tree, starts, leaf))
        leaf = tree.segments[leaf].parent
    return np.concatenate(parts[::-1])


def trunks_of(tree: Tree, starts: npt.NDArray[np.int64], copied: Sequence[bool]) -> tuple[Trunk, ...]:
    """The segments with continuations that attend to the trunk itself, not to copies of it; in preorder."""
    stops = [int(start) + segment.stop - segment.first for start, segment in zip(starts, tree.segments, strict=True)]
    ends, depths = list(stops), [segment.stop for segment in tree.segments]
    for here, segment in reversed([*enumerate(tree.segments)]):
        if segment.parent >= 0:  # its continuations are those of its parent, too
            ends[segment.parent] = max(ends[segment.parent], ends[here])
            depths[segment.parent] = max(depths[segment.parent], depths[here])
    return tuple(
        Trunk(int(starts[here]), stops[here], ends[here], depths[here] - 1 - segment.first)
        for here, segment in enumerate(tree.segments)
        if ends[here] > stops[here] and not copied[here]
    )


@dataclass(frozen=True, slots=True)
class Grids:
    """Dense grids of paths of similar lengths, one path in each row of a grid."""

    shapes: tuple[tuple[int, int], ...]
    """(paths, padded length) of each grid; S cells in total."""
    masked: tuple[bool, ...]
    """Whether a row of the grid holds a clump."""
    spread: npt.NDArray[np.int64]
    """(S,): the row of the pack in each cell. Padding repeats the last row of the path."""
    collect: npt.NDArray[np.int64]
    """(T,): a cell of each row of the pack."""

    def masks(self, until: npt.NDArray[np.int64]) -> list[npt.NDArray[np.bool_] | None]:
        """(paths, length, length) of each grid with clumps: whether one cell attends to another."""
        masks: list[npt.NDArray[np.bool_] | None] = []
        offset = 0
        for (count, length), masked in zip(self.shapes, self.masked, strict=True):
            rows = self.spread[offset : offset + count * length].reshape(count, length)
            offset += count * length
            masks.append(np.tril(rows[:, :, None] < until[rows][:, None, :]) if masked else None)
        return masks


def grids_of(paths: Sequence[npt.NDArray[np.int64]], clumps: Sequence[bool], num_tokens: int) -> Grids:
    """The grids of paths, some of which end with a clump."""
    lengths = np.array([len(rows) for rows in paths])
    members: list[list[int]] = []
    # The longest path of a grid comes first: it decides which shorter ones the grid may hold. Clumps get grids of their
    # own, because only these need a mask.
    for i in np.lexsort((-lengths, np.array(clumps))):
        last = members[-1][0] if members else -1
        if not members or clumps[i] != clumps[last] or lengths[i] < _FILL * lengths[last]:
            members.append([])
        members[-1].append(int(i))
    collect = np.empty(num_tokens, np.int64)
    spread: list[npt.NDArray[np.int64]] = []
    offset = 0
    for grid in members:
        longest = int(lengths[grid[0]])
        for i in grid:
            spread.append(paths[i][np.minimum(np.arange(longest), lengths[i] - 1)])
            collect[paths[i]] = offset + np.arange(lengths[i])
            offset += longest
    shapes = tuple((len(grid), int(lengths[grid[0]])) for grid in members)
    return Grids(shapes, tuple(bool(clumps[grid[0]]) for grid in members), np.concatenate(spread), collect)


def tree_rows(tree: Tree, starts: npt.NDArray[np.int64], positions: torch.Tensor) -> TreeRows:
    """Which rows of a pack attend to which, on the device of `positions` (T,). `starts`: the first row of each
    segment."""
    outline, first_rows, clumps = clumps_of(tree, starts)
    copied = copied_of(outline)
    ends_with_clump = [clump for clump, copy in zip(clumps, copied, strict=True) if not copy]
    grids = grids_of(paths_of(outline, first_rows, copied), ends_with_clump, len(positions))
    device = positions.device
    return TreeRows(
        grids=grids.shapes,
        masks=tuple(None if mask is None else sent(mask, device) for mask in grids.masks(seen_until(tree, starts))),
        spread=sent(grids.spread, device),
        collect=sent(grids.collect, device),
        positions=positions,
        trunks=trunks_of(outline, first_rows, copied),
        copies=any(copied),
    )
