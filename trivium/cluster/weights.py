"""A weight channel over Ray's object store. Each machine holds one copy of the weights, and engines read them in
place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from trivium.models.weights.stream import BUCKET_BYTES, Named, drained, groups, raw, spec, type_named, unique
from trivium.protocols import TensorSpec, Weights
from trivium.sync.hashes import digests, joined, verify
from trivium.sync.memory import read_versions, write_version


@dataclass(frozen=True)
class Stored:
    """The weights of one version in the object store: a `WeightHandle`."""

    version: int
    tensors: tuple[TensorSpec, ...]
    refs: tuple[Any, ...]
    """References to the parts, each a list of (name, type, shape, hash, bytes)."""
    hash: str = ""
    """The hash of all tensors."""

    def __iter__(self) -> Iterator[Named]:
        """Yields the verified tensors: read-only views of the store's memory. Blocks."""
        for part in self.refs:
            yield from drained(_unpacked(self.version, ray.get(part)))


def store(version: int, weights: Weights) -> Stored:
    """Copies weights into the object store. Raises SyncError for a duplicate name."""
    hashes, refs, tensors = dict[str, str](), list[Any](), list[TensorSpec]()
    for group in groups(((name, tensor.detach().cpu()) for name, tensor in unique(weights)), BUCKET_BYTES):
        hashes |= (group_hashes := digests(group))
        packed = [(*spec(name, tensor), group_hashes[name], raw(tensor).numpy()) for name, tensor in group]
        refs.append(ray.put(packed))
        tensors += [spec(name, tensor) for name, tensor in group]
        group.clear()
        del packed  # with `clear`, frees this group before the next one is made
    return Stored(version, tuple(tensors), tuple(refs), joined(hashes))


def _unpacked(version: int, packed: Sequence[tuple[str, str, tuple[int, ...], str, Any]]) -> list[Named]:
    """The tensors of one part, without a copy. Raises SyncError if their bytes differ from the offered ones."""
    with warnings.catch_warnings():  # the views are never written to
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        named = [
            (name, torch.from_numpy(data).view(type_named(kind)).reshape(shape))
            for name, kind, shape, _, data in packed
        ]
    verify(
        named,
        {name: expected for name, _, _, expected, _ in packed},
        version,
        "its bytes differ from those that were offered",
        "do not write to tensors that came from the channel",
    )
    return named


class ObjectStoreChannel:
    """The sync method `memory` between processes of one Ray cluster."""

    def __init__(self, store: Any, *, keep: int) -> None:
        """`store` is the run's weight table (`BoardAndWeights`), or a proxy of it."""
        self._store, self._keep, self.offered = store, keep, ""

    def offer(self, version: int, weights: Weights) -> bool:
        stored = store(version, weights)
        self.offered = stored.hash
        self._store.put_weights(version, stored, self._keep)
        return True

    def collect(self, version: int) -> Stored:
        """Returns a handle. The replicas fetch and verify the tensors."""
        return self._store.get_weights(version)

    @property
    def versions(self) -> tuple[int, ...]:
        return self._store.versions()

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        for version in versions:
            write_version(directory, version, [*self._store.get_weights(version)])

    def restore(self, directory: Path) -> None:
        for version, weights in read_versions(directory):
            self.offer(version, weights)
