"""Replays random train steps of run directories, with all their rollouts and the update, and says what differs.

    python benchmarks/replayed.py runs/demo runs/guess --steps 5 --first 451

Exits with 1 where something differs. Weights of a step are rebuilt from the checkpoint before it: `--first` names one
that is not far behind a checkpoint.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from trivium.buffers.step_log import read_steps
from trivium.inspection.replay_step import replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--first", type=int, default=1, help="the first step to choose from")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    differing = 0
    for run in arguments.runs:
        steps = [step for step, each in read_steps(run).items() if step >= arguments.first and rolled_out(each.taken)]
        number = 0
        for step in sorted(random.Random(arguments.seed).sample(steps, min(arguments.steps, len(steps)))):
            result = replay(run, step, update=True)
            stages = ", ".join(f"{name} {each.equal}/{each.number}" for name, each in result.comparison.stages.items())
            print(f"{run}: step {step}, {result.rollouts} rollouts: {stages}", flush=True)
            number += result.rollouts
            if not result.ok:
                differing += 1
                print(result.text, flush=True)
        print(f"{run}: {number} rollouts replayed, {differing} steps differ so far", flush=True)
    return int(differing > 0)


def rolled_out(taken: object) -> bool:
    """Whether a step took groups of explorers."""
    return isinstance(taken, tuple) and any(each.slot >= 0 for each in taken)


if __name__ == "__main__":
    sys.exit(main())
