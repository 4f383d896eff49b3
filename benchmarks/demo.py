"""The demo's promises, measured: accuracy before and after RL for several seeds, seconds, and a control with shuffled
rewards, which must not learn.

    python benchmarks/demo.py --seeds 0 1 2 --control 0

Exits 1 when a seed takes more than 150 s, gains less than 0.30 or ends below 0.90, or when the control gains 0.05.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from trivium.config import load_config
from trivium.runtime.build import evaluate
from trivium.runtime.launch import run

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "arithmetic.yaml"
SHUFFLED = f"rewards=[{{kind: {ROOT / 'tests/e2e/shuffled.py'}:Shuffled}}]"


def measure(run_dir: Path, seed: int, *changes: str) -> tuple[float, float, float]:
    """(accuracy before RL, after, seconds). Accuracies are by the recipe's own reward, whatever trained."""
    said = [f"run.dir={run_dir}", f"run.seed={seed}", "monitors=[{kind: jsonl}]"]
    began = time.perf_counter()
    run(load_config(RECIPE, [*said, *changes]))
    seconds = time.perf_counter() - began
    config = load_config(RECIPE, said)
    first, last = (stage.schedule.steps for stage in config.stage_configs())
    before, after = (evaluate(config, step)["eval/test/accuracy"] for step in (first, first + last))
    return before, after, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--control", type=int, nargs="*", default=[0], help="seeds to run with shuffled rewards")

    args = parser.parse_args()

    kept = True
    with tempfile.TemporaryDirectory() as directory:
        for seed in args.seeds:
            before, after, seconds = measure(Path(directory) / f"seed-{seed}", seed)
            good = after - before >= 0.30 and after >= 0.90 and seconds <= 150
            print(f"seed {seed}: {before:.3f} -> {after:.3f} in {seconds:.0f} s {'' if good else '  BELOW THE BAR'}")
            kept &= good
        for seed in args.control:
            before, after, seconds = measure(Path(directory) / f"control-{seed}", seed, SHUFFLED)
            good = after - before < 0.05
            print(f"shuffled, seed {seed}: {before:.3f} -> {after:.3f} {'' if good else '  IT LEARNED FROM NOISE'}")
            kept &= good
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
