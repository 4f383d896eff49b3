"""Cost and peak memory of an update against what it should be linear in, and the vocabulary, in which it is flat.

    python benchmarks/step_cost.py [--svg docs/step_cost.svg]

Each series changes one of: tasks, group size, tokens of a completion, tokens of a prompt (members share it), and tokens
of the vocabulary. Each point is one GRPO update in a process of its own, in one micro-batch, after one that is not
counted: processor seconds of one thread, the lesser of two; and how far the peak of the resident set rises above what
was resident before and the gradients of the weights, with freed memory returned to the system as it comes. Beside each
point stands the floor: the arithmetic of the update at the rate of a large matrix product in the same process.

A line is fitted through the first and the last point of a series; `off` is how far the others are from it. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from trivium.algorithms import build_algorithm
from trivium.algorithms.presets import GRPO
from trivium.config.model_shape import read_shape
from trivium.training.batching import prefixes_of
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch, Experience

SIDE = 768
BASE = {"tasks": 4, "members": 8, "completion": 64, "prompt": 64, "vocabulary": 1024}
SERIES = {
    "tasks": (2, 4, 8, 16),
    "members": (4, 8, 16, 32),
    "completion": (32, 64, 128, 256, 512),
    "prompt": (32, 64, 128, 256, 512),
    "vocabulary": (1024, 16_384, 65_536, 131_072),
}
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


def measure(model_dir: Path, sizes: dict[str, int]) -> dict[str, float]:
    """Of one point: processor seconds, MiB at the peak above those before, and the floor in seconds."""
    torch.set_num_threads(1)
    algorithm = build_algorithm(GRPO.configure({"kind": "grpo"}))
    config = {"device": "cpu", "optimizer": {"lr": 1e-6}, "max_tokens_per_micro_batch": 1 << 30}
    how: dict[str, Any] = {"temperature": 1.0, "max_response_length": 2048, "total_steps": 9, "seed": 0, "threads": 1}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate(config), model_dir=model_dir, algorithm=algorithm, **how
    )
    engine.prepare()
    (objective,) = algorithm.objectives
    engine.update("policy", make_batch(**{**sizes, "tasks": 1, "members": 2, "completion": 4}), objective)
    batch = make_batch(**sizes)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, seconds = status_mib("VmRSS"), []
    for _ in range(2):
        began = processor_s()
        engine.update("policy", batch, objective)
        seconds.append(processor_s() - began)
    tree = prefixes_of(batch).tree(range(len(batch)))
    trained = sum(each.num_response_tokens for each in batch.experiences)
    flops = read_shape(model_dir).flops(tree.num_tokens, tree.num_squares, trained, backward=True)
    floor = flops * product_s() / (2.0 * SIDE**3)
    gradients = sum(each.numel() * each.element_size() for _, each in engine.export_weights()) / 2**20
    return {"seconds": min(seconds), "mib": status_mib("VmHWM") - before - gradients, "floor": floor}


def point(model_dir: Path, sizes: dict[str, int]) -> dict[str, float]:
    if not (model_dir / "config.json").is_file():
        write_model(model_dir, sizes["vocabulary"])
    command = [sys.executable, __file__, "--model", str(model_dir), "--point", json.dumps(sizes)]
    own = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the resident set
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=own).stdout)


def off_line(values: tuple[int, ...], costs: list[float]) -> list[float]:
    """How far each cost is from the line through the first and the last, as a part of it."""
    slope = (costs[-1] - costs[0]) / (values[-1] - values[0])
    return [cost / (costs[0] + slope * (value - values[0])) - 1 for value, cost in zip(values, costs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, help="where the plot goes")
    parser.add_argument("--series", nargs="*", choices=list(SERIES), default=list(SERIES))
    parser.add_argument("--point", type=json.loads, help="measure one point in this process, print JSON")
    parser.add_argument("--model", type=Path, help="the model directory of --point")
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(options.model, options.point)))
        return
    began, found = time.monotonic(), dict[str, list[dict[str, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.series:
            values = SERIES[name]
            sizes = [{**BASE, name: value} for value in values]
            found[name] = [point(Path(folder) / str(each["vocabulary"]), each) for each in sizes]
            offs = [off_line(values, [each[key] for each in found[name]]) for key in ("seconds", "mib")]
            print(f"{LABELS.get(name, name)} (the rest: {', '.join(f'{BASE[k]} {k}' for k in BASE if k != name)})")
            for value, each, of_seconds, of_mib in zip(values, found[name], *offs, strict=True):
                print(
                    f"{value:>8}: {each['seconds']:7.3f} s ({of_seconds:+.0%} off), floor {each['floor']:.3f} s; "
                    f"{each['mib']:7.1f} MiB ({of_mib:+.0%} off)",
                    flush=True,
                )
    print(f"{time.monotonic() - began:.0f} s, torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})")
    if options.svg:
        options.svg.write_text(svg_of(found))


# --------------------------------------------------------------------------- the plot

WIDTH, HEIGHT, LEFT, TOP = 210, 130, 46, 30
PANELS = {"seconds": ("processor seconds", "#2563eb"), "mib": ("peak MiB of an update", "#b45309")}


def svg_of(found: dict[str, list[dict[str, float]]]) -> str:
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
            parts += _panel(x, y, SERIES[name], costs, color, f"{label}: {LABELS.get(name, name)}")
            if key == "seconds":
                floors = _places(x, y, SERIES[name], [each["floor"] for each in points], max(costs))
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
