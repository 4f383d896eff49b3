"""Losses that draw the policy towards a teacher: a model that scores the policy's tokens, or the policy itself with
privileged context.

All measure the divergence of the two next-token distributions in the contexts of the batch. A token gets no credit for
its effect on later contexts.

Legend: B sequences, L tokens, K candidates: the top_k tokens of the teacher, or of the policy, at a position.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trivium.algorithms.losses.base import PerToken, PolicyInputs
from trivium.algorithms.metadata import policy_loss
from trivium.foundation.errors import DataError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_TAIL = 1e-6
"""The lower bound of a tail. Below it `1 - sum` is rounding error, and two such tails must not differ."""


@policy_loss(
    formula="-(teacher_log_prob - log_prob).detach() log_prob",
    source="on-policy distillation: MiniLLM, Gu et al. 2024, eq. 2; per token as in Lu and Thinking Machines Lab 2025",
    needs={"teacher_log_prob"},
    on_policy="none: it follows the teacher, regardless of a token's reward",
)
def distill(x: PolicyInputs) -> PerToken:
    """Reverse KL to the teacher, from the sampled tokens alone: its mean gradient is that of KL(policy, teacher). It
    assumes that the current weights sampled the tokens. If the teacher agrees, the gradient is exactly zero.
    """
    gap = (x.log_prob - x.columns["teacher_log_prob"]).detach()
    return PerToken(gap * x.log_prob, {"train/teacher_kl": gap})


_DIVERGENCES = (
    "D(forward) = sum p_T log(p_T / p), D(reverse) = sum p log(p / p_T), D(jsd) = D(p_T, M) / 2 + D(p, M) / 2, "
    "M = (p_T + p) / 2"
)
Direction = Annotated[
    Literal["forward", "reverse", "jsd"],
    Field(
        description="`forward` is KL(teacher, policy), which covers all modes; `reverse` is KL(policy, teacher), which "
        "seeks one mode; `jsd` is the Jensen-Shannon divergence between the two"
    ),
]
Clip = Annotated[
    float | None,
    Field(gt=0, description="the largest contribution of one token of the vocabulary, in nats; null for no limit"),
]


@policy_loss(
    formula=f"D(direction) over the teacher's top_k tokens and one bucket for all others{{clip:, each term at most clip}}; {_DIVERGENCES}",  # noqa: E501
    source="knowledge distillation, Hinton et al. 2015; both directions, GKD, Agarwal et al. 2024, section 3; "
    "the clip, OPSD, Zhao et al. 2026 (arXiv 2601.18734)",
    needs={"teacher_top"},
    on_policy="none: it follows the teacher, regardless of a token's reward",
)
def distill_top_k(x: PolicyInputs, *, direction: Direction = "reverse", clip: Clip = None) -> PerToken:
    """The KL of the two distributions, with all tokens except the teacher's top_k in one bucket. It is a lower bound of
    the KL over the vocabulary, and equals it if top_k is the size of the vocabulary. It is exact for tokens of any
    origin: nothing is sampled. If the two agree, every gradient is exactly zero. Raises DataError if the
    log-probabilities of the candidates are missing.
    """
    policy, teacher = _candidates(x, "teacher_top")
    reverse = _divergence(policy, teacher, "reverse", None)
    loss = _divergence(policy, teacher, direction, clip)
    return PerToken(loss, {"train/teacher_kl": reverse, "train/teacher_mass": teacher.exp().sum(-1)})


@policy_loss(
    formula=f"D(direction) over the policy's top_k tokens before the step{{tail=bucket: and one bucket for the rest}}{{tail=left_out:, both normalised over them}}{{clip:, each term at most clip}}; {_DIVERGENCES}",  # noqa: E501
    source="on-policy distillation over the student's top-k, Li et al. 2026 (arXiv 2604.13016); for self-distillation, "
    "SDPO, Huebotter et al. 2026 (arXiv 2601.20802)",
    needs={"student_top"},
    on_policy="none: it follows the teacher, regardless of a token's reward",
)
def distill_student_top_k(
    x: PolicyInputs,
    *,
    direction: Direction = "reverse",
    tail: Annotated[
        Literal["bucket", "left_out"],
        Field(description="whether all other tokens are one bucket, or the top_k are normalised without them"),
    ] = "bucket",
    clip: Clip = None,
) -> PerToken:
    """As `distill_top_k`, over the tokens that the policy itself finds most probable, where it spends its samples. If
    the two agree, every gradient is exactly zero.
    """
    policy, teacher = _candidates(x, "student_top")
    reverse = _divergence(policy, teacher, "reverse", None)
    if tail == "left_out":
        policy, teacher = policy.log_softmax(-1), teacher.log_softmax(-1)
    loss = _divergence(policy, teacher, direction, clip, tail=tail == "bucket")
    return PerToken(loss, {"train/teacher_kl": reverse})


def _candidates(x: PolicyInputs, column: str) -> tuple[Tensor, Tensor]:
    """(B, L, K): the log-probabilities of the candidates in a column, by the policy and by the teacher."""
    if x.candidate_log_prob is None:
        raise DataError(
            "the policy's log-probabilities of the teacher's tokens",
            "None",
            f"list `{column}` among what the loss needs",
        )
    return x.candidate_log_prob, x.columns[column][..., 1]


def _divergence(policy: Tensor, teacher: Tensor, direction: str, clip: float | None, *, tail: bool = True) -> Tensor:
    """(B, L): the divergence over K candidates, log-probabilities (B, L, K), and the bucket of all other tokens."""
    buckets = [(policy, teacher)]
    if tail:
        buckets.append((_log_tail(policy).unsqueeze(-1), _log_tail(teacher).unsqueeze(-1)))
    total = torch.zeros_like(policy[..., 0])
    for p, q in buckets:
        if direction == "jsd":
            terms = (_terms(p, _log_over_mean(p, q), clip) + _terms(q, _log_over_mean(q, p), clip)) / 2
        else:
            terms = _terms(p, p - q, clip) if direction == "reverse" else _terms(q, q - p, clip)
        total = total + terms.sum(-1)
    return total


def _terms(log_p: Tensor, log_ratio: Tensor, clip: float | None) -> Tensor:
    """p log(p / q), at most `clip`, - p + q for each bucket.

    The last two terms sum to 0 over all buckets. With them the gradient of each bucket is exactly 0 where p = q and,
    without a clip, its value is at least 0.
    """
    p, q = log_p.exp(), (log_p - log_ratio).exp()
    terms = p * log_ratio
    return (terms if clip is None else terms.clamp(max=clip)) - p + q


def _log_over_mean(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log(p / M) for M = (p + q) / 2; exactly 0 where p = q."""
    return log(2) - torch.nn.functional.softplus(log_q - log_p)


def _log_tail(log_prob: Tensor) -> Tensor:
    """(B, L): log of the probability outside the K candidates. A tail at its lower bound keeps its gradient."""
    tail = 1 - log_prob.exp().sum(-1)
    return (tail.clamp(min=_LEAST_TAIL).detach() + (tail - tail.detach())).log()
