"""PPO with advantages that the future of a token reinforces. Legend: B sequences, L tokens."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs, zero_outside
from trivium.algorithms.losses.clipped import ClipHigh, ClipLow, DualClip, ppo
from trivium.algorithms.metadata import policy_loss
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss(
    formula="PPO with A f: max(-A f r, -A f clip(r, 1 - clip_low, 1 + clip_high)){dual_clip:, at most -A f dual_clip where A < 0}; f = clip(exp(sum over k >= t of g^(k - t) log r_k), 1 - future_low, 1 + future_high), g = 2^(-1 / half_life){dual_clip:, without tokens of r > dual_clip}; no gradient through f",  # noqa: E501
    source="FIPO, Ma et al. 2026 (arXiv 2603.19835)",
    needs={"advantages", "old_log_prob"},
    on_policy="plain",
)
def fipo(
    x: PolicyInputs,
    *,
    half_life: Annotated[float, Field(gt=0, description="tokens after which a later change counts half")] = 32.0,
    future_low: Annotated[float, Field(ge=0, le=1, description="how far the weight f may fall below one")] = 0.2,
    future_high: Annotated[float, Field(ge=0, description="how far the weight f may rise above one")] = 0.2,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dual_clip: DualClip = 10.0,
) -> PerToken:
    """Tokens whose continuation the update makes more likely get a larger part of the advantage, others a smaller
    one."""
    change = zero_outside(x.log_ratio.detach(), x.response_mask)
    if dual_clip is not None:
        change = change.masked_fill(change > log(dual_clip), 0.0)
    weight = discounted_future(change, 2 ** (-1 / half_life)).exp().clamp(1 - future_low, 1 + future_high)
    weighted = replace(x, columns={**x.columns, "advantages": x.advantages * weight})
    per_token = ppo(weighted, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return PerToken(per_token.loss, {**per_token.metrics, "train/score_weight": weight})


def discounted_future(values: Tensor, discount: float) -> Tensor:
    """(B, L): sum over k >= t of discount^(k - t) values_k, in log2(L) steps that each double the reach of the sum."""
    total, reach = values, 1
    while reach < values.shape[-1]:
        total = total + discount**reach * torch.nn.functional.pad(total[..., reach:], (0, reach))
        reach *= 2
    return total
