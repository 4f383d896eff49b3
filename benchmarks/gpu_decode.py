"""Decoding on one GPU by the torch engine, beside `model.generate`, as a share of the GPU's memory bandwidth.

    python benchmarks/gpu_decode.py [--rows 8 64 256] [--prompt 512] [--new 256] [--shape qwen-1.5b]

Random weights in bfloat16; every completion has as many tokens, which is asserted. A decode step reads the weights
once, the keys and values of each row, and its recurrent states, which it also writes: these bytes for each step,
divided by its time and by the speed of a large copy in the same run, are the share that is printed. `--device cpu
--shape tiny` tries the benchmark itself; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gpu_train import SHAPES, clock, num_parameters, write_model
from transformers import AutoModelForCausalLM

from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import ConfigError, TriviumError
from trivium.foundation.randomness import SampleKey
from trivium.models.backbone.shape import read_shape
from trivium.models.placement import device_of
from trivium.planning.model_shape import ModelShape
from trivium.types import IntArray, Request, Sampling

Side = Callable[[list[IntArray], int], int]
"""Completes each prompt with so many tokens; returns how many it sampled."""


def engine_side(model_dir: Path, args: argparse.Namespace) -> Side:
    engine = TorchEngine(
        TorchEngine.Config(device=args.device, dtype="bfloat16", max_rows=max(args.rows)),
        model_dir=model_dir,
        eos_token_ids=frozenset({0}),
        decode=str,
        threads=torch.get_num_threads(),
    )

    def complete(prompts: list[IntArray], new: int) -> int:
        async def all_rows() -> int:
            sampling = Sampling(new, min_new_tokens=new)
            keys = (SampleKey(0, "bench", "decode", str(row)) for row in range(len(prompts)))
            requests = [Request(prompt, sampling, key) for prompt, key in zip(prompts, keys, strict=True)]
            return sum(len(done.tokens) for done in await asyncio.gather(*map(engine.generate, requests)))

        return asyncio.run(all_rows())

    return complete


def generate_side(model_dir: Path, args: argparse.Namespace) -> Side:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).to(args.device).eval()

    def complete(prompts: list[IntArray], new: int) -> int:
        ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(args.device)
        with torch.inference_mode():
            how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
            done = model.generate(ids, max_new_tokens=new, pad_token_id=0, **how)  # pyright: ignore[reportCallIssue]
        return int(done[:, ids.shape[1] :].numel())

    return complete


SIDES = {"trivium": engine_side, "generate": generate_side}


def bandwidth(device: str) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.empty(2**30 if device == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), 0.0
    for _ in range(10):
        began = clock(device)
        target.copy_(source)
        best = max(best, 2 * len(source) / (clock(device) - began))
    return best


def bytes_read(shape: ModelShape, weights: int, rows: int, prompt: int, new: int) -> int:
    """Of all steps but the first token's, which the prompt's pass gives: weights, the keys and values of each row so
    far, and its recurrent states, read and written. Input and output embedding are one."""
    positions = sum(prompt + step for step in range(1, new))
    states = 2 * (new - 1) * rows * shape.state_bytes(2)
    return 2 * ((new - 1) * weights + rows * positions * shape.kv_per_token) + states


def measure(args: argparse.Namespace, sides: dict[str, Side], shape: ModelShape, rows: int, copied: float) -> None:
    vocabulary = SHAPES[args.shape]["vocab_size"]
    prompts = [np.random.default_rng(row).integers(1, vocabulary, args.prompt).astype(np.int32) for row in range(rows)]
    read = bytes_read(shape, num_parameters(args.shape), rows, args.prompt, args.new)
    for name, side in sides.items():
        times: dict[int, list[float]] = {}
        for turn in range(args.repeat + 1):
            for new in (1, args.new):  # one token: what reading the prompts takes
                began = clock(args.device)
                assert side(prompts, new) == rows * new, f"{name} did not sample {rows * new} tokens"
                if turn:
                    times.setdefault(new, []).append(clock(args.device) - began)
        whole, first = statistics.median(times[args.new]), statistics.median(times[1])
        steps = max(whole - first, 1e-9)
        print(
            f"{name:9} {rows:5d} rows  prompts {first:7.3f} s  steps {steps:7.3f} s  "
            f"{rows * (args.new - 1) / steps:9.0f} tokens/s  {100 * read / steps / copied:5.1f} % of the bandwidth",
            flush=True,
        )
        figure = {"side": name, "rows": rows, "prompts_s": first, "tokens_per_s": rows * (args.new - 1) / steps}
        print(json.dumps({"figure": figure | {"bandwidth_share": read / steps / copied}}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Decoding on one GPU as a share of its memory bandwidth.")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens of each completion")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen-1.5b")
    parser.add_argument("--device", choices=["cuda", "cpu", "auto"], default="cuda")
    parser.add_argument("--repeat", type=int, default=3, help="counted runs, after one that is not")
    args = parser.parse_args()
    try:
        if args.new < 2:
            raise ConfigError("--new: tokens after the first one", str(args.new), "say 2 or more")
        args.device = device_of(args.device, "--device").type
    except TriviumError as error:
        print(error, file=sys.stderr)
        return 2
    copied = bandwidth(args.device)
    print(f"a large copy: {copied / 1e9:.0f} GB/s; torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.shape, args.prompt + args.new)
        sides = {name: build(Path(folder), args) for name, build in SIDES.items()}
        for rows in args.rows:
            measure(args, sides, read_shape(Path(folder)), rows, copied)
    return 0


if __name__ == "__main__":
    sys.exit(main())
