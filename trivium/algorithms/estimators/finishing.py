"""Normalisation of estimated advantages by their mean and their scale.

Legend: B sequences, L tokens. Arithmetic is in float64; zero outside the mask. Equal values become exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


Normalise = Literal["none", "mean", "std"]
"""How a batch's advantages are normalised: not at all, by their mean, or by their mean and standard deviation."""


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """(B, L) with mean 0 and unbiased variance 1 over the mask (B, L) bool; a single token is unchanged."""
    count = int(mask.sum())
    if count < 2:
        return torch.where(mask, values, 0.0)
    centred = _centred(values.double(), mask)
    variance = centred.square().sum() / (count - 1)
    return (centred * torch.rsqrt(variance + 1e-8)).to(values.dtype)


def normalised(values: Tensor, mask: Tensor, *, by_std: bool = True, axis: int | None = None) -> Tensor:
    """(B, L) with mean 0 and, with `by_std`, population variance 1 over the mask (B, L) bool, or along `axis` of it.

    Variances below 1e-8 count as 1e-8, so nearly equal values are not amplified.
    """
    centred = _centred(values.double(), mask, axis)
    if by_std:
        variance = _mean(centred.square(), mask, axis)
        centred = centred * torch.rsqrt(variance.clamp(min=1e-8))
    return centred.to(values.dtype)


def _centred(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """The values minus their mean over the mask, from distances to the lowest value: equal values give exactly 0."""
    if not values.numel():
        return values
    inside = torch.where(mask, values, torch.inf)
    lowest = inside.amin() if axis is None else inside.amin(axis, keepdim=True)
    distance = torch.where(mask, values - lowest, 0.0)
    return torch.where(mask, distance - _mean(distance, mask, axis), 0.0)


def _mean(values: Tensor, mask: Tensor, axis: int | None) -> Tensor:
    if axis is None:
        return values.sum() / mask.sum().clamp(min=1)
    return values.sum(axis, keepdim=True) / mask.sum(axis, keepdim=True).clamp(min=1)
