"""Tensors between processes of one machine, as the raw bytes that they are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from trivium.models.described import type_name

_PART_BYTES = 2**24
"""Tensors are sent in parts of this size, which are all that is in memory twice."""

Named = tuple[str, torch.Tensor]
Header = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of the tensor whose bytes are next."""


def header_of(name: str, tensor: torch.Tensor) -> Header:
    return name, type_name(tensor.dtype), tuple(tensor.shape)


def parts_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor on the CPU, not a copy, in the order in which `receive` takes them."""
    data = _flat(tensor)
    for first in range(0, len(data), _PART_BYTES):
        yield data[first : first + _PART_BYTES]


def receive(connection: Connection, name: str, dtype: str, shape: tuple[int, ...]) -> Named:
    """The tensor of a header, whose bytes are next."""
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    flat, size = _flat(tensor), 0
    while size < len(flat):
        size += connection.recv_bytes_into(flat, size)
    return name, tensor


def _flat(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
