"""Hashes of weights: every change is detected, and every device computes the same hash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import xxhash
from emulated_gpu import EmulatedGpu, emulated_gpu
from failing import refused
from hypothesis import assume, given
from hypothesis import strategies as st

from trivium.foundation.errors import SyncError
from trivium.sync.hashes import copied, digest, digests, hash_of, joined, verify

ROW = 2048
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
        assert digest(tensor) == xxhash.xxh3_128_hexdigest(header(tensor) + bytes_of(tensor))


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


# --------------------------------------------------------------------------- what changes weights


def burst(data: np.ndarray, rng: np.random.Generator, width: int) -> None:
    start, count = int(rng.integers(len(data))), int(rng.integers(1, 5000))
    data[start : start + count] ^= rng.integers(1, 256, len(data[start : start + count]), np.uint8)


def one_bit(data: np.ndarray, rng: np.random.Generator, width: int) -> None:
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)


def swapped_elements(data: np.ndarray, rng: np.random.Generator, width: int) -> None:
    elements = data.reshape(-1, width)
    some = rng.integers(len(elements), size=2 * int(rng.integers(1, 20)))
    elements[some] = elements[some[::-1]]


def swapped_rows(data: np.ndarray, rng: np.random.Generator, width: int) -> None:
    rows = data[: len(data) // ROW * ROW].reshape(-1, int(rng.choice([512, ROW])))
    one, other = rng.choice(len(rows), 2, replace=False)
    rows[[one, other]] = rows[[other, one]]


def zeroed_block(data: np.ndarray, rng: np.random.Generator, width: int) -> None:
    start = int(rng.integers(len(data)))
    data[start : start + int(rng.choice([width, 64, 4096, 2**20]))] = 0


def signs(data: np.ndarray, rng: np.random.Generator, width: int) -> None:
    """Of two elements, of every n-th, or of all in a range; the sign is the highest bit of the last byte."""
    elements = data.reshape(-1, width)
    start, step = int(rng.integers(len(elements))), int(rng.choice([1, 2, 4, 256]))
    chosen = rng.integers(len(elements), size=2) if rng.random() < 0.3 else slice(start, None, step)
    elements[chosen, -1] ^= 0x80


def high_bits(data: np.ndarray, rng: np.random.Generator, width: int) -> None:
    """The exponents of some elements: powers of two become others."""
    elements = data.reshape(-1, width)
    elements[rng.integers(len(elements), size=int(rng.integers(1, 20))), -1] ^= rng.integers(1, 256, dtype=np.uint8)


def moved(data: np.ndarray, rng: np.random.Generator, width: int) -> None:
    data[:] = np.roll(data, int(rng.choice([1, width, ROW, -width])))


Change = Callable[[np.ndarray, np.random.Generator, int], None]
CHANGES: list[Change] = [
    burst,
    one_bit,
    swapped_elements,
    swapped_rows,
    zeroed_block,
    signs,
    high_bits,
    moved,
]


def changed(tensor: torch.Tensor, change: Change, rng: np.random.Generator) -> torch.Tensor:
    data = np.frombuffer(bytearray(bytes_of(tensor)), np.uint8)
    change(data, rng, tensor.element_size())
    return torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape)


BASES: list[Callable[[torch.dtype], torch.Tensor]] = [
    lambda dtype: weights(2**16 + 1000, dtype),
    lambda dtype: weights(2**20 + 2**15, dtype),
    lambda dtype: torch.ones(9000, dtype=dtype),
    lambda dtype: torch.zeros(40, 500, dtype=dtype),
    lambda dtype: torch.arange(20_000).bitwise_and(1).mul(2).sub(1).to(dtype),
]


@pytest.mark.parametrize("change", CHANGES)
@given(base=st.integers(0, len(BASES) - 1), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32))
def test_changed_bytes_change_the_hash(change: Change, base: int, dtype: torch.dtype, seed: int) -> None:
    before = BASES[base](dtype)
    after = changed(before, change, np.random.default_rng(seed))
    assume(bytes_of(before) != bytes_of(after))
    assert digest(before) != digest(after)


def test_types_and_shapes_are_part_of_the_hash() -> None:
    zeros = torch.zeros(300, 200)
    others = [zeros.reshape(200, 300), zeros.int(), torch.zeros(300, 400, dtype=torch.float16), zeros[:, :199], -zeros]
    assert len({digest(each) for each in (zeros, *others)}) == 1 + len(others)
    assert digest(zeros.T) == digest(others[0])


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
