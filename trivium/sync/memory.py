"""The channel within one process: copies by version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

from trivium.foundation.errors import VersionGone
from trivium.models.weights.stream import Described, Named, spec
from trivium.protocols import Weights
from trivium.sync.hashes import copied, joined, verify
from trivium.synchronizer import Synchronizer
from trivium.types import TRAINER, Capabilities


class MemoryChannel:
    """Keeps copies of the newest `keep` published versions in memory.

    The trainer changes its tensors while an explorer reads. `collect` verifies the hashes of the copies: a copy that
    was changed since the offer is an error.
    """

    capabilities = Capabilities(local=True, uses_directory=False)

    def __init__(
        self,
        *,
        keep: int = 1,
        directory: Path | None = None,
        synchronizer: Synchronizer | None = None,
        role: str = TRAINER,
    ) -> None:
        del directory, synchronizer, role  # both sides are this process
        self._keep = keep
        self._versions: dict[int, tuple[list[Named], dict[str, str]]] = {}
        """(tensors, their hashes by name) by version."""
        self._lock = Lock()
        self.offered = ""

    def offer(self, version: int, weights: Weights) -> bool:
        hashes = dict[str, str]()
        copies = [*copied(weights, hashes)]
        self.offered = joined(hashes)
        with self._lock:
            self._versions[version] = copies, hashes
            for old in sorted(self._versions)[: -self._keep]:
                del self._versions[old]
        return True

    def collect(self, version: int) -> Described:
        # The copies are looked up here: an explorer may finish completions before it reads them, and a newer offer may
        # remove the version meanwhile.
        with self._lock:
            copies = self._versions.get(version)
        if copies is None:
            raise VersionGone(
                f"collect version {version}", f"the channel holds {self.versions}", "publish before adopting"
            )
        return Described(tuple(spec(name, tensor) for name, tensor in copies[0]), _verified(version, *copies))

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions held, oldest first."""
        with self._lock:
            return tuple(sorted(self._versions))

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        """Writes versions, which explorers may still need."""
        for version in versions:
            write_version(directory, version, self._versions[version][0])

    def restore(self, directory: Path) -> None:
        """Restores the versions that `save` wrote."""
        for version, weights in read_versions(directory):
            self.offer(version, weights)


def write_version(directory: Path, version: int, named: Sequence[Named]) -> None:
    """Writes the weights of a version into one safetensors file."""
    from safetensors.torch import save_file  # imports torch, which a check of a config does not need

    directory.mkdir(exist_ok=True)
    # safetensors sorts tensors; the order of the offer is stored beside them.
    order = {"order": json.dumps([name for name, _ in named])}
    save_file(dict(named), directory / f"{version:06d}.safetensors", order)


def read_versions(directory: Path) -> Iterator[tuple[int, Weights]]:
    """Yields the versions that `write_version` wrote into this directory, oldest first, with their weights."""
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield int(path.stem), [(name, file.get_tensor(name)) for name in json.loads(file.metadata()["order"])]


def _verified(version: int, copies: Sequence[Named], hashes: Mapping[str, str]) -> Iterator[Named]:
    verify(
        copies,
        hashes,
        version,
        "its bytes changed after it was offered",
        "do not write to tensors that came from the channel",
    )
    yield from copies
