"""What `trivium simulate` says about published comparisons of synchronous and asynchronous training.

    python benchmarks/published.py [--steps 40] [--only NAME] [--plot docs/scaling.svg]

Each publication states the seconds of its synchronous step, the GPUs and the batch, but not how the step divides into
sampling and training. The division decides the result, so each comparison is simulated for several divisions. The
table has the speedup for each of them beside the published one.

`--plot` draws the speed of the AReaL run with 4 to 1,024 GPUs instead, a quarter of which trains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trivium.config import RunConfig, config_from_mapping
from trivium.simulation.planner import Case, forecasts, plot, table
from trivium.simulation.rates import Rates

LONG_TAIL = (500.0, 1500.0, 2500.0, 3500.0, 4500.0, 5500.0, 7000.0, 9000.0, 12000.0, 17000.0, 27648.0)
"""Assumed tokens of a reasoning model's completions up to AReaL's maximum; the mean is 7,700."""


@dataclass(frozen=True)
class Comparison:
    """A synchronous and an asynchronous run of the same work."""

    assumption: str
    schedule: Mapping[str, int]
    max_new_tokens: int
    synchronous: tuple[Case, Rates]
    asynchronous: tuple[Case, Rates]


def areal() -> Iterator[Comparison]:
    """AReaL, 1.5B, 16 nodes of 8 H800: 41.0 h and 14.8 h for 1,000 steps of 2,048 responses, 16 for each prompt, of at
    most 27,648 tokens. A quarter of the GPUs trains in the asynchronous run; all of them take turns in the other."""
    step_s, tokens, rows = 41.0 * 3.6, 2048 * 7_657, 16
    for share in (0.05, 0.07, 0.09, 0.12, 0.15):
        row_s = 1e-4  # at most 10,000 tokens/s on a GPU
        rates = _rates(
            step_s=step_s * (1 - share) / LONG_TAIL[-1] - rows / 4 * row_s,
            row_s=row_s,
            update_token_s=step_s * share * 128 / tokens,
            response_tokens=LONG_TAIL,
        )
        yield Comparison(
            f"training is {share:.0%} of the synchronous step",
            {"groups_per_step": 128, "group_size": 16},
            27_648,
            (Case(128, 128, 0), rates),
            (Case(96, 32, 8), rates),
        )


def nemo_rl() -> Iterator[Comparison]:
    """NeMo-RL 0.4, Qwen3-30B-A3B, 32 H100: 225 s on policy and 244 s one step off, with 2,048 responses of 3,154 tokens
    on average and at most 4,096. Eight engines have 4 GPUs each on policy, and 2 each one step off, where 16 GPUs
    train."""
    step_s, tokens = 225.0, 2048 * 3_154
    lengths = (1200.0, 2400.0, 3100.0, 3900.0, 4096.0, 4096.0)
    for share in (0.4, 0.46, 0.55, 0.65):
        rates = _rates(
            step_s=step_s * share / 4096 * 0.3,
            row_s=step_s * share / 4096 * 0.7 / 240,
            update_token_s=step_s * (1 - share) * 32 / tokens,
            response_tokens=lengths,
        )
        slower = {name: 1.3 * getattr(rates, name) for name in ("step_s", "row_s")}
        yield Comparison(
            f"sampling is {share:.0%} of the on-policy step, and 1.3 times slower on half of the GPUs",
            {"groups_per_step": 64, "group_size": 32},
            4_096,
            (Case(8, 32, 0), rates),
            (Case(8, 16, 1), rates.model_copy(update=slower)),
        )


def rollart() -> Iterator[Comparison]:
    """RollArt: 1.31 to 2.05 times shorter training of agents than with other systems. Ten turns of 500 tokens; the
    environment takes a tenth to five times as long as sampling, one rollout of twenty four times as long as the median.
    Sampling and training have the same GPUs in both runs."""
    for ratio in (0.1, 1.0, 5.0):
        pause_s = 10 * 500 * 0.02 * ratio
        rates = _rates(
            step_s=0.015,
            row_s=5e-5,
            update_token_s=120.0 * 32 / (512 * 5000),
            response_tokens=(500.0,),
            turns=(10.0,),
            environment_s=(*(pause_s * (0.5 + n / 19) for n in range(20)), 4 * pause_s),
        )
        yield Comparison(
            f"an environment takes {ratio:g} times as long as sampling",
            {"groups_per_step": 64, "group_size": 8},
            4_096,
            (Case(32, 32, 0), rates),
            (Case(32, 32, 1), rates),
        )


def _rates(**rates: object) -> Rates:
    fixed = {"start_s": 0.0, "load_s": 1.0, "update_s": 1.0, "sync_s": 1.0, "save_s": 0.0, "prompt_tokens": (1.0,)}
    return Rates.model_validate({**fixed, "max_rows": 1024, "rank_efficiency": 1.0, **rates})


def main() -> int:
    parser = argparse.ArgumentParser(description="Published and simulated speedups.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="", help="the comparison to simulate")
    parser.add_argument("--plot", type=Path, help="the SVG to write")
    arguments = parser.parse_args()
    steps = arguments.steps
    if arguments.plot is not None:
        return draw(arguments.plot, steps)
    published = {"AReaL": (areal, "2.77"), "NeMo-RL": (nemo_rl, "0.92"), "RollArt": (rollart, "1.31 to 2.05")}
    for name, (comparisons, figure) in published.items():
        if arguments.only not in name:
            continue
        print(f"\n{name}, published {figure}")
        for each in comparisons():
            seconds = [3600 / _speed(each, *side, steps) for side in (each.synchronous, each.asynchronous)]
            speedup = seconds[0] / seconds[1]
            print(f"{speedup:6.2f}  {seconds[0]:6.1f} s, {seconds[1]:6.1f} s: {each.assumption}", flush=True)
    return 0


def draw(out: Path, steps: int) -> int:
    comparison = next(each for each in areal() if "9%" in each.assumption)
    rates = comparison.synchronous[1].model_copy(update={"rank_efficiency": 0.95})
    cases = [Case(3 * ranks, ranks, staleness) for staleness in (0, 1, 4) for ranks in (2**n for n in range(9))]
    results = list(forecasts(_config(comparison), rates, cases, steps))
    print(table(results))
    out.write_text(plot(results), encoding="utf-8")
    return 0


def _speed(comparison: Comparison, case: Case, rates: Rates, steps: int) -> float:
    return next(forecasts(_config(comparison), rates, [case], steps)).steps_per_hour


def _config(comparison: Comparison) -> RunConfig:
    return config_from_mapping(
        {
            "model": {"kind": "tiny", "alphabet": "0123456789+="},
            "tasks": {"train": {"kind": "arithmetic", "max_operand": 99}},
            "rewards": [{"kind": "exact"}],
            "engine": {"sampling": {"max_new_tokens": comparison.max_new_tokens}},
            "schedule": comparison.schedule,
            "sync": {"in_flight": "update"},
        }
    )


if __name__ == "__main__":
    sys.exit(main())
