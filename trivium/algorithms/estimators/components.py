"""Estimators that look at the components of the reward one by one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trivium.algorithms.estimators.base import AdvantageInputs, Advantages, members, per_member, spread
from trivium.algorithms.estimators.finishing import whitened
from trivium.algorithms.estimators.group import Epsilon, NormByStd, relative
from trivium.algorithms.metadata import When, advantage
from trivium.foundation.errors import DataError
from trivium.models.late import torch


@advantage(
    formula="sum over components c of {weights:weight_c *} (R_c - mean(R_c over the group)){norm_by_std: / (std(R_c over the group) + epsilon)}, whitened over the batch{weights:; weight_c from weights}",  # noqa: E501
    source="GDPO, Liu et al. 2026, section 3",
    min_group=2,
    centred=True,
    components=True,
    whitens=True,
    effective={"epsilon": When("norm_by_std")},
)
def gdpo(
    x: AdvantageInputs,
    *,
    weights: Annotated[
        dict[str, float] | None, Field(description="weight of each component by name; null gives all the same weight")
    ] = None,
    norm_by_std: NormByStd = True,
    epsilon: Epsilon = 1e-6,
) -> Advantages:
    """Each component of the reward is normalised within the group separately, so a large component does not hide a
    small one. A trajectory without a component is left out of the comparison of that component. Raises DataError if
    there are no components, or if weights are given and a component has none.
    """
    _check(x, weights)
    trajectories = members(x)
    total = torch.zeros_like(trajectories.score)
    for name, values in sorted(x.components.items()):
        score = per_member(values.double(), trajectories)
        has = ~score.isnan()
        part = relative(score[has], trajectories.group[has], "group" if norm_by_std else None, epsilon)
        total[has] += (1.0 if weights is None else weights[name]) * part
    white = whitened(spread(total, trajectories.of_row, x).advantages, x.response_mask)
    return Advantages(white, white)


def _check(x: AdvantageInputs, weights: dict[str, float] | None) -> None:
    if len(x.token_level_rewards) and not x.components:
        raise DataError("the components of the reward", "there are none", "name at least one reward under `rewards`")
    lacking = sorted(x.components.keys() - weights.keys()) if weights is not None else []
    if lacking:
        raise DataError(
            f"a weight for each component of the reward ({', '.join(sorted(x.components))})",
            f"none for {', '.join(lacking)}",
            "give it one under algorithm.advantage.weights (0 to leave it out)",
        )
