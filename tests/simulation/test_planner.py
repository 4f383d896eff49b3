"""`trivium profile` and `trivium simulate`: rates from a run, and the speed that follows from them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.failing import refused
from trivium.config import RunConfig, config_from_mapping
from trivium.errors import ConfigError, RunDirError

pytest.importorskip("greenlet")

from trivium.simulation.planner import Case, cases_of, cheapest, forecasts, plot, table
from trivium.simulation.rated import Device, Part, RatedEngine, Replica, drawn
from trivium.simulation.rates import Rates, fit, measure

# A full engine makes 500 tokens a second. A step has 16 rollouts of 100 to 200 tokens, so one engine samples for about
# five seconds; the trainer needs two.
RATES = Rates(
    start_s=0.1,
    step_s=0.002,
    row_s=0.002,
    load_s=0.05,
    update_s=0.4,
    update_token_s=0.0006,
    sync_s=0.05,
    save_s=0.1,
    prompt_tokens=(20.0,),
    response_tokens=(100.0, 200.0),
    shared_speed=0.5,
)


def config() -> RunConfig:
    return config_from_mapping(
        {
            "model": {"kind": "tiny", "alphabet": "0123456789+=", "max_position": 600},
            "tasks": {"train": {"kind": "arithmetic", "max_operand": 99}},
            "rewards": [{"kind": "exact"}],
            "engine": {"sampling": {"max_new_tokens": 512}},
            "schedule": {"groups_per_step": 4, "group_size": 4},
            "sync": {"in_flight": "update"},
        }
    )


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
        loop = asyncio.get_running_loop()
        replica = Replica(RatedEngine.Config(start_s=1, step_s=1, row_s=1, load_s=2, max_rows=2), Device(), 0.0)
        part = Part([[2], [4], [1]], [0.0, 0.0, 5.0], [0.0] * 3, loop.create_future())
        later = Part([[1]], [0.0], [0.0], loop.create_future())
        replica.begin(part)
        replica.advance(2.0)
        load = replica.load()
        replica.begin(later)
        # The first two rows make a token in 3 s from second 1 on. The first one ends at 7 and the third one starts,
        # joins the second one at 8 and ends at 11. The second one ends at 12, and the load at 14.
        assert replica.next_end() == 14
        replica.advance(13.9)
        assert not load.done()
        replica.advance(15.9)
        assert load.result() == 14
        assert not part.done.done()  # the third rollout spends five seconds in its environment
        replica.advance(16.0)
        assert part.done.result() == 16
        replica.advance(100.0)
        assert (later.began, later.done.result()) == (14, 17)
        cancelled = Part([[9]], [0.0], [0.0], loop.create_future())
        replica.begin(cancelled)
        replica.cancel(cancelled)
        assert replica.next_end() == float("inf")
        assert replica.busy_s == 11 + 2

    asyncio.run(check())


def test_forecasts_follow_the_schedule() -> None:
    cases = [Case(1, 1, 0), Case(1, 1, 2), Case(4, 1, 2), Case(4, 4, 2), Case(40, 1, 2)]
    found = dict(zip(cases, forecasts(config(), RATES, cases, 8), strict=True))
    synchronous, overlapped, more_explorers, more_ranks, in_bundles = found.values()
    # By hand: 16 rows of 150 tokens on average need 2400 * 0.002 s, and the longest one at most 200 * 0.002 s more; the
    # update needs 0.4 s and 16 * 170 * 0.0006 s.
    assert 3600 / synchronous.steps_per_hour == pytest.approx(4.8 + 0.4 + 2.0 + 0.3, rel=0.1)
    assert in_bundles.steps_per_hour == pytest.approx(more_explorers.steps_per_hour, rel=0.03)
    assert synchronous.staleness == 0 < overlapped.staleness <= 2
    # One process on one device: engine and trainer share it, and overlapping saves little. Four explorers have devices
    # of their own, and the trainer is what limits.
    assert overlapped.steps_per_hour > 0.95 * synchronous.steps_per_hour
    assert 3600 / more_explorers.steps_per_hour == pytest.approx(2.0 + 0.05, rel=0.1)
    assert more_explorers.trainer_idle < 0.1 < synchronous.trainer_idle
    assert more_ranks.steps_per_hour > 1.15 * more_explorers.steps_per_hour
    assert cheapest([more_explorers, more_ranks, overlapped]) is more_ranks
    drawing = plot([more_explorers, more_ranks, synchronous])
    assert drawing.count("<polyline") == 4  # a line and its legend for each staleness
    assert "max_staleness 0" in drawing
    rows = table(list(found.values())).splitlines()
    assert rows[0].split()[:4] == ["explorers", "ranks", "GPUs", "staleness"]
    assert [row.split()[:4] for row in rows[1:]] == [
        ["1", "1", "2", "0"], ["1", "1", "2", "2"], ["4", "1", "5", "2"], ["4", "4", "8", "2"], ["40", "1", "41", "2"]
    ]  # fmt: skip


def test_ranges_of_cases() -> None:
    assert [case.explorers for case in cases_of(config(), "8..50", "", "")] == [8, 16, 32, 50]
    assert [case.staleness for case in cases_of(config(), "", "2", "0..2")] == [0, 1, 2]
    with refused(ConfigError, "many"):
        cases_of(config(), "many", "", "")
