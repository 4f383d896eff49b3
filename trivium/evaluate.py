"""Evaluator: fixed tasks, fixed version, exact estimates. Nothing is bootstrapped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

from trivium.errors import SyncError
from trivium.explorer import check_failures
from trivium.phases import activity, progress, span
from trivium.randomness import SampleKey

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


def maj_at_k(answers: Sequence[str], right: str, k: int) -> float:
    """The probability that the most frequent answer among k of the n answers is `right`; a tie shares the win.

    Exact, by counting k-subsets: for every number m of right answers drawn, the ways in which no other answer is drawn
    more than m times, by how many are drawn exactly m times (the ties).
    """
    counts = Counter(answers)
    num_right = counts.pop(right, 0)
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
    """The expected highest of k of the n rewards, drawn without replacement: exact, by which of them is the highest."""
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
    """Whether the reward is graded, and the fraction of full rewards says little: it is not -1, 0 or 1, and there is
    no `evaluation.threshold`."""
    return threshold is None and trajectory.reward not in (-1, 0, 1)


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
    """The reward from which a rollout counts as right; None: 1, and rewards other than -1, 0 and 1 are counted."""
    max_failed_fraction: float = 1.0

    async def run(self, version: int) -> Metrics:
        """Metrics under `eval/<taskset>/`.

        Raises SyncError if the explorer does not hold `version` throughout, RolloutsFailing if too many rollouts
        failed: a broken reward is no accuracy of zero.
        """
        return self.measured(await self.rollouts(version), version)

    async def rollouts(self, version: int) -> list[Group]:
        """Every task, rolled out with this version."""
        self._expect(version)
        name = f"evaluate {self.taskset}"
        with activity(f"evaluating {self.taskset}", len(self.tasks)), span(self.explorer.name, name, version=version):
            groups = await asyncio.gather(*(self._rollout(index) for index in range(len(self.tasks))))
        self._expect(version)
        return groups

    def measured(self, groups: Sequence[Group], version: int) -> Metrics:
        """The metrics of groups that this version rolled out."""
        check_failures(groups, self.max_failed_fraction, f"the evaluation on {self.taskset!r}")
        metrics = {name: sum(row[name] for row in map(self._judge, groups)) / len(groups) for name in self._names()}
        metrics["failed"] = sum(t.failure is not None for g in groups for t in g.trajectories)
        metrics["partial"] = sum(is_partial(t, self.threshold) for g in groups for t in g.alive)
        return {f"eval/{self.taskset}/{name}": value for name, value in {**metrics, "version": version}.items()}

    async def _rollout(self, index: int) -> Group:
        task = self.tasks[index]
        keys = [
            SampleKey(self.seed, f"eval/{self.taskset}", task.taskset, task.task_id, 0, sample)
            for sample in range(self.samples)
        ]
        group = await self.explorer.rollout(task, keys, sampling=self.sampling)
        progress()
        return group

    def _names(self) -> list[str]:
        kinds = ("pass", "maj", "best", "worst")
        at_k = [f"{kind}@{k}" for k in self.k for kind in kinds] if self.samples > 1 else []
        return ["accuracy", "reward", "response_tokens", *at_k]

    def _judge(self, group: Group) -> Metrics:
        """The numbers of one task. A failed rollout is a wrong one, and is counted as failed as well."""
        right = [is_right(t, self.threshold) for t in group.trajectories]
        # Completions judged right are one answer, however they are spelled; a wrong one is its own text.
        votes = [
            "right" if ok else f"wrong: {t.completion.strip()}" for ok, t in zip(right, group.trajectories, strict=True)
        ]
        rewards = [t.reward for t in group.alive] or [0.0]
        metrics = {
            "accuracy": sum(right) / self.samples,
            "reward": sum(t.reward for t in group.alive) / max(1, len(group.alive)),
            "response_tokens": sum(t.num_tokens for t in group.trajectories) / self.samples,
        }
        for k in self.k:
            metrics[f"pass@{k}"] = pass_at_k(self.samples, sum(right), k)
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
    """Rows that are never trained on, for the loss over them."""

    taskset: str
    buffer: Buffer
    """Holds the rows of the taskset alone, in order."""
    num_groups: int

    async def groups(self) -> list[Group]:
        """Every row as a group."""
        return await self.buffer.taken_groups(range(self.num_groups))

    def named(self, metrics: Metrics) -> Metrics:
        """The part of an update's metrics that says how well the rows are learned, under `eval/<taskset>/`."""
        named = {"loss": sum(value for key, value in metrics.items() if key.startswith("train/loss/"))}
        for key, value in metrics.items():
            name = key.removeprefix("train/")
            if name == "preference_margin" or name.partition("/")[0] == "preference_accuracy":
                named[name] = value
        return {f"eval/{self.taskset}/{name}": value for name, value in named.items()}


@dataclass
class RemoteEvaluator:
    """The trainer's end of an evaluation: an explorer in any process runs it (see `loops.evaluate_loop`)."""

    synchronizer: Synchronizer
    taskset: str

    async def run(self, version: int) -> Metrics:
        """Metrics under `eval/<taskset>/`."""
        return await self.synchronizer.request_evaluation(version)
