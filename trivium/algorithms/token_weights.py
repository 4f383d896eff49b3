"""Token weights (`algorithm.gates`): factors of a token's policy loss, most of them 0 or 1. A token of weight 0 has no
gradient and stays in the mean: the counts that the loss is divided by include it, unless the section sets `narrow`.

Legend: B sequences, L tokens. A token weight of scope `row` is computed with the current weights of the policy; one of
scope `batch` sees the whole mini-batch and is computed with the weights before the update. Expert tokens have no ratio
and keep weight 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trivium.algorithms.entropy import given_entropy
from trivium.algorithms.losses.base import PolicyInputs, row_mean
from trivium.algorithms.metadata import gate
from trivium.algorithms.stats import distinct
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_PAPER = "Wang et al. 2026 (arXiv 2602.03392), On the Entropy Dynamics in Reinforcement Fine-Tuning, {}"


@gate(
    formula="0 where A < 0 and the row's mean of old_log_prob - log_prob exceeds delta, else 1",
    source="off-policy sequence masking, DeepSeek-V3.2, 2025, section 3.1",
    needs={"advantages", "old_log_prob", "log_prob"},
    off_policy=True,
    per_sequence=True,
)
def sequence_drift(
    x: PolicyInputs,
    *,
    delta: Annotated[float, Field(ge=0, description="largest drift of a completion, in nats per token")] = 0.1,
) -> Tensor:
    """Masks completions with a negative advantage that the policy has already moved away from."""
    drifted = row_mean(-x.log_ratio, x.response_mask) > delta
    return _one_unless((x.advantages < 0) & drifted, x)


@gate(
    formula="0 where A > 0 and exp(log_prob) - exp(old_log_prob) > limit, or A <= 0 and it is < -limit, else 1",
    source="prime-rl, Prime Intellect 2026; as a trust region in total variation, DPPO, 2026 (arXiv 2602.04879)",
    needs={"advantages", "old_log_prob", "log_prob"},
    off_policy=True,
)
def probability_difference(
    x: PolicyInputs,
    *,
    limit: Annotated[
        float, Field(gt=0, le=1, description="how far a token's probability may move in the direction of its advantage")
    ] = 0.2,
) -> Tensor:
    """A trust region on the probability itself: the ratio of a rare token may move far, the ratio of a likely token may
    not."""
    moved = x.log_prob.exp() - x.old_log_prob.exp()
    return _one_unless(torch.where(x.advantages > 0, moved > limit, moved < -limit), x)


@gate(
    formula="1 where H is among the highest fraction of the {per=batch:mini-batch}{per=sequence:row}, else 0",
    source="Beyond the 80/20 rule, Wang et al. 2025, section 5; per sequence as in LightRFT 0.1",
    needs={"entropy"},
    scope="batch",
)
def top_entropy(
    x: PolicyInputs,
    *,
    fraction: Annotated[float, Field(gt=0, le=1, description="share of the tokens that count")] = 0.2,
    per: Annotated[
        Literal["batch", "sequence"],
        Field(description="whether tokens are compared with those of the mini-batch or of their row"),
    ] = "batch",
) -> Tensor:
    """Keeps only the tokens with the highest entropy. At least one token of a mini-batch (of a row) is kept, and ties
    are kept too. In a mini-batch the limit is the 1 - fraction quantile of the entropies; in a row, fraction times its
    number of tokens is kept, rounded down.
    """
    compared = x.response_mask & ~x.expert
    entropy = given_entropy(x).masked_fill(~compared, -torch.inf)
    candidates = entropy.flatten().unsqueeze(0) if per == "batch" else entropy
    tokens = (candidates > -torch.inf).sum(-1, keepdim=True)
    num_kept = 1 + (tokens - 1) * fraction if per == "batch" else tokens * fraction
    last = num_kept.double().floor().long().clamp(min=1) - 1
    lowest = candidates.sort(-1, descending=True).values.gather(-1, last)
    return (x.response_mask & (x.expert | (entropy >= lowest))).to(entropy.dtype)


@gate(
    formula="tokens / (prompts * tokens of the prompt): with token-mean, the mean over prompts of their token means",
    source="prompt-level loss aggregation, ScaleRL, Khatri et al. 2025 (arXiv 2510.13786)",
    needs={"group"},
    scope="batch",
)
def prompt_mean(x: PolicyInputs) -> Tensor:
    """Every prompt weighs the same, however long its completions are. Meant for the aggregation `token-mean`."""
    _, group, members = distinct(x.columns["group"].amax(-1))
    tokens = x.response_mask.sum(-1)
    of_prompt = torch.zeros_like(members).index_add(0, group, tokens)
    prompts = (of_prompt > 0).sum().clamp(min=1)
    weight = tokens.sum() / (prompts * of_prompt[group].clamp(min=1))
    return weight.unsqueeze(-1).expand_as(x.log_prob).to(x.log_prob.dtype)


@gate(
    formula="0 where A < 0 and S < mean(S) - mu std(S) over the mini-batch, else 1; S = p (H + log p)",
    source=_PAPER.format("Clip_B"),
    needs={"advantages", "log_prob", "entropy"},
    scope="batch",
)
def clip_b(
    x: PolicyInputs, *, mu: Annotated[float, Field(gt=0, description="standard deviations below the mean")] = 2.5
) -> Tensor:
    """Masks discouraged tokens whose discriminant is far below the mini-batch's mean."""
    signal, mean, std = _measured(discriminant(x), x.response_mask & ~x.expert)
    return 1.0 - (~x.expert & (x.advantages < 0) & (signal < mean - mu * std)).to(signal.dtype)


@gate(
    formula="0 where A <= 0 and mean_discriminant - S > mu std(S - mean_discriminant) over the mini-batch, else 1; S = p (H + log p), mean_discriminant = sum(p_v S_v over the vocabulary); of those with A < 0 at most max_fraction of all tokens",  # noqa: E501
    source=_PAPER.format("Clip_V"),
    needs={"advantages", "log_prob", "entropy", "mean_discriminant"},
    scope="batch",
)
def clip_v(
    x: PolicyInputs,
    *,
    mu: Annotated[float, Field(gt=0, description="standard deviations below what the policy expects")] = 8.5,
    max_fraction: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="largest fraction of the tokens that get weight 0, lowest discriminant first; "
            "at least one token",
        ),
    ] = 1e-4,
) -> Tensor:
    """Masks tokens whose discriminant is far below its expectation under the policy at that position."""
    sampled = x.response_mask & ~x.expert
    excess, _, std = _measured(x.columns["mean_discriminant"] - discriminant(x), sampled)
    masked = sampled & (x.advantages <= 0) & (excess > mu * std)
    tokens, discouraged = int(sampled.sum()), masked & (x.advantages < 0)
    limit = max(int(max_fraction * tokens), 1)
    if int(masked.sum()) > max_fraction * tokens and int(discouraged.sum()) > limit:
        bound = excess[discouraged].topk(limit).values[-1]
        masked = masked & ~(discouraged & (excess < bound))
    return 1.0 - masked.to(excess.dtype)


def discriminant(x: PolicyInputs) -> Tensor:
    """(B, L): p (H + log p) of the sampled tokens; needs `entropy`."""
    assert x.entropy is not None, "a gate that lists `entropy` among its needs is given it"
    return x.log_prob.exp() * (x.entropy + x.log_prob)


def _measured(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the values, their mean over the mask, their population standard deviation over it)."""
    count = mask.sum().clamp(min=1)
    mean = torch.where(mask, values, 0.0).sum() / count
    return values, mean, (torch.where(mask, (values - mean).square(), 0.0).sum() / count).sqrt()


def _one_unless(masked: Tensor, x: PolicyInputs) -> Tensor:
    """(B, L): 0 where a sampled token is masked, else 1."""
    return (~masked | x.expert).to(x.log_prob.dtype)
