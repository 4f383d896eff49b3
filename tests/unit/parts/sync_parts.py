"""A model that is made while it is read, and ends of a channel in processes of their own, for tests of channels."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.waiting import until
from trivium.buffers.sql.buffer import SqlBuffer
from trivium.engines.process_pool import EngineHost
from trivium.engines.torch import layers
from trivium.engines.torch.engine import TorchEngine
from trivium.models.backbone.load import load_lm
from trivium.models.weights.stream import Described, spec
from trivium.sync import collective
from trivium.sync.collective import CollectiveChannel
from trivium.synchronizer import Synchronizer
from trivium.types import TRAINER


class Reading:
    """A model as sharded training exports it: every tensor made when it is asked for. Counts those that live."""

    def __init__(self, count: int, size: int = 64) -> None:
        self._count, self._size = count, size
        self.living: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(self._count):
            tensor = torch.full((self._size,), float(number))
            self.living = [ref for ref in self.living if ref() is not None] + [weakref.ref(tensor)]
            self.most = max(self.most, len(self.living))
            yield f"layer.{number}", tensor


def channel_end(url: str, role: str) -> tuple[Synchronizer, CollectiveChannel]:
    """A role's end of a channel between processes, over a board in a database."""
    board = SqlBuffer.open_board(SqlBuffer.Config(url=url), name="run")
    synchronizer = Synchronizer(board, deadline_s=120.0, collective=True, heartbeat_s=60.0)
    return synchronizer, CollectiveChannel(keep=1, directory=Path(), synchronizer=synchronizer, role=role)


def engine_of(model_dir: Path) -> TorchEngine:
    config = TorchEngine.Config(device="cpu", dtype="float32", max_rows=4)
    return TorchEngine(config, model_dir=model_dir, eos_token_ids=frozenset(), decode=lambda _: "", threads=1)


def shifted(model_dir: Path, dies_at: int | None = None) -> Described:
    """The weights of a model plus one, made while they are read; before this one of them the process is killed."""
    state = load_lm(model_dir, dtype=torch.float32).state_dict()

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(state.items()):
            if number == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor + 1

    return Described(tuple(spec(name, tensor) for name, tensor in state.items()), each())


def train(url: str, model_dir: Path, dies_at: int | None, bucket: int) -> None:
    """A process that offers version 1, and may die of it."""
    collective.BUCKET_BYTES = bucket
    synchronizer, channel = channel_end(url, TRAINER)
    synchronizer.open()
    with synchronizer.heartbeat(TRAINER), synchronizer.report_failure(TRAINER):
        channel.offer(1, shifted(model_dir, dies_at))


async def adopt(url: str, engine: TorchEngine) -> None:
    """Has an engine load version 1 as it arrives."""
    synchronizer, channel = channel_end(url, "ann")
    await synchronizer.wait_for_trainer("ann")
    with synchronizer.heartbeat("ann"):
        await synchronizer.join("ann")
        version = await synchronizer.next_version("ann", None, newest=True)
        await engine.load(version, await asyncio.to_thread(channel.collect, version))


def host(model_dir: Path, folder: Path) -> None:
    """A process whose engine another one uses, until it loads version 1: reports as `explore`."""
    layers.PACKED_BYTES = 0  # models as small as this one are kept a second time, for speed
    engine = engine_of(model_dir)
    rise = memory_rise()
    (folder / "new").write_text(json.dumps(EngineHost(engine, "127.0.0.1", b"key").address))
    (folder / "new").rename(folder / "address")

    async def run() -> dict[str, object]:
        await until(lambda: engine.version, 120)
        return {"rise": rise(), "whole": await holds_shifted(engine, model_dir)}

    (folder / "written").write_text(json.dumps(asyncio.run(run())))
    (folder / "written").rename(folder / "report.json")


async def holds_shifted(engine: TorchEngine, model_dir: Path) -> bool:
    held = dict(await engine.weights())
    return all(torch.equal(held[name], tensor) for name, tensor in shifted(model_dir))


def memory_rise() -> Callable[[], int]:
    """By how many bytes the memory of this process rose at most, from now on, without the code of libraries, which a
    forked process maps as it first runs it."""

    def memory(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    before, libraries = memory("VmRSS"), memory("RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    return lambda: memory("VmHWM") - before - (memory("RssFile") - libraries)


def explore(url: str, model_dir: Path, report: Path) -> None:
    """A process whose engine loads version 1: reports how much its memory rose, and whether it is whole."""
    layers.PACKED_BYTES = 0  # models as small as this one are kept a second time, for speed

    async def run() -> dict[str, object]:
        engine = engine_of(model_dir)
        rise = memory_rise()
        await adopt(url, engine)
        report = {"rise": rise(), "whole": await holds_shifted(engine, model_dir)}
        await engine.close()
        return report

    report.write_text(json.dumps(asyncio.run(run())))
