"""Runs simulated worlds: the commands of a run under faults, in virtual time (`trivium.simulation`).

    python tools/simulate.py [--seeds 0-999] [--processes 2]

Prints each broken promise, the command that repeats the world, and the faults that it takes. One seed alone also prints
the log of its commands. Exits 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trivium.simulation.seeds import prepare, run_seeds, run_spec
from trivium.simulation.world import Spec


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs simulated worlds.")
    parser.add_argument("--seeds", default="0-99", help="FIRST-LAST, or one seed")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    with tempfile.TemporaryDirectory(prefix="trivium-simulation-") as directory:
        model = prepare(Path(directory))
        if len(seeds) > 1:
            return run_many(seeds, arguments.processes, model)
        outcome = run_spec(Spec.of(seeds[0]), model)
        print(outcome)
        return int(bool(outcome.problems))


def run_many(seeds: range, processes: int, model: Path) -> int:
    began, faults, events, broken = time.monotonic(), Counter[str](), 0, 0
    for outcome, smallest in run_seeds(seeds, processes, model):
        faults += outcome.faults
        events += outcome.events
        if outcome.problems:
            broken += 1
            needed = ", ".join(map(str, smallest.faults)) or "none"
            command = f"python tools/simulate.py --seeds {outcome.spec.seed}"
            print(f"{command}: {'; '.join(outcome.problems)}; faults: {needed}", flush=True)
    happened = ", ".join(f"{count:,} {kind}" for kind, count in sorted(faults.items())) or "none"
    summary = f"{len(seeds):,} worlds, {events:,} events; faults: {happened}; {broken} worlds broke a promise"
    print(f"{summary} ({time.monotonic() - began:.0f} s)")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
