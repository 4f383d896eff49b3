"""Trainer: groups in, one new policy version out; decides what is evaluated, logged and saved."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from trivium.checkpoint.run_record import RunRecord
from trivium.evaluate import Measurements
from trivium.explorer import check_failures, described_failure
from trivium.foundation.concurrency import interrupted
from trivium.foundation.errors import RolloutsFailing, TriviumError
from trivium.foundation.metrics import aggregate, declare_missing, declared
from trivium.foundation.phases import TRAINER_LANE, TRAINING_S, activity, add_span, span
from trivium.loops import held_out_loss, train_loop, train_step
from trivium.protocols import RecordingEngine
from trivium.schedule import num_replaced
from trivium.step_report import examples_of, origin, staleness, step_row
from trivium.types import TRAINER, Group, Sample, capabilities_of

if TYPE_CHECKING:
    from pathlib import Path

    from trivium.checkpoint.background import BackgroundSaver
    from trivium.checkpoint.store import Checkpoint
    from trivium.evaluate import HeldOut, RemoteEvaluator
    from trivium.foundation.board import Values
    from trivium.protocols import Algorithm, Buffer, Monitor, SampleStrategy, TrainEngine
    from trivium.publisher import Publisher
    from trivium.schedule import Schedule
    from trivium.synchronizer import Synchronizer
    from trivium.types import Batch, Metrics

T = TypeVar("T")
Keep = Callable[["Batch"], None]
"""Gets the experiences of a step with their computed columns, before the first update."""
Waiting = Callable[[Awaitable[Sample]], Awaitable[Sample]]
"""Awaits a sample, and does meanwhile what explorers need."""
Learn = Callable[[Keep], "Metrics"]
"""Takes a train step, which calls a `Keep`. Blocks."""

_log = logging.getLogger("trivium")
_STEP_ENDS_S = 10.0
"""How long the end of a run waits for the thread of a train step after an error. The step may hang then."""
_INTERRUPTED_STEP_ENDS_S = 300.0
"""How long it waits after Ctrl-C. A process waits for its threads as long, and a second Ctrl-C ends it at once."""


class StepGroups(NamedTuple):
    """The groups of a train step."""

    all: list[Group]
    """Refused groups included: `train_step` filters them again and counts them."""
    fresh: list[Group]
    """Those of them that were rolled out for this step."""
    metrics: Metrics
    """Where they come from."""


class _InProgress(NamedTuple):
    """A train step that has begun and has not been logged."""

    version: int
    """The version it starts from."""
    before: Mapping[str, Any]
    """The state before it of what it changes; empty if that version has a checkpoint."""


class StepKeeper(Protocol):
    """Keeps what train steps take and compute."""

    @property
    def keeps_updates(self) -> bool:
        """Whether `updates` is to be called."""
        ...

    def step(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Called in every train step with its groups and its experiences with their computed columns, before the first
        update."""
        ...

    def updates(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Called in the same way after the updates, with the columns of `take_updates`, if the engine recorded them."""
        ...


@dataclass
class Preview:
    """Rollouts that are logged as a table (`rollout_examples`) at the next sync step."""

    enabled: bool = False
    """Whether each train step adds some of its own."""
    examples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass
class GroupSource:
    """Takes the groups of train steps from the buffer."""

    buffer: Buffer
    strategy: SampleStrategy
    max_failed_fraction: float = 1.0
    """The largest fraction of a step's trajectories that may fail."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Groups that were not trained on until the last row of metrics, by reason."""

    async def take(self, version: int, wanted: int, algorithm: Algorithm, waiting: Waiting) -> StepGroups:
        """The groups of a step; replaces groups that the algorithm's filter refuses. `waiting` awaits each sample.

        Raises RolloutsFailing when too many of the step's trajectories failed.
        """
        missing, rows = wanted, list[dict[str, float]]()
        groups, fresh = list[Group](), list[Group]()
        for refills in reversed(range(algorithm.refill + 1)):
            sample = await waiting(self.strategy.sample(missing, version))
            groups += sample.groups
            fresh += [group for group in sample.groups if group.slot not in sample.stored_slots]
            rows.append({f"sample/{name}": value for name, value in sample.metrics.items()})
            declare_missing(rows[-1], "a number that the sample strategy reported")
            await self._check_failures(fresh, version)
            missing = wanted - len(algorithm.filter(groups)[0])
            if not (missing and refills):
                break
            await self.strategy.refuse(missing)
        if missing == wanted:
            _log.warning("step %d: all %d groups were refused, there is nothing to learn", version + 1, len(groups))
        return StepGroups(groups, fresh, aggregate(rows) | origin(groups))

    async def _check_failures(self, fresh: Sequence[Group], version: int) -> None:
        """Raises RolloutsFailing if too many trajectories of the step failed; a resumed run retries them."""
        try:
            check_failures(fresh, self.max_failed_fraction, f"step {version + 1}")
        except RolloutsFailing as error:
            await self.buffer.retry_on_resume(error.slots)
            raise

    async def counted(self) -> Metrics:
        """Groups since the last row of metrics that were not trained on, by reason."""
        before, self.counts = self.counts, await self.buffer.counts()
        counted = (name for name in self.counts if name != "refused")  # the filter counts these
        return {f"rollout/{name}": self.counts[name] - before.get(name, 0) for name in counted}

    async def state(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "buffer": await self.buffer.state(), "strategy": self.strategy.state()}


@dataclass
class Trainer:
    """Consumes groups and trains the policy."""

    engine: TrainEngine
    groups: GroupSource
    publisher: Publisher
    schedule: Schedule
    monitor: Monitor
    saver: BackgroundSaver
    measurements: Measurements = field(default_factory=Measurements)
    record: RunRecord = field(default_factory=RunRecord)
    """Further state of the run for checkpoints and summary: stage, accuracies, seconds by phase."""
    resume: Checkpoint | None = None
    """The checkpoint of this stage to continue from."""
    keep: StepKeeper | None = None
    preview: Preview = field(default_factory=Preview)
    before_learning: Callable[[], Awaitable[None]] | None = None
    """Called once the groups of a step have arrived: a rollout engine frees the device that it shares."""
    name: ClassVar[str] = TRAINER

    def __post_init__(self) -> None:
        self.train_continue = True
        self._reached = False
        """Whether the threshold of `schedule.until` has been crossed."""
        self._thread = StepThread()

    # ------------------------------------------------------------------ a stage, from its start to its end

    def prepare(self) -> None:
        """Loads the models, and the checkpoint to resume from if there is one."""
        with activity("loading the trainer's models"):
            if self.resume is None:
                self.engine.prepare()
            else:
                self.engine.load(self.resume.path)
                self.publisher.channel.restore(self.resume.path / "versions")
        if self.resume is not None:
            state = self.resume.state
            self.engine.algorithm.restore(state["algorithm"])
            self.saver.step = self.resume.step
            self.measurements.restore(state)
        self.publisher.last_trainer_sync_step = self.train_step_num

    async def train(self) -> str:
        """Trains until the stage is done, and closes the buffer; returns the trainer's name."""
        await train_loop(self)
        return self.name

    async def start(self) -> None:
        """Restores the buffer, publishes the version that explorers start from; evaluates at the start of a stage."""
        state: Mapping[str, Any] = self.resume.state if self.resume is not None else {}
        version, is_first = self.train_step_num, self.train_step_num == self.schedule.first_version
        await self.buffer.restore(state.get("buffer"), version)
        # A buffer without slot order restores nothing that newer versions sampled.
        await self.publisher.earlier_rollouts.start(version, ordered=self.schedule.ordered)
        await self.groups.strategy.restore(state.get("strategy", {}))
        self.groups.counts = state.get("counts", {})  # later counts belong to the next step's row
        if self.resume is None:
            self._draw_tasks(None)
        elif (curriculum := self.schedule.adaptive) is not None:
            curriculum.restore(state["curriculum"])
            self.synchronizer.publish_draws(curriculum.draws)
        self.publisher.publish_held()
        measurements = self.measurements
        evaluator, held_out, cadence = measurements.evaluator, measurements.held_out, measurements.cadence
        if self.publisher.starts_from(version) and (self.publisher.is_followed or evaluator is not None):
            await asyncio.to_thread(self.sync_weight)
        if is_first and evaluator is not None and cadence.ends and not cadence.skip_start:
            is_known = measurements.evaluated == version  # by the stage before
            measured = self.record.last_evaluation() if is_known else await self._evaluate(evaluator)
            self.record.add_evaluation(measured, "before", "after")
        if is_first and held_out is not None:
            measured = await self._measure(held_out)
            self.record.values |= {"held_out_before": measured, "held_out_after": measured}
        self._reached = state.get("reached", False)
        self.train_continue = version < self.last_step and not self._reached
        if state.get("interrupted"):
            await self.end_step()

    async def end_step(self) -> None:
        """Evaluates and saves a checkpoint, if either is due. Raises the error of the previous save."""
        self.saver.look()
        evaluator, held_out = self.measurements.evaluator, self.measurements.held_out
        if self.evaluation_due and evaluator is not None:
            self.record.add_evaluation(await self._evaluate(evaluator), "after")
        if held_out is not None and self._is_due(self.measurements.held_out_due):
            self.record.values["held_out_after"] = await self._measure(held_out)
        if self.saver.is_due(self.train_step_num):
            await self.save_checkpoint()

    async def finish(self) -> None:
        """Saves the last step, unless it has a checkpoint, and waits for the save."""
        self._show_examples()
        if self.saver.step != self.train_step_num:
            await self.save_checkpoint()
        await self.wait_for_save()
        self.record.end_row(self.record.phases)  # of phases after the row of the last step

    async def shutdown(self) -> None:
        """Closes the monitor and frees the engine."""
        self.monitor.close()
        self.engine.close()

    def is_alive(self) -> bool:
        """True: the call itself shows that the process is alive."""
        return True

    # ------------------------------------------------------------------ a train step

    @asynccontextmanager
    async def step_in_progress(self) -> AsyncGenerator[None]:
        """Keeps the state from before the `train_step` in the block, so that a failure can still save the previous
        step."""
        version = self.train_step_num
        has_checkpoint = self.saver.step == version
        # A copy, since the step changes these objects in place.
        before = {} if has_checkpoint else copy.deepcopy(await self._moving_state())
        self._thread.step = _InProgress(version, before)
        yield
        # Not in a `finally`: after an error, `save_before_end` reads the step that failed.
        self._thread.step = None
        if self._thread.was_cancelled:
            raise asyncio.CancelledError

    async def train_step(self) -> bool:
        """Takes groups, trains on them, logs. Returns whether to continue: False at the stage's last step and at the
        end of the data.

        Raises RolloutsFailing when too many of the step's trajectories failed.
        """
        schedule, version = self.schedule, self.train_step_num
        progress = activity(
            f"step {version + 1}: rollouts", schedule.rollouts_per_step, groups=schedule.groups_per_step
        )
        # Explorers may have rolled out this step's groups during an evaluation. `_evaluate` counted those seconds as
        # "wait", and they belong to this step.
        started = time.monotonic() - self.record.phases.get("wait", 0.0)
        try:
            with self._timed("wait"), progress:
                groups = await self._groups(version)
        except StopAsyncIteration:
            _log.info("the data ended at step %d", version)
            self.train_continue = False
            return False
        with self._timed("train"), activity(f"step {version + 1}: training", None, "micro-batches"):
            if self.before_learning is not None:
                await self.before_learning()
            keep = None if self.keep is None else partial(self.keep.step, version + 1, groups.all)
            metrics = await self._thread.run(self._learn(groups.all), keep)
            if self.keep is not None and self.keep.keeps_updates and isinstance(self.engine, RecordingEngine):
                keep = partial(self.keep.updates, version + 1, groups.all)
                await asyncio.to_thread(_keep_updates, self.engine, keep)
        self.measurements.score = None  # this step has not been evaluated yet
        metrics |= groups.metrics | staleness(groups.fresh, version) | await self._counted(version)
        metrics |= self.schedule.learn(groups.fresh)
        self._draw_tasks(version)
        row = step_row(metrics, self.record.phases, groups.fresh, time.monotonic() - started)
        self._log_step(row, groups.fresh)
        self._end_where_reached(row)
        self.publisher.ask_for_sync(self.train_step_num)
        return self.train_continue

    async def _groups(self, version: int) -> StepGroups:
        """Takes the groups of a step from the buffer."""
        await self.publisher.verify_earlier(version)
        wanted, algorithm = self.schedule.groups_per_step, self.engine.algorithm
        return await self.groups.take(version, wanted, algorithm, self._wait_for_explorers)

    def _learn(self, groups: Sequence[Group]) -> Learn:
        """What the thread of a step calls: trains on its groups, which makes one new version."""
        return partial(train_step, self.engine, groups, self.engine.algorithm)

    def _log_step(self, row: Metrics, fresh: Sequence[Group]) -> None:
        """Logs the row of a step, and adds its seconds and failed rollouts to the record of the run."""
        self.record.end_row({key.removeprefix("time/"): row[key] for key in row if key.startswith("time/")})
        failures = (t.failure for group in fresh for t in group.rollouts if t.failure is not None)
        self.record.add_failures(map(described_failure, failures))
        if "reward/mean" in row and "train/preference_accuracy" not in row:  # pairs have rewards of 1 and 0
            self.record.values["rewards"] = [*self.record.values.get("rewards", ()), row["reward/mean"]]
        self.synchronizer.report_step(self.train_step_num)
        self.monitor.log(self.train_step_num, row)
        if self.preview.enabled:
            self._preview(examples_of(fresh))

    async def _counted(self, version: int) -> Metrics:
        """Groups since the last step that were not trained on, by reason, and the fields that `--change` changed."""
        metrics, earlier = await self.groups.counted(), self.publisher.earlier_rollouts
        if changed := self.record.num_changed_fields(version):
            metrics["train/changed_fields"] = changed
        if earlier.num_discarded:
            metrics["rollout/discarded"], earlier.num_discarded = earlier.num_discarded, 0
        return metrics

    def _draw_tasks(self, version: int | None) -> None:
        """Draws and publishes the tasks of the slots that no version up to `version` admits, where a curriculum learns;
        None: of the first slots."""
        if (curriculum := self.schedule.adaptive) is not None:
            self.schedule.draw_tasks(version, num_replaced(self.groups.counts))
            self.synchronizer.publish_draws(curriculum.draws)

    def _end_where_reached(self, metrics: Metrics) -> None:
        """Ends the stage at its last step, or at this step if its metrics cross the threshold of `schedule.until`."""
        self._reached |= self.schedule.ends_with(metrics)
        self.train_continue = self.train_step_num < self.last_step and not self._reached

    # ------------------------------------------------------------------ publishing

    def need_sync(self) -> bool:
        """Whether the current version is to be published now."""
        return self._sync_due(self.synchronizer.board.read())

    def _sync_due(self, values: Values) -> bool:
        return self.publisher.is_due(self.train_step_num, values, is_needed=self.evaluation_due)

    def sync_weight(self) -> None:
        """Offers the current weights to the channel and, if they were delivered, publishes their version. Blocks."""
        with self._timed("sync"), activity(f"publishing version {self.train_step_num}"):
            is_delivered = self.publisher.offer(self.train_step_num)
        if is_delivered:
            self._show_examples()

    async def _wait_for_explorers(self, result: Awaitable[T]) -> T:
        """The result of explorers' work. Publishes weights meanwhile to explorers that cannot continue without."""

        async def sync_if_due() -> None:
            if self.need_sync():
                await asyncio.to_thread(self.sync_weight)

        return await self.publisher.wait_for_explorers(result, self._sync_due, sync_if_due, self.saver)

    def _preview(self, examples: Sequence[dict[str, Any]]) -> None:
        self.preview.examples += examples

    def _show_examples(self) -> None:
        if self.preview.examples:
            self.monitor.table(self.train_step_num, "rollout_examples", self.preview.examples)
            self.preview.examples = []

    # ------------------------------------------------------------------ evaluation

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation of the current step is due and has not been done."""
        return self._is_due(self.measurements.evaluation_due)

    def _is_due(self, due: Callable[..., bool]) -> bool:
        """Whether a measurement of this step is due; none is before the first one."""
        version = self.train_step_num
        return version != self.schedule.first_version and due(version, ended=not self.train_continue)

    async def _evaluate(self, evaluator: RemoteEvaluator) -> dict[str, float]:
        """Logs an evaluation row; returns its mean reward and, unless rewards are graded, its accuracy."""
        version = self.train_step_num
        started = time.monotonic()
        with span(TRAINER_LANE, "evaluate", step=version), activity(f"evaluating {evaluator.taskset}"):
            metrics = dict(await self._wait_for_explorers(evaluator.run(version)))
        self.measurements.evaluated = version
        training_s = metrics.pop(TRAINING_S, 0.0)
        self.record.spend("wait", training_s)
        self._log_evaluation(metrics, time.monotonic() - started - training_s)
        names = ("reward",) if metrics.get(f"eval/{evaluator.taskset}/partial") else ("accuracy", "reward")
        keys = {name: f"eval/{evaluator.taskset}/{name}" for name in names}
        return {name: metrics[key] for name, key in keys.items() if key in metrics}

    async def _measure(self, held_out: HeldOut) -> Metrics:
        """Logs and returns the loss over held-out rows, and its further metrics."""
        started, groups = time.monotonic(), await held_out.groups()
        with activity(f"measuring the loss on {held_out.taskset}", None, "micro-batches"):
            metrics = held_out.named(await asyncio.to_thread(held_out_loss, self.engine, groups, self.engine.algorithm))
        self.measurements.measured = self.train_step_num
        self._log_evaluation(metrics, time.monotonic() - started)
        return metrics

    def _log_evaluation(self, metrics: Metrics, seconds: float) -> None:
        self.record.add_seconds({"evaluate": seconds})
        self.monitor.log(self.train_step_num, {**metrics, "time/evaluate": seconds})
        if self.train_step_num > self.schedule.first_version:
            self._end_where_reached(metrics)
        if (best := self.saver.store.keep_best) in metrics:
            self.measurements.score = -metrics[best] if declared(best).better == "down" else metrics[best]

    # ------------------------------------------------------------------ saving

    async def save_checkpoint(self) -> None:
        """Saves the whole state of the run at this step. The checkpoint is complete when this returns or, if the saver
        is asynchronous, when `wait_for_save` returns: training may continue in between.

        Waits for the previous save. Raises the error of either save.
        """
        with self._timed("checkpoint"), activity(f"saving step {self.train_step_num}"):
            await self.wait_for_save()
            # The state is copied between two steps, when nothing changes it; a thread writes it.
            await self._save(await self._moving_state())

    async def _save(self, moving: Mapping[str, Any]) -> None:
        await self.saver.save(self.train_step_num, *self._contents(moving))

    def _contents(self, moving: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """(state, function that writes further files) of a checkpoint of this step, beside the engine's own files."""
        version, channel = self.train_step_num, self.publisher.channel
        oldest = self.schedule.resume_version(version) if capabilities_of(self.buffer).explored else version
        needed = [v for v in channel.versions if oldest <= v < version]  # by slots that are not yet rolled out
        state = {
            **self.run_record,
            "version": version,
            **self.measurements.state(),
            "reached": self._reached,
            **moving,
            "monitor": self.monitor.state(),
        }
        return state, lambda directory: channel.save(directory / "versions", needed)

    async def _moving_state(self) -> dict[str, Any]:
        """The state that a train step changes before it is complete."""
        return {
            **await self.groups.state(),
            "algorithm": self.engine.algorithm.state(),
            "curriculum": None if (curriculum := self.schedule.adaptive) is None else curriculum.state(),
        }

    async def save_before_end(self) -> None:
        """Saves the last complete step of a run that fails or is interrupted, unless it has a checkpoint.

        After a failed train step this is the step before it, if the engine still holds its weights. An error of the
        save is logged, so that it does not replace the first."""
        try:
            await self.wait_for_save()
            if self._thread.is_computing:
                _log.warning("step %d is not saved: the thread of the next step still computes", self.train_step_num)
                return
            # Read after the wait: until then the thread of a step may make a new version.
            version, step = self.train_step_num, self._thread.step
            has_checkpoint = self.saver.failed or version in (self.saver.step, self.schedule.first_version)
            is_unlogged = step is not None and step.version != version  # it updated the weights, and failed then
            if has_checkpoint or is_unlogged or not self.engine.holds_version:
                return
            _log.warning("saving step %d, the last complete one", version)
            await self._save({**await self._moving_state(), "interrupted": True} if step is None else step.before)
            await self.wait_for_save()
        except Exception as error:
            _log.error("the last complete step could not be saved: %s", error)

    async def wait_for_save(self) -> None:
        """Waits for the save in progress; raises its error."""
        await self.saver.wait()

    # ------------------------------------------------------------------ where the run is

    @property
    def buffer(self) -> Buffer:
        return self.groups.buffer

    @property
    def synchronizer(self) -> Synchronizer:
        return self.publisher.synchronizer

    @property
    def train_step_num(self) -> int:
        """Train steps taken so far, earlier stages included."""
        return self.engine.version

    @property
    def last_step(self) -> int:
        """The global step that ends the stage."""
        return self.schedule.first_version + self.schedule.steps

    @property
    def run_record(self) -> dict[str, Any]:
        """The record of the run so far, for later stages, later sessions and the summary."""
        return self.record.current()

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        started = time.monotonic()
        yield
        # The wait belongs to the step after it, whose version does not exist yet.
        add_span(TRAINER_LANE, name, started, time.monotonic(), step=self.train_step_num + (name == "wait"))
        self.record.spend(name, time.monotonic() - started)


def _keep_updates(engine: RecordingEngine, keep: Keep) -> None:
    """Keeps what the updates of the step recorded. Blocks."""
    if (updates := engine.take_updates()) is not None:
        keep(updates)


class StepThread:
    """Takes train steps in a thread, one at a time. A thread cannot be cancelled: when `run` is, the step ends before
    its first update, or runs to its end."""

    def __init__(self) -> None:
        self.was_cancelled = False
        """Whether a step ran to its end although `run` was cancelled."""
        self.step: _InProgress | None = None
        self._computing: asyncio.Future[Metrics] | None = None

    @property
    def is_computing(self) -> bool:
        return self._computing is not None and not self._computing.done()

    async def run(self, learn: Learn, keep: Keep | None) -> Metrics:
        """The metrics that `learn(keep)` returns. If this call is cancelled after the first update has begun, it still
        returns them, and `was_cancelled` is set."""
        cancelled = threading.Event()

        def keep_unless_cancelled(batch: Batch) -> None:
            if cancelled.is_set():
                raise TriviumError("a train step", "another error ends the run", "see its error")
            if keep is not None:
                keep(batch)

        self._computing = step = asyncio.ensure_future(asyncio.to_thread(learn, keep_unless_cancelled))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            cancelled.set()
            # Reads the error of a step that nothing awaits any more, which asyncio would log as never retrieved.
            step.add_done_callback(lambda step: step.cancelled() or step.exception())
            timeout = _INTERRUPTED_STEP_ENDS_S if interrupted.is_set() else _STEP_ENDS_S
            if interrupted.is_set() and not step.done():
                _log.warning("the train step in progress ends first, within %d s; Ctrl-C again gives it up", timeout)
            ended, _ = await asyncio.wait({step}, timeout=timeout)
            if not ended or step.exception() is not None:
                raise
            self.was_cancelled = True
            return step.result()
