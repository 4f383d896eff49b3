"""Hashes of weights: every change is detected, and every device computes the same hash of one form."""

from __future__ import annotations

import hashlib
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

from trivium.errors import SyncError
from trivium.sync import hashes
from trivium.sync.hashes import continue_form, copied, digest, digests, hash_of, joined, product, verify

ROW, SUMS, SHORT = 2048, 16, 2**15
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def keys() -> np.ndarray:
    """(2, 16, 2048) int64: the keys of both rounds."""
    stream = hashlib.shake_128(b"trivium.sync.hashes").digest(2 * SUMS * ROW)
    return (np.frombuffer(stream, np.uint8).astype(np.int64) % 128 - 64).reshape(2, SUMS, ROW)


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""


def header(tensor: torch.Tensor) -> bytes:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode()


def blake2b(tensor: torch.Tensor, data: bytes) -> str:
    return hashlib.blake2b(header(tensor) + data, digest_size=16).hexdigest()


def slow_digest(tensor: torch.Tensor) -> str:
    """As the module's docstring describes it, a row at a time in 64 bits."""
    data = bytes_of(tensor)
    for of_round in keys():
        if len(data) >= SHORT:
            whole = len(data) // ROW * ROW
            rows = np.frombuffer(data[:whole], np.int8).astype(np.int64).reshape(-1, ROW)
            sums = [(of_round * row).sum(1).astype("<i4").tobytes() for row in rows]
            data = b"".join(sums) + data[whole:]
    return "sums:" + blake2b(tensor, data)


def weights(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor of about so many bytes."""
    made = np.random.default_rng(seed).standard_normal(size // torch.empty(0, dtype=dtype).element_size())
    return torch.from_numpy(made * 1000).to(dtype)


SIZES = [0, 1, 100, SHORT - 8, SHORT, SHORT + 8, 2**16 + 1000, 2**20 - 8, 2**20, 2**21 + 24]


@pytest.mark.parametrize("size", SIZES)
def test_a_hash_is_what_its_description_says(size: int) -> None:
    for dtype in DTYPES:
        tensor = weights(size, dtype)
        assert digest(tensor) == "xxh3:" + xxhash.xxh3_128_hexdigest(header(tensor) + bytes_of(tensor))
        assert digest(tensor, "sums:") == slow_digest(tensor)


OFFERED: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: torch.arange(12.0).reshape(3, 4),
    "large": lambda: torch.arange(60_000.0).reshape(200, 300),
    "two rounds": lambda: torch.arange(700_000).to(torch.bfloat16).reshape(700, 1000).T,
}
RECORDED = [
    {
        "small": "7b736732ce65d57e0ec36e6b2a5a36e1",
        "large": "9431f316374c36ebb9ac7d554a3a4a4e",
        "two rounds": "a6163cd46a81ca090b211a3225ae46df",
    },
    {
        "small": "sums:7b736732ce65d57e0ec36e6b2a5a36e1",
        "large": "sums:499e4875b1a91ffc9845dde264cce893",
        "two rounds": "sums:0cef6c03db8c7b1db919b1601e7d3b6a",
    },
    {
        "small": "xxh3:f47ca9f44064e6017b34c9ebad274426",
        "large": "xxh3:7e28b55762aecf7c46c38648f50e29c5",
        "two rounds": "xxh3:ace93661db643fbaca997a62a0c1bfdc",
    },
]
"""Hashes of the tensors, by commits d56e776 and b7ed6f6, and of today."""
JOINED = [
    "e993176328010ca9042f36d5559e7084",
    "sums:d20ebe00d60baf27d7f4cbbdc8764c58",
    "xxh3:c3e07aea15a4ac98de1df084db1741e0",
]


@pytest.mark.parametrize(("recorded", "of_all"), [*zip(RECORDED, JOINED, strict=True)], ids=["blake2b", "sums", "xxh3"])
def test_recorded_hashes_stay_valid(recorded: dict[str, str], of_all: str) -> None:
    named = [(name, make()) for name, make in OFFERED.items()]
    assert {name: digest(tensor, recorded[name]) for name, tensor in named} == recorded
    assert joined(recorded) == hash_of(named, of_all) == of_all
    verify(named, recorded, 1, "", "")
    for number, (name, tensor) in enumerate(named):
        changed = [*named]
        changed[number] = name, tensor * 2
        with refused(SyncError, f"'{name}'", "version 1"):
            verify(changed, recorded, 1, "other bytes", "send them again")


def test_new_hashes_have_the_newer_form() -> None:
    named = [(name, make()) for name, make in OFFERED.items()]
    assert digests(named) == RECORDED[2]
    assert hash_of(named) == JOINED[2]


@pytest.mark.parametrize(("recorded", "of_all"), [*zip(RECORDED, JOINED, strict=True)], ids=["blake2b", "sums", "xxh3"])
def test_a_run_of_an_earlier_version_keeps_its_form(recorded: dict[str, str], of_all: str) -> None:
    named = [(name, make()) for name, make in OFFERED.items()]
    hashes = dict[str, str]()
    continue_form(of_all)
    try:
        list(copied(named, hashes))
        assert hashes == recorded
        assert joined(hashes) == of_all
    finally:
        continue_form(None)
    assert digests(named) == RECORDED[2]


def test_hashes_of_several_forms_are_verified_side_by_side() -> None:
    tensor = weights(2**16)
    recorded = {"a": digest(tensor), "b": digest(tensor, "sums:"), "c": digest(tensor, "0")}
    verify([(name, tensor) for name in recorded], recorded, 1, "", "")
    assert digest(tensor, "0") == blake2b(tensor, bytes_of(tensor))


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


@pytest.mark.parametrize("form", ["xxh3:", "sums:"])
@pytest.mark.parametrize("change", CHANGES)
@given(base=st.integers(0, len(BASES) - 1), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32))
def test_changed_bytes_change_the_hash(change: Change, form: str, base: int, dtype: torch.dtype, seed: int) -> None:
    before = BASES[base](dtype)
    after = changed(before, change, np.random.default_rng(seed))
    assume(bytes_of(before) != bytes_of(after))
    assert digest(before, form) != digest(after, form)


@pytest.mark.parametrize("change", CHANGES)
def test_a_sum_misses_a_change_as_rarely_as_promised(change: Change) -> None:
    """One time in 128 at most: this is about a single one of the 16 sums, on which the bound rests."""
    rng, of_round = np.random.default_rng(0), torch.from_numpy(keys()[0]).T
    equal = compared = 0
    for number in range(60):
        before = BASES[number % len(BASES)](DTYPES[number % len(DTYPES)])
        both = [
            torch.frombuffer(bytearray(bytes_of(each)), dtype=torch.int8)
            for each in (before, changed(before, change, rng))
        ]
        rows = [each[: len(each) // ROW * ROW].view(-1, ROW) for each in both]
        differ = (rows[0] != rows[1]).any(1)
        sums = [each[differ][:40].long() @ of_round for each in rows]
        equal, compared = equal + int((sums[0] == sums[1]).sum()), compared + sums[0].numel()
    assert compared > 500
    assert equal / compared < 1 / 64


def test_types_and_shapes_are_part_of_the_hash() -> None:
    zeros = torch.zeros(300, 200)
    others = [zeros.reshape(200, 300), zeros.int(), torch.zeros(300, 400, dtype=torch.float16), zeros[:, :199], -zeros]
    assert len({digest(each) for each in (zeros, *others)}) == 1 + len(others)
    assert digest(zeros.T) == digest(others[0])


# --------------------------------------------------------------------------- who computes it


def test_products_are_exact() -> None:
    """At the ends of both ranges too, where a float has no bit to spare."""
    generator = torch.Generator().manual_seed(0)
    for low, high in ((-128, 128), (-128, -127), (127, 128)):
        rows = torch.randint(low, high, (700, ROW), dtype=torch.int8, generator=generator)
        for low_key, high_key in ((-64, 64), (-64, -63), (63, 64)):
            some = torch.randint(low_key, high_key, (SUMS, ROW), dtype=torch.int8, generator=generator).T
            sums = product(rows, some)
            assert sums.dtype == torch.int32
            assert torch.equal(sums.long(), rows.long() @ some.long())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    with emulated_gpu(monkeypatch) as device:
        yield device


def test_a_gpu_computes_the_same_and_its_host_waits_once_for_each(gpu: EmulatedGpu) -> None:
    named = [(str(size), weights(size)) for size in SIZES]
    expected = {name: digest(tensor, "sums:") for name, tensor in named}
    there = [(name, tensor.to("cuda")) for name, tensor in named]
    digests(there)  # sends the keys
    gpu.waits.clear()
    assert digests(there) == expected
    assert sum(gpu.waits.values()) == len(there)
    condensed = hashes._condensed(there[-1][1].view(torch.uint8), hashes._keys(there[-1][1].device)[0])
    assert condensed.is_cuda
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
