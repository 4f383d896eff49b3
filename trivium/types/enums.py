"""Named constants: roles, statuses, methods and reasons."""

from __future__ import annotations

from enum import StrEnum

TRAINER = "trainer"
"""The role name of the trainer; any other name on a board is an explorer's."""
DAY = "run.date"
"""The setting of a run that explorers take from the trainer: the day that chat templates write."""


class RunningStatus(StrEnum):
    """The status of a role, as the other roles see it."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    """The role requests a weight sync: an explorer without a free slot, or a trainer at the end of its interval."""
    WAITING_SYNC = "waiting_sync"
    """The role has entered a collective exchange and waits for the other side."""
    STOPPED = "stopped"


class SyncMethod(StrEnum):
    """How weights are transferred."""

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SyncStyle(StrEnum):
    """Which role decides when weights are transferred."""

    FIXED = "fixed"
    DYNAMIC_BY_TRAINER = "dynamic_by_trainer"
    DYNAMIC_BY_EXPLORER = "dynamic_by_explorer"


class SaveStrategy(StrEnum):
    """Which savers may write at the same time."""

    SINGLE_THREAD = "single_thread"
    """One saver in the whole cluster."""
    SINGLE_PROCESS = "single_process"
    """The savers of one job on one node."""
    SINGLE_NODE = "single_node"
    """The savers of one node."""
    UNRESTRICTED = "unrestricted"
    """Every saver."""


class StopReason(StrEnum):
    """Why a turn ended."""

    EOS = "eos"
    """The policy sampled an end-of-sequence token (which is part of the turn and is trained)."""
    LENGTH = "length"
    """`max_new_tokens` or the context limit was reached."""
    STOP = "stop"
    """A stop string appeared."""
    ABORT = "abort"
    """The engine was closed before the turn ended."""
    ENV_DONE = "env_done"
    """The environment declared the episode finished."""
