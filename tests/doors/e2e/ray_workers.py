"""Worker classes of the tests of worker groups."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.waiting import eventually
from trivium.frontdoors.verl.objects.workers.dispatch import Dispatch, Execute, register
from trivium.frontdoors.verl.objects.workers.worker import Worker


class Traced:
    """Rows that write the ids of the processes that unpickle them to a file."""

    def __init__(self, path: Path, values: np.ndarray) -> None:
        self.path, self.values = path, values

    def __len__(self) -> int:
        return len(self.values)

    def select(self, rows: list[int]) -> Traced:
        return Traced(self.path, self.values[rows])

    @classmethod
    def concat(cls, parts: list[Traced]) -> Traced:
        return cls(parts[0].path, np.concatenate([part.values for part in parts]))

    def __reduce__(self) -> Any:
        return _arrived, (self.path, self.values)


def _arrived(path: Path, values: np.ndarray) -> Traced:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return Traced(path, values)


def deal(group: Any, *names: str) -> tuple[list[list[str]], dict[str, Any]]:
    """A user's rule: each rank receives the names with its rank appended."""
    return [[f"{name} {rank}" for rank in range(group.world_size)] for name in names], {}


def shout(group: Any, results: list[str]) -> str:
    return ", ".join(results).upper()


class Counting(Worker):
    """A worker with a method for each rule."""

    def __init__(self, start: int, peers: int = 1) -> None:
        self.start, self.calls = start, list[str]()
        self.seen: list[int] = []
        if peers > 1:
            self.set_data_rank(self.rank // peers, self.world_size // peers, self.rank % peers == 0)

    @register(Dispatch.ONE_TO_ALL)
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

    @register(Dispatch.ONE_TO_ALL)
    def same(self, value: Any) -> Any:
        return value

    @register(Dispatch.ALL_TO_ALL)
    def dealt(self, value: Any) -> Any:
        return value

    @register(Dispatch.DP_COMPUTE)
    def own(self, value: int) -> int:
        return value + self.rank

    @register(Dispatch.DP_COMPUTE_PROTO)
    def through(self, rows: Any, more: Any = None, *, offset: int = 0) -> Any:
        """Returns the rows, and records their number."""
        self.seen.append(len(rows) if not isinstance(rows, dict) else len(next(iter(rows.values()))))
        return rows if more is None else more

    @register(Dispatch.DP_COMPUTE_PROTO)
    def twice(self, rows: list[Any]) -> list[Any]:
        return [row for row in rows for _ in range(2)]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def even(self, rows: list[int]) -> list[int]:
        return [row for row in rows if row % 2 == 0]

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def added(self, rows: Any, number: int = 1) -> Any:
        return rows.select(list(range(len(rows)))) if isinstance(rows, Traced) else rows + number

    @register(Dispatch.DP_COMPUTE_METRIC)
    def total(self, rows: Any) -> float:
        return float(sum(rows))

    @register(Dispatch.ONE_TO_ALL)
    def length(self, rows: Any) -> int:
        return len(rows)

    @register(Dispatch.RANK_ZERO)
    def alone(self, value: int) -> tuple[int, int]:
        return self.rank, value

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def first(self) -> int:
        return self.rank

    @register({"dispatch_fn": deal, "collect_fn": shout})
    def hear(self, name: str) -> str:
        return f"{name} of {self.world_size}"

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def slow(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def until(self, end: Path) -> int:
        """Returns when the file exists."""
        eventually(end.exists, 120, lambda: f"{end} is not there")
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def remember(self, word: str) -> None:
        time.sleep(0.01 * self.rank)
        self.calls.append(word)

    @register(Dispatch.ONE_TO_ALL)
    def words(self) -> list[str]:
        return self.calls

    @register(Dispatch.ONE_TO_ALL)
    def sizes(self) -> list[int]:
        seen, self.seen = self.seen, []
        return seen

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def unasked(self, value: Any) -> str:
        return f"{type(value).__name__} of {value.get(60.0)}"

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, error: Exception, rank: int = 1) -> int:
        if self.rank == rank:
            raise error
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def summed(self, value: float) -> float:
        meet()
        tensor = torch.tensor(value * (self.rank + 1))
        dist.all_reduce(tensor)
        return tensor.item()

    @register(Dispatch.ONE_TO_ALL)
    def stuck(self) -> None:
        """Rank 1 never takes part in the reduction, so the others wait."""
        meet()
        if self.rank == 1:
            time.sleep(3600)
        dist.all_reduce(torch.zeros(1))


class Talking(Worker):
    """A rollout engine in the process of a trainer, with concurrent calls."""

    def __init__(self) -> None:
        self.talking = self.most = 0

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def generate(self, prompts: list[str]) -> list[str]:
        """Returns after six calls are concurrent; returns `hello` immediately."""
        self.talking += 1
        self.most = max(self.most, self.talking)
        async with asyncio.timeout(120):
            while self.most < 6 and "hello" not in prompts:
                await asyncio.sleep(0.01)
        self.talking -= 1
        return [f"{prompt}!" for prompt in prompts]

    @register(Dispatch.ONE_TO_ALL)
    def at_once(self) -> tuple[int, int]:
        return self.most, os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def group_of(self) -> int:
        meet()
        return dist.get_world_size()


class Broken(Worker):
    def __init__(self) -> None:
        if self.rank == 1:
            raise ValueError("no weights on this machine")


def meet() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
