"""The built-in operators (see `pipeline`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, Literal

import numpy as np
from pydantic import Field

from trivium.config import Plugin
from trivium.foundation.errors import DataError, RewardError
from trivium.policy import named_numbers
from trivium.types import Capabilities, Failure, Group, Trajectory


class RewardFilter:
    """Removes members, or whole groups, with too small a reward.

    A group without a live member left is dropped. A smaller one is trained on as it is: its statistics are those of its
    members, and the algorithm refuses it if they are fewer than its estimator compares.
    """

    class Config(Plugin):
        kind: str = "reward_filter"
        threshold: float = 0.0
        """Members or groups with a smaller reward are removed."""
        of: Literal["members", "groups"] = "members"
        """The reward that is compared: of each member, or the mean over a group."""
        component: str = ""
        """The component of the reward that is compared; empty for the total."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        threshold = self.config.threshold
        earned = group.member_rewards(self.config.component)
        rewards = {member.index: reward for member, reward in zip(group.alive, earned, strict=True)}
        if not rewards:
            return group
        if self.config.of == "groups":
            mean = fmean(rewards.values())
            return group if mean >= threshold else group.refused(f"its mean reward {mean:g} is below {threshold:g}")
        if max(rewards.values()) < threshold:
            return group.refused(f"no member has a reward of at least {threshold:g}")
        return _without(group, [index for index, reward in rewards.items() if reward < threshold])


class RewardStdFilter:
    """Drops groups whose members have (nearly) equal rewards: their advantages are zero.

    A group with a single live member is kept.
    """

    class Config(Plugin):
        kind: str = "reward_std_filter"
        threshold: float = Field(default=0.0, ge=0)
        """A group with at most this population standard deviation is dropped."""
        component: str = ""
        """The component of the reward that is compared; empty for the total."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        rewards = group.member_rewards(self.config.component)
        std = _std(rewards)
        if len(rewards) < 2 or std > self.config.threshold:
            return group
        return group.refused(f"the standard deviation {std:g} of its rewards is not above {self.config.threshold:g}")


class RewardShaping:
    """Changes the reward by a metric that the workflow reported.

    `add` and `sub` add a component to the reward, `mul` and `div` change every component. The greedy completion is
    treated like the members. One whose reward would not be finite, after a division by 0 for example, is recorded as
    failed.
    """

    capabilities = Capabilities(drops=False)

    class Config(Plugin):
        kind: str = "reward_shaping"
        metric: str
        """The name of the number among the workflow's metrics."""
        op: Literal["add", "sub", "mul", "div"] = "add"
        """How the reward changes, by `weight` times the number."""
        weight: float = 1.0
        """The factor of the number."""
        missing: Literal["error", "skip"] = "error"
        """What happens to a member without the metric: `error` ends the run, `skip` leaves it as it is."""
        name: str = ""
        """The name of the component that `add` and `sub` add; empty: the name of the metric."""

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
            return replace(member, rewards=named_numbers("reward", self._changed(member.rewards, number)))
        except (ZeroDivisionError, RewardError) as error:
            problem = error.found if isinstance(error, RewardError) else "division by zero"
        message = f"the reward, {config.op} {config.weight:g} * {config.metric} ({number:g}), cannot be used: {problem}"
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
                f"a component {name!r} of the reward",
                "the trajectory has a component of this name",
                "set the operator's name",
            )
        return {**rewards, name: number if config.op == "add" else -number}


class Dedup:
    """Keeps the first of several members with equal tokens.

    With `drop` the others leave the group, and its statistics are those of the members it has; with `fail` they stay
    as failed.
    """

    capabilities = Capabilities(drops=False)

    class Config(Plugin):
        kind: str = "dedup"
        others: Literal["drop", "fail"] = "drop"
        """What happens to the other members: `drop` removes them from the group, `fail` records them as failed."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        first: dict[Any, int] = {}
        repeated = {
            member.index: first[tokens]
            for member in group.alive
            if first.setdefault(tokens := _tokens(member), member.index) != member.index
        }
        if self.config.others == "drop":
            return _without(group, repeated)
        failures = {
            index: Failure("operator", "Duplicate", f"its tokens equal those of member {of}")
            for index, of in repeated.items()
        }
        members = (replace(t, failure=failures.get(t.index, t.failure)) for t in group.trajectories)
        return replace(group, trajectories=tuple(members))


_NUMBERS: Mapping[str, Callable[[Sequence[Trajectory], float], float]] = {
    "pass_rate": lambda members, threshold: fmean(member.reward >= threshold for member in members),
    "any_right": lambda members, threshold: float(any(member.reward >= threshold for member in members)),
    "reward_std": lambda members, _: _std([member.reward for member in members]),
    "distinct": lambda members, _: len({_tokens(member) for member in members}) / len(members),
}


class GroupMetrics:
    """Adds numbers about the group to the metrics, logged as `workflow/<name>`: means over all live members."""

    capabilities = Capabilities(drops=False)

    class Config(Plugin):
        kind: str = "metrics"
        numbers: tuple[Literal["pass_rate", "any_right", "reward_std", "distinct"], ...] = (
            "pass_rate",
            "any_right",
            "reward_std",
            "distinct",
        )
        """The numbers: the fraction of correct members (`pass_rate`), whether any is correct (`any_right`), the
        standard deviation of their rewards, the fraction of distinct completions."""
        threshold: float = 1.0
        """A member with at least this total reward counts as correct."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, group: Group) -> Group:
        if not group.alive:
            return group
        numbers = {name: _NUMBERS[name](group.alive, self.config.threshold) for name in self.config.numbers}
        for member in group.alive:
            if used := sorted(numbers.keys() & member.metrics.keys()):
                raise DataError(
                    f"the operator metrics with the number(s) {', '.join(used)}",
                    f"the workflow reports metrics of these names for task {group.task.task_id!r}",
                    "leave them out of the operator's numbers, or rename the workflow's",
                )
        members = (replace(t, metrics={**t.metrics, **numbers}) if t.failure is None else t for t in group.trajectories)
        return replace(group, trajectories=tuple(members))


def _without(group: Group, indices: Iterable[int]) -> Group:
    removed = set(indices)
    return replace(group, trajectories=tuple(t for t in group.trajectories if t.index not in removed))


def _std(rewards: Sequence[float]) -> float:
    """The standard deviation of the rewards in float32, computed exactly: 0 for equal ones."""
    return pstdev([float(np.float32(reward)) for reward in rewards]) if rewards else 0.0


def _tokens(member: Trajectory) -> tuple[bytes, ...]:
    """The prompt tokens, media and tokens of every turn."""
    return tuple(
        part
        for turn in member.turns
        for part in (turn.prompt_tokens.tobytes(), *(m.sha256.encode() for m in turn.media), turn.tokens.tobytes())
    )
