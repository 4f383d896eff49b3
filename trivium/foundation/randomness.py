"""Counter-based randomness: every random number is a pure function of an address, without any state.

A `SampleKey` is the address of one policy call; `uniforms` gives the number at each token position. No generator is
advanced, so a sample does not depend on other samples, on the number of engines or on the order of completion.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SampleKey:
    """The address of one policy call within a run."""

    seed: int
    """The run's seed."""
    purpose: str
    """`train` or the name of an evaluation, which never share numbers."""
    taskset: str
    task_id: str
    epoch: int = 0
    """The number of earlier passes of the schedule over this task."""
    index: int = 0
    """Which member of the group."""
    path: tuple[int | str, ...] = ()
    """Which call of the workflow: one entry per nesting level, counted from 0."""

    def child(self, step: int | str) -> SampleKey:
        """The key of the call `step` below this one."""
        path = (*self.path, step)
        return SampleKey(self.seed, self.purpose, self.taskset, self.task_id, self.epoch, self.index, path)

    def digest(self) -> int:
        """64 bits of BLAKE2b that identify the address."""
        address = [
            self.seed,
            self.purpose,
            self.taskset,
            self.task_id,
            self.epoch,
            self.index,
            list(self.path),
        ]
        return _hashed(address)


def stream(*address: int | str) -> int:
    """64 bits for any other purpose (a permutation, an initial weight), named by its address."""
    return _hashed(list(address))


_write = json.JSONEncoder(separators=(",", ":")).encode  # reused, since `json.dumps` makes an encoder for each text


def _hashed(address: Sequence[object]) -> int:
    return int.from_bytes(hashlib.blake2b(_write(address).encode(), digest_size=8).digest(), "little")


def _mix(x: UInt64Array) -> UInt64Array:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(digests: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 bits, one per (digest, position) pair; shapes broadcast."""
    # SplitMix64 computes modulo 2^64, and a float64 has 53 bits.
    with np.errstate(over="ignore"):
        key = _mix(np.asarray(digests, dtype=np.uint64) + _GOLDEN)
        counter = np.asarray(positions, dtype=np.uint64) * _GOLDEN
        bits = _mix(_mix(key ^ counter) + key)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(length: int, *address: int | str) -> npt.NDArray[np.int64]:
    """The permutation of `range(length)` for an address, equal on every machine."""
    keys = uniforms(np.uint64(stream(*address)), np.arange(length))
    # Another kind may order equal keys differently on another machine.
    return np.argsort(keys, kind="stable")
