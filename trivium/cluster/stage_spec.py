"""What a role in another process needs: the stage as plain data, and the actors that the roles share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.board import SharedBoard
from trivium.cluster.actors import Proxy
from trivium.cluster.weights import ObjectStoreChannel
from trivium.config import RunConfig
from trivium.config.memory_estimate import kept_versions
from trivium.registry import resolve
from trivium.runtime.build import Endpoints, build_channel, build_synchronizer
from trivium.runtime.stage import Stage
from trivium.synchronizer import Synchronizer
from trivium.types import capabilities_of

SYNCHRONIZER, BUFFER = "synchronizer", "buffer"


@dataclass(frozen=True)
class StageSpec:
    """A stage as plain data."""

    config: dict[str, Any]
    number: int
    first_version: int
    is_last: bool
    run_dir: Path
    model_dir: Path

    @classmethod
    def of(cls, stage: Stage) -> StageSpec:
        # What the user did not set stays unset; some checks look for that.
        config = stage.config.model_dump(mode="json", exclude_unset=True)
        paths = stage.run_dir.resolve(), stage.model_dir.resolve()
        return cls(config, stage.number, stage.first_version, stage.is_last, *paths)

    def stage(self) -> Stage:
        """The stage, its config read again: users' files are imported in the process that needs them."""
        config = RunConfig.model_validate(self.config)
        return Stage(config, self.number, self.first_version, self.is_last, self.run_dir, self.model_dir)


@dataclass(frozen=True)
class SharedActors:
    """The actors that the roles of a stage share."""

    synchronizer_host: Any
    """Hosts a BoardAndWeights."""
    buffer_host: Any
    namespace: str

    def synchronizer(self, stage: Stage, caller: str) -> Synchronizer:
        """The view of the board that `caller` has."""
        table: Any = Proxy(self.synchronizer_host, SYNCHRONIZER, caller)
        return build_synchronizer(stage.config, SharedBoard(table))

    def endpoints(self, stage: Stage, role: str, caller: str | None = None) -> Endpoints:
        """The endpoints of a role. `caller` tells the processes of one role apart; no two may have the same."""
        caller = caller or role
        synchronizer = self.synchronizer(stage, caller)
        buffer: Any = Proxy(self.buffer_host, BUFFER, caller)
        if capabilities_of(resolve("channels", stage.config.sync.method)).local:
            store = Proxy(self.synchronizer_host, SYNCHRONIZER, caller)
            return Endpoints(buffer, synchronizer, ObjectStoreChannel(store, keep=kept_versions(stage.config)))
        return Endpoints(buffer, synchronizer, build_channel(stage, synchronizer, role))
