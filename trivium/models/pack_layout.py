"""Where the tokens of a pack lie: the rows of each sequence, and the dense grids of attention (`packed`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trivium.models.prefix_attention import Trunk
from trivium.models.prefixes import Tree

_FILL = 0.75
"""The shortest sequence of a dense grid, as a part of its longest."""

_COPIED, _FEW = 0.4, 64
"""Most tokens that are copied for each behind them, and how many always are: up to there, an attention of their own
took longer on CPUs."""


def copied_of(tree: Tree) -> list[bool]:
    """Of each segment, whether each that comes behind it attends to a copy of its own: where few tokens are copied,
    that is faster than an attention of all of them to one."""
    count = len(tree.segments)
    behind, paths = [0] * count, [0] * count  # tokens behind each segment, and the copies that they would need
    copied, kept = [False] * count, [False] * count  # kept: one behind it is not copied, and others go on from there
    for here, segment in reversed([*enumerate(tree.segments)]):
        length, parent = segment.stop - segment.first, segment.parent
        if behind[here]:
            copied[here] = not kept[here] and (paths[here] - 1) * length <= max(_FEW, _COPIED * behind[here])
        paths[here] = paths[here] if copied[here] else paths[here] + 1
        if parent >= 0:
            behind[parent] += behind[here] + length
            paths[parent] += paths[here]
            kept[parent] |= kept[here] or (behind[here] > 0 and not copied[here])
    return copied


def paths_of(tree: Tree, starts: npt.NDArray[np.int64], copied: Sequence[bool]) -> list[npt.NDArray[np.int64]]:
    """The rows of each segment that is not copied, with those before it that are."""
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
    """The rows of the sequence that ends with this segment; `row_of_end` has those of tokens that are not in it."""
    parts = [np.array([row_of_end[leaf]])] if leaf in row_of_end else list[npt.NDArray[np.int64]]()
    while leaf >= 0:
        parts.append(_rows(tree, starts, leaf))
        leaf = tree.segments[leaf].parent
    return np.concatenate(parts[::-1])


def trunks_of(tree: Tree, starts: npt.NDArray[np.int64], copied: Sequence[bool]) -> tuple[Trunk, ...]:
    """The segments that others go on from and attend to as they are, in preorder."""
    stops = [int(start) + segment.stop - segment.first for start, segment in zip(starts, tree.segments, strict=True)]
    ends, depths = list(stops), [segment.stop for segment in tree.segments]
    for here, segment in reversed([*enumerate(tree.segments)]):
        if segment.parent >= 0:  # what comes behind it is behind its parent, too
            ends[segment.parent] = max(ends[segment.parent], ends[here])
            depths[segment.parent] = max(depths[segment.parent], depths[here])
    return tuple(
        Trunk(int(starts[here]), stops[here], ends[here], depths[here] - 1 - segment.first)
        for here, segment in enumerate(tree.segments)
        if ends[here] > stops[here] and not copied[here]
    )


def grids_of(
    paths: Sequence[npt.NDArray[np.int64]], num_tokens: int
) -> tuple[tuple[tuple[int, int], ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Dense grids over sequences of rows, of similar length: their shapes, cell -> row, row -> a cell that has it."""
    lengths = np.array([len(rows) for rows in paths])
    order = np.argsort(-lengths, kind="stable")
    members: list[list[int]] = []
    for i in order:
        if not members or lengths[i] < _FILL * lengths[members[-1][0]]:
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
    return tuple((len(grid), int(lengths[grid[0]])) for grid in members), np.concatenate(spread), collect
