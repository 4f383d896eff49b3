"""Shared prefixes of sequences, as a tree of tokens. One pass over the tree computes all sequences.

Under causal attention the states of a token depend only on the tokens before it. Sequences with a common prefix have
the same states in it, and the gradient of those states is the sum of the gradients from each sequence.

Legend: n sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy.typing as npt

from trivium.planning.choices import FOLLOWING_PER_SHARED, MIN_SHARED


def is_gain(length: int, branches: int, below: int) -> bool:
    """Whether it pays to compute `length` tokens once instead of once for each of `branches` continuations, which have
    `below` tokens in total."""
    saved = (branches - 1) * length
    return saved >= MIN_SHARED and saved * FOLLOWING_PER_SHARED >= below


class Segment(NamedTuple):
    """A run of tokens that belongs to one or more sequences."""

    sequence: int
    """The sequence that the tokens are read from."""
    first: int
    stop: int
    """The tokens are `first` to `stop - 1` of that sequence."""
    parent: int
    """The segment before it; -1 if it begins a sequence."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Segments in preorder: the continuations of a segment follow it immediately."""

    segments: tuple[Segment, ...]
    leaves: tuple[int, ...]
    """The last segment of each sequence."""

    @property
    def num_tokens(self) -> int:
        return sum(segment.stop - segment.first for segment in self.segments)

    @property
    def num_squares(self) -> int:
        """Twice the number of attending pairs of tokens. Without sharing, the sum of the squared lengths."""
        return sum(segment.stop**2 - segment.first**2 for segment in self.segments)

    @property
    def shares(self) -> bool:
        """Whether any segment belongs to several sequences."""
        return any(segment.parent >= 0 for segment in self.segments) or len(self.segments) < len(self.leaves)

    def ends(self) -> dict[int, Segment]:
        """The last token of each segment without continuations, unless it is the only token of the segment."""
        parents = {segment.parent for segment in self.segments}
        last = (
            (i, segment._replace(first=segment.stop - 1)) for i, segment in enumerate(self.segments) if i not in parents
        )
        return {i: end for i, end in last if end.first > self.segments[i].first}

    def without(self, ends: Mapping[int, Segment]) -> Tree:
        """The tree that these ends are cut off from."""
        cut = (s._replace(stop=ends[i].first) if i in ends else s for i, s in enumerate(self.segments))
        return replace(self, segments=tuple(cut))


def separate(lengths: Sequence[int]) -> Tree:
    """The tree of sequences without shared tokens."""
    return Tree(tuple(Segment(i, 0, n, -1) for i, n in enumerate(lengths)), tuple(range(len(lengths))))


class Prefixes:
    """The lengths of the common prefixes of n sequences."""

    def __init__(self, keys: Sequence[npt.NDArray[Any]]) -> None:
        """`keys` are the sequences as arrays of one type: tokens, or whatever must be equal in shared tokens."""
        # Arrays cannot be sorted, bytes can. Their order is not that of the numbers, but common prefixes are neighbours
        # in it all the same.
        as_bytes = [key.tobytes() for key in keys]
        self._lengths = [len(key) for key in keys]
        self._order = sorted(range(len(keys)), key=as_bytes.__getitem__)
        self._rank = {row: rank for rank, row in enumerate(self._order)}
        self._common = [0, *(_common(keys[a], keys[b]) for a, b in pairwise(self._order))]
        """By rank, the length of the common prefix with the rank before."""

    def ordered(self, rows: Sequence[int]) -> list[int]:
        """The rows, sorted so that common prefixes are neighbours."""
        return sorted(rows, key=self._rank.__getitem__)

    def tree(self, rows: Sequence[int]) -> Tree:
        """The tree of the sequences `rows`, which are numbered in the order of the list. Prefixes are shared if it pays
        (`is_gain`)."""
        number = {row: i for i, row in enumerate(rows)}
        grown = _Growth()
        before = -1
        for row in self.ordered(rows):
            rank = self._rank[row]
            grown.add(number[row], self._lengths[row], min(self._common[before + 1 : rank + 1]) if before >= 0 else 0)
            before = rank
        return _laid_out(grown.finished(), len(rows))


def _common(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """The length of the common prefix."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


@dataclass(slots=True)
class _Node:
    """A place where sequences diverge, or where one ends."""

    depth: int
    sequence: int
    """One of the sequences that pass through."""
    ends: list[int] = field(default_factory=list[int])
    """The sequences that end here."""
    branches: list[_Node] = field(default_factory=list["_Node"])
    below: int = 0
    """The number of tokens of all continuations."""

    def adopt(self, nodes: Sequence[_Node]) -> None:
        for node in nodes:
            if node.depth == self.depth:  # a sequence that ends here
                self.ends += node.ends
            else:
                self.branches.append(node)
                self.below += node.depth - self.depth + node.below


class _Growth:
    """The nodes on the path from the root to the last added sequence. Nodes off the path are final."""

    def __init__(self) -> None:
        self._open = [_Node(0, -1)]
        self._last: list[_Node] = []

    def add(self, sequence: int, length: int, common: int) -> None:
        """Adds the next sequence in order, which has `common` tokens in common with the one before."""
        self._close(common)
        if self._open[-1].depth < common:
            self._open.append(_Node(common, sequence))
        self._open[-1].adopt(self._last)
        self._last = [_Node(length, sequence, [sequence])]

    def finished(self) -> _Node:
        self._close(-1)
        return self._open[0]

    def _close(self, depth: int) -> None:
        """Joins the nodes that are deeper than `depth` to their parents."""
        while self._open[-1].depth > depth:
            node = self._open[-1]
            node.adopt(self._last)
            if len(self._open) == 1:
                return
            self._open.pop()
            over = max(depth, self._open[-1].depth)
            pieces = len(node.branches) + len(node.ends)
            gains = is_gain(node.depth - over, pieces, node.below)
            ended = [_Node(node.depth, sequence, [sequence]) for sequence in node.ends]
            self._last = [node] if gains else [*node.branches, *ended]


def _laid_out(root: _Node, num_sequences: int) -> Tree:
    """The tree under a root without tokens."""
    segments: list[Segment] = []
    leaves = [-1] * num_sequences
    waiting = [(node, 0, -1) for node in reversed(root.branches)]
    while waiting:
        node, first, parent = waiting.pop()
        here = len(segments)
        segments.append(Segment(node.sequence, first, node.depth, parent))
        for sequence in node.ends:
            leaves[sequence] = here
        waiting += [(branch, node.depth, here) for branch in reversed(node.branches)]
    return Tree(tuple(segments), tuple(leaves))
