"""One update, and one scoring pass, of groups that share their prompts: computed once (`train.share_prefix`) and for
each member, alternating in one process.

    python benchmarks/prefix.py [--repeat 5] [--device cuda --shape qwen-1.5b]

On a CPU, time is the processor time of this process, which another process on the machine does not change much. Equal
losses and gradient norms are asserted before a ratio is printed. The floor is the arithmetic of the pass that shares
(every weight and every pair of tokens that attend to each other, once) at the rate of a large matrix product.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_train import SHAPES, clock, write_model

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import GRPO
from trivium.models.backbone.shape import read_shape
from trivium.planning.model_shape import ModelShape
from trivium.text.tiny import TinyModel
from trivium.training.batching import prefixes_of
from trivium.training.engine import TorchTrainEngine
from trivium.training.flops import measured_peak
from trivium.types import Batch, Experience

SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "mlp": 768, "max_position": 4096}
CASES = ((1, 16, 1024, 32), (4, 8, 256, 128), (8, 8, 64, 64), (32, 8, 20, 64), (2, 8, 64, 1024), (16, 8, 4, 64))
"""Groups, members, tokens of the prompt, tokens of a completion."""


def make_batch(groups: int, members: int, prompt: int, completion: int) -> Batch:
    rng, length = np.random.default_rng(0), prompt + completion
    mask = np.arange(length) >= prompt
    rows: list[Experience] = []
    for group in range(groups):
        begin = rng.integers(3, 60, prompt)
        for index in range(members):
            tokens = np.concatenate([begin, rng.integers(3, 60, completion)]).astype(np.int32)
            rows.append(Experience(tokens, mask, np.where(mask, -4.0, 0.0), np.where(mask, 0, -1), f"g{group}", index))
    advantages = [np.full(length, rng.normal()) * mask for _ in rows]
    return Batch(tuple(rows)).with_columns(advantages=advantages, old_log_prob=[e.rollout_log_prob for e in rows])


def make_engine(model_dir: Path, share: bool, threads: int, device: str) -> TorchTrainEngine:
    config: dict[str, Any] = {
        "device": device,
        "share_prefix": share,
        "optimizer": {"lr": 1e-6, "schedule": "constant"},
        "gradient_checkpointing": device == "cuda",
    }
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate(config),
        model_dir=model_dir,
        algorithm=build_algorithm(GRPO.configure({"kind": "grpo"})),
        temperature=1.0,
        max_response_length=1024,
        total_steps=10**6,
        seed=0,
        threads=threads,
    )
    engine.prepare()
    return engine


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """(seconds, result). On a CPU the seconds are those of all threads, in user and kernel mode."""
    if device == "cuda":
        began = clock(device)
        result = work()
        return clock(device) - began, result
    before = resource.getrusage(resource.RUSAGE_SELF)
    result = work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, result


def floor_flops(shape: ModelShape, batch: Batch) -> float:
    """Of an update that computes what sequences share once."""
    tree = prefixes_of(batch).tree(range(len(batch)))
    trained = sum(each.num_response_tokens for each in batch.experiences)
    return shape.flops(tree.num_tokens, tree.num_squares, trained, backward=True)


def compare(
    engines: tuple[TorchTrainEngine, TorchTrainEngine], batch: Batch, repeat: int, device: str
) -> dict[str, list[float]]:
    """Seconds by what was done and whether it shared."""
    seconds: dict[str, list[float]] = {}
    for turn in range(repeat + 1):
        metrics: list[dict[str, float]] = []
        for name, engine in zip(("plain", "shared"), engines, strict=True):
            objective = engine.algorithm.objectives[0]
            taken, found = timed(lambda engine=engine, what=objective: engine.update("policy", batch, what), device)
            scored, _ = timed(lambda engine=engine: engine.score(batch, "old"), device)
            metrics.append(found)
            if turn:  # the first one warms up
                seconds.setdefault(f"{name} update", []).append(taken)
                seconds.setdefault(f"{name} score", []).append(scored)
        for key in ("train/loss/policy", "train/grad_norm/policy"):
            rtol = 2e-2 if device == "cuda" else 1e-3  # bfloat16 arithmetic
            assert np.isclose(metrics[0][key], metrics[1][key], rtol=rtol, atol=1e-6), (key, metrics)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="counted passes of each, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), help="a shape of gpu_train.py; unset: 3.2 M parameters")
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory) / "model"
        if args.shape:
            write_model(model_dir, args.shape, 4096)
        else:
            TinyModel(TinyModel.Config.model_validate(SHAPE), seed=0).materialize(model_dir)
        shape = read_shape(model_dir)
        plain_engine, sharing_engine = (
            make_engine(model_dir, share, args.threads, args.device) for share in (False, True)
        )
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        peak = measured_peak(torch.device(args.device), dtype, args.threads)
        clocked = "processor seconds" if args.device == "cpu" else "seconds"
        print(
            f"{shape.parameters / 1e6:.1f} M parameters, {dtype}, {args.threads} threads, {peak / 1e9:.0f} GFLOP/s, "
            f"torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}); {clocked} of an update"
        )
        for groups, members, prompt, completion in CASES[: args.cases]:
            batch = make_batch(groups, members, prompt, completion)
            found = compare((plain_engine, sharing_engine), batch, args.repeat, args.device)
            update, score = (
                [a / b for a, b in zip(found[f"plain {what}"], found[f"shared {what}"], strict=True)]
                for what in ("update", "score")
            )
            floor = floor_flops(shape, batch) / peak * (args.threads if args.device == "cpu" else 1)
            plain, shared = (statistics.median(found[f"{name} update"]) for name in ("plain", "shared"))
            print(
                f"{groups:>3} x {members} x ({prompt} + {completion}): "
                f"{plain:.2f} -> {shared:.2f} s (floor {floor:.2f}), ratio "
                f"{statistics.median(update):.2f} ({min(update):.2f} to {max(update):.2f}); "
                f"scoring {statistics.median(score):.2f} ({min(score):.2f} to {max(score):.2f})",
                flush=True,
            )
            case = {"groups": groups, "members": members, "prompt": prompt, "completion": completion}
            figure = {"shared_s": shared, "floor_s": floor, "update_ratio": statistics.median(update)}
            print(json.dumps({"figure": case | figure | {"score_ratio": statistics.median(score)}}), flush=True)


if __name__ == "__main__":
    main()
