"""Samples on all ranks of torchrun: each rank hosts a rollout engine for the explorer of the first rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from trivium.config import RunConfig
from trivium.planning.memory_estimate import hosts_engine, with_limits
from trivium.processes.sockets import own_address
from trivium.protocols import RolloutEngine, TrainEngine
from trivium.runtime.build import algorithm_of, build_engine
from trivium.runtime.stage import Stage
from trivium.runtime.train_engines import build_rank_engine, train_device
from trivium.training.launched import local_rank, ranks_here

if TYPE_CHECKING:
    from trivium.training.distributed.data_parallel import RankVerbs
    from trivium.training.engine import TorchTrainEngine

# Engines are imported inside the functions: a check of a config imports this module, and not torch.


def samples_here(stage: Stage) -> bool:
    """Whether a stage's trainer has an explorer in its process."""
    return stage.config.run.mode != "train" and stage.num_explorers > 0


def engine_over_ranks(stage: Stage, trainer: TrainEngine) -> RolloutEngine:
    """Returns the engine of the explorer beside a trainer: one engine, or a pool over all ranks that `trainer`
    drives."""
    from trivium.engines.process_pool import ProcessPool
    from trivium.training.distributed.data_parallel import DistributedTrainEngine
    from trivium.training.distributed.torchrun import shared_key

    engine = build_engine(stage)
    if not isinstance(trainer, DistributedTrainEngine) or not trainer.samplers:
        return engine
    others = [(f"rank {rank}", address) for rank, address in trainer.samplers.items()]
    return ProcessPool(engine, others, shared_key(), stage.config.sync.deadline_s)


def serve_train_rank(config: RunConfig, at_end: Callable[[], None]) -> None:
    """Serves a torchrun rank other than the first: builds its engines of each stage, and executes the first rank's
    calls until the run ends. Calls `at_end` before the first rank can end."""
    from trivium.engines.process_pool import EngineHost
    from trivium.training.distributed.data_parallel import RankVerbs
    from trivium.training.distributed.torchrun import serve_rank, shared_key

    def make(stage_spec: dict[str, Any]) -> RankVerbs:
        limited = with_limits(config.stage_configs()[int(stage_spec["number"])], *stage_spec.pop("limits"))
        stage = Stage(config=limited, **stage_spec)
        engine = cast("TorchTrainEngine", build_rank_engine(stage, algorithm_of(stage.config), None))
        hosts = samples_here(stage) and hosts_engine(stage.config, local_rank(), ranks_here())
        sampler = EngineHost(build_engine(stage), own_address(), shared_key()).address if hosts else None
        return RankVerbs(engine, sampler)

    serve_rank(train_device(config.train), make, at_end)
