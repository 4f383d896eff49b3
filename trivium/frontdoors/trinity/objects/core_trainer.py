"""Adapts the core's trainer to Trinity-RFT's objects: it calls the methods of the user's Trainer and of its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trivium import trainer as core
from trivium.checkpoint.background import BackgroundSaver
from trivium.foundation.errors import ConfigError, RunDirError, TriviumError
from trivium.frontdoors.trinity.objects.experiences import Experience, Experiences
from trivium.frontdoors.trinity.objects.run_parts import RunParts
from trivium.frontdoors.trinity.objects.train_engine import EngineCalls, TrainEngineWrapper, step_result, takes_list
from trivium.frontdoors.trinity.objects.verl_wrapper import RunState, VerlPPOTrainerWrapper
from trivium.protocols import MeasuringEngine, Objective, RecordingEngine, TrainEngine, WeightOffer
from trivium.step_report import examples_of
from trivium.types import Batch, FloatArray, Group, Metrics

if TYPE_CHECKING:
    Keep = Callable[[Batch], None] | None


class WrappedEngine(TrainEngine):
    """Adapts a TrainEngineWrapper to the core's trainer. Calls only the seven members of the interface on a user's
    engine."""

    def __init__(self, wrapper: TrainEngineWrapper, run: RunParts, sync_method: str) -> None:
        """`sync_method` names the method of the wrapper that offers the weights."""
        self.wrapper, self._run, self._sync_method = wrapper, run, sync_method
        self.algorithm = run.algorithm
        self.calls = EngineCalls()
        self.goes_on = True
        """Whether the last train step asked to continue."""

    @property
    def built_in(self) -> VerlPPOTrainerWrapper | None:
        return self.wrapper if isinstance(self.wrapper, VerlPPOTrainerWrapper) else None

    def prepare(self) -> None:
        self.calls(self.wrapper.prepare)
        step, name = self.wrapper.train_step_num, type(self.wrapper).__name__
        expected = 0 if self._run.latest is None else self._run.latest.step
        if step != expected:
            raise RunDirError(
                f"continue {self._run.stage.run_dir} at its step {expected}",
                f"{name} is at step {step} after prepare()",
                f"load in {name}.prepare() what save_checkpoint() saved at that step, or choose another run directory",
            )

    def load(self, directory: Path) -> None:
        """Prepares the engine, which loads its own checkpoint."""
        self.prepare()

    def train_on(self, groups: Sequence[Group], keep: Keep) -> Metrics:
        """Runs one train step of the wrapper. Blocks."""
        before, (batch, metrics) = self.wrapper.train_step_num, self.experiences(groups)
        if (built_in := self.built_in) is not None:
            built_in.keep = keep
        elif keep is not None:
            keep(batch.batch)
        self.goes_on, reported = self.train_on_batch(batch)
        if self.wrapper.train_step_num != before + 1:
            raise TriviumError(
                f"a train step of {type(self.wrapper).__name__}",
                f"train_step_num was {before} before it and is {self.wrapper.train_step_num} now",
                "count one train step for each train_step()",
            )
        return {**metrics, **reported}

    def train_on_batch(self, batch: Experiences | list[Experience]) -> tuple[bool, Metrics]:
        """Calls the wrapper's `train_step`. Returns (whether to continue, metrics). Blocks."""
        verb = self.wrapper.train_step
        argument = list(batch) if takes_list(verb) or isinstance(batch, list) else batch
        return step_result(self.wrapper, self.calls(verb, argument))

    def experiences(self, groups: Sequence[Group]) -> tuple[Experiences, Metrics]:
        """Returns the input of the wrapper's `train_step` for these groups. A user's engine gets advantages unless the
        estimator reads scores of a model; the built-in engine computes its own."""
        remaining, metrics = self.algorithm.filter(groups)
        batch = self.algorithm.batch(remaining)
        if self.built_in is None and not self._run.algorithm.advantage_needs:
            batch, of_advantages = self.algorithm.advantages(batch)
            metrics = {**metrics, **of_advantages}
        return Experiences(batch, self._run.pad_token_id), metrics

    def offer_weights(self) -> WeightOffer:
        wrapper = self.wrapper
        verbs = {"memory": wrapper.upload_state_dict, "checkpoint": wrapper.save_state_dict}
        verb = verbs.get(self._sync_method, wrapper.sync_weight)
        self.calls(verb)
        version = wrapper.train_step_num
        if version in self._run.synchronizer.published or not self._run.stage.num_explorers:
            # Without explorers, the engine alone decides where the weights go.
            return WeightOffer(True, getattr(self._run.channel, "offered", ""))
        if self._run.synchronizer.collective:
            return WeightOffer(False)
        call = "self.synchronizer.set_model_state_dict(state_dict, step)"
        if self._run.actor is not None:
            call = "ray.get(self.synchronizer.set_model_state_dict.remote(state_dict, step))"
        raise TriviumError(
            f"the weights of step {version} from {type(wrapper).__name__}.{verb.__name__}()",
            f"the board has versions {list(self._run.synchronizer.published)}",
            f"hand them over there: {call}",
        )

    @property
    def holds_version(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """For a user's engine, always True: `save_before_end` compares its `train_step_num` instead."""
        return self.built_in is None or self._inner.holds_version

    def close(self) -> None:
        if self.built_in is not None:
            self.built_in.shutdown()
        self.calls.close()

    # ------------------------------------------------------------------ the built-in engine only

    @property
    def _inner(self) -> TrainEngine:
        if self.built_in is None or self.built_in.engine is None:
            raise ConfigError(
                f"the models of {type(self.wrapper).__name__}",
                "an engine of Trinity's interface shows none",
                "leave evaluation.held_out out, or use trainer_type verl",
            )
        return self.built_in.engine

    def score(self, batch: Batch, what: str) -> Sequence[FloatArray]:
        return self._inner.score(batch, what)

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        return self._inner.update(role, batch, objective)

    def measure(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        inner = self._inner
        assert isinstance(inner, MeasuringEngine)
        return inner.measure(role, batch, objective)

    def take_updates(self) -> Batch | None:
        """What the updates of the built-in engine recorded. A user's engine records nothing."""
        inner = None if self.built_in is None else self.built_in.engine
        return inner.take_updates() if isinstance(inner, RecordingEngine) else None

    def export_weights(self) -> Iterator[tuple[str, Any]]:
        return self._inner.export_weights()

    def save(self, directory: Path, on_copied: Callable[[], object] | None = None) -> None:
        self._inner.save(directory, on_copied)


class Owner(Protocol):
    """The user's Trainer."""

    @property
    def train_step_num(self) -> int: ...
    def need_sync(self) -> bool: ...
    def sync_weight(self) -> None: ...
    async def train_step(self) -> bool: ...
    def save_checkpoint(self, block_until_saved: bool = False) -> object: ...
    def _log_experiences(self, samples: list[dict[str, Any]]) -> None: ...


class _OwnersSaver(BackgroundSaver):
    """Saves by calling the owner's `save_checkpoint`."""

    def __init__(self, trainer: CoreTrainer) -> None:
        saver = trainer.saver
        super().__init__(saver.store, trainer.engine, asynchronous=saver.asynchronous, every=saver.every)
        self._trainer = trainer

    async def save(self, step: int, state: Mapping[str, Any], write_more: Callable[[Path], None]) -> None:
        self.step, self._trainer.pending_state = step, RunState(state, write_more)
        try:
            # In a thread: the method is the user's, and may block.
            await asyncio.to_thread(self._trainer.owner.save_checkpoint, not self.asynchronous)
        except Exception:
            self.failed = True
            raise
        finally:
            self._trainer.pending_state = None

    async def wait(self) -> None:
        built_in = self._trainer.wrapped.built_in
        if built_in is not None:
            await asyncio.to_thread(built_in.wait_for_save)


@dataclass
class CoreTrainer(core.Trainer):
    """A trainer that calls the methods of its owner."""

    owner: Any = None
    """The user's Trainer (`Owner`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.engine, WrappedEngine)
        self.wrapped = self.engine
        # The owner's methods for weights are called without explorers, too.
        self.publisher.keeps_versions = not self.synchronizer.collective
        self.saver = _OwnersSaver(self)
        self.pending_state: RunState | None = None
        """The state to store with the save in progress."""
        self._is_started = False
        self._moving: Mapping[str, Any] = {}
        """The parts of the state that a step changes, as of the last step."""
        if self.wrapped.built_in is not None:
            self.wrapped.built_in.state_of_run = self.run_state

    @property
    def train_step_num(self) -> int:
        return self.owner.train_step_num

    def need_sync(self) -> bool:
        return self.owner.need_sync()

    def sync_weight(self) -> None:
        self.owner.sync_weight()

    def _preview(self, examples: Sequence[dict[str, Any]]) -> None:
        self.owner._log_experiences(list(examples))

    async def start(self) -> None:
        if not self._is_started:
            self._is_started = True
            await super().start()
            self._moving = await self._moving_state()

    async def train_step(self) -> bool:
        await self.start()
        going_on = await self.owner.train_step() and self.wrapped.goes_on
        self.train_continue = going_on and self.train_step_num < self.last_step
        self._moving = await self._moving_state()
        return self.train_continue

    async def save_before_end(self) -> None:
        """Saves the last step also if it failed after it had changed the weights, in logging for example."""
        step = self._thread.step
        if step is not None and step.version != self.train_step_num:
            self._thread.step = None  # the update is complete, so its weights are saved like those of a logged step
        await super().save_before_end()

    def _learn(self, groups: Sequence[Group]) -> core.Learn:
        return partial(self.wrapped.train_on, groups)

    def run_state(self) -> RunState:
        """Returns the content of this step's checkpoint beside the engine's."""
        return self.pending_state or RunState(*self._contents(self._moving))

    # ------------------------------------------------------------------ default behaviour of the owner's methods

    async def default_train_step(self) -> bool:
        await self.start()
        return await super().train_step() and self.wrapped.goes_on

    def default_need_sync(self) -> bool:
        return super().need_sync()

    def default_sync_weight(self) -> None:
        super().sync_weight()

    def default_preview(self, examples: Sequence[dict[str, Any]]) -> None:
        super()._preview(examples)

    async def sample(self, version: int) -> tuple[Experiences, Metrics, list[dict[str, Any]]]:
        """Returns (the experiences of the next step, metrics, rollouts to show)."""
        await self.start()
        groups = await self._groups(version)
        return self.wrapped.experiences(groups.all)[0], groups.metrics, examples_of(groups.fresh)
