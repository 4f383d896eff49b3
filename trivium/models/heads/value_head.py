"""The linear head of critics and reward models: its state, its file, a new one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from trivium.foundation.errors import TriviumError
from trivium.foundation.randomness import stream
from trivium.models.weights.saved_tensors import SavedTensors, layer_of, open_tensors, weight_files

VALUE_HEAD = "value_head"
"""The name of a value model's head in its state dict, and of its file beside those of the backbone."""
CLASSIFIER_HEADS = ("score", "classifier")
"""The names of the head in transformers' sequence and token classifiers."""


class ScaledLinear(nn.Linear):
    """A linear layer without bias. All outputs are multiplied by one learned factor, positive and at most 100."""

    def __init__(self, weight: nn.Parameter, log_scale: torch.Tensor) -> None:
        """`weight` (1, width), `log_scale` (1,)."""
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


def saved_head(path: Path, prefixes: Sequence[str] = CLASSIFIER_HEADS) -> dict[str, torch.Tensor]:
    """The tensors of the head in a directory; empty if it has none.

    The head is `value_head.safetensors`, or the layer with the first of these names in the model's weight files: the
    head of a sequence or token classifier. Raises DataError if a weight file is missing or damaged.
    """
    file = path / f"{VALUE_HEAD}.safetensors"
    if file.is_file():
        return safetensors.torch.load_file(file)
    saved = open_tensors(weight_files(path, prefixes))
    for prefix in prefixes:
        if f"{prefix}.weight" in saved.entries:
            return {name.rpartition(".")[2]: _read(saved, name) for name in saved.entries if layer_of(name) == prefix}
    return {}


def _read(saved: SavedTensors, name: str) -> torch.Tensor:
    """A tensor of a file, in the type that it was saved in. Raises DataError for a quantized one."""
    entry = saved.entries[name]
    dtype = entry.dtype if isinstance(entry.dtype, torch.dtype) else torch.float32
    tensor = torch.empty(entry.shape, dtype=dtype)
    saved.copy_rows(name, 0, tensor)
    return tensor


def value_head(
    saved: Mapping[str, torch.Tensor], width: int, seed: int, dtype: torch.dtype, *, biased: bool
) -> nn.Linear:
    """A linear head with this state; if that is empty, a new head, drawn from N(0, (0.01 / sqrt(width))^2).

    Raises TriviumError for a state with several outputs.
    """
    head = {name: tensor for name, tensor in saved.items() if name in ("weight", "bias")}
    biased = biased or "bias" in head
    if not head:
        # On the CPU, so that a head begins with the same numbers on every device.
        generator = torch.Generator().manual_seed(stream(seed, "value_head"))
        head["weight"] = torch.empty(1, width, dtype=dtype).normal_(std=0.01 / width**0.5, generator=generator)
    if len(head["weight"]) != 1:
        raise TriviumError(
            "a head with one output",
            f"the one that was saved has {len(head['weight'])}",
            "start from a model with one output, or from one without a head",
        )
    layer = nn.Linear(width, 1, bias=biased, dtype=dtype)
    layer.load_state_dict({"bias": torch.zeros(1), **head} if biased else head)
    return layer
