"""What the synchronizer's process keeps: the board's table, and where the weights of each version are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trivium.cluster.weights import Stored
from trivium.errors import VersionGone


class BoardAndWeights:
    """A `board.Table`, and references to weights by version. Lives on one event loop; the weights are elsewhere."""

    def __init__(self) -> None:
        self._revision = 0
        self._values: Mapping[str, Any] = {}
        self._swapped = asyncio.Event()
        """Set, and replaced by another, whenever the table changes."""
        self._weights: dict[int, Stored] = {}

    async def changed(self, revision: int, patience_s: float) -> None:
        """Returns once the table is newer than `revision`, at the latest after `patience_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._revision <= revision:
                    await self._swapped.wait()

    def load(self) -> tuple[int, Mapping[str, Any]]:
        """(revision, values) of the table."""
        return self._revision, self._values

    def swap(self, revision: int, values: Mapping[str, Any]) -> bool:
        """Stores the values if the table still has that revision; whether it did."""
        if revision != self._revision:
            return False
        self._revision, self._values = revision + 1, values
        self._swapped.set()
        self._swapped = asyncio.Event()
        return True

    def put_weights(self, version: int, weights: Stored, keep: int) -> None:
        """Remembers where the weights of `version` are; forgets all but the newest `keep`."""
        self._weights[version] = weights
        for old in sorted(self._weights)[:-keep]:
            del self._weights[old]

    def get_weights(self, version: int) -> Stored:
        """Where the weights of `version` are. Raises VersionGone."""
        if version not in self._weights:
            raise VersionGone(
                f"collect version {version}", f"the channel holds {self.versions()}", "publish before adopting"
            )
        return self._weights[version]

    def versions(self) -> tuple[int, ...]:
        """The versions whose weights are held, oldest first."""
        return tuple(sorted(self._weights))
