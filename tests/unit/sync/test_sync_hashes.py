"""Hashes of weights: those of xxhash over type, shape and bytes, on every device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import xxhash
from emulated_gpu import EmulatedGpu, emulated_gpu
from failing import refused

from trivium.foundation.errors import SyncError
from trivium.sync.hashes import copied, digest, digests, hash_of, joined, verify

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def header(tensor: torch.Tensor) -> bytes:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode()


def weights(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor of about so many bytes."""
    made = np.random.default_rng(seed).standard_normal(size // torch.empty(0, dtype=dtype).element_size())
    return torch.from_numpy(made * 1000).to(dtype)


SIZES = [0, 1, 100, 2**15, 2**16 + 1000, 2**20 - 8, 2**21 + 24]


@pytest.mark.parametrize("size", SIZES)
def test_a_hash_is_what_its_description_says(size: int) -> None:
    for dtype in DTYPES:
        tensor = weights(size, dtype)
        for each in (tensor, tensor[: len(tensor) // 2 * 2].view(2, -1).T):
            assert digest(each) == xxhash.xxh3_128_hexdigest(header(each) + bytes_of(each))


OFFERED: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: torch.arange(12.0).reshape(3, 4),
    "large": lambda: torch.arange(60_000.0).reshape(200, 300),
    "transposed": lambda: torch.arange(700_000).to(torch.bfloat16).reshape(700, 1000).T,
}
RECORDED = {
    "small": "f47ca9f44064e6017b34c9ebad274426",
    "large": "7e28b55762aecf7c46c38648f50e29c5",
    "transposed": "ace93661db643fbaca997a62a0c1bfdc",
}


def test_a_recorded_hash_is_verified_and_a_changed_tensor_named() -> None:
    named = [(name, make()) for name, make in OFFERED.items()]
    assert digests(named) == RECORDED
    assert hash_of(named) == joined(RECORDED)
    verify(named, RECORDED, 1, "", "")
    for number, (name, tensor) in enumerate(named):
        changed = [*named]
        changed[number] = name, tensor * 2
        with refused(SyncError, f"'{name}'", "version 1"):
            verify(changed, RECORDED, 1, "other bytes", "send them again")


# --------------------------------------------------------------------------- who computes it


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    with emulated_gpu(monkeypatch) as device:
        yield device


def test_a_gpu_has_the_same_hashes_and_its_host_waits_once_for_each(gpu: EmulatedGpu) -> None:
    named = [(str(size), weights(size)) for size in SIZES]
    there = [(name, tensor.to("cuda")) for name, tensor in named]
    gpu.waits.clear()
    assert digests(there) == digests(named)
    assert sum(gpu.waits.values()) == len(there)
    of_copies = dict[str, str]()
    assert all(not tensor.is_cuda for _, tensor in copied(there, of_copies))
    assert of_copies == digests(named)


def test_copies_are_those_of_what_was_hashed() -> None:
    first, second = weights(2**16), torch.zeros(0, 3)
    found = dict[str, str]()
    reading = copied([("first", first.reshape(128, -1).T), ("second", second)], found)
    copies = dict(reading)
    assert found == digests([*copies.items()])
    first.zero_()
    assert copies["first"].any()
    assert all(tensor.is_contiguous() for tensor in copies.values())
    with refused(SyncError, "'first'"):
        list(copied([("first", first), ("first", second)], {}))


def test_one_hash_of_all_does_not_depend_on_their_order() -> None:
    named = [(str(size), weights(size)) for size in SIZES]
    assert hash_of(named) == hash_of(named[::-1]) == joined(digests(named)) != hash_of(named[1:])
    assert joined(json.loads(json.dumps(digests(named)))) == hash_of(named)
