"""What a role in another process is told: the stage as plain data, and where its roles meet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.assemble import Meeting, Stage, build_channel, build_synchronizer, kept_versions
from trivium.board import SharedBoard
from trivium.cluster.remote import Proxy
from trivium.cluster.weights import ObjectStoreChannel
from trivium.config import RunConfig
from trivium.registry import resolve
from trivium.synchronizer import Synchronizer

SYNCHRONIZER, BUFFER = "synchronizer", "buffer"


@dataclass(frozen=True)
class Order:
    """A stage as plain data: what a role in another process is told to do."""

    config: dict[str, Any]
    number: int
    first_version: int
    is_last: bool
    run_dir: Path
    model_dir: Path

    @classmethod
    def of(cls, stage: Stage) -> Order:
        # What the user did not say stays unsaid; some checks look for that.
        said = stage.config.model_dump(mode="json", exclude_unset=True)
        where = stage.run_dir.resolve(), stage.model_dir.resolve()
        return cls(said, stage.number, stage.first_version, stage.is_last, *where)

    def stage(self) -> Stage:
        """The stage, its config read again: users' files are imported in the process that needs them."""
        config = RunConfig.model_validate(self.config)
        return Stage(config, self.number, self.first_version, self.is_last, self.run_dir, self.model_dir)


@dataclass(frozen=True)
class Ends:
    """Where the roles of a stage meet: the actors behind the three things that they share."""

    hub: Any
    buffer: Any
    namespace: str

    def synchronizer(self, stage: Stage, caller: str) -> Synchronizer:
        """The view of the board that `caller` has."""
        table: Any = Proxy(self.hub, SYNCHRONIZER, caller)
        return build_synchronizer(stage.config, SharedBoard(table))

    def meeting(self, stage: Stage, role: str, caller: str | None = None) -> Meeting:
        """The ends of a role. `caller` tells the processes of one role apart; no two may have the same."""
        caller = caller or role
        synchronizer, hub = self.synchronizer(stage, caller), Proxy(self.hub, SYNCHRONIZER, caller)
        buffer: Any = Proxy(self.buffer, BUFFER, caller)
        if getattr(resolve("channels", stage.config.sync.method), "local", False):
            return Meeting(buffer, synchronizer, ObjectStoreChannel(hub, keep=kept_versions(stage.config)))
        return Meeting(buffer, synchronizer, build_channel(stage, synchronizer, role))
