"""What runs in the processes of a stage: the buffer, the trainer's half, an explorer's half.

The coroutines are those of `loops.py`; only the three things that roles share have their ends here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.assemble import (
    Meeting,
    Stage,
    build_buffer,
    build_channel,
    build_engine,
    build_explorer,
    build_monitor,
    build_schedule,
    build_synchronizer,
    build_trainer,
    explorer_parts,
    kept_versions,
    open_store,
    trainer_parts,
)
from trivium.board import SharedBoard
from trivium.cluster.engines import Recipe, ReplicatedEngine
from trivium.cluster.remote import Proxy
from trivium.cluster.weights import ObjectStoreChannel
from trivium.config import RunConfig
from trivium.loops import run
from trivium.protocols import Buffer, RolloutEngine
from trivium.registry import resolve
from trivium.synchronizer import Synchronizer

SYNCHRONIZER, BUFFER = "synchronizer", "buffer"


@dataclass(frozen=True)
class Order:
    """A stage as plain data: what a role in another process is told to do."""

    config: dict[str, Any]
    number: int
    first_version: int
    is_last: bool
    run_dir: Path
    model_dir: Path

    @classmethod
    def of(cls, stage: Stage) -> Order:
        # What the user did not say stays unsaid; some checks look for that.
        said = stage.config.model_dump(mode="json", exclude_unset=True)
        where = stage.run_dir.resolve(), stage.model_dir.resolve()
        return cls(said, stage.number, stage.first_version, stage.is_last, *where)

    def stage(self) -> Stage:
        """The stage, its config read again: users' files are imported in the process that needs them."""
        config = RunConfig.model_validate(self.config)
        return Stage(config, self.number, self.first_version, self.is_last, self.run_dir, self.model_dir)


@dataclass(frozen=True)
class Ends:
    """Where the roles of a stage meet: the actors behind the three things that they share."""

    hub: Any
    buffer: Any
    namespace: str

    def synchronizer(self, stage: Stage, role: str) -> Synchronizer:
        """This role's view of the board."""
        table: Any = Proxy(self.hub, SYNCHRONIZER, role)
        return build_synchronizer(stage.config, SharedBoard(table))

    def meeting(self, stage: Stage, role: str) -> Meeting:
        """This role's own ends."""
        synchronizer, hub = self.synchronizer(stage, role), Proxy(self.hub, SYNCHRONIZER, role)
        buffer: Any = Proxy(self.buffer, BUFFER, role)
        if getattr(resolve("channels", stage.config.sync.method), "local", False):
            return Meeting(buffer, synchronizer, ObjectStoreChannel(hub, keep=kept_versions(stage.config)))
        return Meeting(buffer, synchronizer, build_channel(stage, synchronizer, role))


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
        trainer = build_trainer(stage, meeting, store, latest if resumes else None, monitor, record)
        try:
            trainer.prepare()
            asyncio.run(run(trainer_parts(stage, meeting, trainer)))
            return {**trainer.record, "seconds": trainer.seconds}
        finally:
            trainer.engine.close()
    finally:
        monitor.close()


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
