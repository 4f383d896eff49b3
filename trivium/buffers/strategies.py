"""Sample strategies: which groups a step is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.config import Plugin
from trivium.protocols import Buffer
from trivium.types import Sample


class DefaultStrategy:
    """The groups the buffer has ready, in its order."""

    mixed = False

    class Config(Plugin):
        kind: str = "default"

    def __init__(self, config: Config, *, buffer: Buffer) -> None:
        del config
        self._buffer = buffer

    async def sample(self, count: int, version: int) -> Sample:
        return Sample(tuple(await self._buffer.take(count, version)))

    async def refuse(self, count: int) -> None:
        await self._buffer.refuse(count)

    def state(self) -> dict[str, Any]:
        return {}

    async def restore(self, state: Mapping[str, Any]) -> None: ...
