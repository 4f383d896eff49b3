"""Golden answers: policy losses, value losses and imitation of verl, LightRFT and OpenRLHF."""

from typing import Any

import torch
from golden_runners import Arguments, answers, minimised, policy_objective

from trivium.algorithms import ValueObjective, compute_policy_loss, kl_penalty
from trivium.algorithms.stats import masked_mean
from trivium.models.heads.loss import LossDenominators, LossInputs


@answers("policy_loss", "compute_policy_loss")
def _compute_policy_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    names = ("loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    return dict(zip(names, compute_policy_loss(**inputs, **kwargs), strict=True))


# --------------------------------------------------------------------------- verl

_CLIP = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}
"""The peer's word -> ours."""
_COUNTS = {"batch_num_tokens": "tokens", "global_batch_size": "sequences", "dp_size": "dp_size"}
_METRICS = {
    "actor/pg_clipfrac": "train/clip_fraction",
    "actor/ppo_kl": "train/kl",
    "actor/pg_clipfrac_lower": "train/clip_fraction_lower",
}


def _verl(
    inputs: Arguments,
    kwargs: Arguments,
    kind: str,
    words: Arguments,
    *,
    aggregate: str | None = None,
    metrics: Arguments = _METRICS,
) -> Arguments:
    """The loss of this name, its options in the peer's `words`; a metric that our loss does not have is zero."""
    options = {words[name]: value for name, value in kwargs.items() if name in words}
    mode = aggregate or kwargs["loss_agg_mode"]
    objective = policy_objective(kind, mode, weighted="rollout_is_weights" in inputs, **options)
    counts = {_COUNTS[name]: value for name, value in kwargs.get("global_batch_info", {}).items() if name in _COUNTS}
    columns = {name: tensor for name, tensor in inputs.items() if name not in ("log_prob", "response_mask")}
    loss, found = minimised(objective, inputs["log_prob"], inputs["response_mask"], columns, **counts)
    return {"loss": loss, "metrics": {theirs: found.get(ours, 0.0) for theirs, ours in metrics.items()}}


def _kl(old: torch.Tensor, current: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(old, current) from samples of old, where the peer does not clamp the log-ratio as `train/kl` does."""
    return masked_mean(kl_penalty(old, current.detach(), "k1"), mask)


@answers("policy_loss", "vanilla")
def _vanilla(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _verl(inputs, kwargs, "ppo", {**_CLIP, "clip_ratio_c": "dual_clip"})


@answers("policy_loss", "gpg")
def _gpg(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _verl(inputs, kwargs, "reinforce", {}, metrics={})  # the peer's loss of that name is REINFORCE's


@answers("policy_loss", "gspo")
def _gspo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _verl(inputs, kwargs, "gspo", _CLIP)


@answers("policy_loss", "sapo")
def _sapo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    words = {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}
    return _verl(inputs, kwargs, "sapo", words, aggregate="seq-mean-token-mean")


@answers("policy_loss", "geo_mean")
def _geo_mean(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask = inputs["response_mask"]
    metrics = {
        "actor/pg_clipfrac": "train/clip_fraction_up",
        "actor/ppo_kl": "train/kl",
        "actor/pg_clipfrac_lower": "train/clip_fraction_down",
    }
    rows = {"global_batch_info": {"global_batch_size": len(mask)}}  # the peer's mean, whatever the global counts
    return _verl(inputs, kwargs | rows, "gmpo", _CLIP, aggregate="seq-mean-token-mean", metrics=metrics)


@answers("policy_loss", "cispo")
def _cispo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _verl(inputs, kwargs, "cispo", _CLIP)


_LEFT_OUT = {
    **_METRICS,
    "actor/pg_clipfrac": "train/left_out",
    "actor/pg_clipfrac_lower": "train/clip_fraction",  # of those that are left
}


@answers("policy_loss", "dppo_tv")
def _dppo_tv(inputs: Arguments, kwargs: Arguments) -> Arguments:
    words = {"clip_ratio_low": "tv_low", "clip_ratio_high": "tv_high", "clip_ratio_c": "max_ratio"}
    return _verl(inputs, kwargs, "dppo_tv", words, metrics=_LEFT_OUT)


@answers("policy_loss", "dppo_kl")
def _dppo_kl(inputs: Arguments, kwargs: Arguments) -> Arguments:
    words = {"clip_ratio_low": "kl_low", "clip_ratio_high": "kl_high", "clip_ratio_c": "max_ratio"}
    return _verl(inputs, kwargs, "dppo_kl", words, metrics=_LEFT_OUT)


@answers("policy_loss", "dro")
def _dro(inputs: Arguments, kwargs: Arguments) -> Arguments:
    kl = _kl(inputs["old_log_prob"], inputs["log_prob"], inputs["response_mask"])
    return _verl(inputs, kwargs, "dro", {"dro_beta": "beta"}, metrics={}) | {"metrics": {"actor/ppo_kl": kl}}


@answers("policy_loss", "clip_cov")
def _clip_cov(inputs: Arguments, kwargs: Arguments) -> Arguments:
    words = {**_CLIP, "clip_cov_ratio": "ratio", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"}
    metrics = {"actor/pg_clipfrac": "train/left_out", "actor/ppo_kl": "train/kl"}
    return _verl(inputs, kwargs, "clip_cov", words, metrics=metrics)


@answers("policy_loss", "kl_cov")
def _kl_cov(inputs: Arguments, kwargs: Arguments) -> Arguments:
    words = {"kl_cov_ratio": "ratio", "ppo_kl_coef": "coef"}
    return _verl(inputs, kwargs, "kl_cov", words, metrics={"actor/ppo_kl": "train/log_ratio_abs"})


# --------------------------------------------------------------------------- LightRFT and OpenRLHF


def _rft(
    inputs: Arguments, kind: str, aggregate: str, counts: Arguments, **options: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    objective = policy_objective(kind, aggregate, **options)
    columns = {"old_log_prob": inputs["old_log_probs"], "advantages": inputs["advantages"]}
    numbers = {_COUNTS[name]: value for name, value in counts.items() if name in _COUNTS}
    return minimised(objective, inputs["log_probs"], inputs["action_mask"], columns, **numbers)


@answers("lightrft", "lightrft_ppo_loss")
def _lightrft_ppo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    clip = {"clip_low": kwargs["clip_eps"], "clip_high": kwargs["clip_eps"]}
    return {"loss": _rft(inputs, "ppo", "seq-mean-token-mean", {}, **clip, dual_clip=None)[0]}


@answers("lightrft", "lightrft_cpgd_loss")
def _lightrft_cpgd(inputs: Arguments, kwargs: Arguments) -> Arguments:
    clip = {"clip_low": kwargs["clip_eps"], "clip_high": kwargs["clip_eps"]}
    return {"loss": _rft(inputs, "cpgd", "seq-mean-token-mean", {}, **clip)[0]}


def _openrlhf(inputs: Arguments, kwargs: Arguments, kind: str, aggregate: str, **options: Any) -> Arguments:
    options |= {ours: kwargs[theirs] for theirs, ours in _OPENRLHF.items() if theirs in kwargs}
    loss, metrics = _rft(inputs, kind, aggregate, kwargs, **options)
    kl = _kl(inputs["old_log_probs"], inputs["log_probs"], inputs["action_mask"])
    return {"loss": loss, "clip_ratio": metrics["train/clip_fraction"], "ppo_kl": kl, "rollout_kl": None}


_OPENRLHF = {"clip_eps_low": "clip_low", "clip_eps_high": "clip_high"}


def _level(kwargs: Arguments) -> str:
    return "token-mean" if kwargs.get("token_level_loss", True) else "seq-mean-token-mean"


@answers("lightrft", "openrlhf_ppo_loss")
def _openrlhf_ppo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _openrlhf(inputs, kwargs, "ppo", _level(kwargs), dual_clip=kwargs.get("dual_clip"))


@answers("lightrft", "openrlhf_gspo_loss")
def _openrlhf_gspo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _openrlhf(inputs, kwargs, "gspo_sequence", "seq-mean-token-mean")


@answers("lightrft", "openrlhf_gspo_rollout_ratio")
def _openrlhf_gspo_rollout(inputs: Arguments, kwargs: Arguments) -> Arguments:
    sampled = {**inputs, "old_log_probs": inputs["rollout_log_probs"]}
    done = _openrlhf(sampled, kwargs, "gspo_sequence", "seq-mean-token-mean")
    return done | {"ppo_kl": _kl(inputs["old_log_probs"], inputs["log_probs"], inputs["action_mask"])}


@answers("lightrft", "openrlhf_sft_loss")
def _openrlhf_sft(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask = inputs["loss_mask"]
    counts = {_COUNTS[name]: value for name, value in kwargs.items() if name in _COUNTS}
    expert = mask.new_ones(len(mask))
    objective = policy_objective("sft", _level(kwargs))
    return {"loss": minimised(objective, inputs["per_token_logps"], mask, {}, expert=expert, **counts)[0]}


@answers("lightrft", "lightrft_value_loss", "openrlhf_value_loss")
def _value_loss(inputs: Arguments, kwargs: Arguments) -> Arguments:
    mask, old = inputs["action_mask"].bool(), inputs["old_values"]
    columns = {"values": old, "returns": inputs["returns"], "rollout_log_prob": torch.zeros_like(old)}
    batch = LossInputs(mask, torch.zeros(mask.shape), columns, values=inputs["values"])
    totals = LossDenominators(int(mask.sum()), int(mask.any(-1).sum()), mask.shape[1])
    objective = ValueObjective(kwargs["clip_eps"], _level({"token_level_loss": False, **kwargs}))
    return {"loss": objective.loss(batch, totals).loss}
