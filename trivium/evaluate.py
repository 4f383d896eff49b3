"""Evaluator: fixed tasks, fixed version, exact estimates. Nothing is bootstrapped."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np

from trivium.explorer import check_failures
from trivium.foundation.errors import SyncError
from trivium.foundation.phases import activity, span
from trivium.foundation.randomness import SampleKey
from trivium.policy import ROLLOUT_S
from trivium.schedule import Cadence
from trivium.types import experiences_of

if TYPE_CHECKING:
    from trivium.explorer import Explorer
    from trivium.protocols import Buffer, TaskSource
    from trivium.synchronizer import Synchronizer
    from trivium.types import Group, Metrics, Sampling, Trajectory


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The probability that k of n samples, drawn without replacement, contain a right one.

    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1.
    """
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def maj_at_k(answers: Sequence[Hashable], answer: Hashable, k: int) -> float:
    """The probability that the most frequent answer among k of the n `answers` is `answer`, the right one; a tie shares
    the win.

    Exact, by counting k-subsets. For every number m of right answers drawn, counts the ways in which no other answer is
    drawn more than m times, grouped by the number of answers drawn exactly m times (the ties).
    """
    counts = Counter(answers)
    num_right = counts.pop(answer, 0)
    won = 0.0
    for drawn in range(1, min(num_right, k) + 1):
        # ways[(j, t)]: choices of j other answers, none drawn more often than `drawn`, t of them exactly that often
        ways: dict[tuple[int, int], int] = {(0, 0): 1}
        for count in counts.values():
            grown: dict[tuple[int, int], int] = {}
            for (chosen, ties), number in ways.items():
                for more in range(min(count, drawn, k - drawn - chosen) + 1):
                    place = (chosen + more, ties + (more == drawn))
                    grown[place] = grown.get(place, 0) + number * comb(count, more)
            ways = grown
        others = sum(number / (ties + 1) for (chosen, ties), number in ways.items() if chosen == k - drawn)
        won += comb(num_right, drawn) * others
    return won / comb(len(answers), k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected highest of k of the n rewards, drawn without replacement. Exact, by summing over the reward that is
    the highest."""
    ranked = sorted(rewards)
    won = sum(reward * comb(below, k - 1) for below, reward in enumerate(ranked))
    return won / comb(len(ranked), k)


def worst_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected lowest of k of the n rewards, drawn without replacement."""
    return -best_at_k([-reward for reward in rewards], k)


def is_right(trajectory: Trajectory, threshold: float | None) -> bool:
    """Whether a rollout has the full reward: `evaluation.threshold`, or 1."""
    return trajectory.failure is None and trajectory.reward >= (1.0 if threshold is None else threshold)


def is_partial(trajectory: Trajectory, threshold: float | None) -> bool:
    """Whether the reward is graded: not -1, 0 or 1, without an `evaluation.threshold`. The accuracy of graded rewards
    is not meaningful."""
    return threshold is None and trajectory.reward not in (-1, 0, 1)


def observation_loss(groups: Sequence[Group]) -> Metrics:
    """The mean cross-entropy of the tokens between turns (`Experience.observed`) of rollouts with the extra
    `prompt_log_prob`, and the number of these tokens. Without such tokens, only their number, 0. Failed rollouts are
    left out."""
    total, tokens = 0.0, 0
    for group in groups:
        for experience in (row for member in group.alive for row in experiences_of(group, member)):
            if (observed := experience.observed).any():
                total -= float(experience.extra["prompt_log_prob"][observed].sum(dtype=np.float64))
                tokens += int(observed.sum())
    return {"observation_tokens": tokens, **({"observation_loss": total / tokens} if tokens else {})}


@dataclass
class Evaluator:
    """Rolls out every task of a taskset `samples` times with one version of the policy."""

    explorer: Explorer
    tasks: TaskSource
    taskset: str
    seed: int
    samples: int
    k: tuple[int, ...]
    sampling: Sampling
    threshold: float | None = None
    """The reward from which a rollout counts as right. None: 1, and the metric `partial` counts rewards other than -1,
    0 and 1."""
    max_failed_fraction: float = 1.0
    observations: bool = False
    """Whether to measure the cross-entropy of observations. The engine must record `prompt_log_prob`."""
    training_s: float = field(default=0.0, init=False)
    """The seconds of the last evaluation that rollouts for training took: its part of the seconds of all rollouts."""

    async def run(self, version: int) -> Metrics:
        """Metrics under `eval/<taskset>/`.

        Raises SyncError if the explorer does not hold `version` throughout, RolloutsFailing if too many rollouts
        failed, since a broken reward must not look like an accuracy of zero.
        """
        groups = await self.rollouts(version)
        return await asyncio.to_thread(self.measured, groups, version)  # a grader in another process may read answers

    async def rollouts(self, version: int) -> list[Group]:
        """Rolls out every task with this version."""
        self._expect(version)
        name, started, before = f"evaluate {self.taskset}", time.monotonic(), self.explorer.rollout_s
        progress = activity(f"evaluating {self.taskset}", len(self.tasks) * self.samples, "rollouts")
        with progress, span(self.explorer.name, name, version=version):
            groups = await asyncio.gather(*(self._rollout(index) for index in range(len(self.tasks))))
        own_s = sum(t.metrics.get(ROLLOUT_S, 0.0) for group in groups for t in group.trajectories)
        # 1e-9: both are 0 if no rollout took any time that the clock shows.
        share = own_s / max(self.explorer.rollout_s - before, own_s, 1e-9)
        self.training_s = (1 - share) * (time.monotonic() - started) if own_s else 0.0
        self._expect(version)
        return groups

    def measured(self, groups: Sequence[Group], version: int) -> Metrics:
        """The metrics of groups that this version rolled out. Without any reward, those that need none."""
        check_failures(groups, self.max_failed_fraction, f"the evaluation on {self.taskset!r}")
        alive = [trajectory for group in groups for trajectory in group.alive]
        rewarded = not alive or any(trajectory.rewards for trajectory in alive)
        names = self._names() if rewarded else ["response_tokens"]
        metrics = {name: sum(row[name] for row in map(self._judge, groups)) / len(groups) for name in names}
        metrics["failed"] = sum(t.failure is not None for g in groups for t in g.trajectories)
        if rewarded:
            metrics["partial"] = sum(is_partial(t, self.threshold) for t in alive)
        if self.observations:
            metrics |= observation_loss(groups)
        return {f"eval/{self.taskset}/{name}": value for name, value in {**metrics, "version": version}.items()}

    async def _rollout(self, index: int) -> Group:
        task = self.tasks[index]
        keys = [
            SampleKey(self.seed, f"eval/{self.taskset}", task.taskset, task.task_id, 0, sample)
            for sample in range(self.samples)
        ]
        extra = (*self.sampling.extra, "prompt_log_prob") if self.observations else self.sampling.extra
        return await self.explorer.rollout(task, keys, sampling=replace(self.sampling, extra=extra))

    def _names(self) -> list[str]:
        kinds = ("pass", "maj", "best", "worst")
        at_k = [f"{kind}@{k}" for k in self.k for kind in kinds] if self.samples > 1 else []
        return ["accuracy", "reward", "response_tokens", *at_k]

    def _judge(self, group: Group) -> Metrics:
        """The metrics of one task. A failed rollout counts both as wrong and as failed."""
        successes = [is_right(t, self.threshold) for t in group.trajectories]
        # All right completions are one answer; wrong ones are compared by the rewards that compare answers.
        judge: Any = getattr(self.explorer, "judge", None)
        by_rewards = hasattr(judge, "answer")
        votes = [
            "right" if ok else ("wrong", judge.answer(group.task, t.completion) if by_rewards else t.completion.strip())
            for ok, t in zip(successes, group.trajectories, strict=True)
        ]
        rewards = [t.reward for t in group.alive] or [0.0]
        metrics = {
            "accuracy": sum(successes) / self.samples,
            "reward": sum(t.reward for t in group.alive) / max(1, len(group.alive)),
            "response_tokens": sum(t.num_tokens for t in group.trajectories) / self.samples,
        }
        for k in self.k:
            metrics[f"pass@{k}"] = pass_at_k(self.samples, sum(successes), k)
            metrics[f"maj@{k}"] = maj_at_k(votes, "right", k)
            metrics[f"best@{k}"] = best_at_k(rewards, min(k, len(rewards)))
            metrics[f"worst@{k}"] = worst_at_k(rewards, min(k, len(rewards)))
        return metrics

    def _expect(self, version: int) -> None:
        if self.explorer.version != version:
            raise SyncError(
                f"evaluate version {version}",
                f"the explorer holds version {self.explorer.version}",
                "publish the version and wait for its adoption before evaluating",
            )


@dataclass(frozen=True)
class HeldOut:
    """Rows that are not trained on, to measure their loss."""

    taskset: str
    buffer: Buffer
    """Holds only the rows of the taskset, in order."""
    num_groups: int

    async def groups(self) -> list[Group]:
        """Every row as a group."""
        return await self.buffer.taken_groups(range(self.num_groups))

    def named(self, metrics: Metrics) -> Metrics:
        """Selects the loss and the preference metrics of an update, under `eval/<taskset>/`."""
        named = {"loss": sum(value for key, value in metrics.items() if key.startswith("train/loss/"))}
        for key, value in metrics.items():
            name = key.removeprefix("train/")
            if name == "preference_margin" or name.partition("/")[0] == "preference_accuracy":
                named[name] = value
        return {f"eval/{self.taskset}/{name}": value for name, value in named.items()}


@dataclass
class RemoteEvaluator:
    """Requests an evaluation for the trainer. An explorer in any process runs it (see `loops.evaluate_loop`)."""

    synchronizer: Synchronizer
    taskset: str

    async def run(self, version: int) -> Metrics:
        """Metrics under `eval/<taskset>/`."""
        return await self.synchronizer.request_evaluation(version)


@dataclass
class Measurements:
    """What a trainer measures of its policy, and when it did so last."""

    evaluator: RemoteEvaluator | None = None
    held_out: HeldOut | None = None
    """Rows to measure the loss over, at the cadence of evaluations."""
    cadence: Cadence = field(default_factory=Cadence)
    evaluated: int | None = None
    """The step of the last evaluation."""
    measured: int | None = None
    """The step at which the held-out loss was measured last."""
    score: float | None = None
    """The value that `checkpoint.keep_best` compares, if this step was evaluated; higher is better."""

    def state(self) -> dict[str, Any]:
        return {"score": self.score, "evaluated": self.evaluated, "measured": self.measured}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.evaluated, self.measured = state["evaluated"], state["measured"]

    def evaluation_due(self, version: int, *, ended: bool) -> bool:
        """Whether an evaluation of this step is due and has not been done; `ended`: the stage ends with the step."""
        at_end = ended and self.cadence.ends and not self.cadence.skip_end
        return self.evaluator is not None and version != self.evaluated and (at_end or self.cadence.is_due(version))

    def held_out_due(self, version: int, *, ended: bool) -> bool:
        """The same for the loss over held-out rows."""
        return self.held_out is not None and version != self.measured and (ended or self.cadence.is_due(version))
