"""Worker classes of the tests of worker groups."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.waiting import eventually
from trivium.frontdoors.verl.objects.workers.worker import Worker


class Counting(Worker):
    """A worker with functions, some of which need all ranks."""

    def __init__(self, config: int, role: str) -> None:
        self.start, self.role = config, role

    def who(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "size": self.world_size,
            "local": self.local_rank,
            "pid": os.getpid(),
            "thread": threading.get_ident(),
            "port": int(os.environ["MASTER_PORT"]),
            "threads": os.environ["OMP_NUM_THREADS"],
        }

    def added(self, value: int, more: int = 0) -> int:
        return self.start + value + more + self.rank

    def until(self, end: Path) -> int:
        """Returns when the file exists."""
        eventually(end.exists, 120, lambda: f"{end} is not there")
        return self.rank

    def fail(self, error: Exception, rank: int = 1) -> int:
        if self.rank == rank:
            raise error
        return self.rank

    def summed(self, value: float) -> float:
        meet()
        tensor = torch.tensor(value * (self.rank + 1))
        dist.all_reduce(tensor)
        return tensor.item()

    def stuck(self, mark: Path) -> None:
        """Rank 1 never takes part in the reduction, so the others wait."""
        meet()
        (mark / str(self.rank)).touch()
        if self.rank == 1:
            time.sleep(3600)
        dist.all_reduce(torch.zeros(1))


class Talking(Worker):
    """A rollout engine in the process of a trainer, with concurrent calls."""

    def __init__(self, config: int, role: str) -> None:
        self.talking = self.most = 0

    async def generate(self, prompt: str) -> str:
        """Returns after six calls are concurrent; returns `hello` immediately."""
        self.talking += 1
        self.most = max(self.most, self.talking)
        async with asyncio.timeout(120):
            while self.most < 6 and prompt != "hello":
                await asyncio.sleep(0.01)
        self.talking -= 1
        return f"{prompt}!"

    def at_once(self) -> tuple[int, int]:
        return self.most, os.getpid()

    def group_of(self) -> int:
        meet()
        return dist.get_world_size()


class Broken(Worker):
    def __init__(self, config: int, role: str) -> None:
        if self.rank == 1:
            raise ValueError("no weights on this machine")


def meet() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
