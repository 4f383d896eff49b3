"""The roles that run in the processes of a stage: buffer, trainer and explorers.

The coroutines are those of `loops.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from trivium.cluster.engines import EngineSpec, ReplicatedEngine
from trivium.cluster.ranks import RayRanks
from trivium.cluster.shared_actors import SharedActors
from trivium.config import RunConfig
from trivium.inspection.report import send_report
from trivium.loops import run
from trivium.planning.memory_estimate import gpus_of
from trivium.protocols import Buffer, RolloutEngine
from trivium.runtime.build import (
    build_buffer,
    build_engine,
    build_explorer,
    build_monitor,
    build_parts,
    build_schedule,
    build_trainer,
    open_store,
)
from trivium.runtime.main_loop import run_in_loop
from trivium.runtime.stage import Stage, StageSpec
from trivium.runtime.train_engines import distributed_engine


def make_buffer(spec: StageSpec) -> Buffer:
    stage = spec.stage()
    return build_buffer(stage, build_schedule(stage))


def make_engine(spec: StageSpec) -> RolloutEngine:
    return build_engine(spec.stage())


def train(name: str, spec: StageSpec, shared: SharedActors, record: dict[str, Any], resumes: bool) -> dict[str, Any]:
    """Trains a stage; returns the record of the run so far."""
    stage = spec.stage()
    store = open_store(stage.config.checkpoint, stage.run_dir, stage.config.sync.deadline_s)
    latest = store.latest()
    monitor = build_monitor(stage.config, stage.run_dir, latest)
    try:
        endpoints = shared.endpoints(stage, name)
        ranks = _start_ranks(stage, spec, shared)
        make_engine = None if ranks is None else partial(distributed_engine, ranks)
        trainer = build_trainer(stage, endpoints, store, latest if resumes else None, monitor, record, make_engine)
        try:
            trainer.prepare()
            parts = build_parts(stage, endpoints, trainer)
            running = run(parts if ranks is None else replace(parts, watch=ranks.actors.watch))
            run_in_loop(running, stage.config.workflow.deadline_s)
            if stage.is_last:
                send_report(monitor, stage.run_dir)
            return trainer.run_record
        finally:
            trainer.engine.close()
    finally:
        monitor.close()


def _start_ranks(stage: Stage, spec: StageSpec, shared: SharedActors) -> RayRanks | None:
    """Starts the processes that train together. Returns None if this process trains alone."""
    if stage.config.cluster.ranks == 1:
        return None
    return RayRanks(stage, spec, shared, on_gpus=trains_on_gpus(stage.config))


def trains_on_gpus(config: RunConfig) -> bool:
    """Whether the models are trained on GPUs of the cluster."""
    device = getattr(config.train, "device", "cpu")
    return device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)


def samples_on_gpus(config: RunConfig) -> bool:
    """Whether each engine gets its GPUs of the cluster. With `auto`, if the cluster has enough GPUs for all engines and
    ranks."""
    cluster, device = config.cluster, getattr(config.engine, "device", "cpu")
    wanted = cluster.explorers * cluster.engines * gpus_of(config.engine) + cluster.ranks * trains_on_gpus(config)
    return device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) >= wanted)


def explore(name: str, spec: StageSpec, shared: SharedActors) -> None:
    """Explores and evaluates until the trainer is done with the stage."""
    stage = spec.stage()
    run_in_loop(_explore(name, stage, spec, shared), stage.config.workflow.deadline_s)


async def start_engines(name: str, stage: Stage, spec: StageSpec, namespace: str) -> ReplicatedEngine:
    """Starts the engines of an explorer."""
    cluster, number = stage.config.cluster, name.removeprefix("explorer-")
    engine_spec = EngineSpec(
        make_engine,
        (spec,),
        stage.run_dir,
        stage.threads,
        namespace,
        max_restarts=cluster.max_restarts,
        deadline_s=stage.config.sync.deadline_s,
        num_gpus=float(samples_on_gpus(stage.config)) * gpus_of(stage.config.engine),
    )
    return await ReplicatedEngine.start(
        engine_spec, [f"engine-{number}-{replica}" for replica in range(cluster.engines)]
    )


async def _explore(name: str, stage: Stage, spec: StageSpec, shared: SharedActors) -> None:
    engine = await start_engines(name, stage, spec, shared.namespace)
    try:
        endpoints = shared.endpoints(stage, name)
        explorer = await asyncio.to_thread(build_explorer, stage, name, engine)
        await endpoints.synchronizer.wait_for_trainer(name)
        await run(build_parts(stage, endpoints, explorer=explorer))
    finally:
        await engine.close()
