"""What the environment says of the processes that a launcher (torchrun or a worker group) started together."""

from __future__ import annotations

import os


def launched_ranks() -> int:
    """The number of processes that the launcher (torchrun or a worker group) started to train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    """The rank of this process."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The rank of this process among those of its machine; 0 on Ray, which shows each process only its own GPUs."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def ranks_here() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
