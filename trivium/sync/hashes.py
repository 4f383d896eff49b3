"""Hashes of weights, by which the end that collects them knows that they are those that were offered.

The hash of a tensor is blake2b over its type, its shape and its bytes. blake2b is slower than the transfer, so that the
bytes of a larger tensor are condensed first: rows of 2,048 bytes become 16 sums of 4 bytes each, the products with keys
that are as good as random and never change. Bytes that fill no row are kept as they are. What is still large then is
condensed once more, with other keys.

The sums are whole numbers and exact, so that neither threads nor devices change them. A GPU condenses the weights where
they lie: a thousandth of their bytes crosses to the host.

What is missed: rows that differ have an equal sum if the keys solve `sum_i key_i * difference_i = 0`. For a byte i
that differs, and any keys of the others, at most one of the 128 values of key_i does. So a sum is equal with a
probability of at most 1/128, and all 16 with 2^-112, whichever bytes differ, how many and by how much: signs, elements
or blocks that are swapped or zeroed, bursts. blake2b detects the rest (128 bits), sums in another order among it. With
two rounds, a change is missed with a probability of at most 2^-111 + 2^-128. This holds for changes that do not depend
on the keys, which are public: for damage, not for attacks.

Sources: random vectors that check a matrix product, R. Freivalds, Probabilistic machines can use less running time,
IFIP Congress 1977; rounds of hashes, M. N. Wegman and J. L. Carter, New hash functions and their use in authentication
and set equality, J. Comput. Syst. Sci. 22 (1981).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch

from trivium.concurrency import usable_cores
from trivium.errors import SyncError
from trivium.models.cpu.worker_threads import WorkerThreads
from trivium.models.weights.described import type_name
from trivium.protocols import Weights
from trivium.sync.tensors import Named, parts, raw, unique

CONDENSED = "sums:"
"""What hashes begin with. Those that earlier versions of Trivium recorded do not: blake2b over all bytes."""
_ROW, _SUMS, _ROUNDS = 2048, 16, 2
_SHORT = 2**15
"""Fewer bytes go to blake2b as they are, which is as quick."""
_ROWS_ON_CPU, _ROWS_ON_GPU = 2**8, 2**12
"""Rows that are multiplied at a time: what a cache holds, with copies of them in other types."""
_PART_BYTES = 2**22
"""What a thread hashes at a time: to hand it a small tensor takes longer than to hash it."""
_MAX_THREADS = 4
"""They read faster than weights are copied; with more, more copies wait for their turn."""


def digest(tensor: torch.Tensor, like: str = CONDENSED) -> str:
    """The hash of a tensor's type, shape and bytes, in the form of this recorded hash."""
    data = raw(tensor)
    form = CONDENSED if like.startswith(CONDENSED) else ""
    for keys in _keys(data.device) if form else ():
        if data.numel() >= _SHORT:
            data = _condensed(data, keys)
    hasher = hashlib.blake2b(f"{type_name(tensor.dtype)} {list(tensor.shape)}\n".encode(), digest_size=16)
    hasher.update(data.cpu().numpy().data)
    return form + hasher.hexdigest()


def digests(named: Sequence[Named], like: Mapping[str, str] | None = None) -> dict[str, str]:
    """The hash of each, in the form of the one that `like` has for its name."""
    forms = like or {}
    hashes = {name: digest(each, forms.get(name, CONDENSED)) for name, each in named if each.device.type != "cpu"}
    for _ in _hashed(named, hashes, forms):
        pass
    return hashes


def copied(weights: Weights, hashes: dict[str, str]) -> Iterator[Named]:
    """Copies on the CPU, contiguous and in order, of which `hashes` has the hash when they are yielded. Of the weights,
    one tensor is alive at a time. Raises SyncError for a name that occurs twice."""

    def copies() -> Iterator[Named]:
        for name, tensor in unique(weights):
            if tensor.device.type != "cpu":
                hashes[name] = digest(tensor)  # quicker there
            yield name, tensor.detach().to("cpu", copy=True).contiguous()

    return _hashed(copies(), hashes, {})


def verify(named: Sequence[Named], expected: Mapping[str, str], version: int, found: str, do: str) -> None:
    """Raises SyncError, with this cause and advice, for the first tensor whose hash is not the expected one."""
    hashes = digests(named, expected)
    for name, _ in named:
        if hashes[name] != expected[name]:
            raise SyncError(f"collect {name!r} of version {version}", found, do)


def joined(hashes: Mapping[str, str]) -> str:
    """One hash of all tensors of a version, from theirs by name; in their form."""
    form = CONDENSED if all(each.startswith(CONDENSED) for each in hashes.values()) else ""
    return form + hashlib.blake2b(json.dumps(dict(sorted(hashes.items()))).encode(), digest_size=16).hexdigest()


def hash_of(weights: Weights, like: str = CONDENSED) -> str:
    """One hash of all tensors of a version, in the form of this recorded one."""
    named = [*weights]
    return joined(digests(named, {name: like for name, _ in named}))


def _hashed(weights: Iterable[Named], hashes: dict[str, str], forms: Mapping[str, str]) -> Iterator[Named]:
    """The weights in order, once `hashes` has theirs: those that it lacks are computed by threads."""

    def hash_part(part: list[Named]) -> list[tuple[str, torch.Tensor, str]]:
        return [(name, each, hashes.get(name) or digest(each, forms.get(name, CONDENSED))) for name, each in part]

    threads = min(_MAX_THREADS, usable_cores())
    for part in WorkerThreads(threads, threads).map(hash_part, parts(weights, _PART_BYTES)):
        for name, tensor, each in part:
            hashes[name] = each
            yield name, tensor


def _condensed(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(B,) uint8 -> (B // 2048 * 64 + B % 2048,) uint8: the sums of each row, then the bytes that fill no row."""
    whole, at_once = data.numel() // _ROW * _ROW, _ROWS_ON_CPU if data.device.type == "cpu" else _ROWS_ON_GPU
    product = integer_product if _multiplies_integers(data.device) else float_product
    rows = data[:whole].view(torch.int8).view(-1, _ROW)
    return torch.cat([*(raw(product(part, keys)) for part in rows.split(at_once)), data[whole:]])


def integer_product(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(R, 2048) int8, (2048, 16) int8 -> (R, 16) int32. Keys of 7 bits keep it exact on CPUs that add two products in
    16 bits (AVX2 without VNNI)."""
    return torch._int_mm(rows, keys)  # pyright: ignore[reportPrivateImportUsage]


def float_product(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The same in floating point. Every number on the way is whole and at most 2^24 (128 * 64 * 2,048), so float32 is
    exact in any order, and so is TF32: it has the 8 bits of the factors."""
    return (rows.float() @ keys.float()).int()


@cache
def _multiplies_integers(device: torch.device) -> bool:
    """Whether products of int8 are quick there, and take any number of rows."""
    is_quick = torch.backends.cpu.get_cpu_capability().startswith("AVX") and torch.backends.mkldnn.is_available()
    return device.type == "cpu" and is_quick


@cache
def _keys(device: torch.device) -> tuple[torch.Tensor, ...]:
    """For each round (2048, 16) int8 in [-64, 64): 7 bits each from a fixed stream of random bytes."""
    stream = hashlib.shake_128(b"trivium.sync.hashes").digest(_ROUNDS * _SUMS * _ROW)
    keys = torch.frombuffer(bytearray(stream), dtype=torch.int8).bitwise_and(0x7F).sub(64)
    return tuple(each.T for each in keys.view(_ROUNDS, _SUMS, _ROW).to(device))
