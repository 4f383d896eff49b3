"""Hashes of weights: the process that collects weights verifies that they are those that were offered.

The hash of a tensor covers its type, its shape and its bytes. A recorded hash begins with its form:

`xxh3:`  XXH3-128, for tensors in host memory. It reads ten times as fast as memory is copied.
`sums:`  blake2b over sums of the bytes, for tensors on a GPU: a thousandth of the bytes crosses to the host. Earlier
         versions of Trivium recorded this form for tensors in host memory too.
(none)   blake2b over all bytes: the form of still earlier versions.

A tensor is verified in the form of its recorded hash, on any device. A run that an earlier version began keeps its form
(`continue_form`): a resumed trainer compares the hashes of its weights with the recorded ones.

For `sums:`, rows of 2,048 bytes become 16 sums of 4 bytes each: the products with keys that are as good as random and
never change. Bytes that fill no row are kept. A result that is still large is condensed once more, with other keys. The
sums are whole numbers and exact, so every device computes the same ones.

Rows that differ have an equal sum if the keys solve `sum_i key_i * difference_i = 0`. For a byte i that differs, and
any keys of the others, at most one of the 128 values of key_i solves it. One sum is therefore equal with a probability
of at most 1/128, and all 16 with 2^-112, whichever bytes differ, how many and by how much. blake2b (128 bits) detects
the rest, sums in another order included. With two rounds, a change is missed with a probability of at most
2^-111 + 2^-128. The keys are public: all forms detect damage, not attacks.

Sources: XXH3, https://xxhash.com; random vectors that check a matrix product, R. Freivalds, Probabilistic machines can
use less running time, IFIP Congress 1977; rounds of hashes, M. N. Wegman and J. L. Carter, New hash functions and their
use in authentication and set equality, J. Comput. Syst. Sci. 22 (1981).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import xxhash

from trivium.errors import SyncError
from trivium.models.cpu.worker_threads import one_thread
from trivium.models.late import torch
from trivium.models.weights.stream import Named, raw, type_name, unique
from trivium.protocols import Weights

_XXH3, _SUMS_FORM, _BLAKE2B = "xxh3:", "sums:", ""
_ROW, _SUMS, _ROUNDS = 2048, 16, 2
_SHORT = 2**15
"""Fewer bytes are not condensed: blake2b over them is as fast."""
_ROWS_AT_ONCE = 2**12
"""Rows that are multiplied at a time, which bounds the memory of their copies in float32."""


@dataclass(slots=True)
class _HostForm:
    """The form of new hashes of tensors in host memory, in this process."""

    form: str = _XXH3


_host = _HostForm()


def continue_form(recorded: str | None) -> None:
    """Makes this process hash tensors in host memory in the form of a hash that the run recorded; None: in the newest
    form."""
    _host.form = _XXH3 if recorded is None else _form(torch.device("cpu"), recorded)


def digest(tensor: torch.Tensor, like: str | None = None) -> str:
    """The hash of a tensor: in the form of the recorded hash `like`, or without one in the form for its device."""
    data, form = raw(tensor), _form(tensor.device, like)
    for keys in _keys(data.device) if form == _SUMS_FORM else ():
        if data.numel() >= _SHORT:
            data = _condensed(data, keys)
    hasher = xxhash.xxh3_128() if form == _XXH3 else hashlib.blake2b(digest_size=16)
    hasher.update(f"{type_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
    hasher.update(data.cpu().numpy().data)
    return form + hasher.hexdigest()


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
        if digest(tensor, expected[name]) != expected[name]:
            raise SyncError(f"collect {name!r} of version {version}", found, do)


def joined(hashes: Mapping[str, str]) -> str:
    """One hash of all tensors of a version, from their hashes by name. Its form is theirs."""
    forms = {_form(torch.device("cpu"), each) for each in hashes.values()}
    form = forms.pop() if len(forms) == 1 else _BLAKE2B
    return form + hashlib.blake2b(json.dumps(dict(sorted(hashes.items()))).encode(), digest_size=16).hexdigest()


def hash_of(weights: Weights, like: str | None = None) -> str:
    """One hash of all tensors of a version, in the form of the recorded hash `like`."""
    return joined({name: digest(tensor, like) for name, tensor in weights})


def _form(device: torch.device, like: str | None) -> str:
    """The form of the recorded hash `like`; without one, the form of a new hash of a tensor on this device."""
    if like is None:
        return _host.form if device.type == "cpu" else _SUMS_FORM
    return next((form for form in (_XXH3, _SUMS_FORM) if like.startswith(form)), _BLAKE2B)


def _condensed(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(B,) uint8 -> (B // 2048 * 64 + B % 2048,) uint8: the sums of each row, then the bytes that fill no row."""
    whole = data.numel() // _ROW * _ROW
    rows = data[:whole].view(torch.int8).view(-1, _ROW)
    return torch.cat([*(raw(product(part, keys)) for part in rows.split(_ROWS_AT_ONCE)), data[whole:]])


def product(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(R, 2048) int8, (2048, 16) int8 -> (R, 16) int32. Every number on the way is whole and at most 2^24
    (128 * 64 * 2,048). float32 is therefore exact in any order, and so is TF32: it has the 8 bits of the factors."""
    return (rows.float() @ keys.float()).int()


@cache
def _keys(device: torch.device) -> tuple[torch.Tensor, ...]:
    """For each round (2048, 16) int8 in [-64, 64): 7 bits each from a fixed stream of random bytes."""
    stream = hashlib.shake_128(b"trivium.sync.hashes").digest(_ROUNDS * _SUMS * _ROW)
    keys = torch.frombuffer(bytearray(stream), dtype=torch.int8).bitwise_and(0x7F).sub(64)
    return tuple(each.T for each in keys.view(_ROUNDS, _SUMS, _ROW).to(device))
