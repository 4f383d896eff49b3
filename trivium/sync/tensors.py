"""What every channel does with tensors: their bytes, parts of a model that travel together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trivium.errors import SyncError
from trivium.models.weights.tensor_bytes import Named, groups
from trivium.protocols import Weights

BUCKET_BYTES = 2**28
"""The size of a bucket, unless it holds one larger tensor: what a process that sends or reads weights needs beside
them."""


def drained(named: list[Named]) -> Iterator[Named]:
    """Each in turn, kept no longer than until the next is asked for."""
    while named:
        yield named.pop(0)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in logical order, (B,) uint8; no copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def type_named(name: str) -> torch.dtype:
    """The inverse of `described.type_name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SyncError(f"a tensor of type {name!r}", "torch knows no such type", "use one version of torch everywhere")
    return dtype


def unique(weights: Weights) -> Iterator[Named]:
    """The weights in order. Raises SyncError for a name that occurs twice."""
    seen = set[str]()
    for name, tensor in weights:
        if name in seen:
            raise SyncError(
                f"offer {name!r}", "it occurs twice", "export every parameter and buffer once, under its own name"
            )
        seen.add(name)
        yield name, tensor


def parts(weights: Weights, limit: int) -> Iterator[list[Named]]:
    """The weights in order, in lists of at most `limit` bytes, or of one larger tensor. Raises SyncError for a name
    that occurs twice."""
    return groups(unique(weights), limit)
