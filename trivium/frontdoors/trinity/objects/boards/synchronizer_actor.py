"""The Ray actor of Trinity-RFT's Synchronizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.cluster.actors import Host
from trivium.cluster.weight_store import BoardAndWeights
from trivium.cluster.weights import ObjectStoreChannel
from trivium.config import RunConfig
from trivium.foundation.board import SharedBoard
from trivium.frontdoors.trinity.objects.boards.run_synchronizer import RunSynchronizer, options_of
from trivium.planning.memory_estimate import kept_versions
from trivium.runtime.build import open_board, run_name, shares_buffer


class SynchronizerActor(RunSynchronizer, Host):
    """Holds the board and the references to the weights, for calls of the user and for the roles of a run on Ray.

    The board of a run over a database is in the database.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is a RunConfig as plain data."""
        run_config, table = RunConfig.model_validate(config), BoardAndWeights()
        Host.__init__(self, "synchronizer", None, 1)
        self._object = table
        self._built.set()
        in_database = shares_buffer(run_config.buffers) and run_config.cluster.kind != "ray"
        board = open_board(run_config.buffers, run_name(run_config.run)) if in_database else SharedBoard(table)
        RunSynchronizer.__init__(self, board, **options_of(run_config))
        self.channel = ObjectStoreChannel(table, keep=kept_versions(run_config))
