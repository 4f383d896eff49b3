"""Losses that draw the policy towards a teacher: a frozen model that scores the policy's tokens.

Both measure the divergence of the two next-token distributions in the contexts of the batch. A token gets no credit for
its effect on later contexts.

Legend: B sequences, L tokens, K candidates: the teacher's top_k tokens at a position.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from trivium.algorithms.metadata import policy_loss
from trivium.algorithms.policy_losses.base import PerToken, PolicyInputs
from trivium.errors import DataError

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


@policy_loss(
    formula="D(direction) over the teacher's top_k tokens and one bucket for all others; D(forward) = sum p_T log(p_T / p), D(reverse) = sum p log(p / p_T)",  # noqa: E501
    source="knowledge distillation, Hinton et al. 2015; both directions, GKD, Agarwal et al. 2024, section 3",
    needs={"teacher_top"},
    on_policy="none: it follows the teacher, regardless of a token's reward",
)
def distill_top_k(
    x: PolicyInputs,
    *,
    direction: Annotated[
        Literal["forward", "reverse"],
        Field(
            description="`forward` is KL(teacher, policy), which covers all modes; `reverse` is KL(policy, "
            "teacher), which seeks one mode"
        ),
    ] = "reverse",
) -> PerToken:
    """The KL of the two distributions, with all tokens except the teacher's top_k in one bucket. It is a lower bound of
    the KL over the vocabulary, and equals it if top_k is the size of the vocabulary. It is exact for tokens of any
    origin: nothing is sampled. If the two agree, every gradient is exactly zero. Raises DataError if the
    log-probabilities of the candidates are missing.
    """
    if x.candidate_log_prob is None:
        raise DataError(
            "the policy's log-probabilities of the teacher's tokens",
            "None",
            "list `teacher_top` among what the loss needs",
        )
    policy, teacher = x.candidate_log_prob, x.columns["teacher_top"][..., 1]
    reverse = _divergence(policy, teacher)
    loss = reverse if direction == "reverse" else _divergence(teacher, policy)
    return PerToken(loss, {"train/teacher_kl": reverse, "train/teacher_mass": teacher.exp().sum(-1)})


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(B, L): KL(p, q) over K candidates, log-probabilities (B, L, K), and the bucket of all other tokens."""
    return _terms(log_p, log_q).sum(-1) + _terms(_log_tail(log_p), _log_tail(log_q))


def _terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p log(p / q) - p + q for each bucket.

    The last two terms sum to 0 over all buckets. With them the value of each bucket is at least 0, and its gradient is
    exactly 0 where p = q.
    """
    p, q = log_p.exp(), log_q.exp()
    return p * (log_p - log_q) - p + q


def _log_tail(log_prob: Tensor) -> Tensor:
    """(B, L): log of the probability outside the K candidates. A tail at its lower bound keeps its gradient."""
    tail = 1 - log_prob.exp().sum(-1)
    return (tail.clamp(min=_LEAST_TAIL).detach() + (tail - tail.detach())).log()
