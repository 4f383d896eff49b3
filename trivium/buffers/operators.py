"""The operators that ship: each a small step of the experience pipeline (see `pipeline`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, Literal

import numpy as np
from pydantic import Field

from trivium.config import Plugin
from trivium.errors import DataError
from trivium.types import Failure, Group, Trajectory


class RewardFilter:
    """Members, or whole groups, that earned too little are left out.

    A group without a living member left is dropped. A smaller one is trained on as it is: its statistics are those of
    the members it has, and the algorithm refuses it if they are fewer than its estimator compares.
    """

    drops = True

    class Config(Plugin):
        kind: str = "reward_filter"
        threshold: float = 0.0
        """What earned less is left out."""
        of: Literal["members", "groups"] = "members"
        """What is measured: each member by itself, or the mean over a group."""
        component: str = ""
        """Which component of the reward is measured; empty for the total."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        threshold = self.config.threshold
        rewards = {member.index: _reward(group, member, self.config.component) for member in group.alive}
        if not rewards:
            return group
        if self.config.of == "groups":
            mean = fmean(rewards.values())
            return group if mean >= threshold else group.refused(f"its mean reward {mean:g} is below {threshold:g}")
        if max(rewards.values()) < threshold:
            return group.refused(f"no member has a reward of at least {threshold:g}")
        return _without(group, [index for index, reward in rewards.items() if reward < threshold])


class RewardStdFilter:
    """Groups whose members earned the same, or nearly, are dropped: they have nothing to tell each other apart by.

    A member that is alone, because the others failed, is no evidence of that: its group is kept.
    """

    drops = True

    class Config(Plugin):
        kind: str = "reward_std_filter"
        threshold: float = Field(default=0.0, ge=0)
        """The largest standard deviation (of the members, not an estimate) that is dropped."""
        component: str = ""
        """Which component of the reward is measured; empty for the total."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        rewards = [_reward(group, member, self.config.component) for member in group.alive]
        std = _std(rewards)
        if len(rewards) < 2 or std > self.config.threshold:
            return group
        return group.refused(f"the standard deviation {std:g} of its rewards is not above {self.config.threshold:g}")


class RewardShaping:
    """A number that the workflow reported becomes part of the reward.

    Adding and subtracting make a component of the reward, multiplying and dividing change every component. The greedy
    reply is treated like the members. One whose reward would not be finite any more, by a division by 0 for example,
    is recorded as failed.
    """

    drops = False

    class Config(Plugin):
        kind: str = "reward_shaping"
        metric: str
        """The number's name among the workflow's metrics."""
        op: Literal["add", "sub", "mul", "div"] = "add"
        """What happens to the reward, with `weight` times the number."""
        weight: float = 1.0
        """Factor of the number."""
        missing: Literal["error", "skip"] = "error"
        """What to do about a member whose workflow reported no such number: end the run, or leave it as it is."""
        name: str = ""
        """Name of the component that `add` and `sub` make; empty means the metric's."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        members = tuple(self._shaped(group, member) for member in group.trajectories)
        return replace(group, trajectories=members, greedy=group.greedy and self._shaped(group, group.greedy))

    def _shaped(self, group: Group, member: Trajectory) -> Trajectory:
        config = self.config
        if member.failure is not None:
            return member
        if config.metric not in member.metrics:
            if config.missing == "skip":
                return member
            raise DataError(
                f"the reward shaped by the metric {config.metric!r}",
                f"a trajectory of task {group.task.task_id!r} has {sorted(member.metrics) or 'none'}",
                "report it in the workflow (policy.metrics), name another, or set the operator's missing: skip",
            )
        number = config.weight * member.metrics[config.metric]
        try:
            rewards = self._changed(member.rewards, number)
        except ZeroDivisionError:
            rewards = {"quotient": math.nan}
        if all(math.isfinite(reward) for reward in rewards.values()):
            return replace(member, rewards=rewards)
        message = f"the reward, {config.op} {config.weight:g} * {config.metric} ({number:g}), is not finite"
        return replace(member, failure=Failure("operator", "RewardError", message))

    def _changed(self, rewards: Mapping[str, float], number: float) -> dict[str, float]:
        config = self.config
        if config.op == "mul":
            return {name: reward * number for name, reward in rewards.items()}
        if config.op == "div":
            return {name: reward / number for name, reward in rewards.items()}
        name = config.name or config.metric
        if name in rewards:
            raise DataError(
                f"a component {name!r} of the reward", "there is one of this name already", "set the operator's name"
            )
        return {**rewards, name: number if config.op == "add" else -number}


class Dedup:
    """Of members that say the same, token for token, only the first counts.

    With `drop` the group gets smaller, and its statistics are those of the members it has; with `fail` it keeps its
    size on record, and the others count as failed.
    """

    drops = False

    class Config(Plugin):
        kind: str = "dedup"
        others: Literal["drop", "fail"] = "drop"
        """What becomes of the others: `drop` takes them out of the group, `fail` records them as failed."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        first: dict[Any, int] = {}
        repeated = {
            member.index: first[said]
            for member in group.alive
            if first.setdefault(said := _said(member), member.index) != member.index
        }
        if self.config.others == "drop":
            return _without(group, repeated)
        failures = {
            index: Failure("operator", "Duplicate", f"it says what member {of} says") for index, of in repeated.items()
        }
        members = (replace(t, failure=failures.get(t.index, t.failure)) for t in group.trajectories)
        return replace(group, trajectories=tuple(members))


_NUMBERS: Mapping[str, Callable[[Sequence[Trajectory], float], float]] = {
    "pass_rate": lambda members, right: fmean(member.reward >= right for member in members),
    "any_right": lambda members, right: float(any(member.reward >= right for member in members)),
    "reward_std": lambda members, _: _std([member.reward for member in members]),
    "distinct": lambda members, _: len({_said(member) for member in members}) / len(members),
}


class GroupMetrics:
    """Numbers about the group, logged as `workflow/<name>`: the mean over all members trained or not."""

    drops = False

    class Config(Plugin):
        kind: str = "metrics"
        numbers: tuple[Literal["pass_rate", "any_right", "reward_std", "distinct"], ...] = (
            "pass_rate", "any_right", "reward_std", "distinct",
        )  # fmt: skip
        """Which: the part of the members that are right, whether any is, the standard deviation of their rewards, the
        part of their replies that differ."""
        threshold: float = 1.0
        """A total reward of at least this counts as right."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        if not group.alive:
            return group
        numbers = {name: _NUMBERS[name](group.alive, self.config.threshold) for name in self.config.numbers}
        for member in group.alive:
            if taken := sorted(numbers.keys() & member.metrics.keys()):
                raise DataError(
                    f"the operator metrics with the number(s) {', '.join(taken)}",
                    f"the workflow reports metrics of these names for task {group.task.task_id!r}",
                    "leave them out of the operator's numbers, or rename the workflow's",
                )
        members = (
            replace(t, metrics={**t.metrics, **numbers}) if t.failure is None else t for t in group.trajectories
        )  # fmt: skip
        return replace(group, trajectories=tuple(members))


def _without(group: Group, indices: Iterable[int]) -> Group:
    gone = set(indices)
    return replace(group, trajectories=tuple(t for t in group.trajectories if t.index not in gone))


def _reward(group: Group, member: Trajectory, component: str) -> float:
    if component and component not in member.rewards:
        raise DataError(
            f"the reward component {component!r}",
            f"a trajectory of task {group.task.task_id!r} has {sorted(member.rewards) or 'none'}",
            "name one of them in the operator, or leave `component` out",
        )
    return member.rewards[component] if component else member.reward


def _std(rewards: Sequence[float]) -> float:
    """Of the rewards as a trainer sees them, in float32; computed exactly, so equal ones have a deviation of 0."""
    return pstdev([float(np.float32(reward)) for reward in rewards]) if rewards else 0.0


def _said(member: Trajectory) -> tuple[bytes, ...]:
    """What was said to a member and what it said."""
    return tuple(array.tobytes() for turn in member.turns for array in (turn.prompt_tokens, turn.tokens))
