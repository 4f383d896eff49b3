"""The linear head of critics and reward models: its state, its file, a new one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from trivium.errors import TriviumError
from trivium.randomness import stream

VALUE_HEAD = "value_head"
"""The name of a value model's head in its state dict, and of its file beside those of the backbone."""


class ScaledLinear(nn.Linear):
    """A linear layer without bias. All outputs are multiplied by one learned factor, positive and at most 100."""

    def __init__(self, weight: nn.Parameter, log_scale: torch.Tensor) -> None:
        """`weight` (K, width), `log_scale` (1,)."""
        super().__init__(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        self.weight = weight
        self.log_scale = nn.Parameter(log_scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * _factor(self.log_scale)


def _factor(log_scale: torch.Tensor) -> torch.Tensor:
    """The factor of all scores, (1,). The bound is that of CLIP (Radford et al. 2021, section 2.5)."""
    return log_scale.clamp(max=math.log(100.0)).exp()


def folded_head(head: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a saved head as those of a plain linear layer: the weight includes a learned factor."""
    factor = _factor(head["log_scale"]) if "log_scale" in head else 1.0
    return {name: tensor * factor for name, tensor in head.items() if name in ("weight", "bias")}


def saved_head(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the head in a directory; empty if it has none."""
    file = path / f"{VALUE_HEAD}.safetensors"
    return safetensors.torch.load_file(file) if file.is_file() else {}


def value_head(
    saved: Mapping[str, torch.Tensor], width: int, seed: int, dtype: torch.dtype, *, biased: bool, outputs: int = 1
) -> nn.Linear:
    """A linear head with this state; if that is empty, a new head, drawn from N(0, (0.01 / sqrt(width))^2).

    Raises TriviumError for a state with another number of outputs.
    """
    head = {name: tensor for name, tensor in saved.items() if name in ("weight", "bias")}
    biased = biased or "bias" in head
    if not head:
        generator = torch.Generator().manual_seed(stream(seed, "value_head"))
        head["weight"] = torch.empty(outputs, width, dtype=dtype).normal_(std=0.01 / width**0.5, generator=generator)
    if len(head["weight"]) != outputs:
        raise TriviumError(
            f"a head with {outputs} output(s)",
            f"the one that was saved has {len(head['weight'])}",
            "start from a model with as many, or from one without a head",
        )
    layer = nn.Linear(width, outputs, bias=biased, dtype=dtype)
    layer.load_state_dict({"bias": torch.zeros(outputs), **head} if biased else head)
    return layer
