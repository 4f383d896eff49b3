"""Steps per hour that `trivium simulate` predicts, against real runs on this machine.

    python benchmarks/planner.py [--repeats 3] [--steps 30] [--paced] [--keep DIR]

A tiny model is trained with GRPO by the real engines, in five ways: synchronously, one step off, with `max_staleness`
4, in an environment with a long tail (2 s for every twentieth rollout, else up to 0.2 s), and one step off with the
train engine in a process of its own. The rates come from the synchronous runs, the latencies of the environment from a
run with it; `shared_speed` and `own_process_speed` are the defaults, which runs one step off have set. The table
compares the mean of several runs with the mean of predictions from five seeds: where `max_staleness` just suffices, one
late group decides whether groups are called off for the rest of a run.
`--keep` keeps the runs, and reuses those that a directory holds.

With `--paced`, engine and trainer wait instead of computing, for times that follow from hidden rates. The runs are real
otherwise, in real time. Other work on the machine hardly disturbs them, so this measures what profile and schedule
contribute to the error. There is no process of its own in this mode.

Exits 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from trivium.config import load_config
from trivium.policy import Policy
from trivium.randomness import stream, uniforms
from trivium.simulation.planner import Case, counted_steps, forecasts, seconds_of
from trivium.simulation.rates import Rates, measure
from trivium.types import Capabilities, Task

HERE = Path(__file__).resolve()
BOUND = 0.15
SEEDS = 5
CONFIG = """
model: {kind: tiny, alphabet: "0123456789+=", layers: 3, hidden: 128, heads: 4, kv_heads: 2, mlp: 256, max_position: 64}
tasks: {train: {kind: arithmetic, max_operand: 99}}
rewards: [{kind: exact}]
engine: {sampling: {max_new_tokens: 32}}
train: {optimizer: {lr: 1.0e-6}}
monitors: [{kind: jsonl}]
checkpoint: {save_every: 0}
schedule: {groups_per_step: 16, group_size: 8}
"""
PACED = """
model: {kind: tiny, alphabet: "0123456789+=", layers: 1, hidden: 16, heads: 2, max_position: 128}
tasks: {train: {kind: arithmetic, max_operand: 99}}
rewards: [{kind: exact}]
engine:
  kind: "trivium.simulation.rated:RatedEngine"
  sampling: {max_new_tokens: 64}
  rates: &rates
    start_s: 0.1
    step_s: 0.02
    row_s: 0.002
    load_s: 0.05
    update_s: 0.2
    update_token_s: 0.0015
    sync_s: 0.03
    save_s: 0
    prompt_tokens: [0]
    response_tokens: [8, 16, 32, 64]
train:
  kind: "trivium.simulation.rated:RatedTrainEngine"
  rates: *rates
monitors: [{kind: jsonl}]
checkpoint: {save_every: 0}
schedule: {groups_per_step: 4, group_size: 4}
"""
SLOW = {"workflow.kind": f"{HERE}:SlowWorld"}
SCENARIOS: dict[str, dict[str, object]] = {
    "synchronous": {"schedule.max_staleness": 0},
    "synchronous, many": {"schedule.max_staleness": 0, "schedule.groups_per_step": 64},
    "one step off": {"schedule.max_staleness": 1},
    "max_staleness 4": {"schedule.max_staleness": 4},
    "long tail, synchronous": {"schedule.max_staleness": 0, **SLOW},
    "long tail, max_staleness 4": {"schedule.max_staleness": 4, **SLOW},
    "own process, one step off": {"schedule.max_staleness": 1, "train.own_process": "true"},
}


class SlowWorld:
    """A turn, and an environment that answers after a while."""

    capabilities = Capabilities(gives_rewards=False)

    def __init__(self, config: object) -> None:
        self._rollouts = 0

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float] | None:
        self._rollouts += 1
        slow, long = uniforms(stream("latency", self._rollouts), range(2))
        await policy.generate(task.prompt)
        await asyncio.sleep(2.0 if slow < 0.05 else 0.2 * float(long))
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Predicted against measured steps per hour.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--keep", type=Path, help="directory of the runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trivium-planner-") as temporary:
        directory = arguments.keep or Path(temporary)
        directory.mkdir(exist_ok=True)
        return compare(directory, arguments.repeats, arguments.steps, arguments.paced)


def compare(directory: Path, repeats: int, steps: int, paced: bool) -> int:
    file = directory / "run.yaml"
    file.write_text(PACED if paced else CONFIG, encoding="utf-8")
    scenarios = {name: changes for name, changes in SCENARIOS.items() if not (paced and "train.own_process" in changes)}
    runs = {name: list[float]() for name in scenarios}
    for repeat in range(repeats):
        for name, changes in scenarios.items():
            runs[name].append(measured_speed(file, name, changes, repeat, steps))
            print(f"{name}, run {repeat + 1}: {runs[name][-1]:,.0f} steps/h", flush=True)

    def profile(*names: str) -> Rates:
        return measure([directory / f"{name} {repeat}" for name in names for repeat in range(repeats)])

    rates = profile("synchronous", "synchronous, many")
    if paced:  # engine and trainer share nothing
        rates = rates.model_copy(update={"shared_speed": 1.0})
    slow = rates.model_copy(update={"environment_s": profile("long tail, synchronous").environment_s})
    print(f"\n{'':28}{'measured':>12}{'predicted':>12}{'error':>9}   steps/h")
    worst = 0.0
    for name, changes in scenarios.items():
        known = slow if "workflow.kind" in changes else rates
        measured, predicted = fmean(runs[name]), predict(file, changes, known, steps)
        error = predicted / measured - 1
        worst = max(worst, abs(error))
        print(f"{name:28}{measured:12,.0f}{predicted:12,.0f}{error:+9.1%}", flush=True)
    return int(worst > BOUND)


def measured_speed(file: Path, name: str, changes: Mapping[str, object], repeat: int, steps: int) -> float:
    """The speed of a real run. A run that the directory already holds is reused."""
    run_dir = file.parent / f"{name} {repeat}"
    values = {**changes, "schedule.steps": steps, "run.dir": run_dir, "run.seed": repeat}
    if not run_dir.exists():
        command = [sys.executable, "-m", "trivium", "run", str(file), *(f"{k}={v}" for k, v in values.items())]
        subprocess.run(command, check=True, capture_output=True)
    return steps_per_hour(run_dir, steps, int(str(changes["schedule.max_staleness"])))


def predict(file: Path, changes: Mapping[str, object], rates: Rates, steps: int) -> float:
    """The mean speed of runs with several seeds."""
    case, speeds = Case(staleness=int(str(changes["schedule.max_staleness"]))), list[float]()
    for seed in range(SEEDS):
        values = {**changes, "run.seed": seed}
        config = load_config(file, [f"{key}={value}" for key, value in values.items()])
        speeds.append(next(forecasts(config, rates, [case], steps - case.staleness)).steps_per_hour)
    return fmean(speeds)


def steps_per_hour(run_dir: Path, steps: int, staleness: int) -> float:
    """The speed of a run over the steps that a forecast counts."""
    counted = counted_steps(steps, staleness)
    return 3600 * (counted.stop - counted.start) / seconds_of(run_dir, counted)


if __name__ == "__main__":
    sys.exit(main())
