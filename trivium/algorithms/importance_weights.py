"""Importance weights and rejection for tokens that another policy than the trainer's sampled.

Legend: B sequences, L tokens. The log-ratio of a token is log(trainer / engine). The engine's log-probability is that
of the distribution sampled from; the trainer's uses the weights before the step (`against: old`) or the current weights
(`against: current`). The log-ratio is clamped to +-20 nats before it is exponentiated. No gradient flows through this
module.

A token can be left out in two ways. A weight of zero (`outside: mask`) leaves it in the counts that the loss is divided
by, so the other tokens keep their weight. A rejected token leaves the response mask and with it the counts, so the mean
is over the remaining tokens. Bounds on a sum reject long sequences first, which favours short completions;
`mismatch/rejected_length` shows it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from trivium.algorithms.batches import padded, ragged
from trivium.algorithms.correction import Bounds, Correction, interval
from trivium.algorithms.losses.base import expert_rows, zero_outside
from trivium.algorithms.mismatch import bounded, mismatch, rejected_metrics, rejection_metrics, weight_metrics
from trivium.models.late import torch
from trivium.types import AnyArray, Batch, Metrics

if TYPE_CHECKING:
    from torch import Tensor


class Corrected(NamedTuple):
    """The result of a correction for a batch."""

    weights: Tensor | None
    """(B, L), zero outside the mask; None if the correction has no weights."""
    remaining: Tensor
    """(B, L) bool: the mask without the rejected tokens."""
    metrics: Metrics
    """Keys of the area `mismatch`; empty if no token is compared."""


def correct(trainer: Tensor, engine: Tensor, mask: Tensor, correction: Correction) -> Corrected:
    """Weights and rejection from two log-probabilities of the same tokens, (B, L) each, where `mask` (B, L) is true.

    Arithmetic is in float64. Weights and rejection are computed independently.
    """
    mask = mask.bool()
    log_ratio = zero_outside((trainer - engine).detach().double(), mask)
    weights, metrics = None, Metrics()
    if not mask.any():
        nothing = torch.zeros_like(trainer) if correction.weights != "none" else None
        return Corrected(nothing, mask, metrics)
    if correction.weights != "none":
        weights, metrics = _normalised(log_ratio, mask, correction)
        weights = weights.to(trainer.dtype)
    remaining = mask
    for option, bound in correction.rejection.items():
        low, high = statistic_bounds(option, bound)
        statistic = rejection_statistic(log_ratio, mask, option)
        refused = mask & ((statistic < low) | (statistic > high))
        remaining = remaining & ~refused
        metrics |= rejection_metrics(option, statistic, refused, mask, low, high)
    if correction.rejection:
        metrics |= rejected_metrics(remaining, mask)
    return Corrected(weights, remaining, metrics)


def _normalised(log_ratio: Tensor, mask: Tensor, correction: Correction) -> tuple[Tensor, Metrics]:
    """The weights, normalised to mean 1 with `normalise`, and their metrics."""
    weights, ratios = importance_weights(log_ratio, mask, correction)
    by_token = correction.weights == "token"
    low, high = correction.judged
    metrics = weight_metrics(weights, ratios, mask, low, high, by_token)
    mean = metrics["mismatch/weight/mean" if by_token else "mismatch/weight/sequence_mean"]
    # All weights may be 0, where every ratio is outside the bounds.
    return (weights / mean if correction.normalise and mean > 1e-8 else weights), metrics


def importance_weights(log_ratio: Tensor, mask: Tensor, correction: Correction) -> tuple[Tensor, Tensor]:
    """(weights before normalisation, ratios), (B, L) each. They and `log_ratio` (B, L) are zero outside the mask."""
    ratios = _ratios(log_ratio, mask, correction.weights)
    low, high = correction.bounds
    if correction.outside == "truncate":
        return zero_outside(ratios.clamp(low, high), mask), ratios
    judge = _ratios(log_ratio, mask, "geometric") if correction.outside == "mask_sequence" else ratios
    return torch.where((judge >= low) & (judge <= high), ratios, 0.0), ratios


def _ratios(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """(B, L): the ratio of each token, or the product or geometric mean over its sequence; zero outside the mask."""
    if level != "token":
        total = log_ratio.sum(-1, keepdim=True)
        count = mask.sum(-1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        log_ratio = (total / count).expand(mask.shape)
    return zero_outside(bounded(log_ratio).exp(), mask)


def rejection_statistic(log_ratio: Tensor, mask: Tensor, option: str) -> Tensor:
    """(B, L): the estimate of KL(engine, trainer) that `option` names, for each token or on all tokens of a sequence.

    k1 = -log(r), k2 = log(r)^2 / 2, k3 = r - 1 - log(r). The result and `log_ratio` (B, L) are zero outside the mask.
    """
    level, estimator = option.rsplit("_", 1)
    token = bounded(log_ratio)
    statistic = {"k1": -token, "k2": token.square() / 2, "k3": token.expm1() - token}[estimator]
    if level == "token":
        return statistic
    if level == "seq_max":
        whole = torch.where(mask, statistic, -math.inf).amax(-1, keepdim=True)
    else:
        whole = statistic.sum(-1, keepdim=True)
        whole = whole / mask.sum(-1, keepdim=True).clamp(min=1) if level == "seq_mean" else whole
    return zero_outside(whole.expand(mask.shape), mask)


def statistic_bounds(option: str, bound: float | Bounds) -> Bounds:
    """The bounds of the statistic, in nats. For k1 these are the logarithms of the bounds of the ratio."""
    if not option.endswith("k1"):
        return -math.inf, cast(float, bound)
    low, high = interval(bound)
    return math.log(low), math.log(high)


def live_weights(
    trainer: Tensor, engine: Tensor, mask: Tensor, correction: Correction
) -> tuple[Tensor, dict[str, Tensor]]:
    """(weights by the current log-probabilities, not normalised; metric key -> values to be averaged over tokens),
    (B, L) each. A row must be a whole sequence. In the dtype of `trainer` and `engine`."""
    weights, ratios = importance_weights(zero_outside((trainer - engine).detach(), mask), mask, correction)
    outside = zero_outside((weights != ratios).to(weights.dtype), mask)
    return weights, {"mismatch/weight/mean": weights, "mismatch/weight/outside": outside}


def corrected(batch: Batch, trainer: Tensor, correction: Correction) -> tuple[Batch, list[AnyArray]]:
    """(the batch, with the column `rollout_is_weights` if the correction has weights; the masks of the kept tokens).

    `trainer` (B, L) holds the trainer's log-probabilities. Adds the metrics to the batch's. Expert tokens have no
    log-probability of an engine: their weight is 1, and they are kept.
    """
    mask, engine, sampled = _grids(batch)
    result = correct(trainer, engine, sampled, correction)
    if result.weights is not None:
        weights = torch.where(sampled, result.weights, mask.to(result.weights.dtype))
        batch = batch.with_columns(rollout_is_weights=ragged(weights, batch))
    masks = ragged(result.remaining | (mask & ~sampled), batch)
    return replace(batch, metrics={**batch.metrics, **result.metrics}), masks


def measured(batch: Batch, trainer: Tensor) -> Metrics:
    """The mismatch of engine and trainer on the tokens that the policy sampled; `trainer` (B, L) as in `corrected`."""
    _, engine, sampled = _grids(batch)
    return mismatch(trainer, engine, sampled)


def _grids(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(response mask, the engine's log-probabilities, trained tokens that the policy sampled), (B, L) each."""
    mask = padded([e.response_mask for e in batch.experiences]).bool()
    engine = padded([e.rollout_log_prob for e in batch.experiences])
    return mask, engine, mask & ~expert_rows(padded([e.policy_version for e in batch.experiences]), mask)
