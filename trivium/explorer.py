"""Explorer: rolls out tasks into groups, with deadlines and rewards. Turns any exception of user code into data: a
failed trajectory."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from trivium.foundation.concurrency import Turns, gather_or_cancel, left_behind, wait_for
from trivium.foundation.errors import (
    DeadlineExceeded,
    RewardError,
    RolloutError,
    RolloutsFailing,
    TemplateRefusal,
    TriviumError,
    text_of,
    user_place,
)
from trivium.foundation.phases import Busy, activity, progress, span
from trivium.policy import (
    ENGINE_S,
    MAX_METRIC,
    REWARD_S,
    ROLLOUT_S,
    EngineFailure,
    Policy,
    PromptTooLong,
    named_numbers,
)
from trivium.protocols import DescribedWeights
from trivium.types import Failure, Group, Sampling, Trajectory, capabilities_of

if TYPE_CHECKING:
    from trivium.foundation.randomness import SampleKey
    from trivium.policy import Workflow
    from trivium.protocols import Operator, Renderer, RolloutEngine, WeightChannel, Weights
    from trivium.schedule import Schedule
    from trivium.types import Lease, Task

T = TypeVar("T")

_log = logging.getLogger("trivium")
_MAX_KINDS = 50
"""Kinds of failure that are logged."""
Score = Mapping[str, float] | RewardError
"""Weighted components of a reward by name, or the error of a reward that failed."""


class Judge(Protocol):
    """Scores successful trajectories: each one when it is finished, then the members of a group together."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        """The reward components of one trajectory."""
        ...

    async def compare(self, task: Task, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """The reward components of each member from comparing the members of a group, in order; empty if no reward
        compares."""
        ...


@dataclass(frozen=True)
class RolloutLimits:
    """The bounds of rollouts: those of `workflow` in the config."""

    deadline_s: float
    """Of one rollout and its rewards."""
    max_concurrent: int
    """Rollouts in progress at the same time."""
    max_retries: int = 0
    """How many times a trajectory is rolled out again after its workflow failed."""
    min_members: int = 1
    """A group with fewer successful members is dropped; 1 drops none."""
    max_failed_fraction: float = 1.0
    """The largest fraction of trajectories that may fail, or be dropped with failed ones, if `min_members` drops
    groups."""
    failure_window: int = 16
    """Consecutive groups that `max_failed_fraction` is measured over."""


@dataclass
class SlotDemand:
    """Whether an explorer finds slots for the version it holds, and what it requests from the trainer therefore."""

    leased: int = 0
    """Slots leased since it adopted its version."""
    idle: bool = False
    """Whether it waits for a free slot."""
    request: Literal["", "idle", "now"] = ""
    """Its current request: none, weights when convenient (it is `idle`), or weights `now`."""

    def adopted(self) -> None:
        """Counts from a new version, which answers a request for weights `now`."""
        self.leased, self.request = 0, "idle" if self.idle else ""


@dataclass
class Explorer:
    """Rolls out tasks with one engine. Its policy version is the engine's."""

    engine: RolloutEngine
    renderer: Renderer
    workflow: Workflow
    judge: Judge
    sampling: Sampling
    limits: RolloutLimits
    name: str = "explorer-0"
    greedy_baseline: bool = False
    """Whether training rolls out each task once more at temperature 0."""
    must_judge: bool = True
    """Whether a trajectory without a reward counts as failed."""
    operators: Sequence[Operator] = ()
    """The experience pipeline, in order."""
    in_flight: str = "finish"
    """Whether completions in progress `finish` before new weights are loaded, or `update` (see `sync.in_flight`)."""
    demand: SlotDemand = field(default_factory=SlotDemand, init=False)

    def __post_init__(self) -> None:
        self._work = _Work(self.name, self.limits.max_concurrent)
        self._groups = _StartedGroups(self.limits)
        self._failures = _Failures()

    @property
    def version(self) -> int:
        """The policy version it samples with."""
        return self.engine.version

    @property
    def rollout_s(self) -> float:
        """The seconds of all rollouts so far, those in progress included."""
        return self._work.generating.seconds

    async def adopt(self, version: int, channel: WeightChannel) -> None:
        """Loads a published version; completions in flight finish first, or continue with it."""
        # A collective channel blocks the trainer until the weights are read. If completions must finish before the
        # load, the weights are first copied into memory, so that the trainer need not wait for the completions.
        hold = capabilities_of(channel).collective and self.in_flight == "finish" and bool(self._groups)
        weights = await asyncio.to_thread(_collected, channel, version, hold)  # may wait for the trainer
        self._work.cut()
        with span(self.name, "load weights", version=version), activity(f"loading version {version}"):
            await self.engine.load(version, weights, in_flight=self.in_flight)
        _log.info("%s holds version %d%s", self.name, version, self._work.report())

    def refined(self, group: Group) -> Group:
        """The group after the experience pipeline, which ends at the first operator that drops it."""
        for operator in self.operators:
            if group.dropped:
                break
            group = operator(group)
        return group

    async def rollout_slot(self, schedule: Schedule, lease: Lease) -> Group:
        """Rolls out a leased slot; returns the group for the buffer, possibly dropped.

        Raises RolloutsFailing if too many trajectories fail in groups that are dropped, which the trainer never sees.
        """
        at = schedule.at(lease.slot)
        keys = [schedule.key(at, index) for index in range(schedule.group_size)]
        greedy = schedule.key(at, schedule.group_size) if self.greedy_baseline else None
        with self._groups.started(lease) as finish:
            if lease.recorded is not None and self._can_judge_again(lease.recorded, at.task):
                group = await self._judge_again(replace(lease.recorded, task=at.task))
            else:
                group = await self.rollout(
                    at.task, keys, slot=lease.slot, epoch=at.epoch, attempt=lease.attempt, greedy=greedy
                )
            successful = len(group.alive)
            if (needed := self.limits.min_members) > 1 and successful < needed:
                why = f"{successful} of {len(keys)} members succeeded, workflow.min_members is {needed}"
                group = group.refused(why)
            finish(group)
        self._work.count(group)
        return self.refined(group)

    async def rollout(
        self,
        task: Task,
        keys: Sequence[SampleKey],
        *,
        slot: int = 0,
        epoch: int = 0,
        attempt: int = 0,
        sampling: Sampling | None = None,
        greedy: SampleKey | None = None,
    ) -> Group:
        """Rolls out a task once per key and scores the trajectories; a failed one carries its Failure.

        With a key for `greedy` the task is rolled out once more at temperature 0; rewards that compare the members of
        a group do not see that rollout. Raises EngineFailure if the engine breaks; an error of the task or of user
        code fails the trajectory. Cancelling it frees its rows in the engine.
        """
        version = self.version
        sampling = sampling or self.sampling
        specs = [(key, sampling) for key in keys]
        if greedy is not None:
            specs.append((greedy, replace(sampling, temperature=0.0, extra=())))
        rollouts = await gather_or_cancel(self._rollout_one(task, key, how) for key, how in specs)
        # One deadline covers rollouts and rewards: the comparison gets the time that the longest rollout left.
        left_s = self.limits.deadline_s - max(seconds for _, seconds in rollouts)
        trajectories = [trajectory for trajectory, _ in rollouts]
        parts = (trajectories,) if greedy is None else (trajectories[:-1], trajectories[-1:])
        members, *baseline = await gather_or_cancel(self._compared(task, part, left_s) for part in parts)
        greedy_one = baseline[0][0] if baseline else None
        return Group(slot, task, tuple(members), epoch, attempt, version, greedy=greedy_one)

    async def judge_rollouts(self, task: Task, rollouts: Sequence[Trajectory]) -> list[Trajectory]:
        """Scores trajectories that were rolled out elsewhere. `deadline_s` applies to all of them together."""
        started, deadline_s = time.monotonic(), self.limits.deadline_s
        judged = await gather_or_cancel(self._judged(task, trajectory, deadline_s) for trajectory in rollouts)
        scored = [replace(trajectory, **changes) for trajectory, changes in zip(rollouts, judged, strict=True)]
        return await self._compared(task, scored, started + deadline_s - time.monotonic())

    def _can_judge_again(self, group: Group, task: Task) -> bool:
        """Whether the rewards of a recorded group can be computed again: they come only from the judge, not from the
        workflow or an operator, and the prompt of the task is unchanged (other columns may have changed)."""
        alone = not (capabilities_of(self.workflow).gives_rewards or self.operators)
        return alone and group.task.prompt == task.prompt

    async def _judge_again(self, group: Group) -> Group:
        """A recorded group with new rewards, except for members whose rollout failed."""

        def unjudged(t: Trajectory) -> Trajectory:
            return replace(t, rewards={}, failure=None) if t.failure is None or t.failure.of_rewards else t

        parts = (group.trajectories, () if group.greedy is None else (group.greedy,))
        members, baseline = await gather_or_cancel(
            self.judge_rollouts(group.task, [unjudged(t) for t in part]) for part in parts
        )
        return replace(group, trajectories=tuple(members), greedy=baseline[0] if baseline else None)

    async def _rollout_one(self, task: Task, key: SampleKey, sampling: Sampling) -> tuple[Trajectory, float]:
        """Returns (scored trajectory, its seconds without the wait for `max_concurrent`)."""
        async with self._work.turns:
            started = time.monotonic()
            with self._work.generating:
                trajectory = await self._run_with_retries(task, key, sampling, started + self.limits.deadline_s)
        rolled_out = time.monotonic()
        judged = await self._judged(task, trajectory, started + self.limits.deadline_s - rolled_out)
        ended = time.monotonic()
        seconds = {ROLLOUT_S: rolled_out - started, REWARD_S: ended - rolled_out}
        progress()
        return replace(trajectory, metrics={**trajectory.metrics, **seconds}, **judged), ended - started

    async def _run_with_retries(self, task: Task, key: SampleKey, sampling: Sampling, until: float) -> Trajectory:
        """The first attempt in which the workflow does not fail, or the last one; all use the same random numbers."""
        retries, most = 0, self.limits.max_retries
        trajectory = await self._attempt(task, key, sampling, until)
        while retries < most and trajectory.failure is not None and trajectory.failure.side == "workflow":
            retries += 1
            trajectory = await self._attempt(task, key, sampling, until)
        if not most:
            return trajectory
        return replace(trajectory, metrics={**trajectory.metrics, "retries": float(retries)})

    async def _attempt(self, task: Task, key: SampleKey, sampling: Sampling, until: float) -> Trajectory:
        """Runs the workflow once, until the time `until`. Any error but EngineFailure and TemplateRefusal gives a
        failed trajectory."""
        policy = Policy(self.engine, self.renderer, sampling, key, self.engine.max_context)
        try:
            earned = await wait_for(until - time.monotonic(), self.workflow.run(task, policy), ended=policy.end)
            rewards = {} if earned is None else named_numbers("reward", earned)
            metrics = named_numbers("metric", policy.metrics, largest=MAX_METRIC)
            metrics |= {ENGINE_S: policy.engine_s}
            return Trajectory(key.index, policy.turns, rewards, metrics=metrics, feedback=text_of(policy.feedback))
        except (EngineFailure, TemplateRefusal):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the rollout boundary: failures become data
            return Trajectory(key.index, policy.turns, failure=self._failure(error))

    async def _judged(self, task: Task, trajectory: Trajectory, left_s: float) -> dict[str, Any]:
        """What `Judge.score` changes in the trajectory."""
        if trajectory.failure is not None:
            return {}
        return self._rewarded(trajectory, await self._verdict(task, self.judge.score(task, trajectory), left_s))

    async def _compared(self, task: Task, rollouts: Sequence[Trajectory], left_s: float) -> list[Trajectory]:
        """The trajectories with the rewards of `Judge.compare`; one without any reward has failed."""
        successful = [t for t in rollouts if t.failure is None]
        result = await self._verdict(task, self.judge.compare(task, successful), left_s) if successful else ()
        scores = [result] * len(successful) if isinstance(result, RolloutError) else result
        judged = ((t, self._rewarded(t, score)) for t, score in zip(successful, scores, strict=True))
        by_index = {t.index: replace(t, **changes) for t, changes in judged if changes}
        return [self._fail_unjudged(by_index.get(t.index, t)) for t in rollouts]

    async def _verdict(self, task: Task, judging: Awaitable[T], left_s: float) -> T | RolloutError:
        """The result of a judge, or its error: a failed reward fails the trajectory and never counts as 0."""
        try:
            # Brief rewards have no deadline, since setting one would take longer than they do.
            brief = getattr(self.judge, "is_brief", False)
            async with nullcontext() if brief else asyncio.timeout(max(0.0, left_s)):
                with self._work.rewarding:
                    return await judging
        except TimeoutError:
            return DeadlineExceeded(
                f"the reward of task {task.task_id!r}",
                f"none within {self.limits.deadline_s:.1f} s of rollout and judging",
                "make it faster, or raise workflow.deadline_s",
            )
        except RolloutError as error:  # no thread is free for the reward function
            return RewardError(error.asked, error.found, error.do)

    def _rewarded(self, trajectory: Trajectory, score: Mapping[str, float] | RolloutError) -> dict[str, Any]:
        """What a score changes in the trajectory. An error, or a name that occurs twice, fails it."""
        if isinstance(score, RolloutError):
            return {"failure": self._failure(score)}
        if not score:
            return {}
        rewards = {**trajectory.rewards, **score}
        if len(rewards) < len(trajectory.rewards) + len(score):
            error = RewardError(
                "rewards of different names", f"both the workflow and a reward gave {sorted(score)}", "rename one"
            )
            return {"failure": self._failure(error)}
        return {"rewards": rewards}

    def _fail_unjudged(self, trajectory: Trajectory) -> Trajectory:
        """With `must_judge`, the failed trajectory if neither the workflow nor the judge gave a reward."""
        if trajectory.failure is not None or trajectory.rewards or not self.must_judge:
            return trajectory
        error = RewardError(
            "a reward", "neither the workflow nor a reward function returned a reward", "add an entry under `rewards`"
        )
        return replace(trajectory, failure=self._failure(error))

    def _failure(self, error: BaseException) -> Failure:
        return self._failures.of(error, self.limits.deadline_s)


class _Work:
    """The rollouts and rewards that an explorer works on: as many as are allowed at the same time, with the spans of
    the timeline and the counts of the log."""

    def __init__(self, name: str, max_concurrent: int) -> None:
        self.turns = Turns(max_concurrent)
        self.generating, self.rewarding = Busy(name, "generate"), Busy(name, "reward")
        self._counts, self._counted_since = Counter[str](), time.monotonic()
        """Groups, rollouts, failures and tokens since the last report."""

    def cut(self) -> None:
        """Begins new spans: the timeline shows work before and after a load of weights apart."""
        self.generating.cut()
        self.rewarding.cut()

    def count(self, group: Group) -> None:
        failed = sum(rollout.failure is not None for rollout in group.rollouts)
        tokens = sum(rollout.num_tokens for rollout in group.rollouts)
        self._counts.update(groups=1, rollouts=len(group.rollouts), failed=failed, tokens=tokens)

    def report(self) -> str:
        """A text about the rollouts since the last report."""
        counts, seconds = self._counts, time.monotonic() - self._counted_since
        self._counts, self._counted_since = Counter[str](), time.monotonic()
        rollouts = f"{counts['rollouts']} rollouts, {counts['failed']} of them failed"
        pace = f"{counts['tokens'] / seconds:,.0f} tokens/s"
        return f"; before: {counts['groups']} groups ({rollouts}), {pace}" if counts["groups"] else ""


class _StartedGroups:
    """Groups in the order of their start. Failures are counted in this order, so that groups that fail quickly do not
    outweigh slower ones that succeed."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._limits = limits
        self._in_progress: dict[Lease, Group | None] = {}
        """Each lease with its group; None until the group is finished. A finished group stays until all older ones have
        finished."""
        self._finished = deque[Group](maxlen=limits.failure_window)
        """The last finished groups."""

    def __bool__(self) -> bool:
        """Whether any group is in progress."""
        return bool(self._in_progress)

    @contextmanager
    def started(self, lease: Lease) -> Generator[Callable[[Group], None]]:
        """Holds the place of a group until the block ends. The function that it yields takes the finished group; it
        raises RolloutsFailing if too many trajectories failed, where `min_members` drops groups."""
        self._in_progress[lease] = None
        limits = self._limits

        def finish(group: Group) -> None:
            self._in_progress[lease] = group
            while self._in_progress and (oldest := next(iter(self._in_progress.values()))) is not None:
                del self._in_progress[next(iter(self._in_progress))]
                self._finished.append(oldest)
                if limits.min_members > 1 and len(self._finished) == limits.failure_window:
                    what = f"{limits.failure_window} groups in a row"
                    check_failures(tuple(self._finished), limits.max_failed_fraction, what)

        try:
            yield finish
        finally:
            # After an error no group comes for this lease, and later groups must not wait for it to be counted.
            if self._in_progress.get(lease) is None:
                self._in_progress.pop(lease, None)


class _Failures:
    """Describes exceptions of rollouts, and logs the first of each kind."""

    def __init__(self) -> None:
        self._logged = set[tuple[str, str, str]]()
        """Kinds: side, exception, cause."""

    def of(self, error: BaseException, deadline_s: float) -> Failure:
        """The exception as a Failure."""
        cause = _cause(error)
        match error:
            case RewardError():
                side = "reward"
            case PromptTooLong():
                side = "prompt"
            case TimeoutError() if not cause:  # with a cause, user code raised it
                side = "deadline"
            case _:
                side = "workflow"
        message = text_of(error) or (f"no result within {deadline_s} s" if side == "deadline" else "")
        if side == "deadline" and (number := left_behind()):
            message += f"\n{number} abandoned call(s) of plain functions still run in their threads"
        failure = Failure(side, type(error).__name__, message, cause)
        self._log(failure, error)
        return failure

    def _log(self, failure: Failure, error: BaseException) -> None:
        """Logs the first failure of each kind; its traceback goes to the log file only."""
        # Without digits, since failures of one kind differ in seconds and numbers of tokens.
        reason = failure.cause or re.sub(r"\d+", "", text_of(error.found) if isinstance(error, TriviumError) else "")
        kind = (failure.side, failure.kind, reason)
        if kind in self._logged or len(self._logged) == _MAX_KINDS:
            return
        self._logged.add(kind)
        what = described_failure(failure)
        _log.warning("a rollout failed; further ones like it are only counted: %s\n%s", what, failure.message)
        _log.info("the traceback of that failure", exc_info=error)


def described_failure(failure: Failure) -> str:
    """The side and the cause of a failure, which are equal for failures of one kind."""
    return f"{failure.side}: {failure.cause or failure.kind}"


def _cause(error: BaseException) -> str:
    """The exception of user code and its place; empty if user code raised none."""
    visited = {id(error)}
    while (cause := error.__cause__) is not None and id(
        cause
    ) not in visited:  # `raise error from error` is its own cause
        visited.add(id(cause))
        error = cause
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(error.__traceback__)]
    place = (error.place if isinstance(error, RolloutError) else "") or user_place(frames)
    return f"{type(error).__name__} in {place}" if place else ""


def _collected(channel: WeightChannel, version: int, hold: bool) -> Weights:
    """The weights for `RolloutEngine.load`. Described weights stay unread until the engine reads them, unless `hold`.
    All others are copied into a list."""
    weights = channel.collect(version)
    return list(weights) if hold or not isinstance(weights, DescribedWeights) else weights


def check_failures(groups: Sequence[Group], max_fraction: float, what: str) -> None:
    """Raises RolloutsFailing if more than `max_fraction` of the groups' trajectories failed or were dropped with failed
    ones."""
    failures = [t.failure for group in groups for t in group.rollouts if t.failure is not None]
    total = sum(len(group.rollouts) for group in groups)
    dropped = sum(t.failure is None for group in groups if group.dropped for t in group.rollouts)
    if len(failures) + dropped <= max_fraction * total:
        return
    (side, kind, cause), times = Counter((f.side, f.kind, f.cause) for f in failures).most_common(1)[0]
    message = next(f.message for f in failures if (f.side, f.kind, f.cause) == (side, kind, cause))
    if message.startswith("asked: "):  # keeps `asked` and `found` of a TriviumError; the log has its advice
        message = "; ".join(line.partition(": ")[2] for line in message.splitlines()[:2])
    often = f"{times} times, {cause}" if cause else f"{times} times"
    beside = f" and {dropped} were dropped with them" if dropped else ""
    error = RolloutsFailing(
        f"at most {max_fraction:.0%} failed trajectories in {what}",
        f"{len(failures)} of {total} failed{beside}; most often ({often}) the {side}: {kind}: {message}",
        "fix the cause and run the same command again: it continues from the last checkpoint, and rolls out or judges "
        "again what failed (but prompts that are too long and, with schedule.deterministic, rollouts that met their "
        "deadline); or raise workflow.max_failed_fraction if this many failures are normal",
    )
    error.slots = tuple(group.slot for group in groups)
    raise error
