"""CheckpointMonitor: when a checkpoint that several savers write is complete, and who may write when."""

from __future__ import annotations

from enum import StrEnum


class SaveStrategy(StrEnum):
    """Who may write at the same time."""

    SINGLE_THREAD = "single_thread"
    """One saver in the whole cluster."""
    SINGLE_PROCESS = "single_process"
    """The savers of one job on one node."""
    SINGLE_NODE = "single_node"
    """The savers of one node."""
    UNRESTRICTED = "unrestricted"
    """Everybody."""
