"""Masked sums, means, variances; group statistics that are exact if all members are equal.

Legend: B sequences, L tokens, T trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from trivium.foundation.errors import DataError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 4 * 2**-23
"""The relative rounding error of a sum of a few float32 reward components, in any order."""


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sum where the mask is true. Shapes (B, L); NaN outside the mask does not leak."""
    masked = torch.where(mask.bool(), values, torch.zeros_like(values))
    return masked.sum() if axis is None else masked.sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean where the mask is true, over everything or along `axis`; an empty selection gives 0."""
    count = mask.to(values.dtype).sum() if axis is None else mask.to(values.dtype).sum(axis)
    return masked_sum(values, mask, axis) / (count + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance where the mask is true; `unbiased` divides by n - 1.

    Raises DataError if the selection is too small to have one.
    """
    count = float(mask.sum())
    if count < (2 if unbiased else 1):
        raise DataError(
            "the variance of the tokens in a mask",
            f"{count:.0f} token(s) in it",
            "give it more tokens, or do not normalise",
        )
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * (count / (count - 1)) if unbiased else variance


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Statistics of the groups; every field has one entry per member, (T,)."""

    mean: Tensor
    """Mean of the member's group."""
    centred: Tensor
    """The member's score minus that mean; exactly 0 if all scores of the group are equal."""
    std: Tensor
    """Unbiased standard deviation of the group; 0 for a group of one."""
    count: Tensor
    """Members of the group."""


def distinct(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the values of a (T,) tensor in ascending order, the position of each entry's value among them, their counts)."""
    result = torch.unique(ids, return_inverse=True, return_counts=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor, Tensor]", result)


def group_statistics(scores: Tensor, group: Tensor) -> GroupStatistics:
    """Statistics of `scores` (T,) among the members with an equal entry in `group` (T,).

    Sums run over distances to the group's lowest score: equal scores are at distance 0, so neither their mean nor their
    standard deviation can pick up rounding. Scores that differ by no more than float32 rounds them count as equal.
    """
    ids, inverse, members = distinct(group)
    count = members.to(scores.dtype)
    lowest = scores.new_full((len(ids),), torch.inf).scatter_reduce(0, inverse, scores, "amin")
    largest = scores.new_zeros(len(ids)).scatter_reduce(0, inverse, scores.abs(), "amax")
    distance = scores - lowest[inverse]
    spread = scores.new_zeros(len(ids)).scatter_reduce(0, inverse, distance, "amax")
    distance = torch.where((spread <= _ROUNDING * largest)[inverse], 0.0, distance)
    zeros = scores.new_zeros(len(ids))
    mean_distance = zeros.index_add(0, inverse, distance) / count
    centred = distance - mean_distance[inverse]
    variance = zeros.index_add(0, inverse, centred**2) / (count - 1).clamp(min=1)
    return GroupStatistics((lowest + mean_distance)[inverse], centred, variance.sqrt()[inverse], count[inverse])
