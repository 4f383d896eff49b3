"""Generation and update of a pretrained model against their floors, and where the rest of the time goes.

    python benchmarks/step_cost.py --model DIR [--shapes 64x24 32x64 16x256 8x1024]

The floor of an update is its arithmetic at the rate of a large matrix product. The floor of generation is, for each
step, its arithmetic at this rate or its bytes at the rate of memory, whichever takes longer: a step reads all weights
once, and the keys and values of each row. Both rates are measured in the same process, in CPU seconds of one thread
that computes and in seconds of all threads that read. Prompts have 40 tokens, eight rows share one.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_cost import forward_and_backward, grpo, make_batch, processor_s
from torch._C._profiler import _ExperimentalConfig  # torch.profiler takes one, and exports no name for it
from torch.profiler import ProfilerActivity, profile

from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.randomness import SampleKey
from trivium.models.backbone.shape import read_shape
from trivium.models.cpu.linear import onednn_linear
from trivium.models.cpu.openmp import release_team
from trivium.planning.choices import micro_batch_tokens
from trivium.planning.model_shape import BYTES, ModelShape
from trivium.training.engine import TorchTrainEngine
from trivium.types import Request, Sampling

PROMPT, GROUP, WIDE = 40, 8, BYTES["float32"]
KINDS = {
    "products": ("mkldnn::_linear", "aten::mm", "aten::addmm", "aten::bmm", "mkldnn_linear_backward"),
    "attention": ("flash_attention", "embedding_bag"),
    "logits": ("log_softmax", "aten::exp", "vecdot", "scatter_add", "logsumexp"),
    "optimizer": ("adamw", "_foreach"),
}
"""Kinds of operations by parts of their names; the others are elementwise operations, copies and Python."""


def products_per_s() -> float:
    """Operations in a CPU second of large products in one thread."""
    threads, size, seconds = torch.get_num_threads(), 1536, list[float]()
    torch.set_num_threads(1)
    a = torch.rand(size, size)
    for _ in range(8):
        began = time.thread_time()
        onednn_linear(a, a)
        seconds.append(time.thread_time() - began)
    torch.set_num_threads(threads)
    return 2.0 * size**3 / min(seconds)


def bytes_per_s() -> float:
    """Bytes of a matrix much larger than the caches, read by all threads for a product with few rows."""
    weight, rows, seconds = torch.ones(4096, 32768).T, torch.ones(2, 4096), list[float]()
    for _ in range(5):
        began = time.perf_counter()
        onednn_linear(rows, weight)
        seconds.append(time.perf_counter() - began)
    return weight.nbytes / min(seconds)


def generation_floor(shape: ModelShape, rows: int, tokens: int, products: float, memory: float) -> float:
    """Seconds of all threads."""
    threads, prompts = torch.get_num_threads(), -(-rows // GROUP)
    read = shape.flops(prompts * PROMPT, prompts * PROMPT**2, prompts, backward=False) / products / threads
    steps = 0.0
    for length in range(PROMPT, PROMPT + tokens):
        arithmetic = shape.flops(rows, rows * (2 * length + 1), rows, backward=False) / products / threads
        weights = (shape.parameters + rows * length * shape.kv_per_token) * WIDE
        steps += max(arithmetic, weights / memory)
    return read + steps


def generation(model_dir: Path, rows: int, tokens: int) -> tuple[float, float]:
    """(seconds, CPU seconds), the least of three calls."""
    release_team()  # as a run does after each update: else the engine shares the cores with this thread's team
    config = TorchEngine.Config(max_rows=rows, max_context=PROMPT + tokens)
    threads = torch.get_num_threads()
    engine = TorchEngine(config, model_dir=model_dir, eos_token_ids=frozenset({1}), decode=str, threads=threads)
    vocabulary, how = read_shape(model_dir).vocabulary, Sampling(tokens, min_new_tokens=tokens)

    async def generate(call: int) -> tuple[float, float]:
        rng = np.random.default_rng(call)
        prompts = [rng.integers(3, vocabulary, PROMPT).astype(np.int32) for _ in range(-(-rows // GROUP))]
        keys = [SampleKey(0, "bench", str(call), str(row)) for row in range(rows)]
        began, used = time.perf_counter(), processor_s()
        await asyncio.gather(*(engine.generate(Request(prompts[i // GROUP], how, key)) for i, key in enumerate(keys)))
        return time.perf_counter() - began, processor_s() - used

    async def calls() -> list[tuple[float, float]]:
        try:
            return [await generate(call) for call in range(4)][1:]
        finally:
            await engine.close()

    return min(asyncio.run(calls()))


def update(model_dir: Path, rows: int, tokens: int, lora: int) -> tuple[float, float, float, dict[str, float]]:
    """(seconds, CPU seconds, operations, parts of a profiled update by kind): the least of two updates after one."""
    shape, threads = read_shape(model_dir), torch.get_num_threads()
    config: dict[str, Any] = {
        "device": "cpu",
        "optimizer": {"lr": 1e-6},
        "max_tokens_per_micro_batch": micro_batch_tokens(shape.parameters * WIDE, "cpu", adapter=bool(lora)),
        "lora": {"rank": lora} if lora else None,
    }
    how: dict[str, Any] = {"temperature": 1.0, "max_response_length": tokens, "total_steps": 9, "seed": 0}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate(config), model_dir=model_dir, algorithm=grpo(), threads=threads, **how
    )
    engine.prepare()
    (objective,) = grpo().objectives
    batch = make_batch(-(-rows // GROUP), min(rows, GROUP), tokens, PROMPT, shape.vocabulary)
    spent: list[tuple[float, float]] = []
    for _ in range(3):
        began, used = time.perf_counter(), processor_s()
        engine.update("policy", batch, objective)
        spent.append((time.perf_counter() - began, processor_s() - used))
    every = _ExperimentalConfig(profile_all_threads=True)  # micro-batches are computed by threads of a pool
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every) as profiled:
        engine.update("policy", batch, objective)
    parts = Counter[str]()
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names)), "other")
        parts[kind] += event.self_cpu_time_total
    adapted = shape.layers if lora else 0
    seconds, cpu = min(spent[1:])
    return seconds, cpu, forward_and_backward(shape, batch, adapted), {k: v / parts.total() for k, v in parts.items()}


def report(model_dir: Path, shapes: list[str], rank: int) -> None:
    shape = read_shape(model_dir)
    products, memory = products_per_s(), bytes_per_s()
    threads = torch.get_num_threads()
    print(f"{threads} threads; {products / 1e9:.0f} GFLOP/s in one thread, {memory / 1e9:.0f} GB/s read by all")
    for rows, tokens in (map(int, each.split("x")) for each in shapes):
        seconds, cpu = generation(model_dir, rows, tokens)
        floor = generation_floor(shape, rows, tokens, products, memory)
        print(
            f"{rows:>3} x {tokens:<5} generation      {seconds:7.2f} s, {cpu:7.2f} CPU s; floor {floor:6.2f} s: "
            f"{floor / seconds:.0%}",
            flush=True,
        )
        for lora in (rank, 0):
            gc.collect()
            seconds_update, cpu, operations, parts = update(model_dir, rows, tokens, lora)
            floor_update = operations / products / threads
            rest = ", ".join(f"{kind} {part:.0%}" for kind, part in sorted(parts.items(), key=lambda kv: -kv[1]))
            print(
                f"            update, {'LoRA' if lora else 'all '}    {seconds_update:7.2f} s, {cpu:7.2f} CPU s; floor "
                f"{floor_update:6.2f} s: {floor_update / seconds_update:.0%} ({rest}); step "
                f"{(floor + floor_update) / (seconds + seconds_update):.0%}",
                flush=True,
            )
