"""Counter-based randomness: uniform, independent of its neighbours, and the same numbers for ever."""

from __future__ import annotations

import numpy as np
import pytest

from trivium.foundation.randomness import SampleKey, permutation, stream, uniforms

KEY = SampleKey(seed=0, purpose="train", taskset="train", task_id="7")

GOLDEN_DIGEST = 4202435698648860658
GOLDEN_UNIFORMS = [0.25505330603859444, 0.992727009325395, 0.8589902408831487]
GOLDEN_STREAM = 16506657264538418868
GOLDEN_PERMUTATION = [3, 4, 6, 7, 1, 2, 0, 5]


def chi2(values: np.ndarray, bins: int) -> float:
    """Pearson's statistic against the uniform distribution; mean bins - 1, standard deviation sqrt(2 (bins - 1))."""
    counts = np.histogram(values, bins=bins, range=(0, 1))[0]
    expected = len(values) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def plausible(statistic: float, bins: int) -> bool:
    """Within five standard deviations, on both sides: too even is as wrong as too uneven."""
    return abs(statistic - (bins - 1)) < 5 * (2 * (bins - 1)) ** 0.5


def many_digests(count: int) -> np.ndarray:
    return np.array([SampleKey(0, "train", "train", str(i)).digest() for i in range(count)], np.uint64)


def test_one_stream_is_uniform() -> None:
    assert plausible(chi2(uniforms(KEY.digest(), np.arange(200_000)), 256), 256)


def test_one_position_is_uniform_over_streams() -> None:
    assert plausible(chi2(uniforms(many_digests(20_000), 0), 64), 64)


def test_digests_that_differ_by_one_bit_or_by_one_are_as_good_as_any() -> None:
    consecutive = uniforms(np.arange(200_000, dtype=np.uint64), 5)
    assert plausible(chi2(consecutive, 256), 256)
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    flipped = uniforms(np.uint64(KEY.digest()) ^ bits[:, None], np.arange(2_000)[None, :])
    assert plausible(chi2(flipped.ravel(), 128), 128)


@pytest.mark.parametrize("neighbour", ["position", "stream"])
def test_neighbours_know_nothing_of_each_other(neighbour: str) -> None:
    grid = uniforms(many_digests(500)[:, None], np.arange(401)[None, :])
    a, b = (grid[:, :-1], grid[:, 1:]) if neighbour == "position" else (grid[:-1], grid[1:])
    a, b = a.ravel(), b.ravel()
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / len(a) ** 0.5
    cells = np.floor(a * 16) / 16 + b / 16  # pairs on a 16 x 16 board, uniform if independent
    assert plausible(chi2(cells, 256), 256)


def test_the_checks_above_notice_bad_numbers() -> None:
    good = uniforms(KEY.digest(), np.arange(200_000))
    assert not plausible(chi2(good**1.05, 256), 256)
    assert not plausible(chi2(np.linspace(0, 1, 200_000, endpoint=False), 256), 256)


def test_numbers_are_in_range_with_53_bits() -> None:
    values = uniforms(KEY.digest(), np.arange(10_000))
    assert values.dtype == np.float64
    assert 0 <= values.min() < 1e-3
    assert 1 - 1e-3 < values.max() < 1
    assert np.array_equal(values * 2**53, np.floor(values * 2**53))
    assert len(np.unique(values)) == len(values)


def test_the_numbers_never_change() -> None:
    """Recorded once: a change here breaks the resumption of every run that exists."""
    assert KEY.digest() == GOLDEN_DIGEST
    assert uniforms(KEY.digest(), [0, 1, 2**31]).tolist() == GOLDEN_UNIFORMS
    assert stream("init", 3) == GOLDEN_STREAM
    assert permutation(8, "order", 0, 1).tolist() == GOLDEN_PERMUTATION


def test_company_does_not_matter() -> None:
    digests = many_digests(5)
    together = uniforms(digests[:, None], np.arange(7)[None, :])
    alone = [[float(uniforms(digest, position)) for position in range(7)] for digest in digests]
    assert together.tolist() == alone


def test_every_part_of_the_address_counts() -> None:
    others = [
        SampleKey(1, "train", "train", "7"),
        SampleKey(0, "eval", "train", "7"),
        SampleKey(0, "train", "test", "7"),
        SampleKey(0, "train", "train", "8"),
        SampleKey(0, "train", "train", "7", epoch=1),
        SampleKey(0, "train", "train", "7", index=1),
        KEY.child(0),
        KEY.child(1),
        KEY.child("0"),
        KEY.child(0).child(0),
    ]
    assert len({key.digest() for key in [KEY, *others]}) == len(others) + 1


def test_names_cannot_run_into_each_other() -> None:
    assert SampleKey(0, "a", "bc", "d").digest() != SampleKey(0, "ab", "c", "d").digest()
    assert stream("a", "b") != stream("ab")
    assert stream("1") != stream(1)


def test_a_permutation_holds_everything_once_and_differs_by_address() -> None:
    shuffled = permutation(1000, "order", 0)
    assert sorted(shuffled.tolist()) == list(range(1000))
    assert not np.array_equal(shuffled, permutation(1000, "order", 1))
    assert permutation(0, "order").tolist() == []


def test_every_place_of_a_permutation_is_equally_likely() -> None:
    places = np.array([permutation(8, "order", i)[0] for i in range(4000)])
    assert plausible(chi2((places + 0.5) / 8, 8), 8)
