"""The trajectories of one task that agents are playing: a slot of the buffer, a seat for each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivium.serving.sessions import Session
    from trivium.types import Lease


@dataclass(frozen=True, slots=True)
class Slot:
    """A lease and the version that was loaded when it was granted."""

    lease: Lease
    version: int


@dataclass(eq=False)
class OpenGroup:
    """What becomes a Group once enough of its sessions have had their feedback."""

    task_id: str
    slot: asyncio.Future[Slot]
    """The right to play it, once the buffer admits it."""
    touched: float
    """When something last happened in it, by the monotonic clock."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What agents said about the task, for reward functions."""
    live: list[Session] = field(default_factory=list["Session"])
    """Being played."""
    done: list[Session] = field(default_factory=list["Session"])
    """Over, with feedback or a failure."""
    seats: int = 0
    """How many sessions ever sat down: numbers them."""

    @property
    def taken(self) -> int:
        return len(self.live) + len(self.done)
