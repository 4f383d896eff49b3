"""Explorer: a task in, a group out. Deadlines, failures as data, rewards; the one place that may catch everything."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Protocol

from trivium.errors import DeadlineExceeded, RewardError, RolloutError, RolloutsFailing
from trivium.policy import EngineFailure, Policy, PromptTooLong
from trivium.types import Failure, Group, Sampling, Trajectory

if TYPE_CHECKING:
    from trivium.protocols import Operator, Renderer, RolloutEngine, WeightChannel, Workflow
    from trivium.randomness import SampleKey
    from trivium.types import Task


class Judge(Protocol):
    """Scores the living members of a group."""

    async def score(
        self, task: Task, trajectories: Sequence[Trajectory]
    ) -> Sequence[Mapping[str, float] | RewardError]:
        """The weighted components of each trajectory, or why there are none."""
        ...


@dataclass
class Explorer:
    """Plays tasks with one engine. Holds no policy of its own: the engine's version is the truth."""

    engine: RolloutEngine
    renderer: Renderer
    workflow: Workflow
    judge: Judge
    sampling: Sampling
    max_context: int
    deadline_s: float
    max_concurrent: int
    name: str = "explorer-0"
    greedy_baseline: bool = False
    """Whether training rollouts want each task played once more without randomness."""
    must_judge: bool = True
    """Whether a trajectory that nobody rewarded failed."""
    operators: Sequence[Operator] = ()
    """The experience pipeline, in order."""
    in_flight: str = "finish"
    """What becomes of replies in progress when new weights arrive: `finish` or `update` (see `sync.in_flight`)."""
    _room: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.max_concurrent)

    @property
    def version(self) -> int:
        """The policy version it plays with."""
        return self.engine.version

    async def adopt(self, version: int, channel: WeightChannel) -> None:
        """Loads a published version; replies in flight finish first."""
        weights = await asyncio.to_thread(lambda: list(channel.collect(version)))  # may wait for the trainer
        await self.engine.load(version, weights)

    def refined(self, group: Group) -> Group:
        """The group after the experience pipeline; the first operator that refuses it has the last word."""
        for operator in self.operators:
            if group.dropped:
                break
            group = operator(group)
        return group

    async def play(
        self, task: Task, keys: Sequence[SampleKey], *, slot: int = 0, epoch: int = 0, attempt: int = 0,
        sampling: Sampling | None = None, greedy: SampleKey | None = None,
    ) -> Group:  # fmt: skip
        """Plays a task once per key and judges the results; members that failed say why.

        With a key for `greedy` it is played once more at temperature 0, and judged by itself: whoever judges members
        against each other must not see it. Raises EngineFailure when the engine itself breaks; everything that is the
        task's or a user's fault is data.
        """
        version = self.version
        sampling = sampling or self.sampling
        plays = [(key, sampling) for key in keys]
        if greedy is not None:
            plays.append((greedy, replace(sampling, temperature=0.0)))
        played = await asyncio.gather(*(self._play_one(task, key, how) for key, how in plays))
        # The deadline covers a rollout whole: rewards get what the longest playing left of it.
        left_s = max(0.0, self.deadline_s - max(seconds for _, seconds in played))
        trajectories = [trajectory for trajectory, _ in played]
        members, baseline = await asyncio.gather(
            self._judge(task, trajectories[: len(keys)], left_s), self._judge(task, trajectories[len(keys) :], left_s)
        )
        return Group(slot, task, tuple(members), epoch, attempt, version, greedy=baseline[0] if baseline else None)

    async def judged(self, task: Task, played: Sequence[Trajectory]) -> list[Trajectory]:
        """Trajectories that were played elsewhere, with their rewards, as in `play`."""
        return await self._judge(task, played, self.deadline_s)

    async def _play_one(self, task: Task, key: SampleKey, sampling: Sampling) -> tuple[Trajectory, float]:
        """The trajectory, and the seconds it took once there was room for it."""
        async with self._room:
            started = time.monotonic()
            policy = Policy(self.engine, self.renderer, sampling, key, self.max_context)
            try:
                async with asyncio.timeout(self.deadline_s):
                    earned = await self.workflow.run(task, policy)
                trajectory = Trajectory(
                    key.index, policy.turns, _finite("reward", earned or {}),
                    metrics=_finite("metric", policy.metrics),
                )  # fmt: skip
            except EngineFailure:
                raise
            except asyncio.CancelledError:
                if (current := asyncio.current_task()) is None or current.cancelling():
                    raise
                # Nobody cancelled this rollout: the workflow let a cancellation of its own escape.
                trajectory = Trajectory(
                    key.index, policy.turns,
                    failure=Failure("workflow", "CancelledError", "the workflow let a cancellation of its own escape"),
                )  # fmt: skip
            except Exception as error:  # the rollout boundary: a bad rollout is data
                trajectory = Trajectory(key.index, policy.turns, failure=self._failure(error))
            return trajectory, time.monotonic() - started

    async def _judge(self, task: Task, played: Sequence[Trajectory], deadline_s: float) -> list[Trajectory]:
        """The trajectories with their rewards; a judge that failed fails the trajectory, never scores it 0."""
        living = [t for t in played if t.failure is None]
        try:
            async with asyncio.timeout(deadline_s):
                scores = await self.judge.score(task, living) if living else ()
        except TimeoutError:
            error = DeadlineExceeded(
                f"the reward of task {task.task_id!r}", f"none after {deadline_s:.1f} s", "make it faster, or raise "
                "workflow.deadline_s",
            )  # fmt: skip
            scores = [error] * len(living)
        by_index = dict(zip((t.index for t in living), scores, strict=True))
        return [self._scored(t, by_index[t.index]) if t.index in by_index else t for t in played]

    def _scored(self, trajectory: Trajectory, score: Mapping[str, float] | RolloutError) -> Trajectory:
        if isinstance(score, RolloutError):
            return replace(trajectory, failure=self._failure(score))
        rewards = {**trajectory.rewards, **score}
        if len(rewards) < len(trajectory.rewards) + len(score):
            error = RewardError(
                "rewards of different names", f"both the workflow and a reward gave {sorted(score)}", "rename one"
            )
            return replace(trajectory, failure=self._failure(error))
        if not rewards and self.must_judge:
            error = RewardError(
                "a reward", "neither the workflow nor a reward function gave one", "add an entry under `rewards`"
            )
            return replace(trajectory, failure=self._failure(error))
        return replace(trajectory, rewards=rewards)

    def _failure(self, error: Exception) -> Failure:
        match error:
            case RewardError():
                side = "reward"
            case PromptTooLong():
                side = "prompt"
            case TimeoutError():
                side = "deadline"
            case _:
                side = "workflow"
        message = str(error) or (f"no result within {self.deadline_s} s" if side == "deadline" else "")
        return Failure(side, type(error).__name__, message)


def refuse_failing(groups: Sequence[Group], max_fraction: float, what: str) -> None:
    """Raises RolloutsFailing when more than this part of the groups' trajectories failed."""
    failures = [t.failure for group in groups for t in group.played if t.failure is not None]
    total = sum(len(group.played) for group in groups)
    if len(failures) <= max_fraction * total:
        return
    (side, kind, message), times = Counter((f.side, f.kind, f.message) for f in failures).most_common(1)[0]
    raise RolloutsFailing(
        f"at most {max_fraction:.0%} failed trajectories in {what}",
        f"{len(failures)} of {total} failed; most often ({times} times) the {side}: {kind}: {message}",
        "mend the cause and start another run.dir (failed rollouts are part of this run), or raise "
        "workflow.max_failed_fraction if this many failures are normal",
    )


def _finite(what: str, numbers: Mapping[str, object]) -> dict[str, float]:
    """What a workflow gave, as floats; anything that is not a finite number is a RewardError."""
    floats: dict[str, float] = {}
    for name, value in numbers.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"a finite number for {what} {name!r}", f"the workflow gave {value!r}", "give floats")
        floats[name] = float(value)
    return floats
