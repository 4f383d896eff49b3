"""Trainer: Trinity-RFT's trainer object, on top of Trivium's trainer. `loops.run` is its training loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, cast

from trivium.config import RunConfig
from trivium.explorer import Explorer
from trivium.foundation.concurrency import run_here
from trivium.foundation.errors import ConfigError, first_cause
from trivium.foundation.registry import resolve
from trivium.frontdoors.trinity.config.config_object import Config
from trivium.frontdoors.trinity.monitor_views import MonitorView, prefix_metrics
from trivium.frontdoors.trinity.objects.core_trainer import CoreTrainer, WrappedEngine
from trivium.frontdoors.trinity.objects.run_parts import name_of_trainer, opened, run_config_of, sync_method_of
from trivium.frontdoors.trinity.objects.sample_strategies import SampleStrategyView, strategy_of
from trivium.frontdoors.trinity.objects.train_engine import TrainEngineWrapper
from trivium.frontdoors.trinity.objects.verl_wrapper import VerlPPOTrainerWrapper, get_trainer_wrapper
from trivium.loops import run as run_loops
from trivium.planning.memory_estimate import is_evaluated, is_explored
from trivium.runtime.build import (
    Endpoints,
    build_buffer,
    build_explorer,
    build_monitor,
    build_parts,
    build_schedule,
    build_trainer,
    shares_buffer,
)
from trivium.runtime.launch import carried
from trivium.runtime.stage import StageSpec
from trivium.types import TRAINER, RunningStatus, capabilities_of


class _OfCore:
    """Forwards an attribute to the core's trainer, or to a part of it."""

    def __init__(self, part: str = "") -> None:
        self._part = part

    def _of(self, trainer: Trainer) -> Any:
        return getattr(trainer.core, self._part) if self._part else trainer.core

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Trainer | None, owner: type) -> Any:
        return self if trainer is None else getattr(self._of(trainer), self._name)

    def __set__(self, trainer: Trainer, value: object) -> None:
        setattr(self._of(trainer), self._name, value)


class Trainer:
    """Consumes experiences and trains the model.

    Training calls `train_step`, `need_sync`, `sync_weight`, `save_checkpoint` and `_log_experiences`, which a subclass
    may override.
    """

    train_continue = _OfCore()
    """Whether there is another step to take."""
    last_sync_step = _OfCore("publisher")
    """The step whose weights were offered last; None before the first offer."""
    last_trainer_sync_step = _OfCore("publisher")
    """The step from which `sync.interval` counts."""

    def __init__(self, config: object) -> None:
        """`config` has Trinity's shape, or is a RunConfig of one stage. This process holds the run directory until
        training ends."""
        self.config: Any = Config.of(config) if isinstance(config, Mapping) else config
        self.logger = logging.getLogger("trivium")
        self.name = name_of_trainer(config)
        run_config = run_config_of(config)
        _check(run_config)
        self._is_prepared = self._has_ended = False
        with ExitStack() as closing:
            self._directory = closing.enter_context(ExitStack())
            self._run = closing.enter_context(opened(run_config, self._directory))
            self.engine: TrainEngineWrapper = get_trainer_wrapper(config)
            if self.engine.synchronizer is None:
                self.engine.synchronizer = self.synchronizer
            self.core = self._core_trainer()
            self._closing = closing.pop_all()
        self.monitor = MonitorView(self.core.monitor)
        self.sample_strategy = strategy_of(config, self.core)

    def _core_trainer(self) -> CoreTrainer:
        run, sync_method = self._run, sync_method_of(self.config, self._run.config)
        if isinstance(self.engine, VerlPPOTrainerWrapper):
            self.engine.run = run
        buffer = build_buffer(run.stage, build_schedule(run.stage))
        self._endpoints = Endpoints(buffer, run.synchronizer, run.channel)
        trainer = build_trainer(
            run.stage,
            self._endpoints,
            run.store,
            run.latest,
            build_monitor(run.config, run.stage.run_dir, run.latest),
            {**carried(run.latest), "stage": 0, "pinned": []},
            lambda stage, algorithm, channel: WrappedEngine(self.engine, run, sync_method),
            partial(CoreTrainer, owner=self),
        )
        return cast(CoreTrainer, trainer)

    # ------------------------------------------------------------------ training

    def prepare(self) -> None:
        """Prepares the engine, opens the run to explorers and sets the trainer's status to RUNNING."""
        if not self._is_prepared:
            self.core.prepare()
            self._run.open_board()
            self._closing.enter_context(self._run.synchronizer.heartbeat(TRAINER))
            self._is_prepared = True

    async def train(self) -> str:
        """Trains to the end, with an explorer beside it unless the mode is `train`; returns the trainer's name. Sets
        the status to STOPPED at the end, also after an error.

        Raises the first cause of an error, after the last whole step is saved.
        """
        try:
            await asyncio.to_thread(self.prepare)
            with self._run.synchronizer.report_failure(TRAINER):
                parts = build_parts(self._run.stage, self._endpoints, self.core, await self._explorer())
                ranks = self._run.ranks
                await run_loops(parts if ranks is None else replace(parts, watch=ranks.actors.watch))
        except BaseExceptionGroup as group:
            # Trinity logs the error and returns as if the training had finished.
            raise first_cause(group) from group
        finally:
            self._has_ended, self.train_continue = True, False
            self._run.synchronizer.set_trainer_status(RunningStatus.STOPPED)
            # After the status: a command that waits for the directory finds the trainer STOPPED.
            self._directory.close()
        return self.name

    async def _explorer(self) -> Explorer | None:
        """Returns the explorer of this process: with an engine of its own, or over engines on Ray."""
        run = self._run
        if run.config.run.mode == "train" or run.stage.num_explorers == 0:
            return None
        name = run.config.run.explorer or "explorer-0"
        if run.shared is None:
            return await asyncio.to_thread(build_explorer, run.stage, name)
        from trivium.cluster.roles import start_engines

        engine = await start_engines("explorer-0", run.stage, StageSpec.of(run.stage), run.shared.namespace)
        return await asyncio.to_thread(build_explorer, run.stage, name, engine)

    async def train_step(self) -> bool:
        """Trains one step, after waiting for its experiences; returns whether to continue."""
        if isinstance(self.sample_strategy, SampleStrategyView):
            return await self.core.default_train_step()
        try:
            batch, metrics, samples = await self.sample_strategy.sample(self.train_step_num + 1)
        except StopAsyncIteration:
            self.logger.info("the data ended at step %d", self.train_step_num)
            return False
        going_on, trained = await asyncio.to_thread(self.core.wrapped.train_on_batch, batch)
        self.monitor.log(prefix_metrics(metrics, "sample", trained), self.train_step_num)
        if self._run.config.run.enable_preview:
            self._log_experiences(samples)
        return going_on

    def need_sync(self) -> bool:
        """Whether to offer the current weights to the explorers."""
        return self.core.default_need_sync()

    def sync_weight(self) -> None:
        """Offers the current weights to the explorers, with the engine's method for `sync.method`."""
        self.core.default_sync_weight()

    @property
    def _sample_exps_to_log(self) -> list[dict[str, Any]]:
        """The rollouts that the next table shows."""
        return self.core.preview.examples

    def _log_experiences(self, samples: list[dict[str, Any]]) -> None:
        """Keeps the best and the worst rollout of each step for the table `rollout_examples`, which is shown whenever
        weights are offered. Called with `trainer.enable_preview`."""
        self.core.default_preview(samples)

    def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        """Saves this step, unless it is saved already: the engine by its own method, and the rest of the run's
        state."""
        if isinstance(self.engine, VerlPPOTrainerWrapper):
            self.engine.save_checkpoint(block_until_saved, save_as_hf)
        elif self.train_step_num not in self._run.store.steps():
            options = {"save_as_hf": True} if save_as_hf else {}
            self.core.wrapped.calls(self.engine.save_checkpoint, block_until_saved=block_until_saved, **options)
            added = self.core.run_state()
            run_here(self._run.store.save(self.train_step_num, added.write, added.state))

    # ------------------------------------------------------------------ the end

    async def shutdown(self) -> None:
        """Closes the monitor, frees the engine and releases the explorers."""
        if self._is_prepared and not self._has_ended:
            self._has_ended = True
            await self.core.buffer.close()
            self._run.synchronizer.finish()
        await self.core.shutdown()
        self._closing.close()

    def is_alive(self) -> bool:
        """Returns True: only a live trainer can answer."""
        return True

    @property
    def synchronizer(self) -> Any:
        """The run's synchronizer: an object of this process, or with `cluster.kind: ray` the actor of
        `Synchronizer.get_actor`."""
        return self._run.synchronizer if self._run.actor is None else self._run.actor

    @property
    def train_step_num(self) -> int:
        """The number of train steps that the engine has taken."""
        return self.engine.train_step_num


def _check(config: RunConfig) -> None:
    """Raises ConfigError for settings that a Trainer does not support."""
    if config.run.mode not in ("both", "train", "serve"):
        raise ConfigError(f"a Trainer with run.mode {config.run.mode!r}", "it trains", "use both, train or serve")
    if config.cluster.kind == "ray" and shares_buffer(config.buffers):
        raise ConfigError(
            f"a Trainer on Ray over buffer.kind {config.buffer.kind!r}",
            "its ranks meet on Ray, and explorers in the database",
            "use buffer.kind memory, or cluster.kind local",
        )
    stage = config.stage_configs()[0]
    has_explorers = is_explored(stage) or is_evaluated(stage, is_last=True)
    carried_by_ray = capabilities_of(resolve("channels", config.sync.method)).local
    if config.cluster.kind == "ray" and has_explorers and not carried_by_ray and _is_users(stage):
        raise ConfigError(
            f"the train engine {stage.train.kind!r} on Ray with sync.method {str(config.sync.method)!r}",
            "it hands its weights to the synchronizer's actor, which keeps them in Ray's object store",
            "use sync.method memory",
        )
    if config.run.mode != "train" and config.cluster.explorers > 1:
        raise ConfigError(
            f"a Trainer beside cluster.explorers {config.cluster.explorers}",
            "it has one explorer beside it",
            "use cluster.engines for more engines, mode train beside explorers of their own, or trivium.run",
        )


def _is_users(stage: RunConfig) -> bool:
    """Whether the train engine is a user's, which gives its weights to the synchronizer."""
    kind = resolve("train", stage.train.kind)
    wrapper = isinstance(kind, type) and issubclass(kind, TrainEngineWrapper)
    return wrapper and not issubclass(kind, VerlPPOTrainerWrapper)
