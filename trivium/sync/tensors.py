"""What every channel does with tensors: their bytes, their hashes, parts of a model that travel together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from trivium.concurrency import usable_cores
from trivium.errors import SyncError
from trivium.models.described import type_name
from trivium.protocols import Weights

Named = tuple[str, torch.Tensor]

BUCKET_BYTES = 2**28
"""The size of a bucket, unless it holds one larger tensor: what a process that sends or reads weights needs beside
them."""


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where its bytes can be hashed: itself on the CPU, else a copy in pinned memory, which a GPU writes to
    directly."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def drained(named: list[Named]) -> Iterator[Named]:
    """Each in turn, kept no longer than until the next is asked for."""
    while named:
        yield named.pop(0)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes in logical order, (B,) uint8; no copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """128 bits of blake2b over dtype, shape and bytes."""
    header = f"{type_name(tensor.dtype)} {list(tensor.shape)}\n".encode()
    hasher = hashlib.blake2b(header, digest_size=16)
    hasher.update(raw(tensor).cpu().numpy().data)
    return hasher.hexdigest()


def digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The digest of each, on every core: hashing is the slowest part of the transfer, and releases the GIL."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(digest, tensors))


def verify(named: Sequence[Named], expected: Sequence[str], version: int, found: str, do: str) -> None:
    """Raises SyncError, with this cause and advice, for the first tensor whose digest is not the expected one."""
    for (name, _), before, now in zip(named, expected, digests([tensor for _, tensor in named]), strict=True):
        if before != now:
            raise SyncError(f"collect {name!r} of version {version}", found, do)


def joined(hashes: Mapping[str, str]) -> str:
    """One hash of all tensors of a version, from theirs by name."""
    return hashlib.blake2b(json.dumps(dict(sorted(hashes.items()))).encode(), digest_size=16).hexdigest()


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
    """The weights in order, in lists of at most `limit` bytes, or of one larger tensor."""
    part, size = list[Named](), 0
    for name, tensor in unique(weights):
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part
