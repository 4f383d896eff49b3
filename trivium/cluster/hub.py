"""What the synchronizer's process keeps: the board's table, and where the weights of each version are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trivium.errors import VersionGone


class Hub:
    """A `board.Table`, and a shelf of weights. Lives on one event loop; the weights themselves are elsewhere."""

    def __init__(self) -> None:
        self._revision = 0
        self._values: Mapping[str, Any] = {}
        self._swapped = asyncio.Event()
        """Set, and replaced by another, whenever the table changes."""
        self._shelf: dict[int, Any] = {}

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

    def shelve(self, version: int, weights: Any, keep: int) -> None:
        """Remembers where the weights of `version` are; forgets all but the newest `keep`."""
        self._shelf[version] = weights
        for old in sorted(self._shelf)[:-keep]:
            del self._shelf[old]

    def fetch(self, version: int) -> Any:
        """Where the weights of `version` are. Raises VersionGone."""
        if version not in self._shelf:
            raise VersionGone(
                f"collect version {version}", f"the channel holds {self.shelved()}", "publish before adopting"
            )
        return self._shelf[version]

    def shelved(self) -> tuple[int, ...]:
        """The versions on the shelf, oldest first."""
        return tuple(sorted(self._shelf))
