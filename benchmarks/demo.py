"""The promises of `trivium demo --tiny`, measured: seconds of the whole command, held-out accuracy before and after RL
for several seeds, and a control with shuffled rewards, which must not learn.

    python benchmarks/demo.py --seeds 0-9 --control 0

Exits 1 when a seed takes more than 120 s (150 s without AVX-512), gains less than 0.30 or ends below 0.93, or when the
control gains 0.05. The floor is the arithmetic of the run (every weight of every matrix once per token and pass, what a
group shares once) at the speed of a large matrix product on all cores. To see another kind of processor imitated:

    ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/demo.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from trivium.checkpoint.store import CheckpointStore
from trivium.config import load_config
from trivium.models.backbone.shape import read_shape
from trivium.runtime.checkpoint_eval import evaluate
from trivium.runtime.launch import run
from trivium.training.flops import measured_peak

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "arithmetic.yaml"
SHUFFLED = f"rewards=[{{kind: {ROOT / 'tests/e2e/shuffled.py'}:Shuffled}}]"
GAIN, AFTER = 0.30, 0.93
SECONDS = {"AVX512": 120.0}
"""By what torch uses of the processor; 150 for any other."""
FLAGS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def demo(run_dir: Path, seed: int) -> tuple[dict[str, Any], float]:
    """(the summary of `trivium demo --tiny`, its seconds from start to exit)."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "trivium.cli", "demo", "--tiny", "--dir", str(run_dir), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"seed {seed}: the demo failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads((run_dir / "summary.json").read_text()), seconds


def shuffled(run_dir: Path, seed: int) -> tuple[float, float]:
    """Accuracy before RL and after it, by the recipe's own reward, where shuffled ones trained."""
    changes = [f"run.dir={run_dir}", f"run.seed={seed}", "monitors=[{kind: jsonl}]"]
    run(load_config(RECIPE, [*changes, SHUFFLED]))
    config = load_config(RECIPE, changes)
    before, after = (evaluate(config, step)["eval/test/accuracy"] for step in ends(run_dir))
    return before, after


def ends(run_dir: Path) -> tuple[int, int]:
    """The steps that the two stages ended at."""
    last = CheckpointStore(run_dir / "checkpoints").latest()
    assert last is not None
    return last.state["pinned"][0], last.step


def floor_seconds(run_dir: Path, cores: int) -> float:
    """The arithmetic of generating and training what a run did, at the peak of so many cores."""
    torch.set_num_threads(cores)
    peak = measured_peak(torch.device("cpu"), torch.float32, cores)
    shape, flops = read_shape(run_dir / "model"), 0.0
    for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        if "train/tokens" not in row:
            continue
        prompt, completion = row["rollout/prompt_tokens"], row["rollout/response_tokens"]
        trained = row["rollout/trajectories"] * completion
        tokens = row["rollout/groups"] * prompt + trained
        squares = row["rollout/groups"] * prompt**2 + row["rollout/trajectories"] * completion * (
            completion + 2 * prompt
        )
        flops += shape.flops(tokens, squares, trained, backward=True)
        if "reward/mean" in row:  # it was generated as well
            flops += shape.flops(tokens, squares, trained, backward=False)
    return flops / peak


def numbers(text: str) -> list[int]:
    """`3` or `0-9`."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def machine() -> str:
    """What of the processor matters here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {line.partition(":")[0].strip(): line.partition(":")[2].split() for line in lines}
    flags = " ".join(flag for flag in FLAGS if flag in found.get("flags", []))
    used = torch.backends.cpu.get_cpu_capability()
    return f"{' '.join(found.get('model name', ['?']))}, {usable_cores()} cores, {flags}; torch uses {used}"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, nargs="*", default=[[0, 1, 2]], help="0 1 2, or 0-9")
    parser.add_argument("--control", type=numbers, nargs="*", default=[[0]], help="seeds to run with shuffled rewards")
    args = parser.parse_args()

    limit = SECONDS.get(torch.backends.cpu.get_cpu_capability(), 150.0)
    print(f"{machine()}; at most {limit:.0f} s, up by {GAIN}, to {AFTER}", flush=True)
    kept = True
    with tempfile.TemporaryDirectory() as directory:
        for seed in (seed for seeds in args.seeds for seed in seeds):
            run_dir = Path(directory) / f"seed-{seed}"
            summary, seconds = demo(run_dir, seed)
            before, after = summary["accuracy_before"], summary["accuracy_after"]
            good = after - before >= GAIN and after >= AFTER and seconds <= limit
            floor = floor_seconds(run_dir, usable_cores())
            gained = f"{before:.3f} -> {after:.3f} (+{after - before:.3f})"
            verdict = "" if good else "  BELOW THE BAR"
            print(f"seed {seed}: {gained} in {seconds:.0f} s, floor {floor:.0f} s{verdict}", flush=True)
            kept &= good
        for seed in (seed for seeds in args.control for seed in seeds):
            before, after = shuffled(Path(directory) / f"control-{seed}", seed)
            good = after - before < 0.05
            print(f"shuffled, seed {seed}: {before:.3f} -> {after:.3f}{'' if good else '  IT LEARNED FROM NOISE'}")
            kept &= good
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
