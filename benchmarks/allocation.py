"""Page faults, system time and resident memory of train steps, with freed memory kept and with glibc as it comes.

    python benchmarks/allocation.py [--steps 40]
    python benchmarks/allocation.py --soak 1000

The arithmetic recipe trains `--steps` supervised and as many RL steps in a process of its own, twice: as `trivium run`
does, and with an allocator that the environment configures (to its defaults), which Trivium leaves alone. A monitor
reads the process's counters after each step; the first steps of each stage do not count.

With `--soak` a smaller model takes that many RL steps, once, with everything that a run has: explorer, engine, trainer,
journal, metrics, checkpoints and evaluations. Resident memory is printed every 50 steps; exits 1 where it grows by more
than 2 % in the second half.

Without, exits 1 where the RL steps cause more than a fifth of the page faults, or where resident memory grows by more
than a tenth in the second half of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium.config import Plugin

HERE = Path(__file__).resolve()
WARM = 3
AS_IT_COMES = {"MALLOC_PERTURB_": "0"}


class Counters:
    """A monitor that writes the process's counters after each step."""

    class Config(Plugin):
        kind: str = "counters"

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int) -> None:
        del config, resume_step
        self._file = (run_dir / "counters.jsonl").open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "loss/policy" not in metrics and not any(key.startswith("time/") for key in metrics):
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        row = {"faults": used.ru_minflt, "system_s": used.ru_stime, "user_s": used.ru_utime}
        self._file.write(json.dumps({"step": step, **row, "mib": pages * resource.getpagesize() / 2**20}) + "\n")

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        self._file.close()


def counted(environment: Mapping[str, str], *settings: str) -> dict[int, dict[str, float]]:
    """The counters after each step of the recipe with these settings, run in a process of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    with tempfile.TemporaryDirectory() as directory:
        monitors = f"monitors=[{{kind: '{HERE}:Counters'}}, {{kind: jsonl}}]"
        recipe = str(HERE.parents[1] / "recipes" / "arithmetic.yaml")
        command = [sys.executable, "-m", "trivium.cli", "run", recipe, f"run.dir={directory}/run", monitors, *settings]
        subprocess.run(command, env=own | {**environment}, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(directory) / "run" / "counters.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def soak(steps: int) -> int:
    """Prints resident memory every 50 steps, and returns the exit code."""
    small = ("model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=1", "model.mlp=64")
    tasks = tuple(f"tasks.{name}.max_operand=999" for name in ("train", "test"))
    first = ("stages.0.schedule.steps=1", "stages.0.schedule.groups_per_step=16")
    sizes = ("groups_per_step=8", f"steps={steps}")
    second = ("stages.1.evaluation.every=100", *(f"stages.1.schedule.{size}" for size in sizes))
    limits = ("engine.sampling.max_new_tokens=12", "tasks.test.count=50", "evaluation.sampling.max_new_tokens=12")
    by_step = counted({}, *small, *tasks, *first, *second, *limits)
    for step in range(50, steps + 1, 50):
        print(f"step {step:>6}: {by_step[step]['mib']:8.2f} MiB", flush=True)
    half, end = by_step[steps // 2]["mib"], by_step[steps]["mib"]
    print(f"second half: {1024 * (end - half) / (steps - steps // 2):+.2f} KiB per step, {end / half - 1:+.2%}")
    return int(end > 1.02 * half)


def measure(steps: int, environment: Mapping[str, str]) -> dict[str, float]:
    """Of the RL steps: page faults, system and user seconds of a step; MiB at half and end."""
    lengths = (f"stages.{stage}.schedule.steps={steps}" for stage in (0, 1))
    by_step = counted(environment, "evaluation.every=0", *lengths)
    first, half, last = (by_step[steps + place] for place in (WARM, (WARM + steps) // 2, steps))
    per_step = {key: (last[key] - first[key]) / (steps - WARM) for key in ("faults", "system_s", "user_s")}
    return {**per_step, "half": half["mib"], "end": last["mib"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--soak", type=int, metavar="STEPS", help="RL steps, at least 100")
    options = parser.parse_args()
    if options.soak:
        return soak(options.soak)
    print("     allocator  faults/step  system s/step  user s/step  MiB half  MiB end")
    measured: list[dict[str, float]] = []
    for name, environment in (("kept", {}), ("as it comes", AS_IT_COMES)):
        of = measure(options.steps, environment)
        measured.append(of)
        print(
            f"{name:>14} {of['faults']:>12,.0f} {of['system_s']:>14.3f} {of['user_s']:>12.3f} "
            f"{of['half']:>9,.0f} {of['end']:>8,.0f}",
            flush=True,
        )
    kept, as_it_comes = measured
    return 0 if kept["faults"] < as_it_comes["faults"] / 5 and kept["end"] < 1.1 * kept["half"] else 1


if __name__ == "__main__":
    sys.exit(main())
