"""KL divergence from samples: estimators, the penalty in the reward, and the controllers of its coefficient.

Legend: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

from pydantic import Field

from trivium.algorithms.formulas import with_values
from trivium.algorithms.losses.base import PolicyInputs, bounded_log_ratio, policy_inputs
from trivium.algorithms.metadata import KlMetadata, catalogue, kl_estimator, metadata_of, options_of
from trivium.algorithms.stats import masked_mean
from trivium.foundation.errors import ConfigError, DataError, UnknownName
from trivium.foundation.registry import suggest
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_SCHULMAN = "Schulman 2020, http://joschu.net/blog/kl-approx.html"

Cap = Annotated[
    float | None, Field(gt=0, description="largest size of one token's estimate, in nats; null for no limit")
]


@kl_estimator(formula="d{cap:, within +-cap}; d = log_prob - ref_log_prob", source=_SCHULMAN, gradient="zero")
def k1(x: PolicyInputs, *, cap: Cap = None) -> Tensor:
    """Unbiased; its own gradient has mean zero, so it has no effect in a loss."""
    return _capped(x.log_prob - x.columns["ref_log_prob"], cap)


@kl_estimator(
    formula="abs(d){cap:, at most cap}; d = log_prob - ref_log_prob",
    source=_SCHULMAN,
    gradient="biased: the sign of d instead of d",
    mean="biased: what the two disagree on does not cancel",
)
def absolute(x: PolicyInputs, *, cap: Cap = None) -> Tensor:
    """The absolute difference of the two log-probabilities."""
    return _capped(k1(x).abs(), cap)


@kl_estimator(
    formula="d^2 / 2{cap:, at most cap}; d = log_prob - ref_log_prob",
    source=_SCHULMAN,
    gradient="unbiased",
    mean="biased: right to second order in d",
)
def k2(x: PolicyInputs, *, cap: Cap = None) -> Tensor:
    """Biased in value; on policy its gradient is that of the KL."""
    return _capped(k1(x).square() / 2, cap)


@kl_estimator(
    formula="exp(-d) + d - 1{cap:, at most cap}; d = log_prob - ref_log_prob",
    source=_SCHULMAN,
    gradient="biased: that of KL(reference, policy)",
)
def k3(x: PolicyInputs, *, cap: Cap = 10.0) -> Tensor:
    """Unbiased in value and never negative; the exponent is clamped to +-20."""
    bounded = bounded_log_ratio(x.columns["ref_log_prob"], x.log_prob)
    return _capped(bounded.expm1() - bounded, cap)


def _capped(estimate: Tensor, cap: float | None) -> Tensor:
    """The estimate within +-cap; beyond it the gradient is zero."""
    return estimate if cap is None else estimate.clamp(-cap, cap)


@kl_estimator(
    formula="{bound:min(}r{bound:, bound)} (exp(-d) + d - 1); d = log_prob - ref_log_prob",
    source="the importance-weighted k3 of DeepSeek-V3.2, 2025, section 3.1",
    gradient="unbiased",
    needs={"old_log_prob"},
)
def corrected_k3(
    x: PolicyInputs,
    *,
    bound: Annotated[float | None, Field(gt=0, description="largest importance ratio; null for none")] = 2.0,
) -> Tensor:
    """`k3` without a cap, weighted with the ratio of current and old policy, which makes its gradient that of the KL.
    If an off-policy correction weights the old policy against the engine's, its weights enter as well.
    """
    ratio = x.log_ratio.exp()
    weights = x.columns.get("rollout_is_weights", torch.ones_like(ratio))
    return weights * (ratio if bound is None else ratio.clamp(max=bound)) * k3(x, cap=None)


def _straight_through(estimator: Callable[[PolicyInputs], Tensor]) -> Callable[[PolicyInputs], Tensor]:
    """The estimator's value with the gradient of `k2`."""
    metadata = metadata_of(estimator, KlMetadata, estimator.__name__)
    value = with_values(metadata.formula, {name: default for name, (_, default) in options_of(estimator).items()})

    def plus(x: PolicyInputs) -> Tensor:
        # The first two terms cancel in value and leave the gradient of `k2`.
        return k2(x) - k2(x).detach() + estimator(x).detach()

    plus.__name__ = f"{estimator.__name__}_plus"
    name = "abs" if estimator is absolute else estimator.__name__  # `abs` in configs, a builtin in Python
    plus.__doc__ = f"The value of `{name}` with the gradient of `k2`: unbiased on policy."
    formula = f"{value}; with the gradient of d^2 / 2"
    return kl_estimator(
        formula=formula, source=metadata.source, gradient="unbiased", mean=metadata.mean, straight_through=True
    )(plus)


k1_plus, absolute_plus, k2_plus, k3_plus = map(_straight_through, (k1, absolute, k2, k3))


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate of KL(policy, reference) for each token, in nats; shape of `logprob`.

    With p the policy's and q the reference's log-probability of the sampled token, both (B, L):

    | kind | value |
    |---|---|
    | `kl`, `k1` | p - q: unbiased; its own gradient has mean zero, so in a loss it only adds noise |
    | `abs` | abs(p - q) |
    | `mse`, `k2` | (p - q)^2 / 2: biased value, unbiased gradient on policy |
    | `low_var_kl`, `k3` | exp(q - p) - (q - p) - 1: unbiased and never negative; clamped to 10 |
    | `full` | sum over the vocabulary of exp(p) (p - q), exact; takes log-probabilities (B, L, V), returns (B, L) |

    A `+` after the name of an estimator keeps its value and gives it the gradient of `k2`. Source: Schulman 2020,
    http://joschu.net/blog/kl-approx.html. Raises UnknownName for another kind, DataError if `full` gets samples.
    """
    if kl_penalty == "full":
        return _full(logprob, ref_logprob)
    # All but `corrected_k3`, which also needs the old policy.
    of_two_policies = {
        name: estimator for name, estimator in catalogue("kl_estimators").items() if len(estimator.metadata.needs) == 1
    }
    if kl_penalty not in of_two_policies:
        raise UnknownName(
            f"the KL estimator {kl_penalty!r}", "no such estimator", suggest(kl_penalty, [*of_two_policies, "full"])
        )
    all_tokens = torch.ones_like(logprob, dtype=torch.bool)
    return of_two_policies[kl_penalty](policy_inputs(logprob, all_tokens, ref_log_prob=ref_logprob))


def _full(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The exact KL of each token, (B, L), from log-probabilities (B, L, V)."""
    if log_probs.dim() != 3:
        raise DataError(
            "the exact KL over the vocabulary (`full`)",
            f"log-probabilities of shape {tuple(log_probs.shape)}",
            "pass log-softmax values (B, L, V) of both models, or choose an estimator such as low_var_kl",
        )
    # A token of probability 0 adds 0 to the sum, where its product, 0 times infinity, would be NaN.
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
    estimator: Callable[[PolicyInputs], Tensor],
) -> tuple[Tensor, float]:
    """(token-level rewards, current KL): the scores minus `coef` times the KL estimate of each trained token, (B, L).

    The current KL, in nats, is the mean over a sequence's tokens, then over sequences: the input of a controller.
    """
    x = policy_inputs(log_prob, response_mask, ref_log_prob=ref_log_prob)
    kl = torch.where(x.response_mask, estimator(x), 0.0)
    current = masked_mean(kl, response_mask, axis=-1).mean() if len(kl) else torch.zeros(())
    return token_level_scores - coef * kl, float(current)


class KlController(Protocol):
    """Holds the coefficient of a KL penalty."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Updates the coefficient with the KL measured over `n_steps` sequences."""
        ...


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """Steers the KL towards a target: proportional control, error clipped to 0.2 (Ziegler et al. 2019, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if horizon <= 0:
            raise ConfigError("an adaptive KL controller", f"horizon {horizon}", "use a horizon above 0")
        self.initial = self.value = init_kl_coef
        self.target, self.horizon = target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Changes the coefficient by at most the fraction 0.2 * n_steps / horizon."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: object) -> KlController:
    """The controller that a section (mapping or object) with `type`, `kl_coef`, `target_kl`, `horizon` describes.

    `type` is `fixed` or `adaptive`; a fixed one reads `kl_coef` alone. Raises UnknownName for another type.
    """

    def read(name: str) -> Any:
        return cast(Mapping[str, Any], kl_ctrl)[name] if isinstance(kl_ctrl, Mapping) else getattr(kl_ctrl, name)

    kind = read("type")
    if kind == "fixed":
        return FixedKLController(read("kl_coef"))
    if kind == "adaptive":
        return AdaptiveKLController(read("kl_coef"), read("target_kl"), read("horizon"))
    raise UnknownName(f"the KL controller {kind!r}", "no such type", suggest(str(kind), ("fixed", "adaptive")))
