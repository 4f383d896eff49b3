"""What makes the runs beside this file sick: rewards and an engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trivium.engines.torch.engine import TorchEngine


def brevity(completion: str) -> float:
    """Pays most for no text."""
    return 1 - len(completion) / 16


def seven(completion: str) -> float:
    """Pays for one answer, which is seldom right."""
    return float(completion == "7")


def length(completion: str) -> float:
    """Pays for length, beside a reward for the right answer."""
    return 0.9 * len(completion) / 16


def never(completion: str) -> float:
    """Pays for no completion."""
    del completion
    return 0.0


class RoundingEngine(TorchEngine):
    """Rounds the weights that it loads to steps of 1/8."""

    async def load(
        self, version: int, weights: Iterable[tuple[str, torch.Tensor]], *, in_flight: str = "finish"
    ) -> None:
        await super().load(version, [(name, (8 * x).round() / 8) for name, x in weights], in_flight=in_flight)
