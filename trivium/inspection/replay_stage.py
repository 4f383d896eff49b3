"""Runs a recorded stage again in this process: its config, its trainer on the recorded groups of each step, and engines
with the policy versions that sampled the rollouts. Writes nothing into the run directory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.step_log import STEPS, Taken
from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.config import RewardConfig, RunConfig
from trivium.config.sections import EvaluationSection
from trivium.foundation.board import MemoryBoard
from trivium.foundation.concurrency import usable_cores
from trivium.foundation.errors import DataError, RunDirError
from trivium.foundation.registry import resolve
from trivium.inspection.rollouts import read_groups, taken_groups
from trivium.inspection.run import RecordedRun
from trivium.protocols import Buffer, RolloutEngine
from trivium.rewards.recipe import Recipe, parts_of
from trivium.runtime.build import (
    Endpoints,
    build_buffer,
    build_engine,
    build_schedule,
    build_synchronizer,
    build_trainer,
)
from trivium.runtime.stage import Stage
from trivium.sync.hashes import hash_of
from trivium.sync.memory import MemoryChannel
from trivium.tasks.served import ServedTasks
from trivium.trainer import Trainer
from trivium.training.device import described_machine
from trivium.types import SERVED, Batch, Completion, Group, Metrics, Request, SyncMethod, capabilities_of


def remote_rewards(config: RunConfig) -> list[str]:
    """Returns the rewards that a server computes, whose results may have changed since the run."""
    rewards = [part.reward for part in parts_of(config.rewards)]
    return [reward.label for reward in rewards if capabilities_of(resolve("rewards", reward.kind)).remote]


def without_rewards(config: RunConfig, labels: Collection[str]) -> RunConfig:
    """Returns the config without these rewards."""
    rewards: list[RewardConfig] = []
    for reward in config.rewards:
        if isinstance(reward, Recipe.Config):
            components = tuple(component for component in reward.components if component.label not in labels)
            rewards += [reward.model_copy(update={"components": components})] if components else []
        elif reward.label not in labels:
            rewards.append(reward)
    return config.model_copy(update={"rewards": tuple(rewards)})


def replayed_stage(run: RecordedRun, step: int, scratch: Path, left_out: Collection[str]) -> Stage:
    """Returns the stage of a train step, configured to run in this process alone and without the `left_out` rewards."""
    number, first = run.stage_at(step)
    config = without_rewards(run.stage_config(step), left_out)
    threads = int(run.record(step).machine.get("threads", 0)) or config.cluster.threads
    tasks = dict(config.tasks)
    if capabilities_of(resolve("buffers", config.buffer.kind)).explored:
        # Recorded groups contain their tasks; tasksets with expert data are still read.
        experts = getattr(config.buffer.strategy, "taskset", None)
        tasks |= {"train": ServedTasks.Config(kind=SERVED)} if experts != "train" else {}
    update: dict[str, Any] = {
        "run": config.run.model_copy(update={"dir": str(scratch), "mode": "both", "keep": "rollouts"}),
        "tasks": tasks,
        "evaluation": EvaluationSection(),
        "monitors": (),
        "schedule": config.schedule.model_copy(update={"curriculum": None}),
        "sync": config.sync.model_copy(update={"method": SyncMethod.MEMORY}),
        "cluster": config.cluster.model_copy(update={"kind": "local", "threads": min(threads, 4 * usable_cores())}),
    }
    for section in ("engine", "train"):
        part: Any = getattr(config, section)
        elsewhere = getattr(part, "device", "cpu").startswith("cuda") and not torch.cuda.is_available()
        changed = {"device": "cpu"} if elsewhere else {}
        changed |= {"own_process": False} if hasattr(part, "own_process") else {}
        update[section] = part.model_copy(update=changed)
    return Stage(config.model_copy(update=update), number, first, True, scratch, run.model_dir(step))


def inexact_because(run: RecordedRun, step: int, stage: Stage) -> list[str]:
    """Returns the reasons why bits may differ from those of the run; empty if they may not."""
    there, here = run.record(step).machine, described_machine(stage.config, stage.threads)
    if not there:  # a step on rows whose weights were not published
        return ["the run did not record the machine that it trained on"]
    names = dict.fromkeys([*there, *here])
    return [
        f"{name}: {there.get(name, 'unset')} there, {here.get(name, 'unset')} here"
        for name in names
        if there.get(name) != here.get(name)
    ]


# --------------------------------------------------------------------------- which groups a step took


def taken_by(run: RecordedRun, step: int) -> tuple[Taken, ...]:
    """Returns the groups that a train step took, including replayed groups and expert data. Raises RunDirError if
    `steps.jsonl` does not record them."""
    if groups := taken_groups(run.path, step):
        return groups
    raise RunDirError(
        f"the groups that train step {step} took",
        f"{run.path / STEPS} has no row for it",
        f"put {STEPS} back",
    )


class _Recorded(MemoryBuffer):
    """A buffer that returns the groups that the trainer took in the recorded run."""

    def __init__(
        self,
        groups_of: Callable[[int], Sequence[Group]],
        in_slots: Callable[[Sequence[int]], list[Group]],
        **beside: Any,
    ) -> None:
        super().__init__(MemoryBuffer.Config(), **beside)
        self._groups_of, self._in_slots = groups_of, in_slots
        self._step, self._left = 0, deque[Group]()

    async def take(self, count: int, version: int) -> list[Group]:
        if self._step != version + 1:
            self._step, self._left = version + 1, deque(self._groups_of(version + 1))
        if len(self._left) < count:
            raise DataError(
                f"{count} group(s) that train step {self._step} took",
                f"the record has {len(self._left)} more",
                "the record of this step is incomplete, or the config differs from that of the run",
            )
        return [self._left.popleft() for _ in range(count)]

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        return self._in_slots(slots)


# --------------------------------------------------------------------------- the trainer


class _KeptBatch:
    """Keeps the batch of a train step with its computed columns."""

    keeps_updates = False

    def __init__(self, before_update: Callable[[Batch], None] | None) -> None:
        self.batch = Batch(())
        self._before_update = before_update

    def step(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        self.batch = batch
        if self._before_update is not None:
            self._before_update(batch)

    def updates(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Keeps nothing of them."""


class _NewestMetrics:
    """A monitor that keeps the metrics of the newest step."""

    def __init__(self) -> None:
        self.row: Metrics = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        del step
        self.row = dict(metrics)

    def table(self, *_: object) -> None: ...


class ReplayedTrainer:
    """The trainer of a recorded stage. Repeats its train steps in memory."""

    def __init__(self, run: RecordedRun, stage: Stage) -> None:
        self.run, self.stage = run, stage
        self.schedule = build_schedule(stage)
        self.explored = capabilities_of(resolve("buffers", stage.config.buffer.kind)).explored
        self.channel = MemoryChannel(keep=1)
        self.hashes: dict[int, str] = {}
        """Version -> hash of its weights, for each version reached."""
        self._newest = _NewestMetrics()
        synchronizer = build_synchronizer(stage.config.sync, MemoryBoard())
        self.trainer: Trainer = build_trainer(
            stage,
            Endpoints(self._buffer(), synchronizer, self.channel),
            CheckpointStore(stage.run_dir / "checkpoints"),
            None,
            cast(Any, self._newest),
            {},
        )
        # A note of a version is a line of the run's record. The run has accepted its failed rollouts already.
        self.trainer.publisher.note = None
        self.trainer.groups.max_failed_fraction = 1.0

    @property
    def version(self) -> int:
        return self.trainer.train_step_num

    def _buffer(self) -> Buffer:
        if not self.explored:
            return build_buffer(self.stage, self.schedule)
        return _Recorded(
            self.fresh_groups,
            self._groups_in,
            schedule=self.schedule,
            rollouts=self.stage.run_dir / "rollouts" / f"stage-{self.stage.number}",
            renderer=self.stage.renderer,
            deadline_s=60.0,
        )

    def fresh_groups(self, step: int) -> list[Group]:
        """Returns the groups that a train step took from the explorers, in order."""
        first = self.stage.first_version + 1 if self.schedule.stored_per_step else step
        earlier = {group for number in range(first, step) for group in self._taken(number)}
        fresh = [group for group in self._taken(step) if group.slot >= 0 and group not in earlier]
        return read_groups(self.run.path, self.stage.number, fresh)

    def _groups_in(self, slots: Sequence[int]) -> list[Group]:
        """Returns the groups at these slots that the steps up to the checkpoint took."""
        steps = range(self.stage.first_version + 1, self.trainer.train_step_num + 1)
        group_of_slot = {group.slot: group for step in steps for group in self._taken(step)}
        return read_groups(self.run.path, self.stage.number, [group_of_slot[slot] for slot in slots])

    def _taken(self, step: int) -> tuple[Taken, ...]:
        return taken_by(self.run, step)

    async def begin(self, checkpoint: Checkpoint | None) -> None:
        """Loads a checkpoint of the stage, or the model that the stage starts from."""
        self.trainer.resume = checkpoint
        trainer, state = self.trainer, checkpoint.state if checkpoint is not None else {}
        trainer.prepare()
        await trainer.buffer.restore(state.get("buffer") if not self.explored else None, trainer.train_step_num)
        await trainer.groups.strategy.restore(state.get("strategy", {}))
        self._note_hash()

    async def go_to(self, version: int, wanted: Collection[int] = ()) -> dict[int, list[tuple[str, torch.Tensor]]]:
        """Takes the train steps up to a version; returns the weights of the `wanted` versions passed."""
        weights: dict[int, list[tuple[str, torch.Tensor]]] = {}
        while True:
            if self.version in wanted:
                weights[self.version] = list(self.channel.collect(self.version))
            if self.version >= version:
                return weights
            await self.step()

    async def step(self, before_update: Callable[[Batch], None] | None = None) -> tuple[Metrics, Batch]:
        """Takes the next train step; returns its metrics and the batch with its computed columns. `before_update` gets
        the same batch before the weights change."""
        self.trainer.keep = kept = _KeptBatch(before_update)
        self.trainer.publisher.last_sync_step = self.version  # no explorer waits for weights
        before = self.version
        await self.trainer.train_step()
        if self.version == before:
            raise RunDirError(f"train step {before + 1}", "the data of the run ended before it", "name an earlier step")
        self._note_hash()
        return self._newest.row, kept.batch

    def _note_hash(self) -> None:
        """Offers the weights to the channel, and notes their hash."""
        if self.trainer.engine.offer_weights().delivered:
            self.hashes[self.version] = hash_of(self.channel.collect(self.version))

    def close(self) -> None:
        self.trainer.engine.close()


# --------------------------------------------------------------------------- the engines

CompletionAddress = tuple[str, str, int, int, bytes]
"""(taskset, task id, epoch, index in the group, prompt): identifies a recorded completion."""


class EngineOfVersions:
    """Samples each recorded completion with the policy version that sampled it in the run."""

    def __init__(self, engines: Mapping[int, RolloutEngine], groups: Sequence[Group]) -> None:
        self._engines = engines
        newest = engines[max(engines)]
        self.capabilities, self.max_context, self.version = capabilities_of(newest), newest.max_context, max(engines)
        self._versions: dict[CompletionAddress, int] = {}
        for group in groups:
            for rollout in group.rollouts:
                for turn in rollout.turns:
                    address = _address(group, rollout.index, turn.prompt_tokens.tobytes())
                    self._versions[address] = int(turn.policy_version.min()) if len(turn.tokens) else group.version

    async def generate(self, request: Request) -> Completion:
        key = request.key
        address = (key.taskset, key.task_id, key.epoch, key.index, request.prompt_tokens.tobytes())
        return await self._engines[self._versions.get(address, self.version)].generate(request)

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()


def _address(group: Group, index: int, prompt: bytes) -> CompletionAddress:
    return group.task.taskset, group.task.task_id, group.epoch, index, prompt


async def engines_of(
    stage: Stage, weights: Mapping[int, Sequence[tuple[str, torch.Tensor]]], groups: Sequence[Group]
) -> EngineOfVersions:
    """Builds an engine for each of these versions."""
    engines: dict[int, RolloutEngine] = {}
    for version, named in weights.items():
        engines[version] = build_engine(stage)
        await engines[version].load(version, named)
    return EngineOfVersions(engines, groups)
