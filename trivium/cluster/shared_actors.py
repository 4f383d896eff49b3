"""The actors that the roles of a stage share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trivium.cluster.actors import Proxy
from trivium.cluster.weights import ObjectStoreChannel
from trivium.foundation.board import SharedBoard
from trivium.foundation.registry import resolve
from trivium.planning.memory_estimate import kept_versions
from trivium.runtime.build import Endpoints, build_channel, build_synchronizer, shares_buffer
from trivium.runtime.stage import Stage
from trivium.synchronizer import Synchronizer
from trivium.types import capabilities_of

SYNCHRONIZER, BUFFER = "synchronizer", "buffer"


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
        apart = shares_buffer(stage.config.buffers)
        return build_synchronizer(stage.config.sync, SharedBoard(table), apart=apart)

    def endpoints(self, stage: Stage, role: str, caller: str | None = None) -> Endpoints:
        """The endpoints of a role. `caller` identifies the process and must be unique."""
        caller = caller or role
        synchronizer = self.synchronizer(stage, caller)
        buffer: Any = Proxy(self.buffer_host, BUFFER, caller)
        if capabilities_of(resolve("channels", stage.config.sync.method)).local:
            store = Proxy(self.synchronizer_host, SYNCHRONIZER, caller)
            return Endpoints(buffer, synchronizer, ObjectStoreChannel(store, keep=kept_versions(stage.config)))
        return Endpoints(buffer, synchronizer, build_channel(stage, synchronizer, role))
