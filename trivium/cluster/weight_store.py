"""State of the synchronizer's process: the table of the board, and references to the weights of each version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trivium.cluster.weights import Stored
from trivium.foundation.errors import VersionGone


class BoardAndWeights:
    """A `board.Table`, and references to weights by version. Runs on one event loop. Does not hold the weights."""

    def __init__(self) -> None:
        self._revision = 0
        self._values: Mapping[str, Any] = {}
        self._swapped = asyncio.Event()
        """Set and replaced by a new event at every change of the table."""
        self._weights: dict[int, Stored] = {}

    async def changed(self, revision: int, patience_s: float) -> tuple[int, Mapping[str, Any]]:
        """Waits until the table is newer than `revision`, for at most `patience_s`. Returns (revision, values)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self._revision <= revision:
                    await self._swapped.wait()
        return self.load()

    def load(self) -> tuple[int, Mapping[str, Any]]:
        """(revision, values) of the table."""
        return self._revision, self._values

    def swap(self, revision: int, values: Mapping[str, Any]) -> bool:
        """Stores the values if the table still has that revision. Returns whether it did."""
        if revision != self._revision:
            return False
        self._revision, self._values = revision + 1, values
        self._swapped.set()
        self._swapped = asyncio.Event()
        return True

    def put_weights(self, version: int, weights: Stored, keep: int) -> None:
        """Stores the reference to the weights of `version`, and drops all but the newest `keep`."""
        self._weights[version] = weights
        for old in sorted(self._weights)[:-keep]:
            del self._weights[old]

    def get_weights(self, version: int) -> Stored:
        """The reference to the weights of `version`. Raises VersionGone if it was dropped."""
        if version not in self._weights:
            raise VersionGone(
                f"collect version {version}", f"the channel holds {self.versions()}", "publish before adopting"
            )
        return self._weights[version]

    def versions(self) -> tuple[int, ...]:
        """The versions with stored weights, oldest first."""
        return tuple(sorted(self._weights))
