"""Metrics of the mismatch between rollout engine and trainer, and of its correction.

Legend: B sequences, L tokens. The ratio of a token is trainer / engine, that of a sequence the product over its tokens;
log-ratios are clamped to +-20 nats before they are exponentiated. `compared` returns terms of means over tokens, terms
of means over sequences, and maxima of at least 0, so micro-batches add up to the whole and empty ones change nothing.
Sequences without a token are not counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trivium.algorithms.losses.base import LOG_RATIO_BOUND, row_mean, zero_outside
from trivium.models.late import torch
from trivium.types import Metrics

if TYPE_CHECKING:
    from torch import Tensor


class MismatchTerms(NamedTuple):
    """Metric key -> values; zero for tokens and sequences that are not compared."""

    tokens: dict[str, Tensor]
    """(B, L), to be averaged over the tokens."""
    sequences: dict[str, Tensor]
    """(B,), to be averaged over the sequences with at least one token."""
    maxima: dict[str, Tensor]
    """Scalars."""


def compared(trainer: Tensor, engine: Tensor, mask: Tensor) -> MismatchTerms:
    """Log-probabilities of the same tokens, (B, L) each, where `mask` (B, L) is true."""
    log_ratio = zero_outside(trainer - engine, mask)
    token = bounded(log_ratio)
    sequence = bounded(log_ratio.sum(-1))
    any_token = mask.any(-1)
    surprise, engine_surprise = (-row_mean(log_prob, mask).squeeze(-1) for log_prob in (trainer, engine))
    gap = surprise - engine_surprise
    return MismatchTerms(
        tokens={
            "mismatch/kl": token.expm1() - token,
            "mismatch/kl_k1": -log_ratio,
            "mismatch/ratio": zero_outside(token.exp(), mask),
            "mismatch/ratio_square": zero_outside((2 * token).exp(), mask),
            "mismatch/chi2": (2 * token).expm1(),
        },
        sequences={
            "mismatch/sequence_ratio": zero_outside(sequence.exp(), any_token),
            "mismatch/sequence_ratio_square": zero_outside((2 * sequence).exp(), any_token),
            "mismatch/sequence_chi2": (2 * sequence).expm1(),
            "mismatch/log_perplexity": surprise,
            "mismatch/log_perplexity_engine": engine_surprise,
            "mismatch/perplexity": zero_outside(bounded(surprise).exp(), any_token),
            "mismatch/perplexity_engine": zero_outside(bounded(engine_surprise).exp(), any_token),
            "mismatch/perplexity_ratio": zero_outside(bounded(gap).exp(), any_token),
            "mismatch/log_perplexity_gap": gap,
            "mismatch/log_perplexity_gap_abs": gap.abs(),
        },
        maxima={
            "mismatch/log_prob_max": _largest(log_ratio.abs()),
            "mismatch/log_perplexity_gap_above": _largest(gap),
            "mismatch/log_perplexity_gap_below": _largest(-gap),
        },
    )


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor) -> Metrics:
    """The metrics of a whole batch from inputs (B, L); empty if no token is compared."""
    tokens, sequences = int(mask.sum()), int(mask.any(-1).sum())
    if not tokens:
        return {}
    terms = compared(trainer.double(), engine.double(), mask)
    return with_sample_sizes(
        {
            **{key: float(values.sum()) / tokens for key, values in terms.tokens.items()},
            **{key: float(values.sum()) / sequences for key, values in terms.sequences.items()},
            **{key: float(value) for key, value in terms.maxima.items()},
        }
    )


def with_sample_sizes(means: Metrics) -> Metrics:
    """Adds the effective sample sizes as fractions: mean(r)^2 / mean(r^2), or 0 if mean(r^2) is 0."""
    squares = {name: means.get(f"mismatch/{name}ratio_square") for name in ("", "sequence_")}
    sizes = {
        f"mismatch/{name}ess": means[f"mismatch/{name}ratio"] ** 2 / square if square else 0.0
        for name, square in squares.items()
        if square is not None
    }
    return {**means, **sizes}


def weight_metrics(weights: Tensor, ratios: Tensor, mask: Tensor, low: float, high: float, by_token: bool) -> Metrics:
    """Metrics of importance weights before normalisation and of their ratios, (B, L) each; the mask contains a token.

    With `by_token`, counts the tokens whose ratio is above `high` or below `low`, otherwise the sequences.
    """
    spread = _spread("mismatch/weight", weights, mask, centre=1.0)
    square = _mean(weights[mask].square())
    per_sequence = _row_means(ratios, mask)
    return {
        **spread,
        "mismatch/weight/ess": spread["mismatch/weight/mean"] ** 2 / square if square else 0.0,
        "mismatch/weight/outside": _mean(weights[mask] != ratios[mask]),
        **_beyond("mismatch/weight/", ratios[mask] if by_token else per_sequence, low, high),
        **_beyond("mismatch/weight/sequence_", per_sequence, low, high),
        "mismatch/weight/ratio_max": float(ratios[mask].max()),
        "mismatch/weight/ratio_min": float(ratios[mask].min()),
    }


def rejection_metrics(
    option: str, statistic: Tensor, refused: Tensor, mask: Tensor, low: float, high: float
) -> Metrics:
    """Metrics of an option's statistic and the tokens it rejects, (B, L) each. Clamps to the bounds for `std`."""
    where = f"mismatch/rejection/{option}"
    per_sequence = _row_means(statistic, mask)
    return {
        **_spread(where, statistic, mask, centre=0.0),
        f"{where}/std": _std(statistic[mask].clamp(low, high)),
        **_beyond(f"{where}/", statistic[mask] if option.startswith("token") else per_sequence, low, high),
        **_beyond(f"{where}/sequence_", per_sequence, low, high),
        f"{where}/tokens": _mean(refused[mask]),
        f"{where}/sequences": _mean(refused.any(-1)[mask.any(-1)]),
    }


def rejected_metrics(remaining: Tensor, mask: Tensor) -> Metrics:
    """Metrics of all rejected tokens. The relative length shows whether bounds on sums reject long sequences first."""
    refused, rows = mask & ~remaining, mask.any(-1)
    gone = rows & ~remaining.any(-1)
    length = mask.sum(-1)
    return {
        "mismatch/rejected_tokens": _mean(refused[mask]),
        "mismatch/rejected_sequences": _mean(refused.any(-1)[rows]),
        "mismatch/rejected_length": _mean(length[gone]) / _mean(length[rows]) if gone.any() else 1.0,
    }


def _spread(where: str, values: Tensor, mask: Tensor, centre: float) -> Metrics:
    """Mean, standard deviation and extremes over tokens and over the means of sequences."""
    tokens, rows = values[mask], _row_means(values, mask)
    return {
        f"{where}/mean": _mean(tokens),
        f"{where}/std": _std(tokens),
        f"{where}/max": float(tokens.max()),
        f"{where}/min": float(tokens.min()),
        f"{where}/sequence_mean": _mean(rows),
        f"{where}/sequence_std": float(rows.std()) if len(rows) > 1 else 0.0,
        f"{where}/sequence_max": float(rows.max()),
        f"{where}/sequence_min": float(rows.min()),
        f"{where}/sequence_deviation": float((rows - centre).abs().max()),
    }


def _beyond(prefix: str, values: Tensor, low: float, high: float) -> Metrics:
    """The fractions above and below the bounds."""
    return {f"{prefix}above": _mean(values > high), f"{prefix}below": _mean(values < low)}


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _std(values: Tensor) -> float:
    return float(values.std(correction=0))


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row that has a token."""
    return row_mean(values, mask)[mask.any(-1)].squeeze(-1)


def bounded(log_ratio: Tensor) -> Tensor:
    """Clamped to +-20 nats."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _largest(values: Tensor) -> Tensor:
    """The largest value, at least 0; a micro-batch without rows gives 0."""
    return torch.cat([values.flatten(), values.new_zeros(1)]).amax()
