"""Runs simulated worlds: the commands of a run under faults, in virtual time (`tests.simulation`).

    python tools/simulate.py [--seeds 0-999] [--processes 2]
    python tools/simulate.py --seeds 17 [--faults 'kill@0.25:trainer:1.0 power@0.5:trainer:0.1']

Prints each broken promise, and the command that repeats it with the smallest set of faults. One seed alone also prints
the log of its commands; `--faults` replaces its faults. Exits 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.simulation.seeds import prepare, run_seeds, run_spec, shrunk
from tests.simulation.spec import Fault, Spec


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs simulated worlds.")
    parser.add_argument("--seeds", default="0-99", help="FIRST-LAST, or one seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--faults", help="faults of one seed, in place of those that it draws")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    if arguments.faults is not None and len(seeds) > 1:
        parser.error("--faults needs one seed")
    with tempfile.TemporaryDirectory(prefix="trivium-simulation-") as directory:
        model = prepare(Path(directory))
        if len(seeds) > 1:
            return run_many(seeds, arguments.processes, model)
        spec = Spec.of(seeds[0])
        if arguments.faults is not None:
            spec = replace(spec, faults=tuple(map(Fault.parsed, arguments.faults.split())))
        outcome = run_spec(spec, model)
        print(outcome)
        return int(bool(outcome.problems))


def run_many(seeds: range, processes: int, model: Path) -> int:
    began, faults, shared, starts, events, broken = time.monotonic(), Counter[str](), 0, 0, 0, 0
    for outcome in run_seeds(seeds, processes, model):
        faults += outcome.faults
        shared += outcome.spec.shared
        starts += outcome.starts
        events += outcome.events
        if outcome.problems:
            broken += 1
            needed = " ".join(map(str, shrunk(outcome.spec, model).faults))
            command = f"python tools/simulate.py --seeds {outcome.spec.seed} --faults '{needed}'"
            print(f"{command}\n  {'; '.join(outcome.problems)}", flush=True)
    happened = ", ".join(f"{count:,} {kind}" for kind, count in sorted(faults.items())) or "none"
    print(f"{len(seeds):,} worlds ({shared:,} over a database), {starts:,} starts of commands, {events:,} events")
    print(f"faults: {happened}")
    print(f"{broken} worlds broke a promise ({time.monotonic() - began:.0f} s)")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
