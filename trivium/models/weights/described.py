"""Weights of which names, types and shapes are known before they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from trivium.protocols import TensorSpec


@dataclass(frozen=True)
class Described:
    """`protocols.DescribedWeights`: what they are, and where they are read."""

    tensors: tuple[TensorSpec, ...]
    weights: Iterable[tuple[str, torch.Tensor]]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.weights)


def described(weights: Iterable[tuple[str, torch.Tensor]]) -> Described:
    """Weights that are in memory."""
    named = [*weights]
    return Described(tuple(spec(name, tensor) for name, tensor in named), named)


def type_name(dtype: torch.dtype) -> str:
    """The name of a type without the module: `float32`, `bfloat16`, ..."""
    return str(dtype).removeprefix("torch.")


def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What a tensor is, without its values."""
    return TensorSpec(name, type_name(tensor.dtype), tuple(tensor.shape))
