"""Tensors between processes of one machine, as the raw bytes that they are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from trivium.models.weights.described import type_name

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


def send_together(connection: Connection, named: Sequence[Named]) -> None:
    """The bytes of a group (`groups`) whose headers were sent: a group of several tensors is one message. Where other
    threads want the interpreter, each read of the other end may wait for it."""
    if len(named) > 1:
        connection.send_bytes(b"".join(part for _, tensor in named for part in parts_of(tensor)))
        return
    for part in parts_of(named[0][1]):
        connection.send_bytes(part)


def receive_together(connection: Connection, headers: Sequence[Header]) -> Iterator[Named]:
    """The tensors of these headers, whose bytes are next."""
    if len(headers) == 1:
        yield receive(connection, *headers[0])
        return
    data, start = memoryview(connection.recv_bytes()), 0
    for name, dtype, shape in headers:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        flat = _flat(tensor)
        flat[:] = data[start : start + len(flat)]
        start += len(flat)
        yield name, tensor


def groups(weights: Iterable[Named], limit: int = _PART_BYTES) -> Iterator[list[Named]]:
    """The tensors in order, in lists of at most `limit` bytes, or of one larger tensor."""
    group, size = list[Named](), 0
    for name, tensor in weights:
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += tensor.nbytes
    if group:
        yield group


def _flat(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
