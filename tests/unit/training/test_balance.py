"""Balanced shares: every sequence once, deterministic, never worse than the greedy rule."""

from failing import refused
from hypothesis import given
from hypothesis import strategies as st

from trivium.foundation.errors import DataError
from trivium.training.balance import partition, workload

WORKLOADS = st.lists(st.integers(0, 5000), max_size=40)
PARTS = st.integers(1, 9)


def sums(workloads: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(workloads[item] for item in part) for part in parts]


def greedy(workloads: list[int], parts: int) -> int:
    """The heaviest part when each item, heaviest first, goes to the lightest part."""
    loads = [0] * parts
    for work in sorted(workloads, reverse=True):
        loads[loads.index(min(loads))] += work
    return max(loads)


@given(WORKLOADS, PARTS, st.booleans())
def test_every_item_is_in_one_part(workloads: list[int], parts: int, equal_size: bool) -> None:
    found = partition(workloads, parts, equal_size=equal_size)
    assert len(found) == parts
    assert sorted(item for part in found for item in part) == list(range(len(workloads)))
    assert all(part == sorted(part) for part in found)
    assert sums(workloads, found) == sorted(sums(workloads, found), reverse=True)
    assert found == partition(list(workloads), parts, equal_size=equal_size)


@given(WORKLOADS, PARTS)
def test_no_part_is_heavier_than_the_greedy_rule_makes_it(workloads: list[int], parts: int) -> None:
    assert max(sums(workloads, partition(workloads, parts))) <= greedy(workloads, parts)


@given(WORKLOADS, PARTS)
def test_equal_sizes_differ_by_one_at_most(workloads: list[int], parts: int) -> None:
    sizes = [len(part) for part in partition(workloads, parts, equal_size=True)]
    assert max(sizes) - min(sizes) <= (len(workloads) % parts > 0)


@given(st.lists(st.integers(1, 5000), max_size=8), PARTS)
def test_items_that_would_leave_no_part_empty_leave_none_empty(workloads: list[int], parts: int) -> None:
    found = partition(workloads, parts)
    assert sum(not part for part in found) == max(0, parts - len(workloads))


def test_differencing_finds_what_the_greedy_rule_does_not() -> None:
    assert sums([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2)) == [16, 14]
    assert greedy([8, 7, 6, 5, 4], 2) == 17


def test_no_parts_are_refused() -> None:
    with refused(DataError, "0 parts"):
        partition([1, 2], 0)


def test_attention_weighs_more_in_a_narrow_model() -> None:
    assert workload(512) == 24576 * 512 + 512**2
    assert workload(2048, 64) / workload(1024, 64) > workload(2048) / workload(1024)
