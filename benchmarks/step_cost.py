"""Cost and peak memory of updates, of generation and of whole steps against what they should be linear in.

    python benchmarks/step_cost.py --of update [--svg docs/step_cost.svg]
    python benchmarks/step_cost.py --of generation [--svg docs/step_cost_generation.svg]
    python benchmarks/step_cost.py --of loop [--svg docs/step_cost_loop.svg]
    python benchmarks/step_cost.py --model DIR    # generation and update of a pretrained model (`floors.py`)

Each series changes one size and keeps the others. Each point runs in its own process, with one torch thread in each
engine, after a run that is not counted. A point is the processor seconds, the lesser of two runs, and how far the peak
of the resident set rises above what was resident before. Freed memory returns to the system at once. The floor of a
point is the time of its arithmetic at the rate of a large matrix product in the same process.

- `update` is one GRPO update in one micro-batch. Members of a group share a prompt. Its memory does not include the
  gradients of the weights.
- `generation` samples all rows at once with the torch engine. Eight rows share a prompt.
- `loop` is a whole step: every explorer loads the weights, the explorers roll out and judge the groups, and the trainer
  updates.

A line is fitted through the first and the last point of a series; its slope is printed, and `off` is how far the others
are from it. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import GRPO
from trivium.config import RewardConfig
from trivium.engines.torch.engine import TorchEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.randomness import SampleKey
from trivium.loops import train_step
from trivium.models.backbone.shape import read_shape
from trivium.planning.model_shape import ModelShape
from trivium.rewards.judge import make_judge
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel
from trivium.training.batching import prefixes_of
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch, Experience, Group, IntArray, Message, Request, Sampling, Task
from trivium.workflows.single_turn import SingleTurn

SIDE = 768
Sizes = dict[str, int]


@dataclass(frozen=True)
class Part:
    """What is measured: `base` sizes, and for each series the values that replace one of them."""

    base: Sizes
    series: dict[str, tuple[int, ...]]
    measure: Callable[[Path, Sizes], dict[str, float]]


LABELS = {"members": "members of a group", "completion": "tokens of a completion", "prompt": "tokens of a prompt"}


def write_model(directory: Path, vocabulary: int) -> None:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def make_batch(tasks: int, members: int, completion: int, prompt: int, vocabulary: int) -> Batch:
    rng, length = np.random.default_rng(0), prompt + completion
    mask = np.arange(length) >= prompt
    rows: list[Experience] = []
    for task in range(tasks):
        begin = rng.integers(3, vocabulary, prompt)
        for index in range(members):
            tokens = np.concatenate([begin, rng.integers(3, vocabulary, completion)]).astype(np.int32)
            rows.append(Experience(tokens, mask, np.where(mask, -4.0, 0.0), np.where(mask, 0, -1), f"g{task}", index))
    advantages = [np.full(length, rng.normal()) * mask for _ in rows]
    return Batch(tuple(rows)).with_columns(advantages=advantages, old_log_prob=[e.rollout_log_prob for e in rows])


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def product_s() -> float:
    """Of two large square matrices: the least processor time of a few."""
    a, seconds = torch.ones(SIDE, SIDE), list[float]()
    for _ in range(10):
        began = time.thread_time()
        torch.mm(a, a)
        seconds.append(time.thread_time() - began)
    return min(seconds)


def status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def train_engine(model_dir: Path) -> TorchTrainEngine:
    """Updates in one micro-batch and one thread."""
    config = {"device": "cpu", "optimizer": {"lr": 1e-6}, "max_tokens_per_micro_batch": 1 << 30}
    how: dict[str, Any] = {"temperature": 1.0, "max_response_length": 2048, "total_steps": 9, "seed": 0, "threads": 1}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate(config), model_dir=model_dir, algorithm=grpo(), **how
    )
    engine.prepare()
    return engine


def grpo() -> Any:
    return build_algorithm(GRPO.configure({"kind": "grpo"}))


def rate() -> float:
    """Operations of one thread per second in large matrix products."""
    return 2.0 * SIDE**3 / product_s()


def cost_of(work: Callable[[], object]) -> dict[str, float]:
    """Processor seconds, the lesser of two, and MiB at the peak above those before."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, seconds = status_mib("VmRSS"), []
    for _ in range(2):
        began = processor_s()
        work()
        seconds.append(processor_s() - began)
    return {"seconds": min(seconds), "mib": status_mib("VmHWM") - before}


def forward_and_backward(shape: ModelShape, batch: Batch, adapted: int = 0) -> float:
    """Operations of an update of all weights, or of adapters in the last `adapted` layers."""
    tree = prefixes_of(batch).tree(range(len(batch)))
    trained = sum(each.num_response_tokens for each in batch.experiences)
    return shape.flops(tree.num_tokens, tree.num_squares, trained, backward=True, adapted=adapted)


def measure_update(model_dir: Path, sizes: Sizes) -> dict[str, float]:
    write_model(model_dir, sizes["vocabulary"])
    engine, (objective,) = train_engine(model_dir), grpo().objectives
    engine.update("policy", make_batch(**{**sizes, "tasks": 1, "members": 2, "completion": 4}), objective)
    batch = make_batch(**sizes)
    cost = cost_of(lambda: engine.update("policy", batch, objective))
    gradients = sum(each.numel() * each.element_size() for _, each in engine.export_weights()) / 2**20
    floor = forward_and_backward(read_shape(model_dir), batch) / rate()
    return {"seconds": cost["seconds"], "mib": cost["mib"] - gradients, "floor": floor}


def measure_generation(model_dir: Path, sizes: Sizes) -> dict[str, float]:
    write_model(model_dir, sizes["vocabulary"])
    rows, completion, prompt = sizes["rows"], sizes["completion"], sizes["prompt"]
    engine = TorchEngine(
        TorchEngine.Config(max_rows=rows), model_dir=model_dir, eos_token_ids=frozenset({0}), decode=str, threads=1
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, sizes["vocabulary"], prompt).astype(np.int32) for _ in range(-(-rows // 8))]

    async def generate(tokens: int) -> None:
        how = Sampling(tokens, min_new_tokens=tokens)
        keys = [SampleKey(0, "bench", "cost", str(row)) for row in range(rows)]
        await asyncio.gather(*(engine.generate(Request(prompts[i // 8], how, key)) for i, key in enumerate(keys)))

    asyncio.run(generate(4))
    cost = cost_of(lambda: asyncio.run(generate(completion)))
    shape = read_shape(model_dir)
    read = shape.flops(len(prompts) * prompt, len(prompts) * prompt**2, len(prompts), backward=False)
    # A row attends to its own tokens and to those of its prompt.
    squares = (prompt + completion) ** 2 - prompt**2
    sampled = shape.flops(rows * completion, rows * squares, rows * completion, backward=False)
    return {**cost, "floor": (read + sampled) / rate()}


def measure_loop(model_dir: Path, sizes: Sizes) -> dict[str, float]:
    shape = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "mlp": 384, "max_position": 1024}
    TinyModel(TinyModel.Config.model_validate(shape), seed=0).materialize(model_dir)
    renderer, tokens = ChatRenderer(AutoTokenizer.from_pretrained(model_dir)), sizes["completion"]
    config = TorchEngine.Config(max_rows=sizes["groups"] * sizes["members"])
    own: dict[str, Any] = {"eos_token_ids": renderer.eos_token_ids, "decode": renderer.decode, "threads": 1}
    engines = [TorchEngine(config, model_dir=model_dir, **own) for _ in range(sizes["explorers"])]
    judge = make_judge([RewardConfig(kind=f"{__file__}:variety")])
    how, workflow = Sampling(tokens, min_new_tokens=tokens), SingleTurn(SingleTurn.Config())
    explorers = [Explorer(engine, renderer, workflow, judge, how, RolloutLimits(600.0, 4096)) for engine in engines]
    tasks = [Task(str(i), (Message("user", f"What is {17 * i + 3} plus {29 * i + 11}?"),)) for i in range(999)]
    trainer, algorithm = train_engine(model_dir), grpo()
    finished: list[Group] = []

    async def rollouts(groups: int) -> None:
        weights = list(trainer.export_weights())
        await asyncio.gather(*(engine.load(trainer.version, weights) for engine in engines))
        keys = [
            [SampleKey(0, "bench", "cost", task.task_id, trainer.version, index) for index in range(sizes["members"])]
            for task in tasks[:groups]
        ]
        finished[:] = await asyncio.gather(
            *(explorers[i % len(explorers)].rollout(tasks[i], keys[i]) for i in range(groups))
        )

    def step(groups: int) -> None:
        asyncio.run(rollouts(groups))
        train_step(trainer, finished, algorithm)

    step(sizes["explorers"])
    cost = cost_of(lambda: step(sizes["groups"]))
    experiences = [
        _experience(turn.prompt_tokens, turn.tokens, group, index)
        for group, each in enumerate(finished)
        for index, turn in enumerate(each.turns())
    ]
    # Generation is one more forward pass, a third of the operations of the update.
    return {**cost, "floor": 4 / 3 * forward_and_backward(read_shape(model_dir), Batch(tuple(experiences))) / rate()}


def _experience(prompt: IntArray, completion: IntArray, group: int, index: int) -> Experience:
    tokens = np.concatenate([prompt, completion])
    log_prob, version = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
    return Experience(tokens, np.arange(len(tokens)) >= len(prompt), log_prob, version, str(group), index)


def variety(prompt: str, completion: str) -> float:
    """The reward of `loop`: the number of different characters."""
    return float(len(set(completion)))


PARTS = {
    "update": Part(
        {"tasks": 4, "members": 8, "completion": 64, "prompt": 64, "vocabulary": 1024},
        {
            "tasks": (2, 4, 8, 16),
            "members": (4, 8, 16, 32),
            "completion": (32, 64, 128, 256, 512),
            "prompt": (32, 64, 128, 256, 512),
            "vocabulary": (1024, 16_384, 65_536, 131_072),
        },
        measure_update,
    ),
    "generation": Part(
        {"rows": 64, "completion": 64, "prompt": 64, "vocabulary": 1024},
        {
            "rows": (16, 32, 64, 128, 256),
            "completion": (32, 64, 128, 256, 512),
            "prompt": (32, 64, 128, 256, 512),
            "vocabulary": (1024, 16_384, 65_536, 131_072),
        },
        measure_generation,
    ),
    "loop": Part(
        {"groups": 8, "members": 8, "completion": 64, "explorers": 1},
        {"groups": (4, 8, 16, 32, 64), "completion": (32, 64, 128, 256), "explorers": (1, 2, 4, 8)},
        measure_loop,
    ),
}


def point(of: str, model_dir: Path, sizes: Sizes) -> dict[str, float]:
    command = [sys.executable, __file__, "--of", of, "--model", str(model_dir), "--point", json.dumps(sizes)]
    own = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the resident set
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=own).stdout)


def off_line(values: tuple[int, ...], costs: list[float]) -> tuple[float, list[float]]:
    """The slope of the line through the first and the last cost, and how far each cost is from it, as a part of it."""
    slope = (costs[-1] - costs[0]) / (values[-1] - values[0])
    offs = [cost / (costs[0] + slope * (value - values[0])) - 1 for value, cost in zip(values, costs, strict=True)]
    return slope, offs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=list(PARTS), default="update", help="what is measured")
    parser.add_argument("--svg", type=Path, help="where the plot goes")
    parser.add_argument("--series", nargs="*", help="some of the series; default: all")
    parser.add_argument("--point", type=json.loads, help="measure one point in this process, print JSON")
    parser.add_argument("--model", type=Path, help="a model directory; without --point, of a pretrained model")
    parser.add_argument("--shapes", nargs="*", default=["64x24", "32x64", "16x256", "8x1024"], help="rows x tokens")
    parser.add_argument("--lora", type=int, default=16, help="the rank of the adapter of --model")
    options = parser.parse_args()
    if options.model and not options.point:
        import floors

        floors.report(options.model, options.shapes, options.lora)
        return
    part = PARTS[options.of]
    if options.point:
        torch.set_num_threads(1)
        print(json.dumps(part.measure(options.model, options.point)))
        return
    began, found = time.monotonic(), dict[str, list[dict[str, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.series or part.series:
            values = part.series[name]
            sizes = [{**part.base, name: value} for value in values]
            found[name] = [point(options.of, Path(folder) / f"{name}-{each[name]}", each) for each in sizes]
            (slope, offs), (more, offs_mib) = (off_line(values, [p[key] for p in found[name]]) for key in PANELS)
            print(f"{LABELS.get(name, name)} ({', '.join(f'{part.base[k]} {k}' for k in part.base if k != name)}):")
            print(f"   slope: {1e3 * slope:.4f} ms, {1024 * more:.2f} KiB")
            for value, each, of_seconds, of_mib in zip(values, found[name], offs, offs_mib, strict=True):
                print(
                    f"{value:>8}: {each['seconds']:7.3f} s ({of_seconds:+.0%} off), floor {each['floor']:.3f} s; "
                    f"{each['mib']:7.1f} MiB ({of_mib:+.0%} off)",
                    flush=True,
                )
    print(f"{time.monotonic() - began:.0f} s, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})")
    if options.svg:
        options.svg.write_text(svg_of(found, part.series))


# --------------------------------------------------------------------------- the plot

WIDTH, HEIGHT, LEFT, TOP = 210, 130, 46, 30
PANELS = {"seconds": ("processor seconds", "#2563eb"), "mib": ("peak MiB", "#b45309")}


def svg_of(found: dict[str, list[dict[str, float]]], series: dict[str, tuple[int, ...]]) -> str:
    """A row of panels for each of seconds and memory, a column for each series; dashed, the line of equal growth."""
    across, down = (WIDTH + LEFT + 14) * len(found), (HEIGHT + 2 * TOP) * len(PANELS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}"',
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, (key, (label, color)) in enumerate(PANELS.items()):
        for column, (name, points) in enumerate(found.items()):
            x, y = LEFT + column * (WIDTH + LEFT + 14), TOP + row * (HEIGHT + 2 * TOP)
            costs = [each[key] for each in points]
            parts += _panel(x, y, series[name], costs, color, f"{label}: {LABELS.get(name, name)}")
            if key == "seconds":
                floors = _places(x, y, series[name], [each["floor"] for each in points], max(costs))
                parts.append(f'<polyline points="{floors}" fill="none" stroke="#9ca3af"/>')
    return "\n".join([*parts, "</svg>", ""])


def _places(x: int, y: int, values: tuple[int, ...], costs: list[float], top: float) -> str:
    spots = ((x + WIDTH * v / values[-1], y + HEIGHT * (1 - c / top)) for v, c in zip(values, costs, strict=True))
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)


def _panel(x: int, y: int, values: tuple[int, ...], costs: list[float], color: str, title: str) -> list[str]:
    line, top = _places(x, y, values, costs, max(costs)), max(costs)
    ends = _places(x, y, (values[0], values[-1]), [costs[0], costs[-1]], top)
    dots = (spot.split(",") for spot in line.split())
    return [
        f'<text x="{x}" y="{y - 10}">{title}</text>',
        f'<path d="M{x} {y}V{y + HEIGHT}H{x + WIDTH}" fill="none" stroke="black"/>',
        f'<text x="{x - 4}" y="{y + 8}" text-anchor="end">{top:.3g}</text>',
        f'<text x="{x - 4}" y="{y + HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{x + WIDTH}" y="{y + HEIGHT + 14}" text-anchor="end">{values[-1]:,}</text>',
        f'<polyline points="{ends}" fill="none" stroke="{color}" stroke-dasharray="3 3"/>',
        f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>',
        *(f'<circle cx="{a}" cy="{b}" r="2.5" fill="{color}"/>' for a, b in dots),
    ]


if __name__ == "__main__":
    main()
