"""VerlPPOTrainerWrapper: the built-in engine of Trinity-RFT's Trainer, on top of Trivium's train engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trivium.buffers.slots import SlotsState
from trivium.checkpoint.background import save_failed
from trivium.checkpoint.store import export
from trivium.foundation.errors import ConfigError, TriviumError
from trivium.foundation.registry import resolve
from trivium.frontdoors.trinity.objects.experiences import Experience, Experiences, batch_of
from trivium.frontdoors.trinity.objects.run_parts import RunParts, engine_kind, parts_in, run_config_of
from trivium.frontdoors.trinity.objects.train_engine import TrainEngineWrapper
from trivium.loops import train_step
from trivium.planning.memory_estimate import kept_versions
from trivium.protocols import TrainEngine, WeightChannel
from trivium.runtime.build import build_schedule
from trivium.runtime.run_dir import as_saved, open_run_dir
from trivium.training.engine import TorchTrainEngine
from trivium.types import TRAINER, Batch, Metrics, SyncMethod, capabilities_of


class UnknownTrainer(ConfigError, NotImplementedError):
    """A `trainer_type` that is neither `verl` nor a class of the user."""


@dataclass(frozen=True)
class RunState:
    """The state that a Trainer adds to a checkpoint of its engine."""

    state: Mapping[str, Any]
    write: Callable[[Path], None]


class VerlPPOTrainerWrapper(TrainEngineWrapper):
    """Holds the policy and, if the algorithm requires them, critic, reward model, reference and teacher: in this
    process, or over the `cluster.ranks` ranks on Ray."""

    Config = TorchTrainEngine.Config

    def __init__(self, global_config: object) -> None:
        """`global_config` has Trinity's shape, or is a RunConfig. The constructor starts and loads nothing."""
        self.config = global_config
        self.run: RunParts | None = None
        """The run of the engine: that of a Trainer, or one that `init_workers` opens."""
        self.engine: TrainEngine | None = None
        self.state_of_run: Callable[[], RunState] | None = None
        """Returns the state that a Trainer adds to every checkpoint."""
        self.keep: Callable[[Batch], None] | None = None
        """Gets the experiences of a step with all computed columns, before the first update."""
        self._writer = ThreadPoolExecutor(1, "trivium-save")
        self._writing: Future[None] | None = None
        self._saving_step = -1
        """The step of the save that began last."""

    # ------------------------------------------------------------------ the start

    def init_workers(self) -> None:
        """Starts the ranks, if the config has several. Raises ConfigError if the cluster is too small."""
        if self.engine is not None:
            raise TriviumError("init_workers()", "the workers are there already", "call it once; prepare() calls it")
        if self.run is None:
            config = as_saved(run_config_of(self.config))
            with open_run_dir(config) as run_dir:
                self.run = parts_in(run_dir, config, ExitStack())
        self.engine = self.run.train_engine()

    async def prepare(self) -> None:
        """Loads the models, and the latest checkpoint of the run directory if there is one, in a thread."""
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        if self.engine is None:
            self.init_workers()
        run, engine = self._prepared()
        engine.prepare()
        if run.latest is not None:
            engine.load(run.latest.path)
        if self.state_of_run is None:  # otherwise, the Trainer does this
            if run.latest is not None:
                run.channel.restore(run.latest.path / "versions")
                run.algorithm.restore(run.latest.state["algorithm"])
            run.open_board()

    @property
    def train_step_num(self) -> int:
        """The number of train steps taken."""
        return self.engine.version if self.engine is not None else 0

    @cached_property
    def processor(self) -> Any:
        """The processor of the model's images; None for a text-only model."""
        if self.run is None:
            self.init_workers()
        model_dir = self._prepared()[0].stage.model_dir
        if not any((model_dir / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
            return None
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(model_dir)

    # ------------------------------------------------------------------ training

    async def train_step(  # pyright: ignore[reportIncompatibleMethodOverride]  (each API document has its name)
        self, batch_exps: Experiences | list[Experience]
    ) -> Metrics:
        """Takes one step in a thread, and returns its metrics. Raises DataError for anything but experiences."""
        run, engine = self._prepared()
        return await asyncio.to_thread(train_step, engine, batch_of(batch_exps), run.algorithm, self.keep)

    def post_process_batch(self, batch: Any) -> Any:
        """Returns the batch unchanged: the model computes the positions of text and images itself."""
        return batch

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, block_until_saved: bool = False, save_as_hf: bool = False) -> None:
        """Saves this step among the run's checkpoints, unless it is saved already. `checkpoint.keep` limits the kept
        checkpoints.

        Returns once training may continue or, with `block_until_saved`, once the save is complete. `save_as_hf` also
        writes the policy to `huggingface/step-N` in the run directory, as a Hugging Face directory that is never
        removed. Waits for the previous save first, and raises its error.
        """
        run, engine = self._prepared()
        step, held = engine.version, threading.Event()
        self.wait_for_save()
        saved = step in run.store.steps()
        added = self._run_state() if self.state_of_run is None else self.state_of_run()

        def write(directory: Path) -> None:
            added.write(directory)
            engine.save(directory, None if block_until_saved else held.set)

        def save() -> None:
            try:
                if not saved:
                    asyncio.run(run.store.save(step, write, added.state))
                out = run.stage.run_dir / "huggingface" / f"step-{step:06d}"
                if save_as_hf and not out.is_dir():
                    export(run.store.open(step), out)
            finally:
                held.set()

        if not saved or save_as_hf:
            self._saving_step, self._writing = step, self._writer.submit(save)
            held.wait()
            if block_until_saved:
                self.wait_for_save()

    def wait_for_save(self) -> None:
        """Waits until the save in progress is complete. Raises RunDirError if it failed."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except TriviumError:
            raise
        except Exception as error:
            raise save_failed(self._saving_step, error) from error

    def _run_state(self) -> RunState:
        """Returns the state of a run without a Trainer, which took its groups in order."""
        run, engine = self._prepared()
        schedule = build_schedule(run.stage)
        consumed = engine.version * schedule.fresh_per_step
        explored = capabilities_of(resolve("buffers", run.stage.config.buffer.kind)).explored
        state: dict[str, Any] = {
            "version": engine.version,
            "stage": 0,
            "pinned": [],
            "score": None,
            "evaluated": None,
            "measured": None,
            "counts": {},
            "buffer": replace(SlotsState.of(None), consumed_below=consumed).to_json() if explored else {},
            "strategy": {},
            "algorithm": run.algorithm.state(),
            "monitor": {},
        }
        return RunState(state, lambda directory: None)

    # ------------------------------------------------------------------ weights

    def sync_weight(self) -> None:
        """Offers the weights to the explorers by `sync.method`, and publishes their version if they were delivered or
        can be fetched. Blocks."""
        run, engine = self._prepared()
        if engine.offer_weights().delivered:
            run.synchronizer.publish(engine.version, run.channel.versions)

    def upload_state_dict(self) -> None:
        """Offers the weights like `sync_weight`; with method `memory`, explorers fetch the version."""
        self.sync_weight()

    def save_state_dict(self) -> None:
        """Writes a version to files. With method `checkpoint`, explorers fetch it."""
        run, engine = self._prepared()
        if run.stage.config.sync.method == SyncMethod.CHECKPOINT:
            self.sync_weight()
        else:
            self._files.offer(engine.version, engine.export_weights())

    @cached_property
    def _files(self) -> WeightChannel:
        run = self._prepared()[0]
        return resolve("channels", SyncMethod.CHECKPOINT)(
            keep=kept_versions(run.stage.config),
            directory=run.stage.run_dir / "sync",
            synchronizer=run.synchronizer,
            role=TRAINER,
        )

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Completes the save in progress, frees the models and ends the ranks."""
        try:
            self.wait_for_save()
        finally:
            self._writer.shutdown()
            if self.engine is not None:
                self.engine.close()
            if self.run is not None and self.state_of_run is None:
                self.run.closing.close()

    def _prepared(self) -> tuple[RunParts, TrainEngine]:
        if self.run is None or self.engine is None:
            raise TriviumError(f"{type(self).__name__}", "its workers are not there", "await prepare() first")
        return self.run, self.engine


def get_trainer_wrapper(config: object) -> TrainEngineWrapper:
    """Returns the engine of a config: the user's (`trainer.trainer_type`, `train.kind`), or the built-in one.

    Raises UnknownTrainer, a ConfigError and a NotImplementedError, for a type that is neither.
    """
    try:
        kind = engine_kind(config, run_config_of(config))
    except ConfigError as error:
        if any(problem.where == "trainer.trainer_type" for problem in error.problems):
            raise UnknownTrainer(error.asked, error.found, error.do, error.problems) from error
        raise
    target = resolve("train", kind)
    if isinstance(target, type) and issubclass(target, TrainEngineWrapper):
        return target(config)  # pyright: ignore[reportCallIssue]  (a user's class takes the config)
    if isinstance(target, type) and issubclass(target, TrainEngine):
        return VerlPPOTrainerWrapper(config)
    raise UnknownTrainer(
        f"the train engine {kind!r}",
        f"{getattr(target, '__name__', target)} is no TrainEngineWrapper",
        "derive it from trivium.frontdoors.trinity.TrainEngineWrapper",
    )
