"""Aggregates a loss per token into a scalar.

Legend: B sequences, L tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trivium.algorithms.metadata import aggregation
from trivium.algorithms.stats import masked_sum
from trivium.foundation.errors import UnknownName
from trivium.foundation.registry import CATALOGUE, resolve, suggest
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


class Counts(NamedTuple):
    """The counts that normalise an optimizer step, over all its micro-batches and ranks."""

    tokens: float | Tensor
    """Trained tokens."""
    sequences: float | Tensor
    """Sequences with at least one trained token."""
    length: float
    """The limit of one completion, in tokens."""


@aggregation(formula="sum over tokens / tokens", source="DAPO, Yu et al. 2025, eq. 8")
def token_mean(loss: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Every token weighs the same."""
    return masked_sum(loss, mask) / counts.tokens


@aggregation(formula="sum over tokens", source="the plain sum of Williams 1992")
def token_sum(loss: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Not normalised: the gradient grows with the batch."""
    del counts
    return masked_sum(loss, mask)


@aggregation(formula="mean over sequences of the sum over tokens", source="Ahmadian et al. 2024, section 3.2")
def seq_mean_token_sum(loss: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Every token of every completion weighs the same, so long completions weigh more."""
    return masked_sum(loss, mask) / counts.sequences


@aggregation(formula="mean over sequences of the mean over tokens", source="GRPO, Shao et al. 2024, eq. 3")
def seq_mean_token_mean(loss: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """Every sequence weighs the same, so a token of a long sequence weighs less."""
    lengths = mask.bool().sum(-1).clamp(min=1)
    return (masked_sum(loss, mask, axis=-1) / lengths).sum() / counts.sequences


@aggregation(
    formula="mean over sequences of the sum over tokens / the length limit of a completion",
    source="Dr. GRPO, Liu et al. 2025, section 3.2",
)
def seq_mean_token_sum_norm(loss: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """As `seq-mean-token-sum`, divided by a constant: no bias towards short or long completions."""
    return masked_sum(loss, mask) / counts.sequences / counts.length


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

    The counts default to those of the given tensors: valid tokens, sequences with at least one of them, L. Give the
    counts of the whole optimizer step to make micro-batch losses add up to the step's loss. `dp_size` undoes the
    average that data-parallel ranks take over gradients. An empty mask gives 0. Raises UnknownName for another mode.
    """
    if loss_agg_mode not in CATALOGUE["aggregations"]:
        raise UnknownName(
            f"the loss aggregation {loss_agg_mode!r}",
            "no such mode",
            suggest(loss_agg_mode, CATALOGUE["aggregations"]),
        )
    lengths = loss_mask.bool().sum(-1)
    counts = Counts(
        lengths.sum().clamp(min=1) if batch_num_tokens is None else batch_num_tokens,
        torch.count_nonzero(lengths).clamp(min=1) if global_batch_size is None else global_batch_size,
        loss_mat.shape[-1] if loss_scale_factor is None else loss_scale_factor,
    )
    return resolve("aggregations", loss_agg_mode)(loss_mat, loss_mask, counts) * dp_size
