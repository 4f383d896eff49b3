"""Shares of equal work: which sequences go to which rank, which balances the ranks' step times."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from trivium.foundation.errors import DataError

LINEAR_PER_WIDTH = 6
"""The ratio of linear work per token to attention work per token and position, in widths of the model. A transformer
block of width d with a feed-forward layer of width 4 d takes 12 d^2 multiplications per token, and 2 d per attended
position."""
WIDTH = 4096
"""Default width."""

Part = tuple[float, int, tuple[int, ...]]
"""(workload, number of items, items)."""


def workload(length: int, width: int = WIDTH) -> int:
    """The cost of a sequence of `length` tokens in a model of hidden size `width`, in units of one attention score: 6 *
    width * L + L^2."""
    return LINEAR_PER_WIDTH * width * length + length * length


def partition(workloads: Sequence[float], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Splits the indices of `workloads` into `parts` lists with nearly equal sums, heaviest first.

    Largest differencing method (Karmarkar and Karp, 1982): repeatedly joins the two most uneven partial solutions, the
    heavy parts of one with the light parts of the other, until one is left. Deterministic. The heaviest part is never
    heavier than with the greedy rule, which gives each item, heaviest first, to the lightest part. With fewer items
    than parts, some parts are empty.

    `equal_size` makes the numbers of items differ by at most one; the greedy bound does not hold then. Raises DataError
    for less than one part.
    """
    if parts < 1:
        raise DataError(f"{len(workloads)} sequences in {parts} parts", "less than one part", "ask for at least one")
    if equal_size:
        chosen = _differenced(workloads, parts, parts)
    else:
        chosen = min(_differenced(workloads, parts, 1), _greedy(workloads, parts), key=lambda solution: solution[0][0])
    return [sorted(items) for _, _, items in chosen]


def _differenced(workloads: Sequence[float], parts: int, chunk_size: int) -> list[Part]:
    """Largest differencing. Each chunk of `chunk_size` items of similar weight starts as one solution, one item per
    part."""
    order = sorted(range(len(workloads)), key=lambda item: (workloads[item], item))
    first = -len(order) % chunk_size  # the lightest chunk has fewer items if the number is not divisible
    chunks = [order[max(start, 0) : start + chunk_size] for start in range(-first, len(order), chunk_size)]
    heap = [_solution([(workloads[item], 1, (item,)) for item in chunk], parts) for chunk in chunks]
    if not heap:
        return [(0, 0, ())] * parts
    heapify(heap)
    while len(heap) > 1:
        one = heappop(heap)[-1]
        other = heap[0][-1]
        joined = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in zip(one, reversed(other), strict=True)]
        heapreplace(heap, _solution(joined, parts))
    return heap[0][-1]


def _solution(nonempty: list[Part], parts: int) -> tuple[float, float, int, tuple[int, ...], list[Part]]:
    """A heap entry: a sort key that puts the most uneven solution first, and the parts, heaviest first."""
    filled = sorted([*nonempty, *[(0, 0, ())] * (parts - len(nonempty))], reverse=True)
    total, number, items = filled[0]
    return filled[-1][0] - total, -total, -number, tuple(-item for item in items), filled


def _greedy(workloads: Sequence[float], parts: int) -> list[Part]:
    """Gives each item, heaviest first, to the lightest part. Returns the heaviest part first."""
    heap: list[Part] = [(0, 0, ())] * parts
    for item in sorted(range(len(workloads)), key=lambda item: (-workloads[item], item)):
        total, number, items = heap[0]
        heapreplace(heap, (total + workloads[item], number + 1, (*items, item)))
    return sorted(heap, reverse=True)
