"""The ranks of a trainer on Ray, as a `RankGroup`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import ray

from trivium.cluster.actor_group import ActorGroup, put_inputs
from trivium.cluster.pools import ResourcePool
from trivium.cluster.shared_actors import SharedActors
from trivium.protocols import WeightOffer
from trivium.runtime.build import algorithm_of
from trivium.runtime.stage import Stage, StageSpec
from trivium.runtime.train_engines import build_rank_engine
from trivium.training.distributed.data_parallel import RankVerbs
from trivium.training.engine import TorchTrainEngine
from trivium.training.launched import this_rank
from trivium.types import TRAINER

_CPUS = 0.001
"""CPUs reserved for a rank: nearly none, since the roles of a run take turns on a small machine."""


class RayRank(RankVerbs):
    """One rank of the trainer, with its part of the models."""

    def __init__(self, spec: StageSpec, shared: SharedActors) -> None:
        """The first rank publishes the weights, which do not pass through the driver."""
        stage = spec.stage()
        endpoints = shared.endpoints(stage, TRAINER, f"{TRAINER}-rank-0") if this_rank() == 0 else None
        self._synchronizer = endpoints.synchronizer if endpoints is not None else None
        """The synchronizer of the first rank, until it has joined as the trainer."""
        channel = endpoints.channel if endpoints is not None else None
        super().__init__(cast(TorchTrainEngine, build_rank_engine(stage, algorithm_of(stage.config), channel)))

    def data_ranks(self) -> tuple[int, int]:
        """(number of data ranks, ranks of each)."""
        ranks = self.engine.ranks
        return ranks.data_size, ranks.share_size

    def offer_weights(self, version: int) -> WeightOffer:
        if self._synchronizer is not None:
            asyncio.run(self._synchronizer.wait_for_trainer(TRAINER))
            self._synchronizer = None
        return super().offer_weights(version)


class RayRanks:
    """The `RankGroup` of a trainer actor. Its ranks are separate actors that end with it."""

    def __init__(self, stage: Stage, spec: StageSpec, shared: SharedActors, *, on_gpus: bool) -> None:
        """Starts the ranks, each on its own GPU or all on one machine. Raises ConfigError if the cluster is too small,
        and the error of building a rank's engine."""
        config = stage.config
        pool = ResourcePool(
            machines_for(config.cluster.ranks) if on_gpus else [config.cluster.ranks],
            name=TRAINER,
            cpus=_CPUS,
            gpus=float(on_gpus),
            deadline_s=config.sync.deadline_s,
        )
        self.actors = ActorGroup(
            TRAINER,
            pool,
            RayRank,
            spec,
            shared,
            run_dir=stage.run_dir,
            threads=stage.threads,
            deadline_s=config.sync.deadline_s,
        )
        self.data_size, self._share_size = self.run_on_all_ranks("data_ranks")

    def run_on_all_ranks(self, method: str, *args: object) -> Any:
        inputs = put_inputs(*args)
        return self.actors.results(
            self.actors.call(method, dict.fromkeys(range(len(self.actors.names)), inputs), wanted=[0])
        )[0]

    def scatter(self, method: str, shares: Sequence[tuple[Any, ...]], *args: object) -> list[Any]:
        share_inputs = [put_inputs(*share, *args) for share in shares]
        inputs = {rank: share_inputs[rank // self._share_size] for rank in range(len(self.actors.names))}
        answering = range(0, len(inputs), self._share_size)
        results = self.actors.results(self.actors.call(method, inputs, wanted=answering))
        return [results[rank] for rank in answering]

    def close(self) -> None:
        self.actors.shutdown()


def machines_for(count: int) -> list[int]:
    """Distributes `count` processes with one GPU each over as few machines as possible, largest first.

    If the machines have too few GPUs, returns [count], and reserving the pool raises.
    """
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    counts: list[int] = []
    for gpus in sorted((int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]), reverse=True):
        if count > sum(counts) and gpus:
            counts.append(min(gpus, count - sum(counts)))
    return counts if sum(counts) == count else [count]
