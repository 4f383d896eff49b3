"""Arithmetic of a pass over a model, and what the device can do at most: their ratio is the utilisation (MFU).

Model FLOPs: what the mathematics needs. Activations that are computed twice (gradient checkpointing) count once, and so
does what sequences share (`train.share_prefix`); sequences without a trained token do not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from trivium.config.model_shape import ModelShape
from trivium.phases import Phase
from trivium.training.ranks import Ranks
from trivium.types import Metrics

_SIDE = {"cpu": 768, "cuda": 8192}
"""Side of the square matrices that the peak is measured with."""
_TIMES = 5


def pass_flops(
    shape: ModelShape, tokens: int, squares: int, head_tokens: int, *, backward: bool, adapter: bool = False
) -> float:
    """Floating-point operations of one pass over sequences of `tokens` tokens, of which `squares` is the sum of the
    squared lengths; the head sees `head_tokens` of them.

    Forward, each multiplied weight takes two operations per token (embedding lookups none, of experts the active ones),
    and causal attention 2 * heads * head_dim * length^2 per layer, half of the full square. The backward pass takes
    twice as much again, or once where an `adapter` alone is trained: its own arithmetic is neglected, and the frozen
    weights get no gradient.
    """
    forward = 2.0 * (shape.multiplied * tokens + shape.embedding * head_tokens)
    forward += 2.0 * shape.layers * shape.heads * shape.head_dim * squares
    return forward * ((2 if adapter else 3) if backward else 1)


@cache
def measured_peak(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """Operations per second of a large matrix product: the best of a few, once per process. `threads` are those that
    torch was set to."""
    del threads  # another number is another answer
    side = _SIDE.get(device.type, _SIDE["cuda"])
    a = torch.ones(side, side, device=device, dtype=dtype)
    best = min(_seconds(a) for _ in range(_TIMES))
    return 2.0 * side**3 / best


def _seconds(a: torch.Tensor) -> float:
    product = torch.empty_like(a)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    started = time.perf_counter()
    torch.mm(a, a, out=product)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - started


class WorkDone:
    """How much of the sequences of a step's phases was computed, by one rank."""

    def __init__(self) -> None:
        self._version = -1
        self._by_phase: dict[str, npt.NDArray[np.int64]] = {}

    def add(self, version: int, phase: str, work: npt.NDArray[np.int64]) -> None:
        """`work` is (2, 4): what was computed, and what the sequences are. A later version begins another step."""
        if version != self._version:
            self._version, self._by_phase = version, {}
        self._by_phase[phase] = self._by_phase.get(phase, np.zeros_like(work)) + work

    def part_of(self, phases: Mapping[str, Phase], ranks: Ranks) -> dict[str, Phase]:
        """The phases with the part of their sequences that the ranks computed; all ranks call it."""
        by_rank = ranks.all_gather(self._by_phase)
        parts = dict(phases)
        for name in phases.keys() & self._by_phase.keys():
            computed, whole = np.sum([each[name] for each in by_rank if name in each], 0)
            fractions = np.divide(computed, whole, out=np.ones(len(whole)), where=whole > 0)
            entire = parts[name]
            sizes = (entire.tokens, entire.squares, entire.image_tokens, entire.image_squares)
            tokens, squares, image_tokens, image_squares = (round(n) for n in fractions * sizes)
            how = {"image_tokens": image_tokens, "image_squares": image_squares}
            parts[name] = replace(entire, tokens=tokens, squares=squares, **how)
        return parts


def utilisation(
    phases: Mapping[str, Phase],
    models: Mapping[str, ModelShape],
    role_of: Mapping[str, str],
    peak: float,
    *,
    adapter: bool = False,
    vision_tower: str | None = None,
) -> Metrics:
    """`perf/` metrics of a step: arithmetic of its scoring passes and updates over the time they took.

    `models` are the shapes by role and `role_of` says whose a score is; phases of other models do not count. `peak` is
    what all ranks together could do in a second. `vision_tower` says which of the image side is trained.
    """
    flops = {"score": 0.0, "update": 0.0}
    seconds = dict.fromkeys(flops, 0.0)
    for name, each in phases.items():
        kind, _, what = name.partition("/")
        role = role_of.get(what, what) if kind == "score" else what
        if kind not in flops or role not in models:
            continue
        heads = each.trained_tokens if role in ("policy", "reference", "teacher") else 0
        flops[kind] += pass_flops(
            models[role],
            each.tokens,
            each.squares,
            heads,
            backward=kind == "update",
            adapter=adapter and role == "policy",
        )
        vision = models[role].vision
        if vision is not None:
            learns = kind == "update" and vision_tower in (None, "trained") and not (adapter and role == "policy")
            flops[kind] += vision.flops(each.image_tokens, each.image_squares) * (3 if learns else 1)
        seconds[kind] += each.seconds
    if not sum(seconds.values()):
        return {}
    mfu = {f"perf/mfu/{kind}": flops[kind] / seconds[kind] / peak for kind in flops if seconds[kind]}
    rate = sum(flops.values()) / sum(seconds.values())
    return {**mfu, "perf/mfu": rate / peak, "perf/model_flops_per_second": rate}
