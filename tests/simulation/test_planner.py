"""`trivium profile` and `trivium simulate`: rates from a run, and the speed that follows from them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.failing import refused
from trivium.config import RunConfig, config_from_mapping
from trivium.errors import ConfigError, RunDirError

pytest.importorskip("greenlet")

from trivium.simulation.planner import Case, Forecast, cases_of, cheapest, forecasts, plot, table, virtual_run
from trivium.simulation.rated import Part, Replica, Rollout, drawn
from trivium.simulation.rates import Rates, fit, measure

RATES = Rates(
    start_s=0.1,
    step_s=0.002,
    row_s=0.002,
    load_s=0.05,
    update_s=0.4,
    update_token_s=0.0006,
    sync_s=0.05,
    save_s=0.0,
    prompt_tokens=(20.0,),
    response_tokens=(100.0,),
)


def config(groups: int = 4, **algorithm: object) -> RunConfig:
    return config_from_mapping(
        {
            "model": {"kind": "tiny", "alphabet": "0123456789+=", "max_position": 600},
            "tasks": {"train": {"kind": "arithmetic", "max_operand": 99}},
            "rewards": [{"kind": "exact"}],
            "engine": {"sampling": {"max_new_tokens": 512}},
            "schedule": {"groups_per_step": groups, "group_size": 4},
            "sync": {"in_flight": "update"},
            "algorithm": algorithm,
        }
    )


def forecast(case: Case, stage: RunConfig | None = None, **rates: Any) -> Forecast:
    return next(forecasts(stage or config(), RATES.model_copy(update=rates), [case], 8))


def sampling_s(rows: int) -> float:
    """Seconds in which so many rows sample 100 tokens."""
    return 0.1 + 100 * (0.002 + 0.002 * rows)


def training_s(tokens: int) -> float:
    return 0.4 + tokens * 0.0006


BESIDE_S = 0.05 + 0.05 + 0.002
"""Seconds in which weights are published, fetched and loaded."""
TOKENS = 16 * 120


@pytest.mark.parametrize(
    ("case", "rates", "step_s"),
    [
        pytest.param(Case(), {}, sampling_s(16) + training_s(TOKENS), id="one engine, one rank"),
        pytest.param(Case(), {"max_rows": 4}, 4 * sampling_s(4) + training_s(TOKENS), id="rows wait"),
        pytest.param(
            Case(),
            {"turns": (2.0,), "environment_s": (3.0,)},
            2 * sampling_s(16) + 3 + training_s(16 * 220),
            id="turns and environments",
        ),
        pytest.param(Case(2), {}, sampling_s(8) + 0.002 + training_s(TOKENS), id="two explorers"),
        pytest.param(Case(300), {}, sampling_s(4) + training_s(TOKENS), id="more explorers than groups"),
        pytest.param(
            Case(1, 4), {"rank_efficiency": 0.8}, sampling_s(16) + 0.4 + TOKENS * 0.0006 / (4 * 0.8**2), id="four ranks"
        ),
    ],
)
def test_a_synchronous_step_takes_the_sum_of_its_parts(case: Case, rates: dict[str, Any], step_s: float) -> None:
    found = forecast(case, **rates)
    assert 3600 / found.steps_per_hour == pytest.approx(step_s + BESIDE_S, rel=0.02)
    assert found.staleness == found.dropped == 0


def test_a_large_step_takes_as_long_in_units_of_groups() -> None:
    # 256 groups are simulated as 64 units. Each of 64 explorers has four groups, each of 256 one.
    rates = {"update_token_s": 0.00002}
    train_s = 0.4 + 256 * 4 * 120 * 0.00002
    for explorers, rows in ((64, 16), (256, 4)):
        found = forecast(Case(explorers), config(256), **rates)
        assert 3600 / found.steps_per_hour == pytest.approx(sampling_s(rows) + train_s + BESIDE_S, rel=0.03)
        # Part of the time in which no row is in flight.
        assert found.explorers_idle == pytest.approx(1 - (sampling_s(rows)) * found.steps_per_hour / 3600, abs=0.03)


def test_scores_add_the_time_of_their_tokens() -> None:
    plain, scored = (
        forecast(Case(), config(kind="grpo", kl={"coef": coef}), score_token_s=0.0004) for coef in (0.0, 0.1)
    )
    assert 3600 / scored.steps_per_hour - 3600 / plain.steps_per_hour == pytest.approx(TOKENS * 0.0004, rel=0.02)


@pytest.mark.parametrize("own_process", [False, True])
def test_engine_and_trainer_slow_each_other_down_on_one_device(own_process: bool) -> None:
    speed = {False: 0.5, True: 0.25}[own_process]
    stage = config_from_mapping({**config().model_dump(exclude_unset=True), "train": {"own_process": own_process}})
    rates = {"shared_speed": 0.5, "own_process_speed": 0.25, "update_token_s": 0.003}
    train_s = 0.4 + TOKENS * 0.003
    shared, apart = (forecast(Case(explorers, 1, 1), stage, **rates) for explorers in (1, 2))
    # The trainer limits. While the engine decodes, for 3.4 s / speed, the trainer does the work of 3.4 s.
    assert 3600 / shared.steps_per_hour == pytest.approx(3.4 / speed + train_s - 3.4, rel=0.02)
    assert 3600 / apart.steps_per_hour == pytest.approx(train_s, rel=0.02)
    assert shared.trainer_idle < 0.03


def test_a_file_of_rates_says_what_each_means_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text(RATES.to_yaml(), encoding="utf-8")
    assert Rates.read(file) == RATES
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[lines.index("row_s: 0.002") - 1].startswith("# Seconds that each row in flight adds")
    file.write_text("row_s: -1\nspeed: 3\n", encoding="utf-8")
    with refused(ConfigError, str(file), "row_s", "speed", "step_s"):
        Rates.read(file)
    with refused(RunDirError, str(tmp_path)):
        measure([tmp_path])


def test_factors_are_never_negative_and_one_of_equal_columns_is_left_out() -> None:
    rows = [((1.0, tokens, tokens * rows), 0.5 + 0.01 * tokens + 0.002 * tokens * rows) for tokens, rows in
            ((10.0, 1.0), (20.0, 4.0), (30.0, 2.0), (40.0, 8.0))]  # fmt: skip
    assert fit(rows) == pytest.approx((0.5, 0.01, 0.002))
    assert fit([((1.0, x), 3.0 - 0.1 * x) for x in (1.0, 2.0, 3.0)])[1] == 0
    assert fit([((x, 4 * x), 2 * x) for x in (1.0, 2.0, 3.0)]) == pytest.approx((0.0, 0.5))
    assert [drawn(uniform, (1.0, 2.0, 4.0)) for uniform in (0.0, 0.5, 0.75)] == [1.0, 2.0, 3.0]


def test_rows_share_an_engine_and_a_load_waits_for_earlier_turns() -> None:
    async def check() -> None:
        rates = {"start_s": 1.0, "step_s": 1.0, "row_s": 1.0, "load_s": 2.0, "max_rows": 2}
        loop, replica = asyncio.get_running_loop(), Replica(RATES.model_copy(update=rates), 0.0)
        part, later, cancelled = (Part(left, loop.create_future(), 9) for left in (3, 1, 1))
        replica.begin([Rollout(part, [2]), Rollout(part, [4]), Rollout(part, [1], 5.0)])
        replica.advance(2.0)
        load = replica.load(1)
        replica.begin([Rollout(later, [1])])
        # The first two rows make a token in 3 s from second 1 on. The first one ends at 7 and the third one starts,
        # joins the second one at 8 and ends at 11. The second one ends at 12, and the load at 14.
        replica.advance(13.9)
        assert not load.done()
        assert replica.next_at == 14
        assert replica.load(2) is load  # a newer version takes the place of one that is not loaded
        replica.advance(15.9)
        assert load.done()
        assert not part.done.done()  # the third rollout spends five seconds in its environment
        replica.advance(16.0)
        assert part.done.done()
        replica.advance(16.9)
        assert not later.done.done()
        replica.advance(17.0)
        assert later.done.done()
        assert (part.version, later.version) == (0, 2)
        replica.begin([Rollout(cancelled, [9])])
        replica.cancel(cancelled)
        assert replica.next_at == float("inf")
        assert replica.busy_s == 11 + 2

    asyncio.run(check())


@pytest.fixture
def probes(tmp_path: Path) -> list[Path]:
    """Two runs of rated engines without a planner: each completion is one rollout."""
    rates = RATES.model_copy(update={"prompt_tokens": (0.0,), "response_tokens": (8.0, 16.0, 32.0, 64.0)})
    rated = "trivium.simulation.rated:Rated{}Engine"
    runs = [tmp_path / "small", tmp_path / "large"]
    for run, groups in zip(runs, (4, 16), strict=True):
        stage = {
            "run": {"dir": str(run)},
            "engine": {"kind": rated.format(""), "sampling": {"max_new_tokens": 64}, "rates": rates.model_dump()},
            "train": {"kind": rated.format("Train"), "rates": rates.model_dump()},
            "schedule": {"groups_per_step": groups, "group_size": 4, "steps": 6},
            "checkpoint": {"save_every": 0},
            "monitors": [{"kind": "jsonl"}],
        }
        virtual_run(config_from_mapping({**config().model_dump(exclude_unset=True), **stage}))
    return runs


def test_the_profile_of_runs_has_the_rates_that_they_had(probes: list[Path]) -> None:
    found = measure(probes)
    for name in ("step_s", "row_s", "update_s", "update_token_s", "sync_s"):
        assert getattr(found, name) == pytest.approx(getattr(RATES, name), rel=0.02), name
    for name in ("start_s", "load_s"):  # completions end on a grid of times
        assert getattr(found, name) == pytest.approx(getattr(RATES, name), rel=0.05), name
    assert found.mean("response_tokens") == pytest.approx(28, rel=0.1)
    assert found.mean("environment_s") < 0.001


def test_forecasts_follow_the_schedule() -> None:
    rates = RATES.model_copy(update={"shared_speed": 0.5, "response_tokens": (100.0, 200.0)})
    cases = [Case(1, 1, 0), Case(1, 1, 2), Case(4, 1, 2), Case(4, 4, 2)]
    synchronous, overlapped, more_explorers, more_ranks = results = list(forecasts(config(), rates, cases, 8))
    assert synchronous.staleness == 0 < overlapped.staleness <= 2
    # One process on one device: overlapping saves little. Four explorers have devices of their own, and the trainer is
    # what limits.
    assert overlapped.steps_per_hour > 0.95 * synchronous.steps_per_hour
    assert 3600 / more_explorers.steps_per_hour == pytest.approx(training_s(16 * 170), rel=0.05)
    assert more_explorers.trainer_idle < 0.1 < synchronous.trainer_idle
    assert more_ranks.steps_per_hour > 1.15 * more_explorers.steps_per_hour
    assert cheapest([more_explorers, more_ranks, overlapped]) is more_ranks
    drawing = plot([more_explorers, more_ranks, synchronous])
    assert drawing.count("<polyline") == 4  # a line and its legend for each staleness
    assert "max_staleness 0" in drawing
    rows = [row.split() for row in table(results).splitlines()]
    assert rows[0][:4] == ["explorers", "ranks", "GPUs", "staleness"]
    assert [row[:4] for row in rows[1:]] == [list(each) for each in ("1120", "1122", "4152", "4482")]


def test_ranges_of_cases() -> None:
    assert [case.explorers for case in cases_of(config(), "8..50", "", "")] == [8, 16, 32, 50]
    assert [case.staleness for case in cases_of(config(), "", "2", "0..4")] == [0, 1, 2, 4]
    with refused(ConfigError, "many"):
        cases_of(config(), "many", "", "")
