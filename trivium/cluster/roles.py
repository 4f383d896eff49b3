"""What runs in the processes of a stage: the buffer, the trainer's half, an explorer's half.

The coroutines are those of `loops.py`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import ray

from trivium.assemble import (
    Stage,
    build_buffer,
    build_engine,
    build_explorer,
    build_monitor,
    build_schedule,
    build_trainer,
    explorer_parts,
    open_store,
    split_engine,
    trainer_parts,
)
from trivium.cluster.engines import Recipe, ReplicatedEngine
from trivium.cluster.orders import Ends, Order
from trivium.cluster.ranks import RayRanks
from trivium.config import RunConfig
from trivium.loops import Parts, run
from trivium.protocols import Buffer, RolloutEngine


def make_buffer(order: Order) -> Buffer:
    stage = order.stage()
    return build_buffer(stage, build_schedule(stage))


def make_engine(order: Order) -> RolloutEngine:
    return build_engine(order.stage())


def train(name: str, order: Order, ends: Ends, record: dict[str, Any], resumes: bool) -> dict[str, Any]:
    """Trains a stage; returns the record of the run so far."""
    stage = order.stage()
    store = open_store(stage.config, stage.run_dir)
    latest = store.latest()
    monitor = build_monitor(stage.config, stage.run_dir, latest)
    try:
        meeting = ends.meeting(stage, name)
        ranks = _start_ranks(stage, order, ends)
        make_engine = None if ranks is None else partial(split_engine, ranks)
        trainer = build_trainer(stage, meeting, store, latest if resumes else None, monitor, record, make_engine)
        try:
            trainer.prepare()
            asyncio.run(_train(trainer_parts(stage, meeting, trainer), ranks))
            return {**trainer.record, "seconds": trainer.seconds}
        finally:
            trainer.engine.close()
    finally:
        monitor.close()


def _start_ranks(stage: Stage, order: Order, ends: Ends) -> Any:
    """The processes that train together; None where this one trains alone."""
    if stage.config.cluster.ranks == 1:
        return None
    return RayRanks(stage, order, ends, on_gpus=trains_on_gpus(stage.config))


async def _train(parts: Parts, ranks: Any) -> None:
    """The trainer's half, and beside it a look at the ranks: one may die while nobody asks it for anything."""
    async with asyncio.TaskGroup() as tasks:
        watching = None if ranks is None else tasks.create_task(ranks.group.watch(), name="watch")
        await run(parts)
        if watching is not None:
            watching.cancel()


def trains_on_gpus(config: RunConfig) -> bool:
    """Whether the models are trained on GPUs of the cluster."""
    device = getattr(config.train, "device", "cpu")
    return device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def explore(name: str, order: Order, ends: Ends) -> None:
    """Explores and evaluates until the trainer is done with the stage."""
    stage = order.stage()
    asyncio.run(_explore(name, stage, order, ends))


async def _explore(name: str, stage: Stage, order: Order, ends: Ends) -> None:
    cluster, number = stage.config.cluster, name.removeprefix("explorer-")
    recipe = Recipe(
        make_engine, (order,), stage.run_dir, stage.threads, ends.namespace,
        num_gpus=float(getattr(stage.config.engine, "device", "cpu") == "cuda"),
    )  # fmt: skip
    engine = await ReplicatedEngine.start(
        recipe, [f"engine-{number}-{replica}" for replica in range(cluster.engines)],
        max_restarts=cluster.max_restarts, deadline_s=stage.config.sync.deadline_s,
    )  # fmt: skip
    try:
        meeting = ends.meeting(stage, name)
        explorer = build_explorer(stage, name, engine)
        await meeting.synchronizer.meet(name)
        await run(explorer_parts(stage, meeting, explorer))
    finally:
        await engine.close()
