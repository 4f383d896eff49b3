"""Golden answers: sums, means, aggregation, value loss, entropy, KL."""

from typing import Any

import torch
from golden_runners import Arguments, answers, section

from trivium.algorithms import (
    AdaptiveKLController,
    agg_loss,
    apply_kl_penalty,
    compute_entropy_loss,
    compute_value_loss,
    entropy_from_logits,
    get_kl_controller,
    kl_penalty,
)
from trivium.algorithms.metadata import KlMetadata, resolve_function
from trivium.algorithms.stats import masked_mean, masked_sum, masked_var


@answers("agg_loss", "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
def _agg_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"loss": agg_loss(inputs["loss_mat"], inputs["loss_mask"], **kwargs)}


@answers("stats", "masked_whiten")
def _whiten(inputs: Arguments, kwargs: Arguments) -> Arguments:
    values, mask = inputs["values"], inputs["mask"]
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return {"out": whitened if kwargs.get("shift_mean", True) else whitened + mean}


@answers("stats", "masked_var")
def _var(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"out": masked_var(inputs["values"], inputs["mask"], **kwargs)}


@answers("stats", "masked_mean_all", "masked_mean_nan_outside")
def _mean(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"out": masked_mean(inputs["values"], inputs["mask"], **kwargs)}


@answers("stats", "masked_mean_rows")
def _mean_rows(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"out": masked_mean(inputs["values"], inputs["mask"], axis=-1, **kwargs)}


@answers("stats", "masked_sum_rows")
def _sum_rows(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"out": masked_sum(inputs["values"], inputs["mask"], axis=-1, **kwargs)}


@answers("value_loss", "value_loss")
def _value_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    loss, clipped = compute_value_loss(**inputs, **kwargs)
    return {"loss": loss, "vf_clipfrac": clipped}


@answers("entropy", "entropy", "entropy_masked_vocab")
def _entropy(inputs: Arguments, kwargs: Arguments) -> Arguments:
    entropy = entropy_from_logits(inputs["logits"])
    return {"loss": entropy.sum(), "entropy": entropy}


@answers("entropy", "entropy_loss")
def _entropy_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"loss": compute_entropy_loss(**inputs, **kwargs)}


# --------------------------------------------------------------------------- KL


@answers("kl", *(kind + plus for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+")))
def _kl(inputs: Arguments, kwargs: Arguments) -> Arguments:
    kl = kl_penalty(inputs["logprob"], inputs["ref_logprob"], **kwargs)
    return {"loss": kl.sum(), "kl": kl}


@answers("kl", "apply_kl_penalty")
def _apply_kl_penalty(inputs: Arguments, kwargs: Arguments) -> Arguments:
    controller = get_kl_controller(kwargs)
    rewards, current = apply_kl_penalty(
        inputs["token_level_scores"],
        inputs["old_log_probs"],
        inputs["ref_log_prob"],
        inputs["response_mask"],
        coef=controller.value,
        estimator=resolve_function("kl_estimators", section("kl_estimators", kwargs["kl_penalty"]), KlMetadata)[0],
    )
    metrics = {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": controller.value}
    controller.update(current, len(rewards))
    return {"token_level_rewards": rewards, "metrics": metrics, "kl_coef_after": controller.value}


@answers("kl", "fixed_controller")
def _fixed(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"values": _steered(get_kl_controller({"type": "fixed", **kwargs}), inputs["updates"])}


@answers("kl", "adaptive_controller")
def _adaptive(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"values": _steered(AdaptiveKLController(**kwargs), inputs["updates"])}


def _steered(controller: Any, updates: torch.Tensor) -> torch.Tensor:
    values: list[float] = []
    for current_kl, n_steps in updates.tolist():
        controller.update(current_kl, n_steps)
        values.append(controller.value)
    return torch.tensor(values, dtype=torch.float64)
