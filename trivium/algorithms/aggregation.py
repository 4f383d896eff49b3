"""The one place that turns a loss per token into a number."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from trivium.algorithms.stats import masked_sum
from trivium.errors import UnknownName
from trivium.registry import suggest

AggregateMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """A scalar loss from a loss per token, (B, L), and its mask, (B, L).

    | mode | value, with l the masked loss |
    |---|---|
    | `token-mean` | dp_size * sum(l) / batch_num_tokens |
    | `token-sum` | dp_size * sum(l) |
    | `seq-mean-token-sum` | dp_size * sum over sequences of sum(l) / global_batch_size |
    | `seq-mean-token-mean` | dp_size * sum over sequences of mean(l) / global_batch_size |
    | `seq-mean-token-sum-norm` | `seq-mean-token-sum` / loss_scale_factor (Dr. GRPO, Liu et al. 2025) |

    The counts default to what the tensors given hold: valid tokens, sequences with at least one of them, L. Give the
    counts of the whole optimizer step to make micro-batch losses add up to the step's loss. `dp_size` undoes the
    average that data-parallel ranks take over gradients. Nothing to aggregate gives 0. Raises UnknownName for another
    mode.
    """
    mask = loss_mask.bool()
    lengths = mask.sum(-1)
    if loss_agg_mode == "token-mean":
        tokens = lengths.sum().clamp(min=1) if batch_num_tokens is None else batch_num_tokens
        return masked_sum(loss_mat, mask) / tokens * dp_size
    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, mask) * dp_size
    sequences = torch.count_nonzero(lengths).clamp(min=1) if global_batch_size is None else global_batch_size
    per_sequence = masked_sum(loss_mat, mask, axis=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        per_sequence = per_sequence / lengths.clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / (loss_mat.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    elif loss_agg_mode != "seq-mean-token-sum":
        raise UnknownName(
            f"the loss aggregation {loss_agg_mode!r}", "no such mode", suggest(loss_agg_mode, get_args(AggregateMode))
        )
    return per_sequence.sum() / sequences * dp_size
