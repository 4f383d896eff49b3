"""The processes that train together on Ray, as the train engine's driver sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import ray

from trivium.assemble import Stage, algorithm_of, build_rank_engine
from trivium.cluster.dispatch import Dispatch, register
from trivium.cluster.orders import Ends, Order
from trivium.cluster.pools import ResourcePool
from trivium.cluster.worker import Worker
from trivium.cluster.worker_group import RayClassWithInitArgs, RayWorkerGroup
from trivium.synchronizer import TRAINER
from trivium.training.split import RankVerbs

_SLIVER = 0.001
"""CPUs that are reserved for a rank: as good as none. The roles of a run take turns on a small machine."""


class TrainWorker(Worker):
    """One rank of the trainer, with its part of the models."""

    def __init__(self, order: Order, ends: Ends) -> None:
        """The first rank offers the weights: they never come to the driver."""
        stage = order.stage()
        meeting = ends.meeting(stage, TRAINER, f"{TRAINER}-rank-0") if self.rank == 0 else None
        self._to_meet = meeting.synchronizer if meeting is not None else None
        """Until it has been told who the trainer of this run is; where this rank offers the weights."""
        channel = meeting.channel if meeting is not None else None
        engine: Any = build_rank_engine(stage, algorithm_of(stage.config), channel)
        self._verbs = RankVerbs(engine)
        ranks = engine.ranks
        self.set_data_rank(ranks.data_rank, ranks.data_size, ranks.sequence_rank == 0)

    @register(Dispatch.ONE_TO_ALL)
    def everywhere(self, method: str, args: tuple[Any, ...]) -> Any:
        """Does it; what came of it, on the first rank."""
        if method == "sync_weight" and self._to_meet is not None:
            asyncio.run(self._to_meet.meet(TRAINER))
            self._to_meet = None
        answer = getattr(self._verbs, method)(*args)
        return answer if self.rank == 0 else None

    @register(Dispatch.DP_COMPUTE_METRIC)
    def shared_out(self, orders: Sequence[tuple[str, tuple[Any, ...]]]) -> Any:
        """Does the one thing that this data rank is told to do."""
        ((method, args),) = orders
        return getattr(self._verbs, method)(*args)


class RayRanks:
    """The `RankGroup` of a trainer that is an actor: its ranks are actors of their own, and end with it."""

    def __init__(self, stage: Stage, order: Order, ends: Ends, *, on_gpus: bool) -> None:
        """Starts the ranks: on a GPU each, or all on one machine. Raises ConfigError where the cluster is too small,
        and what building a rank's engine raises."""
        config = stage.config
        pool = ResourcePool(
            machines_for(config.cluster.ranks) if on_gpus else [config.cluster.ranks], name=TRAINER, cpus=_SLIVER,
            gpus=float(on_gpus), deadline_s=config.sync.deadline_s,
        )  # fmt: skip
        self.group: Any = RayWorkerGroup(
            pool, RayClassWithInitArgs(TrainWorker, order, ends), name=TRAINER, run_dir=stage.run_dir,
            threads=stage.threads, deadline_s=config.sync.deadline_s,
        )  # fmt: skip

    @property
    def data_size(self) -> int:
        return self.group.data_size

    def everywhere(self, method: str, *args: Any) -> Any:
        return self.group.everywhere(method, args)[0]

    def shared_out(self, method: str, shares: Sequence[tuple[Any, ...]], *args: Any) -> list[Any]:
        return self.group.shared_out([(method, (*share, *args)) for share in shares])

    def close(self) -> None:
        self.group.shutdown()


def machines_for(count: int) -> list[int]:
    """How many of `count` processes with a GPU each go to each machine: to few machines, the largest first.

    What the machines lack is for the pool to say.
    """
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    counts: list[int] = []
    for gpus in sorted((int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]), reverse=True):
        if count > sum(counts) and gpus:
            counts.append(min(gpus, count - sum(counts)))
    return counts if sum(counts) == count else [count]
