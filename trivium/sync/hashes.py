"""Hashes of weights: the process that collects weights verifies that they are those that were offered.

The hash of a tensor is the XXH3-128 of its type, its shape and its bytes (https://xxhash.com). It reads host memory ten
times as fast as memory is copied, and detects damage, not attacks. A tensor on a GPU is copied to the host first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import xxhash

from trivium.foundation.errors import SyncError
from trivium.models.cpu.worker_threads import one_thread
from trivium.models.late import torch
from trivium.models.weights.stream import Named, raw, type_name, unique
from trivium.protocols import Weights


def digest(tensor: torch.Tensor) -> str:
    """The hash of a tensor."""
    hasher = xxhash.xxh3_128(f"{type_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
    hasher.update(raw(tensor).cpu().numpy().data)
    return hasher.hexdigest()


def digests(named: Sequence[Named]) -> dict[str, str]:
    """The hash of each tensor, by name."""
    return {name: digest(tensor) for name, tensor in named}


def copied(weights: Weights, hashes: dict[str, str]) -> Iterator[Named]:
    """Contiguous copies on the CPU; `hashes` has the hash of each when it is yielded. One tensor of the weights is
    alive at a time. Raises SyncError for a name that occurs twice."""
    for name, tensor in unique(weights):
        with one_thread():  # the explorer of this process has the other cores
            copy = tensor.detach().to("cpu", copy=True).contiguous()
        hashes[name] = digest(copy)
        yield name, copy


def verify(named: Sequence[Named], expected: Mapping[str, str], version: int, found: str, do: str) -> None:
    """Raises SyncError, with this cause and advice, for the first tensor whose hash is not the expected one."""
    for name, tensor in named:
        if digest(tensor) != expected[name]:
            raise SyncError(f"collect {name!r} of version {version}", found, do)


def joined(hashes: Mapping[str, str]) -> str:
    """One hash of all tensors of a version, from their hashes by name."""
    return hash_of_json(dict(hashes))


def hash_of(weights: Weights) -> str:
    """One hash of all tensors of a version."""
    return joined({name: digest(tensor) for name, tensor in weights})


def hash_of_json(value: object) -> str:
    """The XXH3-128 of a JSON value, with sorted keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
