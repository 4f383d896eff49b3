"""The utilisation of a device (MFU): the FLOPs of a step over the peak of the device.

Model FLOPs are those of the mathematical definition. Activations that gradient checkpointing computes twice count once,
as do prefixes that sequences share (`train.share_prefix`). Sequences without a trained token do not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from trivium.foundation.phases import Phase
from trivium.planning.model_shape import ModelShape
from trivium.training.distributed.ranks import Ranks
from trivium.types import Metrics

_SIDE = {"cpu": 768, "cuda": 8192}
"""Size of the square matrices that measure the peak."""
_TIMES, _ENOUGH_S = 5, 0.5
"""Runs, unless fewer take this long: a product in bfloat16 takes 0.8 s on a CPU without instructions for it."""


@cache
def measured_peak(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """The operations per second of a large matrix product: the best of a few runs. Measured once per process for each
    number of `threads` of torch."""
    del threads  # part of the cache's key
    side = _SIDE.get(device.type, _SIDE["cuda"])
    a = torch.ones(side, side, device=device, dtype=dtype)
    taken: list[float] = []
    while len(taken) < _TIMES and sum(taken[1:]) < _ENOUGH_S:  # the first one starts a GPU's library, too
        taken.append(_seconds(a))
    return 2.0 * side**3 / min(taken)


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
    """Counts the work of one rank by phase of the current step."""

    def __init__(self) -> None:
        self._version = -1
        self._by_phase: dict[str, npt.NDArray[np.int64]] = {}

    def add(self, version: int, phase: str, work: npt.NDArray[np.int64]) -> None:
        """Adds `work` (2, 4): the sizes of the computed tokens and of the whole sequences. A new version begins a new
        step."""
        if version != self._version:
            self._version, self._by_phase = version, {}
        self._by_phase[phase] = self._by_phase.get(phase, np.zeros_like(work)) + work

    def part_of(self, phases: Mapping[str, Phase], ranks: Ranks) -> dict[str, Phase]:
        """The phases, with sizes scaled to the work that the ranks computed. All ranks must call it."""
        by_rank = ranks.all_gather(self._by_phase)
        parts = dict(phases)
        for name in phases.keys() & self._by_phase.keys():
            computed, whole = np.sum([work[name] for work in by_rank if name in work], 0)
            fractions = np.divide(computed, whole, out=np.ones(len(whole)), where=whole > 0)
            entire = parts[name]
            sizes = (entire.tokens, entire.squares, entire.image_tokens, entire.image_squares)
            tokens, squares, image_tokens, image_squares = (round(n) for n in fractions * sizes)
            parts[name] = replace(
                entire, tokens=tokens, squares=squares, image_tokens=image_tokens, image_squares=image_squares
            )
        return parts


def utilisation(
    phases: Mapping[str, Phase],
    models: Mapping[str, ModelShape],
    role_of: Mapping[str, str],
    peak: float,
    *,
    adapted: int = 0,
    vision_tower: str | None = None,
) -> Metrics:
    """`perf/` metrics of a step: arithmetic of its scoring passes and updates over the time they took.

    `models` has the shapes by role, and `role_of` the role that computes a score. Phases of other models do not count.
    `peak` is the peak of all ranks together, in operations per second. If the policy trains adapters only, `adapted` is
    the number of layers that have one. `vision_tower` names the trained parts of the
    vision side.
    """
    flops = {"score": 0.0, "update": 0.0}
    seconds = dict.fromkeys(flops, 0.0)
    for name, phase in phases.items():
        kind, _, what = name.partition("/")
        role = role_of.get(what, what) if kind == "score" else what
        if kind not in flops or role not in models:
            continue
        shape, backward, with_adapter = models[role], kind == "update", adapted if role == "policy" else 0
        head_tokens = phase.trained_tokens if role in ("policy", "reference", "teacher") else 0
        flops[kind] += shape.flops(phase.tokens, phase.squares, head_tokens, backward=backward, adapted=with_adapter)
        if shape.vision is not None:
            learns = backward and vision_tower in (None, "trained") and not with_adapter
            flops[kind] += shape.vision.flops(phase.image_tokens, phase.image_squares) * (3 if learns else 1)
        seconds[kind] += phase.seconds
    if not sum(seconds.values()):
        return {}
    mfu = {f"perf/mfu/{kind}": flops[kind] / seconds[kind] / peak for kind in flops if seconds[kind]}
    rate = sum(flops.values()) / sum(seconds.values())
    return {**mfu, "perf/mfu": rate / peak, "perf/model_flops_per_second": rate}
