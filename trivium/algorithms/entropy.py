"""Entropy of the next-token distribution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trivium.algorithms.aggregation import agg_loss
from trivium.algorithms.losses.base import PolicyInputs
from trivium.algorithms.metadata import entropy_term
from trivium.foundation.errors import DataError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@entropy_term(
    formula="-sum of p log p over the vocabulary", source="Williams and Peng 1991; Mnih et al. 2016", needs={"entropy"}
)
def exact(x: PolicyInputs) -> Tensor:
    """The entropy of the whole next-token distribution, for every trained token."""
    return given_entropy(x)


@entropy_term(
    formula="H, averaged over the tokens that the policy sampled; an expert's tokens do not count",
    source="the entropy term of mixed imitation and reinforcement (CHORD, Zhang et al. 2025)",
    needs={"entropy"},
    sampled=True,
)
def sampled(x: PolicyInputs) -> Tensor:
    """As `exact`, without the tokens of an expert."""
    return torch.where(x.expert, 0.0, given_entropy(x))


@dataclass
class EntropyController:
    """Steers the coefficient of an entropy bonus: the bonus acts only in steps whose entropy is at most the target
    (Skywork-OR1, He et al. 2025, arXiv 2505.22312, section 3.2.5)."""

    value: float
    """The coefficient of the next step whose entropy is low enough; never below 0."""
    target: float
    """In nats per token."""
    step: float
    """The change of the coefficient in each train step: up below the target, down above it."""
    coef: float = 0.0
    """The coefficient of this step."""
    initial: float = field(init=False)
    """The coefficient of the config."""

    def __post_init__(self) -> None:
        self.initial = self.value

    def update(self, entropy: float) -> None:
        """Begins a step with this entropy."""
        self.coef = self.value if entropy <= self.target else 0.0
        change = (entropy < self.target) - (entropy > self.target)
        self.value = max(0.0, self.value + change * self.step)


def given_entropy(x: PolicyInputs) -> Tensor:
    """The entropy in the inputs, (B, L). Raises DataError if the head did not compute it."""
    if x.entropy is None:
        raise DataError("the entropy of each token", "None", "list `entropy` among what the function needs")
    return x.entropy


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats, (B, L), of softmax(logits), logits (B, L, V). A forbidden token (-inf) contributes 0."""
    finite = logits.masked_fill(logits == -torch.inf, 0.0)  # 0 * log 0 = 0, in the gradient as well
    return logits.logsumexp(-1) - (logits.softmax(-1) * finite).sum(-1)


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregated entropy in nats, a scalar: logits (B, L, V), mask (B, L), modes and counts as in `agg_loss`.

    A bonus for entropy subtracts it from the loss.
    """
    return agg_loss(
        entropy_from_logits(logits),
        response_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    )
