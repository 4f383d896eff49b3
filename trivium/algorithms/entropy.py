"""Entropy of the next-token distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.algorithms.aggregation import agg_loss


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
        entropy_from_logits(logits), response_mask, loss_agg_mode, dp_size=dp_size,
        batch_num_tokens=batch_num_tokens, global_batch_size=global_batch_size, loss_scale_factor=loss_scale_factor,
    )  # fmt: skip
