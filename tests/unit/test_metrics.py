"""The catalogue of metrics: declared once, aggregated as declared, refused when unknown."""

from __future__ import annotations

import math

import pytest
from failing import refused

from trivium.foundation.errors import DataError
from trivium.foundation.metrics import METRICS, aggregate, checked, declare, declared, depends_on_machine, same
from trivium.step_report import step_row


def test_an_undeclared_key_is_refused() -> None:
    with refused(DataError, "reward/maen"):
        checked({"reward/mean": 1.0, "reward/maen": 1.0})


def test_a_pattern_covers_the_users_names() -> None:
    assert declared("eval/my set/pass@4").key == "eval/*/pass@*"
    assert declared("reward/component/format").better == "up"


def test_a_key_is_declared_once() -> None:
    with refused(DataError, "'reward/mean'"):
        declare("reward/mean", "again")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward/mean", 2.0),
        ("reward/min", 1.0),
        ("reward/max", 4.0),
        ("rollout/groups", 6.0),
        ("train/version", 1.0),
    ],
)
def test_rows_become_one_by_the_declared_rule(key: str, value: float) -> None:
    rows = [{key: 1.0}, {key: 4.0}, {key: 1.0}]
    assert aggregate(rows) == {key: value}


def test_a_row_without_the_key_does_not_count() -> None:
    assert aggregate([{"reward/mean": 1.0}, {}, {"reward/mean": 3.0}]) == {"reward/mean": 2.0}


def test_checked_metrics_are_plain_floats_in_a_fixed_order() -> None:
    row = checked({"train/version": 3, "reward/mean": True})
    assert list(row) == ["reward/mean", "train/version"]
    assert all(type(value) is float for value in row.values())


def test_every_declaration_is_complete() -> None:
    for key, metric in METRICS.items():
        area, _, name = key.partition("/")
        assert area, key
        assert name, key
        assert metric.help[0].islower() or metric.help.split()[0].isupper() or "KL" in metric.help, key
        assert metric.better in ("", "up", "down"), key
        assert aggregate([{key: 1.0}]) == {key: 1.0}, key


def test_an_area_may_depend_on_the_machine() -> None:
    assert depends_on_machine("time/step")
    assert depends_on_machine("perf/tokens_per_s")
    assert not depends_on_machine("train/time")
    seconds = [key for key, metric in METRICS.items() if metric.unit in ("s", "B", "tokens/s")]
    assert all(depends_on_machine(key) for key in seconds)


def test_nan_equals_nan_and_nothing_else() -> None:
    assert same(math.nan, math.nan)
    assert not same(math.nan, 0.0)
    assert same(1.0, 1.0)


def test_a_step_that_takes_no_time_has_rates() -> None:
    row = step_row({}, {"wait": 0.0}, (), 0.0)
    assert (row["perf/idle"], row["perf/rollout_tokens_per_second"]) == (0.0, 0.0)
