"""Off-policy correction: importance weights and rejection for tokens that another policy than the trainer's sampled.

Legend: B sequences, L tokens. The log-ratio of a token is log(trainer / engine): the engine's log-probability is that
of the distribution sampled from, the trainer's that of the weights as the step began (`against: old`) or at the moment
of the update (`against: current`). It is clamped to +-20 nats before it is exponentiated, and no gradient flows through
anything here.

Two ways to leave a token out, and what they do to the mean. A weight of zero (`outside: mask`) leaves it in the counts
that the loss is divided by: the others weigh what they weighed. A rejected token leaves the response mask and with it
the counts: the survivors are averaged among themselves. Bounds on a sum reject long sequences first, which teaches to
be brief; `mismatch/rejected_length` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor

from trivium.algorithms.inputs import inside
from trivium.algorithms.mismatch import about_rejected, about_rejection, about_weights, bounded
from trivium.config import Plugin, RunConfig
from trivium.errors import Problem
from trivium.registry import suggest
from trivium.types import Metrics

OPTIONS = tuple(
    f"{level}_{estimator}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for estimator in ("k1", "k2", "k3")
    if (level, estimator) != ("seq_max", "k1")
)
"""What a token (or a sequence, by its sum, mean or maximum) can be rejected for: an estimate of KL(engine, trainer)."""

Bounds = tuple[float, float]


class Correction(Plugin):
    """What is done about tokens that the trainer's weights did not sample."""

    weights: Literal["none", "token", "sequence"] = "none"
    """Importance weights on the policy loss: the ratio of each token, or the product over the sequence."""
    threshold: float | tuple[float, float] | None = 2.0
    """Bounds of the ratio: [low, high], or one number for high alone (and its inverse for low where ratios outside are
    masked); null for none."""
    outside: Literal["truncate", "mask", "mask_sequence"] = "truncate"
    """A ratio outside the bounds: is set to the bound (`truncate`), or weighs nothing and still counts in the mean
    (`mask`). `mask_sequence` judges a sequence by the geometric mean of its ratios and leaves weights inside alone."""
    normalise: bool = False
    """Whether to divide the weights by their mean over the batch (over its tokens, or its sequences)."""
    rejection: dict[str, float | tuple[float, float]] = Field(default={})
    """What leaves the mask, and with it the mean: `{seq_mean_k1: [0.999, 1.001], token_k2: 0.5}`. k1 is bounded by the
    ratio it stands for (trainer / engine; one number u means [1/u, u]), k2 and k3 from above in nats. A token must pass
    every entry."""
    against: Literal["old", "current"] = "old"
    """Which trainer log-probabilities are compared with the engine's: as the step began (a pass before the step; the
    ratio of the policy loss then starts there), or of the current weights at every update."""

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self.weights != "none" or bool(self.rejection)

    @property
    def decoupled(self) -> bool:
        """Whether three policies are told apart: the engine's, the old and the current one."""
        return self.active and self.against == "old"

    @property
    def live(self) -> bool:
        """Whether the weights of a token follow from its own sequence under the current weights: no further pass."""
        return self.active and self.against == "current" and not self.rejection and not self.normalise

    @property
    def bounds(self) -> Bounds:
        """The lowest and highest weight that is left alone."""
        if self.threshold is None:
            return 0.0, math.inf
        if isinstance(self.threshold, tuple):
            return self.threshold
        return 0.0 if self.outside == "truncate" else 1 / self.threshold, self.threshold

    @property
    def judged(self) -> Bounds:
        """The interval that ratios are counted against in the log; where only `high` is applied, 1 / high is `low`."""
        return (0.0, math.inf) if self.threshold is None else _interval(self.threshold)

    @property
    def words(self) -> str:
        """What it does, for people."""
        return "; ".join([*self._weights_in_words(), *self._rejection_in_words()]) or "none"

    def _weights_in_words(self) -> Iterator[str]:
        if self.weights == "none":
            return
        low, high = self.bounds
        interval = f"{high}" if low == 0 and self.outside == "truncate" else _written(self.bounds)
        outside = {
            "truncate": f" truncated at {interval}",
            "mask": f", zero outside {interval}",
            "mask_sequence": f", zero for sequences whose geometric mean is outside {interval}",
        }[self.outside]
        mean = ", divided by their mean" if self.normalise else ""
        yield f"{self.weights} importance weights{self._whose}{'' if self.threshold is None else outside}{mean}"

    def _rejection_in_words(self) -> Iterator[str]:
        for option, bound in self.rejection.items():
            what = "tokens" if option.startswith("token") else "sequences"
            outside = f"outside {_written(_interval(bound))}" if option.endswith("k1") else f"above {bound}"
            yield f"{what} rejected where {option}{self._whose} is {outside}"

    @property
    def _whose(self) -> str:
        return " of the current policy" if self.against == "current" else ""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """Bounds that cannot be meant, and keys without effect."""
        del run
        if self.kind in ("auto", "none"):
            for name in self._changed():
                yield Problem(
                    f"{where}.{name}", f"the {name} of a correction of kind {self.kind!r}", "it has no options",
                    "leave `kind` out, or name another",
                )  # fmt: skip
            return
        if not self.active:
            yield Problem(
                where, "a correction", "neither weights nor rejection", "say one of them, or correction: none"
            )
        yield from self._weights_problems(where)
        for option, bound in self.rejection.items():
            yield from _rejection_problems(option, bound, f"{where}.rejection.{option}")

    def _weights_problems(self, where: str) -> Iterator[Problem]:
        idle = [name for name in ("threshold", "outside", "normalise") if name in self._changed()]
        if self.weights == "none":
            for name in idle:
                yield Problem(
                    f"{where}.{name}", f"{name} of importance weights", "there are none", f"set {where}.weights"
                )
        elif self.threshold is None and self.outside != "truncate":
            yield Problem(f"{where}.outside", f"outside: {self.outside}", "no threshold", f"set {where}.threshold")
        elif self.threshold is not None and not _around_one(self.threshold):
            yield Problem(
                f"{where}.threshold", f"weights bounded by {self.threshold}", "a fresh token's ratio is 1",
                "use one number above 1, or [low, high] around 1",
            )  # fmt: skip

    def _changed(self) -> list[str]:
        """The keys that say something else than the default."""
        fields = type(self).model_fields
        return [name for name in fields if name != "kind" and getattr(self, name) != fields[name].default]


class Corrected(NamedTuple):
    """What a correction says about a batch."""

    weights: Tensor | None
    """(B, L), zero outside the mask; None where there are no weights."""
    kept: Tensor
    """(B, L) bool: the mask without what is rejected."""
    metrics: Metrics
    """Keys of the area `mismatch`; empty where nothing is compared."""


def correct(trainer: Tensor, engine: Tensor, mask: Tensor, correction: Correction) -> Corrected:
    """Weights and rejection from two log-probabilities of the same tokens, (B, L) each, where `mask` (B, L) is true.

    Arithmetic is in float64. Weights do not know of the rejection, nor the rejection of the weights.
    """
    mask = mask.bool()
    log_ratio = inside((trainer - engine).detach().double(), mask)
    weights, metrics = None, Metrics()
    if not mask.any():
        nothing = torch.zeros_like(trainer) if correction.weights != "none" else None
        return Corrected(nothing, mask, metrics)
    if correction.weights != "none":
        weights, metrics = _normalised(log_ratio, mask, correction)
        weights = weights.to(trainer.dtype)
    kept = mask
    for option, bound in correction.rejection.items():
        low, high = statistic_bounds(option, bound)
        statistic = rejection_statistic(log_ratio, mask, option)
        refused = mask & ((statistic < low) | (statistic > high))
        kept = kept & ~refused
        metrics |= about_rejection(option, statistic, refused, mask, low, high)
    if correction.rejection:
        metrics |= about_rejected(kept, mask)
    return Corrected(weights, kept, metrics)


def _normalised(log_ratio: Tensor, mask: Tensor, correction: Correction) -> tuple[Tensor, Metrics]:
    """The weights, of mean 1 where that is asked for, and what is logged of them."""
    weights, ratios = importance_weights(log_ratio, mask, correction)
    by_token = correction.weights == "token"
    low, high = correction.judged
    metrics = about_weights(weights, ratios, mask, low, high, by_token)
    mean = metrics["mismatch/weight/mean" if by_token else "mismatch/weight/sequence_mean"]
    return (weights / mean if correction.normalise and mean > 1e-8 else weights), metrics


def importance_weights(log_ratio: Tensor, mask: Tensor, correction: Correction) -> tuple[Tensor, Tensor]:
    """(weights before normalisation, ratios), (B, L) each and zero outside the mask, as `log_ratio` (B, L) must be."""
    ratios = _ratios(log_ratio, mask, correction.weights)
    low, high = correction.bounds
    if correction.outside == "truncate":
        return inside(ratios.clamp(low, high), mask), ratios
    judge = _ratios(log_ratio, mask, "geometric") if correction.outside == "mask_sequence" else ratios
    return torch.where((judge >= low) & (judge <= high), ratios, 0.0), ratios


def _ratios(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """(B, L): the ratio of each token, or the product or geometric mean over its sequence; zero outside the mask."""
    if level != "token":
        total = log_ratio.sum(-1, keepdim=True)
        count = mask.sum(-1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        log_ratio = (total / count).expand(mask.shape)
    return inside(bounded(log_ratio).exp(), mask)


def rejection_statistic(log_ratio: Tensor, mask: Tensor, option: str) -> Tensor:
    """(B, L): the estimate of KL(engine, trainer) that `option` names, for each token or on all tokens of a sequence.

    k1 = -log(r), k2 = log(r)^2 / 2, k3 = r - 1 - log(r); zero outside the mask, as `log_ratio` (B, L) must be.
    """
    level, estimator = option.rsplit("_", 1)
    token = bounded(log_ratio)
    statistic = {"k1": -token, "k2": token.square() / 2, "k3": token.expm1() - token}[estimator]
    if level == "token":
        return statistic
    if level == "seq_max":  # of k2 and k3, which are never negative
        whole = statistic.amax(-1, keepdim=True)
    else:
        whole = statistic.sum(-1, keepdim=True)
        whole = whole / mask.sum(-1, keepdim=True).clamp(min=1) if level == "seq_mean" else whole
    return inside(whole.expand(mask.shape), mask)


def statistic_bounds(option: str, bound: float | Bounds) -> Bounds:
    """The bounds of the statistic, in nats; k1 is minus the logarithm of the ratio that is bounded."""
    if not option.endswith("k1"):
        return -math.inf, cast(float, bound)
    low, high = _interval(bound)
    return -math.log(high), -math.log(low)


def live_weights(
    trainer: Tensor, engine: Tensor, mask: Tensor, correction: Correction
) -> tuple[Tensor, dict[str, Tensor]]:
    """(weights of whole sequences, metric key -> values to be averaged over tokens), (B, L) each."""
    weights, ratios = importance_weights(inside((trainer - engine).detach(), mask), mask, correction)
    outside = inside((weights != ratios).to(weights.dtype), mask)
    return weights, {"mismatch/weight/mean": weights, "mismatch/weight/outside": outside}


def _interval(bound: float | Bounds) -> Bounds:
    """One number stands for the interval that is symmetric in logarithms."""
    return bound if isinstance(bound, tuple) else (1 / bound, bound)


def _around_one(bound: float | Bounds) -> bool:
    """Whether the interval holds the ratio of a fresh token, and more than that."""
    low, high = bound if isinstance(bound, tuple) else (0.0, bound)
    return 0 <= low <= 1 <= high and low < high != 1


def _written(bounds: Bounds) -> str:
    return f"[{round(bounds[0], 4)}, {round(bounds[1], 4)}]"


def _rejection_problems(option: str, bound: float | Bounds, where: str) -> Iterator[Problem]:
    if option not in OPTIONS:
        yield Problem(where, f"the rejection option {option!r}", "no such option", suggest(option, OPTIONS))
    elif option.endswith("k1"):
        if not _around_one(bound) or _interval(bound)[0] == 0:
            yield Problem(
                where, f"a ratio bounded by {bound}", "a fresh token's ratio is 1",
                "use one number above 1, or [low, high] around 1 with low above 0",
            )  # fmt: skip
    elif isinstance(bound, tuple) or bound <= 0:
        yield Problem(where, f"the bounds {bound}", "k2 and k3 are never negative", "give one upper bound above 0")
