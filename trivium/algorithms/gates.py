"""Gates: how much of a token's policy loss counts, 0 or 1. They shut tokens out of the gradient, not out of the mean:
the counts that the loss is divided by stay, unless the section says `narrow`.

Legend: B sequences, L tokens. A gate of scope `row` is judged under the weights that the gradient is taken at; one of
scope `batch` sees the whole mini-batch, under the weights before the update. An expert's tokens have no ratio to judge
and pass.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from trivium.algorithms.entropy import given_entropy
from trivium.algorithms.inputs import PolicyInputs, row_mean
from trivium.algorithms.registered import gate


@gate(
    formula="0 where A < 0 and the row's mean of old_log_prob - log_prob exceeds delta, else 1",
    source="off-policy sequence masking, DeepSeek-V3.2, 2025, section 3.1",
    needs=("advantages", "old_log_prob", "log_prob"),
    off_policy=True,
    per_sequence=True,
)
def sequence_drift(
    x: PolicyInputs,
    *,
    delta: Annotated[float, Field(ge=0, description="how far a reply may have drifted, in nats per token")] = 0.1,
) -> Tensor:
    """Replies that went badly and that the policy has moved away from teach nothing any more."""
    drifted = row_mean(-x.log_ratio, x.response_mask) > delta
    return _open_unless((x.advantages < 0) & drifted, x)


@gate(
    formula="0 where A > 0 and exp(log_prob) - exp(old_log_prob) > limit, or A <= 0 and it is < -limit, else 1",
    source="prime-rl, Prime Intellect 2026; as a trust region in total variation, DPPO, 2026 (arXiv 2602.04879)",
    needs=("advantages", "old_log_prob", "log_prob"),
    off_policy=True,
)
def probability_difference(
    x: PolicyInputs,
    *,
    limit: Annotated[
        float, Field(gt=0, le=1, description="how far a token's probability may move the way its advantage points")
    ] = 0.2,
) -> Tensor:
    """A trust region on the probability itself: the ratio of a rare token may move far, that of a likely one not."""
    moved = x.log_prob.exp() - x.old_log_prob.exp()
    return _open_unless(torch.where(x.advantages > 0, moved > limit, moved < -limit), x)


@gate(
    formula="1 where H is among the highest fraction of the {per=batch:mini-batch}{per=sequence:row}, else 0",
    source="Beyond the 80/20 rule, Wang et al. 2025, section 5; per sequence, as LightRFT 0.1 does",
    needs=("entropy",),
    scope="batch",
)
def top_entropy(
    x: PolicyInputs,
    *,
    fraction: Annotated[float, Field(gt=0, le=1, description="share of the tokens that count")] = 0.2,
    per: Annotated[
        Literal["batch", "sequence"], Field(description="whether tokens compete with all others or with their row's")
    ] = "batch",
) -> Tensor:
    """Only the tokens at which the policy was least certain.

    At least one token of a mini-batch (of a row) counts, and of equal ones all do. In a mini-batch the limit is the
    1 - fraction quantile of the entropies; in a row, fraction times its tokens are counted, rounded down.
    """
    compared = x.response_mask & ~x.expert
    given = given_entropy(x).masked_fill(~compared, -torch.inf)
    candidates = given.flatten().unsqueeze(0) if per == "batch" else given
    tokens = (candidates > -torch.inf).sum(-1, keepdim=True)
    kept = 1 + (tokens - 1) * fraction if per == "batch" else tokens * fraction
    last = kept.double().floor().long().clamp(min=1) - 1
    lowest = candidates.sort(-1, descending=True).values.gather(-1, last)
    return (x.response_mask & (x.expert | (given >= lowest))).to(given.dtype)


def _open_unless(shut: Tensor, x: PolicyInputs) -> Tensor:
    """(B, L): 0 where a sampled token is shut out, else 1."""
    return (~shut | x.expert).to(x.log_prob.dtype)
