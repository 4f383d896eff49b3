"""Reward shaping: changes to a trajectory's reward before the estimator, in the order of the config.

Legend: T trajectories. All arithmetic is in float64. Filters see the rewards before shaping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import fsum, sqrt
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.metadata import ShapingMetadata, When, reward_shaping
from trivium.algorithms.stats import distinct, group_statistics
from trivium.foundation.errors import DataError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Moments:
    """Mean and spread of every number seen so far: Welford 1962, merged as by Chan, Golub and LeVeque 1983."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two numbers."""
        return sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Sequence[float]) -> None:
        """Adds these numbers. Their order does not change the result by a bit."""
        if not values:
            return
        count, mean = len(values), fsum(values) / len(values)
        distance, total = mean - self.mean, self.count + count
        self.squares += fsum((value - mean) ** 2 for value in values) + distance**2 * self.count * count / total
        self.mean += distance * count / total
        self.count = total


@dataclass(frozen=True, slots=True)
class ShapingInputs:
    """The inputs of a shaping; every tensor (T,)."""

    reward: Tensor
    """Float64: the total reward after the earlier shapings."""
    length: Tensor
    """Int64: tokens that the policy sampled, in all turns."""
    truncated: Tensor
    """Bool: whether a length limit cut the last turn."""
    group: Tensor
    """Int64: equal for the members of one group."""
    max_new_tokens: int
    """The longest completion that sampling allows."""
    moments: Moments | None = None
    """Moments of all inputs of this shaping so far, this step's rewards included; None if it does not need them."""
    participants: tuple[str, ...] = ()
    """The participant of each trajectory (`Policy.fork`); empty texts if they have no rewards of their own."""
    role_mean: Tensor | None = None
    """Float64: the mean of all rewards of the participant so far, this step's included; None if it is not needed."""
    longest_turn: Tensor | None = None
    """Int64: tokens that the policy sampled in its longest turn; None if each trajectory has one turn."""


@dataclass(frozen=True)
class Shaping:
    """A shaping from a config."""

    function: Callable[[ShapingInputs], Tensor]
    metadata: ShapingMetadata
    moments: Moments | None = None
    """Moments of the rewards that it has received, if it needs them. Mutable, as `roles`."""
    roles: dict[str, Moments] | None = None
    """The same for each participant."""


def shaped(shapings: Sequence[Shaping], x: ShapingInputs) -> Tensor:
    """Applies the shapings in order and returns the rewards (T,). Updates the moments of each shaping that has them.

    Raises DataError if a shaping does not return one finite number per trajectory.
    """
    for step in shapings:
        if step.moments is not None:
            step.moments.update([float(reward) for reward in x.reward])
        means = None if step.roles is None else _role_means(step.roles, x)
        reward = step.function(replace(x, moments=step.moments, role_mean=means))
        if reward.shape != x.reward.shape or not bool(reward.isfinite().all()):
            name = getattr(step.function, "func", step.function).__name__
            raise DataError(
                f"rewards shaped by {name!r}",
                f"shape {tuple(reward.shape)} for {len(x.reward)} trajectories, or a number that is not finite",
                "return one finite number for each trajectory",
            )
        x = replace(x, reward=reward.double())
    return x.reward


def _role_means(roles: dict[str, Moments], x: ShapingInputs) -> Tensor:
    """The mean reward of each trajectory's participant, after adding this step's rewards to `roles`."""
    names = x.participants or ("",) * len(x.reward)
    for name in dict.fromkeys(names):
        rewards = [float(reward) for reward, other in zip(x.reward, names, strict=True) if other == name]
        roles.setdefault(name, Moments()).update(rewards)
    return x.reward.new_tensor([roles[name].mean for name in names])


Limit = Annotated[
    int | None,
    Field(ge=1, description="L_max of all turns together, in tokens; unset, `engine.sampling.max_new_tokens`"),
]


def _longest(x: ShapingInputs, limit: int | None) -> int:
    """L_max. Raises DataError if neither the option nor the engine's sampling sets it."""
    if limit is None and x.max_new_tokens < 1:
        raise DataError(
            "the longest completion, in tokens", "neither limit nor max_new_tokens", "set `limit`, or max_new_tokens"
        )
    return limit or x.max_new_tokens


@reward_shaping(
    formula="R - factor * clip(1 - (L_max - length) / (buffer * L_max), 0, 1){limit:, L_max = limit, of all turns}",
    source="soft overlong punishment: DAPO, Yu et al. 2025, eq. 13",
)
def overlong_penalty(
    x: ShapingInputs,
    *,
    factor: Annotated[
        float, Field(gt=0, description="the loss of a completion of full length, which is the largest loss")
    ] = 1.0,
    buffer: Annotated[
        float,
        Field(gt=0, le=1, description="the last fraction of the limit, over which the loss grows linearly from 0"),
    ] = 0.2,
    limit: Limit = None,
) -> Tensor:
    """Completions near the length limit lose reward: linearly within the buffer, and never more than `factor`.

    The paper's buffer is 4096 of 20480 tokens. Of several completions of a trajectory, the longest counts; with
    `limit`, all of them together.
    """
    longest = _longest(x, limit)
    length = x.length if limit is not None or x.longest_turn is None else x.longest_turn
    return x.reward - factor * overlong_fraction(length, longest, max(1, round(buffer * longest)))


def overlong_fraction(length: Tensor, max_length: int, buffer: int) -> Tensor:
    """(T,) float64: 0 for lengths (T,) up to `max_length - buffer` tokens, then linearly to 1 at `max_length`."""
    return (1 - (max_length - length.double()) / buffer).clamp(0, 1)


@reward_shaping(
    formula="coef * R if coef >= 0 else coef, where a length limit cut the completion",
    source="OpenRLHF, Hu et al. 2024, option stop_properly_penalty_coef",
)
def truncation_penalty(
    x: ShapingInputs,
    *,
    coef: Annotated[float, Field(le=1, description="factor of the reward; a value below 0 replaces the reward")] = 0.0,
) -> Tensor:
    """Truncated completions earn less than finished ones."""
    return torch.where(x.truncated, coef * x.reward if coef >= 0 else torch.full_like(x.reward, coef), x.reward)


@reward_shaping(
    formula="R - coef * length / L_max{limit:, L_max = limit}",
    source="LCPO, Aggarwal and Welleck 2025, with a target length of 0",
)
def length_penalty(
    x: ShapingInputs,
    *,
    coef: Annotated[float, Field(gt=0, description="the loss of a completion of full length")] = 0.1,
    limit: Limit = None,
) -> Tensor:
    """Every token costs the same."""
    return x.reward - coef * x.length.double() / _longest(x, limit)


@reward_shaping(
    formula="R + coef * (w if R >= threshold else min(w, 0)); w = 0.5 - (length - shortest) / (longest - shortest)",
    source="Kimi k1.5, Kimi Team 2025, section 2.3.3",
)
def relative_length(
    x: ShapingInputs,
    *,
    coef: Annotated[float, Field(gt=0, description="twice the largest change of a reward by length")] = 0.2,
    threshold: Annotated[float, Field(description="a reward of at least this counts as correct")] = 1.0,
) -> Tensor:
    """Among the correct completions of a group, short ones gain and long ones lose; wrong ones can only lose. A group
    whose members are all equally long is not changed.
    """
    ids, inverse, _ = distinct(x.group)
    length = x.length.double()
    shortest = length.new_full((len(ids),), torch.inf).scatter_reduce(0, inverse, length, "amin")[inverse]
    longest = length.new_zeros(len(ids)).scatter_reduce(0, inverse, length, "amax")[inverse]
    # The lower bound only keeps 0 / 0 out of groups of equal lengths, which get no weight below.
    weight = 0.5 - (length - shortest) / (longest - shortest).clamp(min=1)
    weight = torch.where(longest == shortest, 0.0, weight)
    return x.reward + coef * torch.where(x.reward >= threshold, weight, weight.clamp(max=0))


@reward_shaping(formula="clip(R, low, high)", source="reward clipping: DQN, Mnih et al. 2015")
def clip(
    x: ShapingInputs,
    *,
    low: Annotated[float, Field(le=0, description="no reward is lower")] = -10.0,
    high: Annotated[float, Field(ge=0, description="no reward is higher")] = 10.0,
) -> Tensor:
    """Clips rewards to bounds, against outliers of a reward model."""
    return x.reward.clamp(low, high)


@reward_shaping(formula="scale * R + shift", source="an affine change of units")
def scale_shift(
    x: ShapingInputs,
    *,
    scale: Annotated[float, Field(description="factor")] = 1.0,
    shift: Annotated[float, Field(description="added after scaling")] = 0.0,
) -> Tensor:
    """Changes the units: from {0, 1} to {-1, 1} with scale 2 and shift -1."""
    return scale * x.reward + shift


@reward_shaping(
    formula="(R - mean(R over the group)){norm_by_std: / (std(R over the group) + epsilon)}",
    source="GRPO, Shao et al. 2024, section 4.1.2, ahead of any other estimator",
    effective={"epsilon": When("norm_by_std")},
)
def group_normalise(
    x: ShapingInputs,
    *,
    norm_by_std: Annotated[bool, Field(description="whether to divide by the group's standard deviation")] = True,
    epsilon: Annotated[float, Field(gt=0, description="added to the standard deviation")] = 1e-6,
) -> Tensor:
    """Rewards relative to their group, for estimators that do not compare members; a group of one keeps its reward."""
    stats = group_statistics(x.reward, x.group)
    normalised = stats.centred / (stats.std + epsilon) if norm_by_std else stats.centred
    return torch.where(stats.count == 1, x.reward, normalised)


@reward_shaping(
    formula="(R{minus_mean: - mean}) / std; {minus_mean:mean and }std of every reward so far, std >= min_std or else 1",
    source="reward scaling: Engstrom et al. 2020, with the moments of Welford 1962",
    needs={"moments"},
)
def running_normalise(
    x: ShapingInputs,
    *,
    minus_mean: Annotated[bool, Field(description="whether to subtract the mean as well")] = False,
    min_std: Annotated[
        float, Field(gt=0, description="rewards are not divided by a smaller standard deviation")
    ] = 1e-6,
) -> Tensor:
    """Rewards in units of the standard deviation of all rewards trained on so far. A resumed run keeps the moments."""
    moments = x.moments
    if moments is None:
        raise DataError("running_normalise", "no moments", "call it through an algorithm's `shaping`")
    centred = x.reward - moments.mean if minus_mean else x.reward
    return centred / (moments.std if moments.std >= min_std else 1.0)


@reward_shaping(
    formula="R - mean(R of the same participant so far)",
    source="role-conditioned advantage estimation: SPIRAL, Liu et al. 2025, with the mean of all steps",
    needs={"role_mean"},
)
def role_baseline(x: ShapingInputs) -> Tensor:
    """Rewards relative to their participant's, for games, where one role may be easier than the other. Use it with
    an estimator that compares no members (`reinforce`). A resumed run keeps the means."""
    if x.role_mean is None:
        raise DataError("role_baseline", "no means", "call it through an algorithm's `shaping`")
    return x.reward - x.role_mean
