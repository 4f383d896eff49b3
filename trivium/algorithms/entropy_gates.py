"""Gates that shut out tokens whose update would cost entropy: those the policy is taught to avoid.

A token's discriminant S = p (H + log p) says where the entropy goes when the token's logit rises: down where S is
positive, up where it is negative. Both gates spare tokens with a positive advantage, and compare within the mini-batch.
Legend: B sequences, L tokens.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from trivium.algorithms.inputs import PolicyInputs
from trivium.algorithms.registered import gate

_PAPER = "Wang et al. 2026 (arXiv 2602.03392), On the Entropy Dynamics in Reinforcement Fine-Tuning, {}"


@gate(
    formula="0 where A < 0 and S < mean(S) - mu std(S) over the mini-batch, else 1; S = p (H + log p)",
    source=_PAPER.format("Clip_B"),
    needs=("advantages", "log_prob", "entropy"),
    scope="batch",
)
def clip_b(
    x: PolicyInputs, *, mu: Annotated[float, Field(gt=0, description="standard deviations below the mean")] = 2.5
) -> Tensor:
    """Shuts discouraged tokens whose discriminant is far below the mini-batch's mean."""
    signal, mean, std = _measured(discriminant(x), x.response_mask & ~x.expert)
    return 1.0 - (~x.expert & (x.advantages < 0) & (signal < mean - mu * std)).to(signal.dtype)


@gate(
    formula="0 where A <= 0 and mean_discriminant - S > mu std(S - mean_discriminant) over the mini-batch, else 1; S = p (H + log p), mean_discriminant = sum(p_v S_v over the vocabulary); of those with A < 0 at most max_fraction of all tokens",  # noqa: E501
    source=_PAPER.format("Clip_V"),
    needs=("advantages", "log_prob", "entropy", "mean_discriminant"),
    scope="batch",
)
def clip_v(
    x: PolicyInputs,
    *,
    mu: Annotated[float, Field(gt=0, description="standard deviations below what the policy expects")] = 8.5,
    max_fraction: Annotated[
        float, Field(gt=0, le=1, description="largest part of the tokens to be shut, the worst first; at least one")
    ] = 1e-4,
) -> Tensor:
    """Shuts tokens whose discriminant is far below its expectation under the policy at that place."""
    sampled = x.response_mask & ~x.expert
    excess, _, std = _measured(x.columns["mean_discriminant"] - discriminant(x), sampled)
    shut = sampled & (x.advantages <= 0) & (excess > mu * std)
    tokens, discouraged = int(sampled.sum()), shut & (x.advantages < 0)
    room = max(int(max_fraction * tokens), 1)
    if int(shut.sum()) > max_fraction * tokens and int(discouraged.sum()) > room:
        bound = excess[discouraged].topk(room).values[-1]
        shut = shut & ~(discouraged & (excess < bound))
    return 1.0 - shut.to(excess.dtype)


def discriminant(x: PolicyInputs) -> Tensor:
    """(B, L): p (H + log p) of the sampled tokens; needs `entropy`."""
    assert x.entropy is not None, "a gate that lists `entropy` among its needs is given it"
    return x.log_prob.exp() * (x.entropy + x.log_prob)


def _measured(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the values, their mean over the mask, their population standard deviation over it)."""
    count = mask.sum().clamp(min=1)
    mean = torch.where(mask, values, 0.0).sum() / count
    return values, mean, (torch.where(mask, (values - mean).square(), 0.0).sum() / count).sqrt()
