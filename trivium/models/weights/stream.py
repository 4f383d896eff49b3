"""Weights as a stream of (name, tensor): what every source yields and every sink takes.

Sources are a train engine's export, files (`saved_tensors`) and weight channels; sinks are engines, files and channels.
A source that knows names, types and shapes in advance is a `Described`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from trivium.foundation.errors import SyncError
from trivium.models.late import torch
from trivium.protocols import TensorSpec, Weights

Named = tuple[str, "torch.Tensor"]

BUCKET_BYTES = 2**28
"""The size of a bucket, unless it holds one larger tensor: what a process needs beside the weights to pass them on."""
_MESSAGE_BYTES = 2**24
"""The size of a message between processes, which is what is in memory twice."""


@dataclass(frozen=True)
class Described:
    """`protocols.DescribedWeights`: the specs of the tensors, and the stream that yields them in this order."""

    tensors: tuple[TensorSpec, ...]
    weights: Weights

    def __iter__(self) -> Iterator[Named]:
        return iter(self.weights)


def described(weights: Weights) -> Described:
    """Reads a stream to its end, into memory."""
    named = [*weights]
    return Described(tuple(spec(name, tensor) for name, tensor in named), named)


# --------------------------------------------------------------------------- one tensor


def type_name(dtype: torch.dtype) -> str:
    """The name of a type without the module: `float32`, `bfloat16`, ..."""
    return str(dtype).removeprefix("torch.")


def type_named(name: str) -> torch.dtype:
    """The inverse of `type_name`. Raises SyncError for a name that this version of torch does not know."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SyncError(f"a tensor of type {name!r}", "torch knows no such type", "use one version of torch everywhere")
    return dtype


def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The name, type and shape of a tensor."""
    return TensorSpec(name, type_name(tensor.dtype), tuple(tensor.shape))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in logical order, (B,) uint8; no copy of a contiguous one."""
    flat = tensor.detach().contiguous().reshape(-1)  # torch does not view a tensor without axes as bytes
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


# --------------------------------------------------------------------------- streams


def unique(weights: Weights) -> Iterator[Named]:
    """The stream itself. Raises SyncError for a name that occurs twice."""
    names = set[str]()
    for name, tensor in weights:
        if name in names:
            raise SyncError(
                f"offer {name!r}", "it occurs twice", "export every parameter and buffer once, under its own name"
            )
        names.add(name)
        yield name, tensor


def groups(weights: Weights, limit: int = _MESSAGE_BYTES) -> Iterator[list[Named]]:
    """The stream in lists of at most `limit` bytes, or of one larger tensor."""
    group, size = list[Named](), 0
    for name, tensor in weights:
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = [], 0
        group.append((name, tensor))
        size += tensor.nbytes
    if group:
        yield group


def drained(named: list[Named]) -> Iterator[Named]:
    """Empties a list: each tensor is released once the next one is asked for."""
    while named:
        yield named.pop(0)


# --------------------------------------------------------------------------- through a pipe


def _parts_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a contiguous tensor on the CPU, without a copy, as the messages that `_receive` reads."""
    data = _bytes(tensor)
    for first in range(0, len(data), _MESSAGE_BYTES):
        yield data[first : first + _MESSAGE_BYTES]


def _receive(connection: Connection, name: str, dtype: str, shape: tuple[int, ...]) -> Named:
    """Reads the messages of `_parts_of` into a new tensor."""
    tensor = torch.empty(shape, dtype=type_named(dtype))
    data, size = _bytes(tensor), 0
    while size < len(data):
        size += connection.recv_bytes_into(data, size)
    return name, tensor


def send_together(connection: Connection, group: Sequence[Named]) -> None:
    """Sends the bytes of a group (`groups`), several tensors in one message: each message may wait for the other
    process's interpreter."""
    if len(group) > 1:
        connection.send_bytes(b"".join(part for _, tensor in group for part in _parts_of(tensor)))
        return
    for part in _parts_of(group[0][1]):
        connection.send_bytes(part)


def receive_together(connection: Connection, specs: Sequence[TensorSpec]) -> Iterator[Named]:
    """Reads what `send_together` sends of a group with these specs."""
    if len(specs) == 1:
        yield _receive(connection, *specs[0])
        return
    message, start = memoryview(connection.recv_bytes()), 0
    for name, dtype, shape in specs:
        tensor = torch.empty(shape, dtype=type_named(dtype))
        data = _bytes(tensor)
        data[:] = message[start : start + len(data)]
        start += len(data)
        yield name, tensor


def _bytes(tensor: torch.Tensor) -> memoryview:
    return raw(tensor).numpy().data
