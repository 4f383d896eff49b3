"""Sessions of a run without models: the real loops, buffer, synchronizer and trainer around engines that only count.

A session may lose explorers and be killed itself at a chosen event; the next one in the same directory goes on from
the last checkpoint.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trivium.algorithms import GroupAlgorithm, build_algorithm
from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.strategies import DefaultStrategy
from trivium.checkpoint.background import BackgroundSaver
from trivium.checkpoint.store import CheckpointStore
from trivium.config import AlgorithmConfig, plugin
from trivium.engines.scripted import ScriptedEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.board import Board, MemoryBoard
from trivium.foundation.errors import RoleFailed, VersionGone
from trivium.foundation.metrics import depends_on_machine
from trivium.loops import Parts, run_explorer, train_loop
from trivium.policy import Policy, Workflow
from trivium.protocols import Buffer, EngineSettings, Objective, TrainEngine, WeightChannel, Weights
from trivium.publisher import Publisher
from trivium.rewards.judge import make_judge
from trivium.schedule import Schedule
from trivium.sync.memory import MemoryChannel
from trivium.synchronizer import Synchronizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.trainer import GroupSource, Trainer
from trivium.types import Batch, FloatArray, Group, Lease, Message, Metrics, Sampling, SyncStyle, Task

TASKS = [Task(f"t{i}", (Message("user", str(i)),)) for i in range(7)]
RENDERER = ChatRenderer(tiny_tokenizer("0123456789"))


class Killed(Exception):
    """Where a process would have died."""


class Counting(TrainEngine):
    """Trains nothing and remembers on what."""

    def __init__(self, algorithm: GroupAlgorithm, seconds: Callable[[], float]) -> None:
        self.algorithm, self._seconds = algorithm, seconds
        self.updates: list[tuple[int, tuple[str, ...], tuple[bytes, ...]]] = []
        """(version before, groups, the advantages of their rows)."""

    def prepare(self) -> None: ...

    def score(self, batch: Batch, what: str) -> Sequence[FloatArray]:
        raise AssertionError("GRPO needs no scores")

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        time.sleep(self._seconds())
        groups = dict.fromkeys(e.group_id for e in batch.experiences)
        self.updates.append((self.version, tuple(groups), tuple(a.tobytes() for a in batch.columns["advantages"])))
        return {}

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        yield "weight", torch.full((2,), float(self.version))

    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        (directory / "version").write_text(str(self.version), encoding="utf-8")

    def load(self, directory: Path) -> None:
        self.version = int((directory / "version").read_text(encoding="utf-8"))


class Kept:
    """A monitor that keeps all rows and tables."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[int, str, list[Mapping[str, Any]]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.tables.append((step, name, list(rows)))

    def state(self) -> dict[str, Any]:
        return {"rows": len(self.rows)}

    def restore(self, state: Mapping[str, Any]) -> None:
        del self.rows[state["rows"] :]

    def close(self) -> None:
        self.closed = True

    def steps_with(self, key: str) -> list[int]:
        return [step for step, row in self.rows if key in row]


class Rows(Kept):
    """A monitor that keeps the last row of each step, without what depends on the machine."""

    rows: dict[int, Metrics]

    def __init__(self) -> None:
        super().__init__()
        self.rows = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows[step] = {key: value for key, value in metrics.items() if not depends_on_machine(key)}

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Plays:
    """A workflow made of a function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float] | None:
        return await self.function(task, policy)


class Ledger:
    """A buffer, with a note of what went out and came back; the process may die after the nth put, take or refuse."""

    def __init__(self, buffer: Buffer, deadly: tuple[str, int] | None = None) -> None:
        self.buffer = buffer
        self.leased: Counter[Lease] = Counter()
        self.taken: list[tuple[int, list[Group]]] = []
        """(the version it was for, groups) of every take."""
        self.refused: list[int] = []
        self.released = 0
        self._deadly, self._calls = deadly, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def _survive(self, what: str) -> None:
        self._calls[what] += 1
        if (what, self._calls[what]) == self._deadly:
            raise Killed

    async def lease(self, owner: str, *, wait: bool = True) -> Lease | None:
        lease = await self.buffer.lease(owner, wait=wait)
        if lease is not None:
            self.leased[lease] += 1
        return lease

    async def put(self, owner: str, group: Group) -> None:
        await self.buffer.put(owner, group)
        self._survive("put")

    async def take(self, count: int, version: int) -> list[Group]:
        groups = await self.buffer.take(count, version)
        self.taken.append((version, groups))
        self._survive("take")
        return groups

    async def refuse(self, count: int) -> None:
        await self.buffer.refuse(count)
        self.refused.append(count)
        self._survive("refuse")

    async def release(self, owner: str) -> int:
        released = await self.buffer.release(owner)
        self.released += released
        return released

    @property
    def played(self) -> list[Group]:
        """Every group that was taken, in order."""
        return [group for _, groups in self.taken for group in groups]


def memory_buffer(schedule: Schedule, directory: Path) -> Buffer:
    return MemoryBuffer(
        MemoryBuffer.Config(), schedule=schedule, rollouts=directory / "rollouts", renderer=RENDERER, deadline_s=60
    )


class Gathering:
    """One end of a channel whose ends meet for each version, as collective ones do; the weights lie in memory."""

    versions: Sequence[int] = ()

    def __init__(self, weights: MemoryChannel, synchronizer: Synchronizer, role: str) -> None:
        self._weights, self._synchronizer, self._role = weights, synchronizer, role

    def offer(self, version: int, weights: Weights) -> bool:
        self._weights.offer(version, weights)
        return asyncio.run(self._synchronizer.ready_to_nccl_sync(self._role, version, "here:1")) is not None

    def collect(self, version: int) -> Weights:
        if asyncio.run(self._synchronizer.ready_to_nccl_sync(self._role, version)) is None:
            raise VersionGone(f"collect version {version}", "the exchange went on without it", "wait for the next one")
        return self._weights.collect(version)

    def save(self, directory: Path, versions: Sequence[int]) -> None: ...

    def restore(self, directory: Path) -> None: ...


@dataclass
class Session:
    """One life of a run: the trainer, explorers, and whoever makes the explorers die."""

    schedule: Schedule
    directory: Path
    workflow: Callable[[int], Workflow]
    """The workflow of the nth explorer."""
    said: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the algorithm's section says."""
    fail_fraction: float = 0.0
    deadly: tuple[str, int] | None = None
    max_failed_fraction: float = 1.0
    explorers: int = 1
    deaths: Sequence[float] = ()
    """Seconds between the deaths of explorers; another one takes the place of each."""
    operators: Sequence[Callable[[Group], Group]] = ()
    style: SyncStyle = SyncStyle.FIXED
    collective: bool = False
    make_buffer: Callable[[Schedule, Path], Buffer] = memory_buffer
    make_board: Callable[[], Board] = MemoryBoard
    save_every: int = 2
    train_s: Callable[[], float] = lambda: 0.0
    """How long a train step takes."""
    monitor: Rows = field(default_factory=Rows)
    began: Callable[[Session], None] = lambda _: None
    """Called when all parts are there."""

    async def live(self) -> Session:
        """Plays until the stage is done, or until it is killed."""
        trainer = self.prepare()
        self.began(self)
        self.killed = False
        try:
            await self._play(trainer)
        except ExceptionGroup as errors:
            killed, rest = errors.split(Killed)
            if killed is None or (rest is not None and rest.split(RoleFailed)[1] is not None):
                raise
            self.killed = True
        self.counted = await self.buffer.state()
        return self

    def prepare(self) -> Trainer:
        """All parts but the explorers; the trainer has taken up the last checkpoint."""
        store = CheckpointStore(self.directory / "checkpoints", keep=2)
        store.recover()
        section = plugin("algorithms", AlgorithmConfig)({"kind": "grpo", **self.said})
        self.engine = Counting(build_algorithm(section, 0, 8), self.train_s)
        self.engine.version = self.schedule.first_version
        self.buffer = Ledger(self.make_buffer(self.schedule, self.directory), self.deadly)
        self.synchronizer = Synchronizer(
            self.make_board(),
            deadline_s=60,
            style=self.style,
            interval=self.schedule.sync_interval,
            collective=self.collective,
        )
        self.weights = MemoryChannel(keep=self.schedule.max_staleness // self.schedule.sync_interval + 2)
        self.channel = self.end("trainer")
        self.engine.settings = EngineSettings(self.channel)
        trainer = Trainer(
            self.engine,
            GroupSource(
                self.buffer,
                DefaultStrategy(DefaultStrategy.Config(), buffer=self.buffer),
                self.max_failed_fraction,
            ),
            Publisher(self.engine, self.buffer, self.channel, self.synchronizer, self.schedule),
            self.schedule,
            self.monitor,
            BackgroundSaver(store, self.engine, asynchronous=False, every=self.save_every),
            resume=store.latest(),
        )
        trainer.prepare()
        self.trainer, self.resumed_at = trainer, self.engine.version
        return trainer

    def end(self, role: str) -> WeightChannel:
        """The end of the channel that belongs to a role."""
        return Gathering(self.weights, self.synchronizer, role) if self.collective else self.weights

    async def _play(self, trainer: Trainer) -> None:
        self.synchronizer.open()
        shared = (self.buffer, self.schedule, self.synchronizer)
        async with asyncio.TaskGroup() as roles:
            training = roles.create_task(train_loop(trainer))
            names = iter(range(10_000))

            def explore() -> asyncio.Task[None]:
                explorer = self._explorer(next(names))
                parts = Parts(*shared, self.end(explorer.name), explorer=explorer)
                return roles.create_task(run_explorer(parts, explorer), name=explorer.name)

            exploring = [explore() for _ in range(self.explorers)]
            for number, seconds in enumerate(self.deaths):
                await asyncio.wait({training}, timeout=seconds)
                if not training.done():
                    exploring[number % self.explorers].cancel()
                    exploring[number % self.explorers] = explore()

    def _explorer(self, number: int) -> Explorer:
        engine = ScriptedEngine(
            ScriptedEngine.Config(replies=((1, 2), (3,), (4, 5, 6)), fail_fraction=self.fail_fraction),
            eos_token_ids=RENDERER.eos_token_ids,
            decode=RENDERER.decode,
        )
        return Explorer(
            engine,
            RENDERER,
            self.workflow(number),
            make_judge(()),
            Sampling(8),
            RolloutLimits(5.0, max_concurrent=64),
            name=f"explorer-{number}",
            operators=tuple(self.operators),
        )


class Lengths:
    """A workflow whose reward is a function of what was sampled; only its duration is random."""

    def __init__(self, dice: random.Random, seconds: Sequence[float] = (0, 0, 0.001, 0.004)) -> None:
        self.dice, self.seconds = dice, seconds

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float]:
        await asyncio.sleep(self.dice.choice(self.seconds))
        return {"length": float(len((await policy.generate(task.prompt)).tokens))}
