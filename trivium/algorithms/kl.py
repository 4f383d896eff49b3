"""KL divergence from samples: estimators, the penalty in the reward, and the controllers of its coefficient.

Legend: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from trivium.algorithms.stats import masked_mean
from trivium.errors import ConfigError, DataError, UnknownName
from trivium.registry import suggest

KlEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
"""The estimators that work from the log-probabilities of the sampled tokens alone."""

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this many nats before they are exponentiated."""


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate of KL(policy, reference) for each token, in nats; shape of `logprob`.

    With p the policy's and q the reference's log-probability of the sampled token, both (B, L):

    | kind | value |
    |---|---|
    | `kl`, `k1` | p - q: unbiased; its own gradient has mean zero, so it teaches nothing in a loss |
    | `abs` | abs(p - q) |
    | `mse`, `k2` | (p - q)^2 / 2: biased value, unbiased gradient on policy |
    | `low_var_kl`, `k3` | exp(q - p) - (q - p) - 1: unbiased and never negative; clamped to 10 |
    | `full` | sum over the vocabulary of exp(p) (p - q), exact; takes log-probabilities (B, L, V), returns (B, L) |

    A `+` after the name of an estimator keeps its value and gives it the gradient of `k2`. Source: Schulman 2020,
    http://joschu.net/blog/kl-approx.html. Raises UnknownName for another kind, DataError where `full` gets samples.
    """
    kind, plus, _ = kl_penalty.partition("+")
    if kind == "full" and not plus:
        return _full(logprob, ref_logprob)
    difference = logprob - ref_logprob
    if kind in ("kl", "k1"):
        value = difference
    elif kind == "abs":
        value = difference.abs()
    elif kind in ("mse", "k2"):
        value = difference.square() / 2
    elif kind in ("low_var_kl", "k3"):
        bounded = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        value = (bounded.expm1() - bounded).clamp(-10, 10)
    else:
        known = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
        raise UnknownName(f"the KL estimator {kl_penalty!r}", "no such estimator", suggest(kl_penalty, known))
    if not plus:
        return value
    k2 = difference.square() / 2
    return k2 - k2.detach() + value.detach()


def _full(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    if log_probs.dim() != 3:
        raise DataError(
            "the exact KL over the vocabulary (`full`)",
            f"log-probabilities of shape {tuple(log_probs.shape)}",
            "pass log-softmax values (B, L, V) of both models, or choose an estimator such as low_var_kl",
        )
    possible = log_probs > -torch.inf
    difference = torch.where(possible, log_probs, 0.0) - torch.where(possible, ref_log_probs, 0.0)
    return (log_probs.exp() * difference).sum(-1)


def apply_kl_penalty(
    token_level_scores: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    *,
    coef: float,
    estimator: str,
) -> tuple[Tensor, float]:
    """(token-level rewards, current KL): the scores minus `coef` times the KL estimate of each trained token, (B, L).

    The current KL, in nats, is the mean over a sequence's tokens, then over sequences: what a controller wants to see.
    """
    kl = torch.where(response_mask.bool(), kl_penalty(log_prob, ref_log_prob, estimator), 0.0)
    current = masked_mean(kl, response_mask, axis=-1).mean() if len(kl) else torch.zeros(())
    return token_level_scores - coef * kl, float(current)


class KlController(Protocol):
    """Holds the coefficient of a KL penalty."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Learns of the KL measured over `n_steps` sequences."""
        ...


class FixedKLController:
    """A coefficient that stays what it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """Steers the KL towards a target: proportional control, error clipped to 0.2 (Ziegler et al. 2019, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if horizon <= 0:
            raise ConfigError("an adaptive KL controller", f"horizon {horizon}", "use a horizon above 0")
        self.value, self.target, self.horizon = init_kl_coef, target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Moves the coefficient by at most 0.2 * n_steps / horizon of itself."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: object) -> KlController:
    """The controller that a section (mapping or object) with `type`, `kl_coef`, `target_kl`, `horizon` describes.

    `type` is `fixed` or `adaptive`; a fixed one reads `kl_coef` alone. Raises UnknownName for another type.
    """

    def said(name: str) -> Any:
        return cast(Mapping[str, Any], kl_ctrl)[name] if isinstance(kl_ctrl, Mapping) else getattr(kl_ctrl, name)

    kind = said("type")
    if kind == "fixed":
        return FixedKLController(said("kl_coef"))
    if kind == "adaptive":
        return AdaptiveKLController(said("kl_coef"), said("target_kl"), said("horizon"))
    raise UnknownName(f"the KL controller {kind!r}", "no such type", suggest(str(kind), ("fixed", "adaptive")))
