"""The two sides of a collective exchange, each a process of its own, that a test starts and kills."""

# ruff: noqa: T201  (its words are what the test reads)

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import trivium.sync.collective as collective
import trivium.sync.process_group as process_group
from trivium.buffers.files import FileBuffer
from trivium.buffers.sql.database import Database, SqlTable
from trivium.config import config_from_mapping
from trivium.engines.torch.engine import TorchEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.board import SharedBoard
from trivium.foundation.run_role import live_explorers
from trivium.loops import Parts, run_explorer
from trivium.protocols import EngineSettings, WeightChannel
from trivium.publisher import Publisher
from trivium.runtime.build import algorithm_of
from trivium.schedule import Schedule
from trivium.sync.collective import CollectiveChannel
from trivium.synchronizer import Synchronizer
from trivium.training.engine import TorchTrainEngine
from trivium.types import TRAINER, Sampling

HEARTBEAT_S, DEADLINE_S = 4.0, 200.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def meeting(order: dict[str, Any], role: str) -> tuple[Synchronizer, CollectiveChannel]:
    board = SharedBoard(SqlTable(Database(f"sqlite:///{order['directory']}/board.db"), "run"))
    synchronizer = Synchronizer(board, deadline_s=DEADLINE_S, collective=True, heartbeat_s=HEARTBEAT_S)
    return synchronizer, CollectiveChannel(
        keep=1, directory=Path(order["directory"]), synchronizer=synchronizer, role=role
    )


def arm(owner: Any, name: str, nth: int, deed: str) -> None:
    """The nth call of `owner.name` is preceded by the deed."""
    original, calls = getattr(owner, name), iter(range(1, 1_000_000))

    def replacement(*args: Any) -> Any:
        if next(calls) == nth:
            os.kill(os.getpid(), SIGNALS[deed])
        return original(*args)

    setattr(owner, name, replacement)


def flip() -> None:
    """One bit of the second bucket changes on its way into this process."""
    original, calls = collective._received_bytes, iter(range(1, 1_000_000))

    def replacement(group: Any, size: int) -> torch.Tensor:
        flat = original(group, size)
        if next(calls) == 2:
            flat[1] ^= 4
        return flat

    collective._received_bytes = replacement


# --------------------------------------------------------------------------- the trainer


def trainer(order: dict[str, Any]) -> None:
    config = config_from_mapping(
        {
            "model": {"kind": "hf", "path": order["model"]},
            "tasks": {"train": {"kind": "arithmetic"}},
            "rewards": ["exact"],
            "schedule": {"groups_per_step": 2, "group_size": 2},
        }
    )
    engine = TorchTrainEngine(
        TorchTrainEngine.Config(),
        model_dir=Path(order["model"]),
        algorithm=algorithm_of(config),
        temperature=1.0,
        max_response_length=4,
        total_steps=4,
        seed=0,
        threads=1,
    )
    engine.prepare()
    synchronizer, channel = meeting(order, TRAINER)
    engine.settings = EngineSettings(channel)
    nobody: Any = None  # no task is played here
    publisher = Publisher(engine, nobody, channel, synchronizer, nobody)
    asyncio.run(train(order, engine, synchronizer, publisher))


async def train(
    order: dict[str, Any], engine: TorchTrainEngine, synchronizer: Synchronizer, publisher: Publisher
) -> None:
    directory, board = Path(order["directory"]), synchronizer.board

    async def reap(name: str) -> None:
        print(f"reaped {name}", flush=True)

    synchronizer.open()
    with synchronizer.report_failure(TRAINER), synchronizer.heartbeat(TRAINER):
        async with asyncio.TaskGroup() as tasks:
            monitoring = tasks.create_task(synchronizer.monitor(TRAINER, reap))
            await board.poll(lambda values: len(live_explorers(values)) == order["explorers"], DEADLINE_S)
            for engine.version in range(order["versions"]):
                change(engine)
                held = {name: tensor.clone() for name, tensor in engine._policy.module.state_dict().items()}
                save_file(held, directory / f"sent-{engine.version}.safetensors")
                assert await asyncio.to_thread(publisher.offer, engine.version)
                print(f"delivered {engine.version}", flush=True)
            last = engine.version
            await board.poll(lambda v: all(e["version"] == last for e in live_explorers(v).values()), DEADLINE_S)
            synchronizer.finish()
            monitoring.cancel()


@torch.no_grad()
def change(engine: TorchTrainEngine) -> None:
    """Other weights, and other buffers, for every version."""
    generator = torch.Generator().manual_seed(engine.version)
    for _, tensor in engine.export_weights():
        if tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)


# --------------------------------------------------------------------------- an explorer


class ReadBack(Explorer):
    """Writes down what its engine holds after it has adopted a version."""

    directory: Path

    async def adopt(self, version: int, channel: WeightChannel) -> None:
        await super().adopt(version, channel)
        assert isinstance(self.engine, TorchEngine)
        path = self.directory / f"{self.name}-{version}.safetensors"
        save_file(dict(await self.engine.weights()), path)
        print(f"adopted {version}", flush=True)


def explorer(order: dict[str, Any]) -> None:
    synchronizer, channel = meeting(order, order["name"])
    config = TorchEngine.Config.model_validate({"dtype": order["dtype"], "batch_invariant": False})
    engine = TorchEngine(
        config, model_dir=Path(order["model"]), eos_token_ids=frozenset(), decode=lambda _: "", threads=1
    )
    nobody: Any = None  # no task is played here
    role = ReadBack(engine, nobody, nobody, nobody, Sampling(4), RolloutLimits(10.0, 8), order["name"])
    role.directory = Path(order["directory"])
    schedule = Schedule(tasks=(), seed=0)
    buffer = FileBuffer(FileBuffer.Config(), schedule=schedule, rollouts=role.directory, renderer=nobody, deadline_s=1)

    async def follow() -> None:
        await synchronizer.wait_for_trainer(order["name"])
        if "at" in order:
            arm(process_group.ExchangeGroup, order["at"], order["nth"], order["deed"])
        elif order.get("deed") == "flip":
            flip()
        await run_explorer(Parts(buffer, schedule, synchronizer, channel), role)
        await engine.close()

    asyncio.run(follow())


# --------------------------------------------------------------------------- the processes


def take_part(order: dict[str, Any]) -> None:
    """One side, in a process of its own."""
    torch.set_num_threads(1)
    # Several buckets of several pieces, of a small model.
    collective.BUCKET_BYTES, process_group.PIECE_BYTES = 4096, 1000
    if order["role"] == TRAINER:
        if "at" in order:
            arm(process_group.ExchangeGroup, order["at"], order["nth"], order["deed"])
        trainer(order)
    else:
        explorer(order)
