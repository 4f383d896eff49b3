"""Translates the algorithm of verl's config: estimator, losses, KL penalty and rollout correction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trivium.errors import Problem
from trivium.frontdoors.tables import Settings
from trivium.frontdoors.verl import registered
from trivium.frontdoors.verl.config_table import TABLE
from trivium.frontdoors.verl.conflicts import ACTOR
from trivium.frontdoors.verl.registered import advantage_address, loss_address
from trivium.registry import CATALOGUE, suggest

_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Estimators that verl has under two names."""
_LOSSES = {"vanilla": "ppo", "gpg": "reinforce", "geo_mean": "gmpo"}
"""Policy losses that have another name here."""
_PLAIN = "trivium.frontdoors.verl.plain_loss:plain"
"""The loss without a ratio, for steps with several updates."""
_FILTER = "trivium.frontdoors.verl.group_filter:varied"
_UNLIMITED = 1_000_000
"""Limit of replacements for refused groups if the config sets none."""
_PER_SEQUENCE = ("gspo", "sapo", "gmpo")
"""Losses that verl averages over sequences regardless of loss_agg_mode."""


def algorithm_of(verl: Settings, problems: list[Problem]) -> dict[str, Any]:
    estimator = str(verl["algorithm.adv_estimator"])
    kind, loss = _ESTIMATORS.get(estimator, estimator), _policy_loss(verl)
    own = advantage_address(estimator)
    problems += _unknown(kind, "advantages", "algorithm.adv_estimator", "register_adv_est") if own is None else ()
    problems += _unknown(loss["kind"], "policy_losses", f"{ACTOR}.policy_loss.loss_mode", "register_policy_loss")
    advantage = {"kind": kind, **_estimator_options(verl, kind, problems)} if own is None else _own(verl, own)
    epochs, mini_batches = verl[f"{ACTOR}.ppo_epochs"], _mini_batches(verl)
    algorithm: dict[str, Any] = {
        "kind": "ppo" if kind == "gae" else "grpo",
        "advantage": advantage,
        "policy_loss": loss,
        "aggregate": "seq-mean-token-mean" if loss["kind"] in _PER_SEQUENCE else verl[f"{ACTOR}.loss_agg_mode"],
        "epochs": epochs,
        "mini_batches": mini_batches,
    }
    if verl[f"{ACTOR}.entropy_coeff"]:
        algorithm["entropy"] = {"coef": verl[f"{ACTOR}.entropy_coeff"]}
    if kl := _kl(verl, problems):
        algorithm["kl"] = kl
    if kind == "gae":
        algorithm["critic"] = {
            "clip": verl["critic.cliprange_value"],
            "aggregate": verl.first("critic.loss_agg_mode", f"{ACTOR}.loss_agg_mode"),
        }
        if verl["trainer.critic_warmup"]:
            algorithm["critic_warmup"] = verl["trainer.critic_warmup"]
    elif verl["trainer.critic_warmup"]:
        problems.append(
            Problem(
                "trainer.critic_warmup",
                str(verl["trainer.critic_warmup"]),
                f"adv_estimator {estimator!r} has no critic",
                "leave it out, or use gae",
            )
        )
    algorithm |= _correction(verl, loss, problems) | _dynamic_sampling(verl, problems)
    if epochs * mini_batches > 1 and algorithm["policy_loss"]["kind"] == "reinforce" and not _weighed(algorithm):
        algorithm["policy_loss"] = {"kind": _PLAIN}
    return algorithm


def _dynamic_sampling(verl: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Returns the filter of `filter_groups`, and the limit of replacements for refused groups. verl's limit counts
    generation batches, including the first batch of the step."""
    where = "algorithm.filter_groups"
    if not verl[f"{where}.enable"]:
        return {}
    metric, batches = str(verl[f"{where}.metric"]), verl[f"{where}.max_num_gen_batches"]
    if metric == "seq_final_reward" and verl["algorithm.use_kl_in_reward"]:
        found = "groups are filtered before the KL is taken off their rewards"
        problems.append(Problem(f"{where}.metric", repr(metric), found, "use seq_reward"))
    of_step = max(1, (verl["data.gen_batch_size"] or 0) // verl["data.train_batch_size"])
    refill = batches * of_step - 1 if batches > 0 else _UNLIMITED
    return {"filters": [{"kind": _FILTER, "metric": metric}], "refill": refill}


def _unknown(kind: str, catalogue: str, where: str, decorator: str) -> Iterator[Problem]:
    """Yields the problem of an unknown name."""
    if ":" not in kind and kind not in CATALOGUE[catalogue]:
        do = f"{suggest(kind, CATALOGUE[catalogue])}; or import the module that uses @{decorator}({kind!r}) first"
        yield Problem(where, repr(kind), "no such name", do)


def _own(verl: Settings, address: str, prefix: str = "algorithm", kind: str = "estimated") -> dict[str, Any]:
    """Returns the section of a user's function with verl's signature."""
    return {"kind": f"{registered.__name__}:{kind}", "function": address, "config": verl.section(prefix)}


def _mini_batches(verl: Settings) -> int:
    return max(1, verl["data.train_batch_size"] // verl[f"{ACTOR}.ppo_mini_batch_size"])


def _weighed(algorithm: Mapping[str, Any]) -> bool:
    """Returns whether weights against the current policy correct later mini-batches."""
    correction = algorithm["correction"]
    return isinstance(correction, Mapping) and "weights" in correction and correction["against"] == "current"


def _estimator_options(verl: Settings, kind: str, problems: list[Problem]) -> dict[str, Any]:
    """Returns gamma, lam and the normalisation if the estimator has them. Otherwise they must not be set."""
    has = {
        "gae": ("gamma", "lam"),
        "reinforce_plus_plus": ("gamma",),
        "grpo": ("norm_adv_by_std_in_grpo",),
        "grpo_passk": ("norm_adv_by_std_in_grpo",),
    }.get(kind, ())
    options: dict[str, Any] = {}
    for name, to in (("gamma", "gamma"), ("lam", "lam"), ("norm_adv_by_std_in_grpo", "norm_by_std")):
        value, default = verl[f"algorithm.{name}"], TABLE.default_of(f"algorithm.{name}")
        if name in has:
            options[to] = value
        elif value != default and not (name == "lam" and kind == "reinforce_plus_plus"):
            problems.append(
                Problem(
                    f"algorithm.{name}",
                    repr(value),
                    f"adv_estimator {kind!r} does not read it",
                    "leave it out, or use another estimator",
                )
            )
    return options


def _policy_loss(verl: Settings) -> dict[str, Any]:
    mode = str(verl[f"{ACTOR}.policy_loss.loss_mode"])
    if address := loss_address(mode):
        return {**_own(verl, address, ACTOR, "computed"), "loss_agg_mode": verl[f"{ACTOR}.loss_agg_mode"]}
    loss: dict[str, Any] = {"kind": _LOSSES.get(mode, mode)}
    clips = {
        "clip_low": verl.first(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio"),
        "clip_high": verl.first(f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio"),
    }
    if loss["kind"] != "gmpo":  # gmpo clips logarithms; a ratio is above 0, so clips of 1 and more are equal
        clips["clip_low"] = min(1.0, clips["clip_low"])
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "ppo": lambda: clips | {"dual_clip": verl[f"{ACTOR}.clip_ratio_c"]},
        "gspo": lambda: clips,
        "gmpo": lambda: clips,
        "cispo": lambda: clips,
        "clip_cov": lambda: (
            clips | _policy_loss_options(verl, clip_cov_ratio="ratio", clip_cov_lb="cov_low", clip_cov_ub="cov_high")
        ),
        "kl_cov": lambda: _policy_loss_options(verl, kl_cov_ratio="ratio", ppo_kl_coef="coef"),
        "sapo": lambda: {k: verl[f"{ACTOR}.{k}"] for k in ("tau_pos", "tau_neg") if verl.has(f"{ACTOR}.{k}")},
    }
    return loss | (own[loss["kind"]]() if loss["kind"] in own else {})


def _policy_loss_options(verl: Settings, **names: str) -> dict[str, Any]:
    where = f"{ACTOR}.policy_loss"
    return {to: verl[f"{where}.{name}"] for name, to in names.items() if verl.has(f"{where}.{name}")}


def _kl(verl: Settings, problems: list[Problem]) -> dict[str, Any]:
    in_loss, in_reward = bool(verl[f"{ACTOR}.use_kl_loss"]), bool(verl["algorithm.use_kl_in_reward"])
    if in_loss and in_reward:
        problems.append(
            Problem(
                f"{ACTOR}.use_kl_loss",
                "a KL penalty in the loss",
                "algorithm.use_kl_in_reward asks for another one",
                "use one of the two: the same distance would be paid for twice",
            )
        )
    if in_loss:
        coef = verl[f"{ACTOR}.kl_loss_coef"]
        return {"coef": coef, "place": "loss", "estimator": {"kind": verl[f"{ACTOR}.kl_loss_type"]}} if coef else {}
    if not in_reward or not verl["algorithm.kl_ctrl.kl_coef"]:
        return {}
    kl = {
        "coef": verl["algorithm.kl_ctrl.kl_coef"],
        "place": "reward",
        "estimator": {"kind": verl["algorithm.kl_penalty"]},
    }
    if verl["algorithm.kl_ctrl.type"] == "adaptive":
        kl |= {
            "controller": "adaptive",
            "target": verl["algorithm.kl_ctrl.target_kl"],
            "horizon": verl["algorithm.kl_ctrl.horizon"],
        }
    return kl


def _correction(verl: Settings, loss: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Returns the source of the old log-probabilities, and the correction for those of the engine."""
    where = "algorithm.rollout_correction"
    weights, bounds = verl[f"{where}.rollout_is"], _rejection(verl, problems)
    bypass = verl[f"{where}.bypass_mode"] or verl[f"{ACTOR}.use_rollout_log_probs"]
    correction: dict[str, Any] = {"against": "current" if bypass else "old"}
    if weights:
        correction |= {"weights": weights, **_weight_bounds(verl[f"{where}.rollout_is_threshold"])}
        correction["normalise"] = bool(verl[f"{where}.rollout_is_batch_normalize"])
    if bounds:
        correction["rejection"] = bounds
    active = {"correction": {"kind": "custom", **correction}} if weights or bounds else {"correction": "none"}
    if not bypass:
        # verl scores the old log-probabilities with the actor before every step if a loss reads them.
        return active | ({} if loss["kind"] == "reinforce" else {"old_log_prob": "recompute"})
    if verl[f"{where}.loss_type"] == "reinforce":
        return active | {"policy_loss": {"kind": "reinforce"}}
    if weights:  # PPO's ratio against the engine is the importance weight
        active = {"correction": {"kind": "custom", "against": "current", "rejection": bounds} if bounds else "none"}
    return active | {"old_log_prob": "rollout"}


def _weight_bounds(threshold: object) -> dict[str, Any]:
    """`0.5_5.0` zeroes weights outside the interval, one number truncates them from above."""
    low, is_interval, high = str(threshold).partition("_")
    return {"threshold": [low, high], "outside": "mask"} if is_interval else {"threshold": threshold}


def _rejection(verl: Settings, problems: list[Problem]) -> dict[str, Any]:
    """`{option: bound or (low, high)}` from verl's comma lists; `0.5_2.0` is an interval."""
    where = "algorithm.rollout_correction.rollout_rs"
    if not verl.has(where):
        return {}
    options = [option.strip() for option in str(verl[where]).split(",")]
    bounds = [bound.strip() for bound in str(verl[f"{where}_threshold"] or "").split(",") if bound.strip()]
    try:
        numbers = [tuple(float(part) for part in bound.split("_")) for bound in bounds]
    except ValueError:
        numbers = []
    if len(numbers) == 1:
        numbers *= len(options)
    if len(numbers) != len(options):
        problems.append(
            Problem(
                f"{where}_threshold",
                repr(verl[f"{where}_threshold"]),
                f"rollout_rs has {len(options)} option(s)",
                "give one number, or low_high, for each (or one for all)",
            )
        )
        return {}
    return {o: pair if len(pair) == 2 else pair[0] for o, pair in zip(options, numbers, strict=True)}
