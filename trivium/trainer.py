"""Trainer: groups in, one new policy version out; decides when weights travel, what is logged, what is saved."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from trivium.checkpoint.background import BackgroundSaver
from trivium.checkpoint.run_record import add_failures, add_seconds, num_changed_fields, with_evaluation
from trivium.errors import RolloutsFailing, TriviumError
from trivium.explorer import check_failures, described_failure
from trivium.loops import held_out_loss, train_loop, train_step
from trivium.metrics import aggregate, declare_missing, declared
from trivium.phases import TRAINER_LANE, activity, add_span, span
from trivium.run_role import live_explorers
from trivium.synchronizer import weights_requested
from trivium.types import Group, RunningStatus, Sample, SyncStyle, capabilities_of

if TYPE_CHECKING:
    from pathlib import Path

    from trivium.board import Values
    from trivium.checkpoint.store import Checkpoint, CheckpointStore
    from trivium.evaluate import HeldOut, RemoteEvaluator
    from trivium.protocols import Buffer, Monitor, SampleStrategy, TrainEngine, WeightChannel
    from trivium.schedule import Cadence, Schedule
    from trivium.synchronizer import Synchronizer
    from trivium.types import Batch, Metrics

T = TypeVar("T")

_log = logging.getLogger("trivium")
_GRACE_S = 0.2
"""How long a trainer waits for groups before an explorer may be given weights ahead of `sync.interval`."""
_STEP_ENDS_S = 10.0
"""How long the end of a run waits for the thread of a train step."""


@dataclass
class Trainer:
    """Consumes groups and trains the policy."""

    engine: TrainEngine
    buffer: Buffer
    strategy: SampleStrategy
    channel: WeightChannel
    synchronizer: Synchronizer
    schedule: Schedule
    monitor: Monitor
    checkpoints: CheckpointStore
    cadence: Cadence
    evaluator: RemoteEvaluator | None = None
    held_out: HeldOut | None = None
    """Rows to measure the loss over, at the cadence of evaluations."""
    resume: Checkpoint | None = None
    """The checkpoint of this stage to continue from."""
    max_failed_fraction: float = 1.0
    saves_asynchronously: bool = False
    """Whether training continues while a checkpoint is written, if the engine supports it."""
    keeps_versions: bool = False
    """Whether the channel keeps versions for any process: they are published even if no explorer fills the buffer."""
    enable_preview: bool = False
    """Whether a table of rollouts (`rollout_examples`) is logged at every sync step."""
    keep: Callable[[int, Sequence[Group], Batch], None] | None = None
    """Called in every step with (train step, its groups, its experiences with their computed columns)."""
    keep_updates: Callable[[int, Sequence[Group], Batch], None] | None = None
    """Called in the same way after the updates, with the columns of `take_updates`, if the engine recorded them."""
    published: Callable[[int, str], None] | None = None
    """Called with (version, hash of its weights) for every published version."""
    recorded_weights: Mapping[int, str] | None = None
    """The hash of each version that earlier sessions published in this stage: the rollouts that they left count only
    if this session's weights are the same. None: they count without a check."""
    before_learning: Callable[[], Awaitable[None]] | None = None
    """Called once the groups of a step have arrived: a rollout engine frees the device that it shares."""
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further state of the run for checkpoints and summary: stage, accuracies, seconds by phase. JSON values."""
    name: str = "trainer"

    def __post_init__(self) -> None:
        self.train_continue = True
        self.last_sync_step: int | None = None
        self.last_trainer_sync_step = 0
        self.score: float | None = None
        """The value that `checkpoint.keep_best` compares, if this step was evaluated; higher is better."""
        self._starved = False
        """Whether it has waited for explorers for longer than `_GRACE_S`."""
        self._seconds: dict[str, float] = {}
        self._counts: Mapping[str, int] = {}
        self._examples: list[dict[str, Any]] = []
        self.saver = BackgroundSaver(self.checkpoints, self.engine, asynchronous=self.saves_asynchronously)
        self._stepping_from: int | None = None
        """The version that the train step in progress starts from; None between steps."""
        self._learning: asyncio.Future[Metrics] | None = None
        """What the thread of the last train step computes."""
        self._ends = False
        """Whether the run was cancelled while the thread of a train step updated the weights."""
        self._before: Mapping[str, Any] = {}
        """The state before that step of what the step changes; empty if that version has a checkpoint."""
        self._evaluated_step: int | None = None
        self._measured_step: int | None = None
        """The last step at which the held-out loss was measured."""
        self._reached = False
        """Whether the threshold of `schedule.until` has been crossed."""
        self._unverified = dict(self.recorded_weights or {})
        """Of `recorded_weights`, the versions that this session has not reached."""
        self._offered_hash = ""
        """The hash of the weights of `last_sync_step`."""
        self._discarded = 0
        """Groups of earlier sessions that were discarded since the last row of metrics."""
        self._started = time.monotonic()

    def prepare(self) -> None:
        """Loads the models, and the checkpoint to resume from if there is one."""
        with activity("loading the trainer's models"):
            if self.resume is None:
                self.engine.prepare()
            else:
                self.engine.resume(self.resume.path)
                self.channel.restore(self.resume.path / "versions")
        if self.resume is not None:
            self.engine.algorithm.restore(self.resume.state["algorithm"])
            self.saver.step, self._evaluated_step = self.resume.step, self.resume.state["evaluated"]
            self._measured_step = self.resume.state.get("measured")
        self.last_trainer_sync_step = self.train_step_num

    async def train(self) -> str:
        """Trains until the stage is done, and closes the buffer; returns the trainer's name."""
        await train_loop(self)
        return self.name

    async def start(self) -> None:
        """Restores the buffer, publishes the version that explorers start from; evaluates at the start of a stage."""
        state: Mapping[str, Any] = self.resume.state if self.resume is not None else {}
        await self.buffer.restore(state.get("buffer"), self.train_step_num)
        if self.recorded_weights is not None:
            await self._discard(
                max((self.train_step_num, *self._unverified)) + 1, "no hash of their weights is recorded"
            )
        if not self.schedule.ordered:  # its buffer restores nothing that newer versions sampled
            self._unverified = {v: h for v, h in self._unverified.items() if v == self.train_step_num}
        await self.strategy.restore(state.get("strategy", {}))
        self._counts = state.get("counts", {})  # later counts belong to the next step's row
        held = self.channel.versions
        for version in held:
            self.synchronizer.publish(version, held)
        version = self.train_step_num
        followed = capabilities_of(self.buffer).explored or self.evaluator is not None or self.keeps_versions
        started_from = self.schedule.resume_version(version) == version or self.schedule.published(version)
        if followed and (started_from or self.synchronizer.style is not SyncStyle.FIXED):
            await asyncio.to_thread(self.sync_weight)
        starts = self.cadence.evaluate_ends and not self.cadence.skip_start
        at_start = version == self.schedule.first_version and starts
        if at_start and self.evaluator is not None:
            measured = await self._evaluate(self.evaluator)
            self.record = with_evaluation(self.record, measured, "before", "after")
        if version == self.schedule.first_version and self.held_out is not None:
            self.record["held_out_before"] = self.record["held_out_after"] = await self._measure(self.held_out)
        self._reached = state.get("reached", False)
        self.train_continue = self.train_step_num < self.last_step and not self._reached
        if state.get("interrupted"):
            await self.end_step()

    async def take_step(self) -> None:
        """`train_step`; keeps the state from before it, so that a failure can still save the previous step."""
        self._stepping_from = self.train_step_num
        if self.saver.step != self._stepping_from:
            self._before = copy.deepcopy(await self._moving_state())
        await self.train_step()
        self._stepping_from = None
        if self._ends:
            raise asyncio.CancelledError

    async def train_step(self) -> bool:
        """Takes groups, trains on them, logs. Returns whether to continue: False at the stage's last step and at the
        end of the data.

        Raises RolloutsFailing when too many of the step's trajectories failed.
        """
        started, version = time.monotonic(), self.train_step_num
        try:
            with self._timed("wait"), activity(f"step {version + 1}: rollouts", self.schedule.groups_per_step):
                groups, fresh, sampled = await self._groups(version)
        except StopAsyncIteration:
            _log.info("the data ended at step %d", version)
            self.train_continue = False
            return False
        with self._timed("train"), activity(f"step {version + 1}: training"):
            if self.before_learning is not None:
                await self.before_learning()
            metrics = await self._learned(groups, version + 1)
            if self.keep and self.keep_updates:
                await asyncio.to_thread(self._keep_seen, partial(self.keep_updates, version + 1, groups))
        self.score = None  # this step has not been evaluated yet
        metrics |= sampled | self._staleness(fresh, version) | await self._counted()
        if changed := num_changed_fields(self.record, version):
            metrics["train/changed_fields"] = changed
        if self._discarded:
            metrics["rollout/discarded"], self._discarded = self._discarded, 0
        metrics |= {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["time/step"] = time.monotonic() - started
        metrics["perf/idle"] = self._seconds.get("wait", 0.0) / max(metrics["time/step"], 1e-9)
        seconds = {name.removeprefix("time/"): metrics[name] for name in metrics if name.startswith("time/")}
        add_seconds(self.record, seconds)
        failures = (t.failure for group in fresh for t in group.rollouts if t.failure is not None)
        add_failures(self.record, map(described_failure, failures))
        sampled_tokens = sum(trajectory.num_tokens for group in fresh for trajectory in group.rollouts)
        metrics["perf/rollout_tokens_per_second"] = sampled_tokens / metrics["time/step"]
        self._seconds.clear()
        self.synchronizer.report_step(self.train_step_num)
        self.monitor.log(self.train_step_num, metrics)
        if self.enable_preview:
            self._preview(examples_of(fresh))
        self._end_where_reached(metrics)
        self._ask_for_sync()
        return self.train_continue

    def _end_where_reached(self, metrics: Metrics) -> None:
        """Ends the stage at its last step, or at this step if its metrics cross the threshold of `schedule.until`."""
        self._reached |= self.schedule.ends_with(metrics)
        self.train_continue = self.train_step_num < self.last_step and not self._reached

    async def _learned(self, groups: Sequence[Group], step: int) -> Metrics:
        """The metrics of a train step, which a thread takes. A thread cannot be cancelled: when this call is, the
        thread ends before its first update, or runs to the end of the step, and `take_step` is cancelled after it."""
        cancelled = threading.Event()
        keep = partial(self._before_updates, cancelled, step, groups)
        self._learning = asyncio.ensure_future(asyncio.to_thread(self._learn, groups, keep))
        try:
            return await asyncio.shield(self._learning)
        except asyncio.CancelledError:
            cancelled.set()
            self._learning.add_done_callback(lambda learning: learning.cancelled() or learning.exception())
            ended, _ = await asyncio.wait({self._learning}, timeout=_STEP_ENDS_S)
            if not ended or self._learning.exception() is not None:
                raise
            self._ends = True
            return self._learning.result()

    def _before_updates(self, cancelled: threading.Event, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Called by the thread of a train step once nothing but the updates is left to do."""
        if cancelled.is_set():
            raise TriviumError(f"train step {step}", "the run ends for another reason", "see its error")
        if self.keep is not None:
            self.keep(step, groups, batch)

    def _keep_seen(self, keep: Callable[[Batch], None]) -> None:
        """Keeps what the updates of the step recorded. Blocks."""
        if (seen := self.engine.take_updates()) is not None:
            keep(seen)

    def _learn(self, groups: Sequence[Group], keep: Callable[[Batch], None] | None) -> Metrics:
        """Trains on a step's groups: one new version. Blocks."""
        return train_step(self.engine, groups, self.engine.algorithm, keep)

    async def _groups(self, version: int) -> tuple[list[Group], list[Group], Metrics]:
        """Returns (the groups of a step, those of them that were rolled out for it, metrics of their origin). Refused
        groups are included: `train_step` filters them again and counts them."""
        wanted = missing = self.schedule.groups_per_step
        algorithm, rows = self.engine.algorithm, list[dict[str, float]]()
        groups, fresh = list[Group](), list[Group]()
        recorded = self._unverified.pop(version, None)
        if recorded is not None and (self.last_sync_step, self._offered_hash) != (version, recorded):
            self._unverified.clear()
            await self._discard(version, f"version {version} has other weights in this session")
        for refills in reversed(range(algorithm.refill + 1)):
            sample = await self._sample(missing, version)
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
        return groups, fresh, aggregate(rows) | _origin(groups)

    async def _discard(self, version: int, cause: str) -> None:
        if count := await self.buffer.discard(version):
            _log.warning("%d groups of an earlier session are discarded and rolled out again: %s", count, cause)
            self._discarded += count

    async def _check_failures(self, fresh: Sequence[Group], version: int) -> None:
        """Raises RolloutsFailing if too many trajectories of the step failed; a resumed run retries them."""
        try:
            check_failures(fresh, self.max_failed_fraction, f"step {version + 1}")
        except RolloutsFailing as error:
            await self.buffer.retry_on_resume(error.slots)
            raise

    async def _sample(self, count: int, version: int) -> Sample:
        return await self._wait_for_explorers(self.strategy.sample(count, version))

    async def _wait_for_explorers(self, result: Awaitable[T]) -> T:
        """The result of explorers' work. Publishes weights meanwhile to explorers that cannot continue without."""
        waited_for = asyncio.ensure_future(result)
        try:
            while not waited_for.done():
                # A change of the board wakes it at once; an overridden need_sync is polled every second.
                patience_s = 1.0 if self._starved else _GRACE_S
                polling = asyncio.ensure_future(self.synchronizer.board.poll(self._sync_due, patience_s))
                writing = set[asyncio.Future[Any]]() if self.saver.writing is None else {self.saver.writing}
                try:
                    await asyncio.wait({waited_for, polling, *writing}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ended = not polling.cancel()
                self.saver.look()
                if ended:
                    polling.result()  # raises where the board fails
                if not waited_for.done() and self.need_sync():
                    await asyncio.to_thread(self.sync_weight)
                self._starved = True
            return waited_for.result()
        finally:
            self._starved = False
            waited_for.cancel()

    def need_sync(self) -> bool:
        """Whether the current version is to be published now."""
        return self._sync_due(self.synchronizer.board.read())

    def _sync_due(self, values: Values) -> bool:
        offered = self.last_sync_step == self.train_step_num
        if not offered and (self.evaluation_due or self.train_step_num in self._unverified):
            return True
        explorers = live_explorers(values).values()
        if self.synchronizer.collective and any(entry.get("version") is None for entry in explorers):
            return True  # an explorer that joined late has no weights, and a collective channel keeps none to fetch
        if offered or not (capabilities_of(self.buffer).explored or self.keeps_versions):
            return False
        if self.synchronizer.style is SyncStyle.FIXED:
            return self.schedule.published(self.train_step_num)
        # While the trainer has groups to train on, a sync for explorers that are idle ahead of it would only delay it.
        return weights_requested(values, idle=self._interval_over or self._starved)

    @property
    def _interval_over(self) -> bool:
        return self.train_step_num - self.last_trainer_sync_step >= self.synchronizer.interval

    def _ask_for_sync(self) -> None:
        """With `dynamic_by_trainer`, requests a sync from the explorers once the interval is over."""
        if self.synchronizer.style is SyncStyle.DYNAMIC_BY_TRAINER and self._interval_over:
            self.synchronizer.set_trainer_status(RunningStatus.REQUIRE_SYNC)

    def sync_weight(self) -> None:
        """Offers the current weights to the channel and, if they were delivered, publishes their version. Blocks."""
        with self._timed("sync"):
            if not self.engine.sync_weight():
                return
            self._offered_hash = self.engine.offered_hash()
            if self.published is not None:  # before any rollout of this version can be journaled
                self.published(self.train_step_num, self._offered_hash)
            self.synchronizer.publish(self.train_step_num, self.channel.versions)
        self.last_sync_step = self.last_trainer_sync_step = self.train_step_num
        self._show_examples()

    def _preview(self, examples: Sequence[dict[str, Any]]) -> None:
        self._examples += examples

    def _show_examples(self) -> None:
        if self._examples:
            self.monitor.table(self.train_step_num, "rollout_examples", self._examples)
            self._examples = []

    async def end_step(self) -> None:
        """Evaluates and saves a checkpoint, if either is due. Raises the error of the previous save."""
        self.saver.look()
        if self.evaluation_due and self.evaluator is not None:
            measured = await self._evaluate(self.evaluator)
            self.record = with_evaluation(self.record, measured, "after")
        if self.held_out is not None and self._is_due(self._measured_step, ends=True):
            self.record["held_out_after"] = await self._measure(self.held_out)
        if self._due(self.cadence.save_every) and self.saver.step != self.train_step_num:
            await self.save_checkpoint()

    async def finish(self) -> None:
        """Saves the last step, unless it has a checkpoint, and waits for the save."""
        self._show_examples()
        if self.saver.step != self.train_step_num:
            await self.save_checkpoint()
        await self.wait_for_save()
        add_seconds(self.record, self._seconds)  # of phases after the row of the last step
        self._seconds.clear()

    async def save_checkpoint(self) -> None:
        """Saves the whole state of the run at this step. The checkpoint is complete when this returns or, with
        `saves_asynchronously`, when `wait_for_save` returns: training may continue in between.

        Waits for the previous save. Raises the error of either save.
        """
        with self._timed("checkpoint"):
            await self.wait_for_save()
            # The state is copied between two steps, when nothing changes it; a thread writes it.
            await self._save(await self._moving_state())

    async def _save(self, moving: Mapping[str, Any]) -> None:
        await self.saver.save(self.train_step_num, *self._contents(moving))

    def _contents(self, moving: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """(state, function that writes further files) of a checkpoint of this step, beside the engine's own files."""
        version = self.train_step_num
        oldest = self.schedule.resume_version(version) if capabilities_of(self.buffer).explored else version
        needed = [v for v in self.channel.versions if oldest <= v < version]  # by slots that are not yet rolled out
        state = {
            **self.run_record,
            "version": version,
            "score": self.score,
            "evaluated": self._evaluated_step,
            "measured": self._measured_step,
            "reached": self._reached,
            **moving,
            "monitor": self.monitor.state(),
        }
        return state, lambda directory: self.channel.save(directory / "versions", needed)

    async def _moving_state(self) -> dict[str, Any]:
        """The state that a train step changes before it is complete."""
        return {
            "counts": dict(self._counts),
            "buffer": await self.buffer.state(),
            "strategy": self.strategy.state(),
            "algorithm": self.engine.algorithm.state(),
        }

    async def save_before_end(self) -> None:
        """Saves the last complete step of a run that fails or is interrupted, unless it has a checkpoint.

        After a failed train step this is the step before it, if the engine still holds its weights. An error of the
        save is logged, so that it does not replace the first."""
        try:
            await self.wait_for_save()
            if self._learning is not None and not self._learning.done():
                _log.warning("step %d is not saved: the thread of the next one still computes", self.train_step_num)
                return
            version, from_version = self.train_step_num, self._stepping_from
            saved = self.saver.failed or version in (self.saver.step, self.schedule.first_version)
            made = from_version not in (None, version)  # the step updated the weights, and failed before it was logged
            if saved or made or not self.engine.holds_version():
                return
            _log.warning("saving step %d, the last complete one", version)
            await self._save(
                self._before if from_version == version else {**await self._moving_state(), "interrupted": True}
            )
            await self.wait_for_save()
        except Exception as error:
            _log.error("the last complete step could not be saved: %s", error)

    async def wait_for_save(self) -> None:
        """Waits for the save in progress; raises its error."""
        await self.saver.wait()

    async def shutdown(self) -> None:
        """Closes the monitor and frees the engine."""
        self.monitor.close()
        self.engine.close()

    def is_alive(self) -> bool:
        """True: the call itself shows that the process is alive."""
        return True

    @property
    def train_step_num(self) -> int:
        """Train steps taken so far, earlier stages included."""
        return self.engine.version

    @property
    def seconds(self) -> float:
        """Wall time spent on this run, earlier sessions and stages included."""
        return self.record.get("seconds", 0.0) + time.monotonic() - self._started

    @property
    def run_record(self) -> dict[str, Any]:
        """The record of the run so far, for later stages, later sessions and the summary."""
        return {**self.record, "seconds": self.seconds}

    @property
    def last_step(self) -> int:
        """The global step that ends the stage."""
        return self.schedule.first_version + self.schedule.steps

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation of the current step is due and has not been done."""
        ends = self.cadence.evaluate_ends and not self.cadence.skip_end
        return self.evaluator is not None and self._is_due(self._evaluated_step, ends=ends)

    def _is_due(self, last: int | None, *, ends: bool) -> bool:
        """Whether a measurement that was last made at step `last` is due; `ends`: also at the end of the stage."""
        version = self.train_step_num
        if version in (self.schedule.first_version, last):
            return False
        return (ends and not self.train_continue) or self._due(self.cadence.evaluate_every)

    def _due(self, every: int) -> bool:
        return every > 0 and self.train_step_num % every == 0

    async def _evaluate(self, evaluator: RemoteEvaluator) -> dict[str, float]:
        """Logs an evaluation row; returns its mean reward and, unless rewards are graded, its accuracy."""
        version = self.train_step_num
        started = time.monotonic()
        with span(TRAINER_LANE, "evaluate", step=version):
            metrics = await self._wait_for_explorers(evaluator.run(version))
        self._evaluated_step = version
        self._log_evaluation(metrics, time.monotonic() - started)
        names = ("reward",) if metrics.get(f"eval/{evaluator.taskset}/partial") else ("accuracy", "reward")
        keys = {name: f"eval/{evaluator.taskset}/{name}" for name in names}
        return {name: metrics[key] for name, key in keys.items() if key in metrics}

    async def _measure(self, held_out: HeldOut) -> Metrics:
        """Logs and returns the loss over held-out rows, and its further metrics."""
        started, groups = time.monotonic(), await held_out.groups()
        metrics = held_out.named(await asyncio.to_thread(held_out_loss, self.engine, groups, self.engine.algorithm))
        self._measured_step = self.train_step_num
        self._log_evaluation(metrics, time.monotonic() - started)
        return metrics

    def _log_evaluation(self, metrics: Metrics, seconds: float) -> None:
        add_seconds(self.record, {"evaluate": seconds})
        self.monitor.log(self.train_step_num, {**metrics, "time/evaluate": seconds})
        if self.train_step_num > self.schedule.first_version:
            self._end_where_reached(metrics)
        if (best := self.checkpoints.keep_best) in metrics:
            self.score = -metrics[best] if declared(best).better == "down" else metrics[best]

    def _staleness(self, fresh: Sequence[Group], version: int) -> Metrics:
        ages = [version - group.oldest_version for group in fresh if not group.expert] or [0]
        return {"rollout/staleness": sum(ages) / len(ages), "rollout/staleness_max": max(ages)}

    async def _counted(self) -> Metrics:
        """Groups since the last step that were not trained on, by reason."""
        before, self._counts = self._counts, await self.buffer.counts()
        return {f"rollout/{name}": count - before.get(name, 0) for name, count in self._counts.items()}

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        started = time.monotonic()
        yield
        add_span(TRAINER_LANE, name, started, time.monotonic(), step=self.train_step_num + (name == "wait"))
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started


def _origin(groups: Sequence[Group]) -> Metrics:
    """Metrics of the tasks and policy versions of a step's groups."""
    versions = [group.oldest_version for group in groups if not group.expert]
    statistics = (("mean", fmean), ("min", min), ("max", max)) if versions else ()
    of_versions = {f"sample/model_version/{name}": statistic(versions) for name, statistic in statistics}
    return {"sample/task_count": len({(g.task.taskset, g.task.task_id) for g in groups}), **of_versions}


def examples_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The best and the worst rollout of a step, and one that failed, as rows of a table."""
    rollouts = [(trajectory.reward, group, trajectory) for group in groups for trajectory in group.alive]
    chosen = [pick(rollouts, key=lambda row: row[0]) for pick in (max, min) if rollouts]
    failed = ((0.0, group, each) for group in groups for each in group.trajectories if each.failure is not None)
    extremes = {id(row[2]): row for row in (*chosen, *islice(failed, 1))}
    return [
        {
            "task": group.task.task_id,
            "prompt": "\n".join(message.content for message in group.task.prompt),
            "reply": trajectory.completion,
            "reward": reward,
            **trajectory.rewards,
            "version": group.oldest_version,
            "tokens": trajectory.num_tokens,
            **(
                {} if trajectory.failure is None else {"reward": None, "failure": described_failure(trajectory.failure)}
            ),
        }
        for reward, group, trajectory in extremes.values()
    ]
