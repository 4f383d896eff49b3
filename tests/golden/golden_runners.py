"""What this version answers to a golden case: (file, function) -> a call of what a config would call.

A function that is not listed is not built yet; the suite says so and counts its cases. A listed one passes all of them.
"""

from collections.abc import Callable
from typing import Any

import torch

from trivium.algorithms import (
    AdaptiveKLController,
    AdvantageInputs,
    agg_loss,
    apply_kl_penalty,
    compute_entropy_loss,
    compute_policy_loss,
    compute_value_loss,
    entropy_from_logits,
    get_kl_controller,
    kl_penalty,
)
from trivium.algorithms.objective import PolicyObjective, SftObjective
from trivium.algorithms.registered import EstimatorLaw, PolicyLossLaw, chosen
from trivium.algorithms.stats import masked_mean, masked_sum, masked_var, masked_whiten
from trivium.config import Plugin, plugin
from trivium.models.loss import LossInputs, Totals

Arguments = dict[str, Any]
Runner = Callable[[Arguments, Arguments], Arguments]
RUNNERS: dict[tuple[str, str], Runner] = {}


def answers(file: str, *functions: str) -> Callable[[Runner], Runner]:
    def register(runner: Runner) -> Runner:
        RUNNERS.update({(file, function): runner for function in functions})
        return runner

    return register


def section(room: str, kind: str, **options: Any) -> Plugin:
    """What a config with these words would hold."""
    return plugin(room)({"kind": kind, **options})


# --------------------------------------------------------------------------- sums, means, aggregation


@answers("agg_loss", "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
def _agg_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"loss": agg_loss(inputs["loss_mat"], inputs["loss_mask"], **kwargs)}


@answers("stats", "masked_whiten")
def _whiten(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return {"out": masked_whiten(inputs["values"], inputs["mask"], **kwargs)}


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


# --------------------------------------------------------------------------- policy, value, entropy


@answers("policy_loss", "compute_policy_loss")
def _compute_policy_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    names = ("loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    return dict(zip(names, compute_policy_loss(**inputs, **kwargs), strict=True))


def _objective(inputs: Arguments, kwargs: Arguments, kind: str, **options: Any) -> tuple[Arguments, dict[str, float]]:
    """A policy objective's loss on a whole batch, and its metrics as token means."""
    loss, law = chosen("policy_losses", section("policy_losses", kind, **options), PolicyLossLaw)
    mask = inputs["response_mask"].bool()
    columns = {name: tensor for name, tensor in inputs.items() if name not in ("log_prob", "response_mask")}
    columns["rollout_log_prob"] = columns["old_log_prob"]
    counts = kwargs.get("global_batch_info", {})
    totals = Totals(
        tokens=counts.get("batch_num_tokens", int(mask.sum())),
        sequences=counts.get("global_batch_size", int(mask.any(-1).sum())),
        max_response_length=mask.shape[-1],
        dp_size=counts.get("dp_size", 1),
    )
    objective = PolicyObjective(loss, law, kwargs["loss_agg_mode"], weighted="rollout_is_weights" in columns)
    done = objective.loss(LossInputs(mask, torch.zeros(mask.shape), columns, inputs["log_prob"]), totals)
    return {"loss": done.loss}, {key: float(value / mask.sum()) for key, value in done.sums.items()}


@answers("policy_loss", "vanilla")
def _vanilla(inputs: Arguments, kwargs: Arguments) -> Arguments:
    options = {
        ours: kwargs[theirs]
        for ours, theirs in (
            ("clip_low", "clip_ratio_low"), ("clip_high", "clip_ratio_high"), ("dual_clip", "clip_ratio_c"),
        )
        if theirs in kwargs
    }  # fmt: skip
    result, metrics = _objective(inputs, kwargs, "ppo", **options)
    names = {
        "actor/pg_clipfrac": "train/clip_fraction",
        "actor/ppo_kl": "train/kl",
        "actor/pg_clipfrac_lower": "train/clip_fraction_lower",
    }
    return result | {"metrics": {theirs: metrics[ours] for theirs, ours in names.items()}}


@answers("policy_loss", "gpg")
def _gpg(inputs: Arguments, kwargs: Arguments) -> Arguments:
    result, _ = _objective(inputs, kwargs, "reinforce")  # the peer's loss of that name is REINFORCE's
    return result | {"metrics": {}}


@answers("trinity", "sft")
def _sft(inputs: Arguments, kwargs: Arguments) -> Arguments:
    loss, law = chosen("policy_losses", section("policy_losses", "sft"), PolicyLossLaw)
    mask = inputs["action_mask"].bool()
    totals = Totals(int(mask.sum()), int(mask.any(-1).sum()), mask.shape[-1])
    objective = SftObjective(loss, law, kwargs["loss_agg_mode"])
    done = objective.loss(LossInputs(mask, torch.full(mask.shape, -1), {}, inputs["logprob"]), totals)
    return {"loss": done.loss, "metrics": {"sft_loss": done.loss}}


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
        inputs["token_level_scores"], inputs["old_log_probs"], inputs["ref_log_prob"], inputs["response_mask"],
        coef=controller.value, estimator=kwargs["kl_penalty"],
    )  # fmt: skip
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


# --------------------------------------------------------------------------- advantages


def _advantages(inputs: Arguments, kind: str, **options: Any) -> Arguments:
    estimator, law = chosen("advantages", section("advantages", kind, **options), EstimatorLaw)
    rewards = inputs["token_level_rewards"]
    rows = torch.arange(len(rewards))
    done = estimator(
        AdvantageInputs(
            rewards, inputs["response_mask"].bool(), inputs.get("index", rows), rows,
            {name: inputs[name] for name in law.needs},
        )
    )  # fmt: skip
    return {"advantages": done.advantages, "returns": done.returns}


@answers("advantages", "gae")
def _gae(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _advantages(inputs, "gae", **kwargs)


@answers("advantages", "grpo")
def _grpo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _advantages(inputs, "grpo", norm_by_std=kwargs["norm_adv_by_std_in_grpo"])


@answers("advantages", "rloo")
def _rloo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _advantages(inputs, "rloo", **kwargs)
