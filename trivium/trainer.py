"""Trainer: groups in, one new policy version out; decides when weights travel, what is logged, what is saved."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from trivium.checkpoint.background import BackgroundSaver
from trivium.errors import RolloutsFailing
from trivium.explorer import check_failures, described_failure
from trivium.loops import held_out_loss, train_loop, train_step
from trivium.metrics import aggregate, declare_missing, declared
from trivium.phases import TRAINER_LANE, activity, add_span, span
from trivium.synchronizer import live_explorers, weights_requested
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
    """Whether it trains on while a checkpoint is being written, where the engine can do that."""
    keeps_versions: bool = False
    """Whether versions lie where any process can fetch them: they are offered though no explorer fills the buffer."""
    enable_preview: bool = False
    """Whether the monitors see a table of rollouts (`rollout_examples`) at every sync step."""
    keep: Callable[[int, Sequence[Group], Batch], None] | None = None
    """Gets (train step, the groups it took, its experiences with what was computed for them) of every step."""
    keep_updates: Callable[[int, Sequence[Group], Batch], None] | None = None
    """Gets the same of every step whose engine kept what the updates saw of each token."""
    published: Callable[[int, str], None] | None = None
    """Gets (version, hash of its weights) of every version that was offered."""
    before_learning: Callable[[], Awaitable[None]] | None = None
    """Called once a step's groups are there: an engine on the same device leaves it to the trainer."""
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    """What else belongs to the run and must survive it: stage, accuracies, seconds, where they went. JSON values."""
    name: str = "trainer"

    def __post_init__(self) -> None:
        self.train_continue = True
        self.last_sync_step: int | None = None
        self.last_trainer_sync_step = 0
        self.score: float | None = None
        """What `checkpoint.keep_best` compares, where this step was evaluated; more is better."""
        self._starved = False
        """Whether it has been waiting for explorers for more than a moment."""
        self._seconds: dict[str, float] = {}
        self._counts: Mapping[str, int] = {}
        self._examples: list[dict[str, Any]] = []
        self.saver = BackgroundSaver(self.checkpoints, self.engine, asynchronous=self.saves_asynchronously)
        self._stepping_from: int | None = None
        """The version that a train step is being taken from."""
        self._before: Mapping[str, Any] = {}
        """What that step changes, as it was before; empty where that version is saved."""
        self._evaluated_step: int | None = None
        self._measured_step: int | None = None
        """The last step that the loss over held-out rows was measured at."""
        self._reached = False
        """Whether its step is the last one by `schedule.until`."""
        self._started = time.monotonic()

    def prepare(self) -> None:
        """Loads models, and the checkpoint where there is one."""
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
        """Takes up the data, publishes what explorers start from; evaluates it if this is where the stage starts."""
        state: Mapping[str, Any] = self.resume.state if self.resume is not None else {}
        await self.buffer.restore(state.get("buffer"), self.train_step_num)
        await self.strategy.restore(state.get("strategy", {}))
        self._counts = state.get("counts", {})  # what befell groups since the checkpoint belongs to the next step's row
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
            self._record(await self._evaluate(self.evaluator), "before", "after")
        if version == self.schedule.first_version and self.held_out is not None:
            self.record["held_out_before"] = self.record["held_out_after"] = await self._measure(self.held_out)
        self._reached = state.get("reached", False)
        self.train_continue = self.train_step_num < self.last_step and not self._reached
        if state.get("interrupted"):
            await self.end_step()

    async def take_step(self) -> None:
        """`train_step`, with what a failure in the middle of it needs to save the step before."""
        self._stepping_from = self.train_step_num
        if self.saver.step != self._stepping_from:
            self._before = copy.deepcopy(await self._moving_state())
        await self.train_step()
        self._stepping_from = None

    async def train_step(self) -> bool:
        """Takes groups, trains on them, logs. Returns whether to go on: not at the stage's last step, nor at the end of
        the data.

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
            keep = None if self.keep is None else partial(self.keep, version + 1, groups)
            metrics = await asyncio.to_thread(self._learn, groups, keep)
            if keep is not None and self.keep_updates is not None and (seen := self.engine.take_updates()) is not None:
                await asyncio.to_thread(self.keep_updates, version + 1, groups, seen)
        self.score = None  # of this step nothing has been measured yet
        metrics |= sampled | self._staleness(fresh, version) | await self._counted() | self._changed(version)
        metrics |= {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics["time/step"] = time.monotonic() - started
        metrics["perf/idle"] = self._seconds.get("wait", 0.0) / max(metrics["time/step"], 1e-9)
        self._spend({name.removeprefix("time/"): metrics[name] for name in metrics if name.startswith("time/")})
        self._count_failures(fresh)
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
        """Ends the stage with its last step, or with the one whose metrics these are by `schedule.until`."""
        self._reached |= self.schedule.ends_with(metrics)
        self.train_continue = self.train_step_num < self.last_step and not self._reached

    def _learn(self, groups: Sequence[Group], keep: Callable[[Batch], None] | None) -> Metrics:
        """Trains on a step's groups: one new version. Blocks."""
        return train_step(self.engine, groups, self.engine.algorithm, keep)

    async def _groups(self, version: int) -> tuple[list[Group], list[Group], Metrics]:
        """A step's groups, the refused ones among them (the step leaves them out again, and counts them); those of them
        that were rolled out for it; and their origin."""
        wanted = missing = self.schedule.groups_per_step
        algorithm, rows = self.engine.algorithm, list[dict[str, float]]()
        groups, fresh = list[Group](), list[Group]()
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

    async def _check_failures(self, fresh: Sequence[Group], version: int) -> None:
        """Raises RolloutsFailing where too many of the step's trajectories failed; a resumed run retries them."""
        try:
            check_failures(fresh, self.max_failed_fraction, f"step {version + 1}")
        except RolloutsFailing as error:
            await self.buffer.retry_on_resume(error.slots)
            raise

    async def _sample(self, count: int, version: int) -> Sample:
        return await self._answering(self.strategy.sample(count, version))

    async def _answering(self, doing: Awaitable[T]) -> T:
        """Waits for explorers; one of them that asks for weights meanwhile gets them, or it could do nothing."""
        waited_for = asyncio.ensure_future(doing)
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
        """Whether explorers are to be offered the current version now."""
        return self._sync_due(self.synchronizer.board.read())

    def _sync_due(self, values: Values) -> bool:
        offered = self.last_sync_step == self.train_step_num
        if self.evaluation_due and not offered:
            return True
        explorers = live_explorers(values).values()
        if self.synchronizer.collective and any(entry.get("version") is None for entry in explorers):
            return True  # an explorer that joined late has no weights at all, and there is nowhere to fetch them
        if offered or not (capabilities_of(self.buffer).explored or self.keeps_versions):
            return False
        if self.synchronizer.style is SyncStyle.FIXED:
            return self.schedule.published(self.train_step_num)
        # A trainer that has groups to learn from would pay at every step for explorers that are far enough ahead.
        return weights_requested(values, idle=self._interval_over or self._starved)

    @property
    def _interval_over(self) -> bool:
        return self.train_step_num - self.last_trainer_sync_step >= self.synchronizer.interval

    def _ask_for_sync(self) -> None:
        """With `dynamic_by_trainer`, tells the explorers that the interval is over."""
        if self.synchronizer.style is SyncStyle.DYNAMIC_BY_TRAINER and self._interval_over:
            self.synchronizer.set_trainer_status(RunningStatus.REQUIRE_SYNC)

    def sync_weight(self) -> None:
        """Offers the current weights and publishes their version where they were delivered. Blocks."""
        with self._timed("sync"):
            if not self.engine.sync_weight():
                return
            self.synchronizer.publish(self.train_step_num, self.channel.versions)
            if self.published is not None:
                self.published(self.train_step_num, self.engine.offered_hash())
        self.last_sync_step = self.last_trainer_sync_step = self.train_step_num
        self._show_examples()

    def _preview(self, examples: Sequence[dict[str, Any]]) -> None:
        self._examples += examples

    def _show_examples(self) -> None:
        if self._examples:
            self.monitor.table(self.train_step_num, "rollout_examples", self._examples)
            self._examples = []

    async def end_step(self) -> None:
        """Evaluates and saves, where this step is one for it. Raises what went wrong with the save before."""
        self.saver.look()
        if self.evaluation_due and self.evaluator is not None:
            self._record(await self._evaluate(self.evaluator), "after")
        if self.held_out is not None and self._is_due(self._measured_step, ends=True):
            self.record["held_out_after"] = await self._measure(self.held_out)
        if self._due(self.cadence.save_every) and self.saver.step != self.train_step_num:
            await self.save_checkpoint()

    async def finish(self) -> None:
        """A last blocking save, where this step has none yet: after the last step, or at the end of the data."""
        self._show_examples()
        if self.saver.step != self.train_step_num:
            await self.save_checkpoint()
        await self.wait_for_save()
        self._spend(self._seconds)  # of what came after the last step's row
        self._seconds.clear()

    async def save_checkpoint(self) -> None:
        """Saves the whole state of the run at this step. It is complete when this returns or, with
        `saves_asynchronously`, when `wait_for_save` does: then this returns as soon as training may move what is saved.

        Waits for the save before. Raises what either save raises.
        """
        with self._timed("checkpoint"):
            await self.wait_for_save()
            # Taken between two steps, when nothing of it moves; the slow writing happens in a thread.
            await self._save(await self._moving_state())

    async def _save(self, moving: Mapping[str, Any]) -> None:
        await self.saver.save(self.train_step_num, *self._contents(moving))

    def _contents(self, moving: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """What a checkpoint of this step holds beside the engine: its state, and what writes its files."""
        version = self.train_step_num
        oldest = self.schedule.resume_version(version) if capabilities_of(self.buffer).explored else version
        needed = [v for v in self.channel.versions if oldest <= v < version]  # by slots still to come
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
        """What a train step changes from its beginning on."""
        return {
            "counts": dict(self._counts),
            "buffer": await self.buffer.state(),
            "strategy": self.strategy.state(),
            "algorithm": self.engine.algorithm.state(),
        }

    async def save_after_failure(self) -> None:
        """Saves the last step that is whole, where it has no checkpoint: the one before a train step that failed, as
        long as the engine still holds it. What goes wrong with that is logged, and hides nothing."""
        try:
            await self.wait_for_save()
            version, from_version = self.train_step_num, self._stepping_from
            saved = self.saver.failed or version in (self.saver.step, self.schedule.first_version)
            made = from_version not in (None, version)  # and was never logged
            if saved or made or not self.engine.holds_version():
                return
            _log.warning("saving step %d, the last one before the failure", version)
            await self._save(
                self._before if from_version == version else {**await self._moving_state(), "interrupted": True}
            )
            await self.wait_for_save()
        except Exception as error:
            _log.error("the step before the failure could not be saved: %s", error)

    async def wait_for_save(self) -> None:
        """Waits until the save that is being written is complete; raises what went wrong with it."""
        await self.saver.wait()

    async def shutdown(self) -> None:
        """Closes the monitor and frees the engine."""
        self.monitor.close()
        self.engine.close()

    def is_alive(self) -> bool:
        """True: a trainer that can answer is alive."""
        return True

    @property
    def train_step_num(self) -> int:
        """Train steps behind this policy, earlier stages included."""
        return self.engine.version

    @property
    def seconds(self) -> float:
        """Wall time spent on this run, earlier sessions and stages included."""
        return self.record.get("seconds", 0.0) + time.monotonic() - self._started

    @property
    def run_record(self) -> dict[str, Any]:
        """What a later stage or session, and the summary, need to know of the run so far."""
        return {**self.record, "seconds": self.seconds}

    @property
    def last_step(self) -> int:
        """The global step that ends the stage."""
        return self.schedule.first_version + self.schedule.steps

    @property
    def evaluation_due(self) -> bool:
        """Whether the current step is one to evaluate, and has not been."""
        ends = self.cadence.evaluate_ends and not self.cadence.skip_end
        return self.evaluator is not None and self._is_due(self._evaluated_step, ends=ends)

    def _is_due(self, last: int | None, *, ends: bool) -> bool:
        """Whether to measure at the current step what was measured at step `last`; `ends`: also at the stage's end."""
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
            metrics = await self._answering(evaluator.run(version))
        self._evaluated_step = version
        self._log_evaluation(metrics, time.monotonic() - started)
        names = ("reward",) if metrics.get(f"eval/{evaluator.taskset}/partial") else ("accuracy", "reward")
        keys = {name: f"eval/{evaluator.taskset}/{name}" for name in names}
        return {name: metrics[key] for name, key in keys.items() if key in metrics}

    def _record(self, measured: Mapping[str, float], *ends: str) -> None:
        """Notes an evaluation for the summary. Accuracies count together: rewards that are graded once are graded."""
        record = self.record | {f"{name}_{end}": value for name, value in measured.items() for end in ends}
        started_graded = "reward_before" in record and "accuracy_before" not in record
        graded = started_graded or "accuracy" not in measured
        self.record = {name: value for name, value in record.items() if not (graded and name.startswith("accuracy_"))}

    async def _measure(self, held_out: HeldOut) -> Metrics:
        """Logs the loss over held-out rows and what belongs to it; returns them."""
        started, groups = time.monotonic(), await held_out.groups()
        metrics = held_out.named(await asyncio.to_thread(held_out_loss, self.engine, groups, self.engine.algorithm))
        self._measured_step = self.train_step_num
        self._log_evaluation(metrics, time.monotonic() - started)
        return metrics

    def _log_evaluation(self, metrics: Metrics, seconds: float) -> None:
        self._spend({"evaluate": seconds})
        self.monitor.log(self.train_step_num, {**metrics, "time/evaluate": seconds})
        if self.train_step_num > self.schedule.first_version:
            self._end_where_reached(metrics)
        if (best := self.checkpoints.keep_best) in metrics:
            self.score = -metrics[best] if declared(best).better == "down" else metrics[best]

    def _changed(self, version: int) -> Metrics:
        """How many config fields `--change` changed before this step, where it did."""
        changed = sum(len(row["changes"]) for row in self.record.get("changes", ()) if row["step"] == version)
        return {"train/changed_fields": changed} if changed else {}

    def _staleness(self, fresh: Sequence[Group], version: int) -> Metrics:
        ages = [version - group.oldest_version for group in fresh if not group.expert] or [0]
        return {"rollout/staleness": sum(ages) / len(ages), "rollout/staleness_max": max(ages)}

    async def _counted(self) -> Metrics:
        """What became of groups that were not trained on, since the last step."""
        before, self._counts = self._counts, await self.buffer.counts()
        return {f"rollout/{name}": count - before.get(name, 0) for name, count in self._counts.items()}

    def _count_failures(self, groups: Sequence[Group]) -> None:
        """Adds the failed rollouts to the run's, by cause."""
        failures = [t.failure for group in groups for t in group.rollouts if t.failure is not None]
        if failures:
            before: Mapping[str, int] = self.record.get("failures", {})
            counts = Counter(before) + Counter(map(described_failure, failures))
            self.record["failures"] = dict(sorted(counts.items()))

    def _spend(self, seconds: Mapping[str, float]) -> None:
        """Adds to what the run's time went to, by phase."""
        before: Mapping[str, float] = self.record.get("time", {})
        added = {name: before.get(name, 0.0) + taken for name, taken in seconds.items()}
        self.record["time"] = {**before, **added}  # another one: a save may be writing the one before

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        started = time.monotonic()
        yield
        add_span(TRAINER_LANE, name, started, time.monotonic(), step=self.train_step_num + (name == "wait"))
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started


def _origin(groups: Sequence[Group]) -> Metrics:
    """Which tasks and versions a step's groups are of."""
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
