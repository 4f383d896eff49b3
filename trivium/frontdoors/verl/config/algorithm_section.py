"""Translates the algorithm of verl's config: estimator, losses, KL penalty and rollout correction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trivium.foundation.errors import ConfigError, Problem
from trivium.foundation.registry import CATALOGUE, suggest
from trivium.frontdoors.tables import Mapped, Settings
from trivium.frontdoors.verl import registered
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.frontdoors.verl.config.conflicts import ACTOR, ROLLOUT
from trivium.frontdoors.verl.config.correction_bounds import rejection, veto, weight_bounds
from trivium.frontdoors.verl.objects.core_algos import LOSSES, kind_of
from trivium.frontdoors.verl.registered import advantage_address, loss_address

_ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""Estimators that verl has under two names."""
_PLAIN = "trivium.frontdoors.verl.plain_loss:plain"
"""The loss without a ratio, for steps with several updates."""
_FILTER = "trivium.frontdoors.verl.group_filter:varied"
_UNLIMITED = 1_000_000
"""Limit of replacements for refused groups if the config sets none."""
_CORRECTION = "algorithm.rollout_correction"
SINGLE = ("grpo", "rloo")
"""Estimators whose advantage is the reward itself in a group of one."""
_BOUNDS_DIVERGENCE = ("dppo_tv", "dppo_kl")
"""Losses for which verl's clips of the ratio are bounds of a divergence."""


def names_of(verl: Settings) -> dict[str, str]:
    """Returns the names of estimator and loss that conditions of the table read; empty for a user's function."""
    estimator, mode = str(verl["algorithm.adv_estimator"]), str(verl[f"{ACTOR}.policy_loss.loss_mode"])
    loss = "" if loss_address(mode) else kind_of(mode)
    if _bypasses(verl) and verl[f"{_CORRECTION}.loss_type"] == "reinforce":
        loss = "reinforce"
    advantage = "" if advantage_address(estimator) else _ESTIMATORS.get(estimator, estimator)
    # In a group of one, verl subtracts 0 and divides by 1.
    alone = verl[f"{ROLLOUT}.n"] == 1 and advantage in SINGLE
    return {"advantage": "reinforce" if alone else advantage, "loss": loss}


def _bypasses(verl: Settings) -> bool:
    """Returns whether the engine's log-probabilities are the old ones."""
    return bool(verl[f"{_CORRECTION}.bypass_mode"] or verl[f"{ACTOR}.use_rollout_log_probs"])


def algorithm_of(verl: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Returns the fields of the algorithm that follow from several keys."""
    estimator = str(verl["algorithm.adv_estimator"])
    kind, loss = names_of(verl)["advantage"], _policy_loss(verl)
    address = advantage_address(estimator)
    problems += _unknown(kind, "advantages", "algorithm.adv_estimator", "register_adv_est") if address is None else ()
    problems += _unknown(loss["kind"], "policy_losses", f"{ACTOR}.policy_loss.loss_mode", "register_policy_loss")
    if address is None:
        problems += _unread_by_estimator(verl, _ESTIMATORS.get(estimator, estimator))
    problems += _pf_ppo_problems(verl)
    epochs, mini_batches = verl[f"{ACTOR}.ppo_epochs"], _mini_batches(verl)
    algorithm: dict[str, Any] = {
        "kind": "ppo" if kind == "gae" else "grpo",
        "advantage": {"kind": kind, **_gdpo(verl, kind, problems)} if address is None else _own(verl, address),
        "policy_loss": loss,
        "mini_batches": mini_batches,
    }
    if loss["kind"] in LOSSES and (aggregate := LOSSES[loss["kind"]].aggregate):
        algorithm["aggregate"] = aggregate
    if verl[f"{ACTOR}.use_kl_loss"] and verl["algorithm.use_kl_in_reward"]:
        problems.append(
            Problem(
                f"{ACTOR}.use_kl_loss",
                "a KL penalty in the loss",
                "algorithm.use_kl_in_reward asks for another one",
                "use one of the two penalties",
            )
        )
    if kind == "gae":
        algorithm["critic"] = _critic(verl)
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
        cause = "groups are filtered before the KL is taken off their rewards"
        problems.append(Problem(f"{where}.metric", repr(metric), cause, "use seq_reward"))
    of_step = max(1, (verl["data.gen_batch_size"] or 0) // verl["data.train_batch_size"])
    # The first batch is no replacement.
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


def _critic(verl: Settings) -> dict[str, Any]:
    """Returns the fields of the critic that are not the actor's."""
    critic: dict[str, Any] = {}
    if not verl.has("critic.loss_agg_mode"):
        critic["aggregate"] = verl[f"{ACTOR}.loss_agg_mode"]
    if verl["critic.ppo_epochs"] not in (None, verl[f"{ACTOR}.ppo_epochs"]):
        critic["epochs"] = verl["critic.ppo_epochs"]
    if verl["critic.ppo_mini_batch_size"] not in (None, verl[f"{ACTOR}.ppo_mini_batch_size"]):
        critic["mini_batches"] = max(1, verl["data.train_batch_size"] // verl["critic.ppo_mini_batch_size"])
    return critic


def _mini_batches(verl: Settings) -> int:
    return max(1, verl["data.train_batch_size"] // verl[f"{ACTOR}.ppo_mini_batch_size"])


def _weighed(algorithm: Mapping[str, Any]) -> bool:
    """Returns whether weights against the current policy correct later mini-batches."""
    correction = algorithm["correction"]
    return isinstance(correction, Mapping) and "weights" in correction and correction["against"] == "current"


def _unread_by_estimator(verl: Settings, kind: str) -> Iterator[Problem]:
    """Yields problems for options that the estimator does not read."""
    for name in ("gamma", "lam", "norm_adv_by_std_in_grpo"):
        key = f"algorithm.{name}"
        entry, value = TABLE.entries[key], verl[key]
        assert isinstance(entry, Mapped)
        readers = entry.when["advantage"]
        unread = kind != readers if isinstance(readers, str) else kind not in readers
        if unread and value != entry.default and not (name == "lam" and kind == "reinforce_plus_plus"):
            cause = f"adv_estimator {kind!r} does not read it"
            yield Problem(key, repr(value), cause, "leave it out, or use another estimator")


def _pf_ppo_problems(verl: Settings) -> Iterator[Problem]:
    """Yields problems of PF-PPO with an estimator that verl does not apply it to, and of an unknown method."""
    estimator, where = verl["algorithm.adv_estimator"], "algorithm.pf_ppo.reweight_method"
    if verl["algorithm.use_pf_ppo"] and estimator != "gae":
        cause = f"with adv_estimator {estimator!r} it has no effect"
        yield Problem("algorithm.use_pf_ppo", "True", cause, "use gae, or algorithm.resample in a RunConfig")
    entry = TABLE.entries[where]
    assert isinstance(entry, Mapped)
    if entry.converted(verl[where]) is None:
        yield Problem(where, repr(verl[where]), "no such method", "use pow, max_min or max_random")


def _policy_loss(verl: Settings) -> dict[str, Any]:
    """Returns the loss, and the clips that its rows of the table give in another form."""
    address, kind = loss_address(str(verl[f"{ACTOR}.policy_loss.loss_mode"])), names_of(verl)["loss"]
    if address and not kind:
        return {**_own(verl, address, ACTOR, "computed"), "loss_agg_mode": verl[f"{ACTOR}.loss_agg_mode"]}
    if kind in _BOUNDS_DIVERGENCE:
        options = LOSSES[kind].options
        return {"kind": kind} | {o: verl.first(*(f"{ACTOR}.{key}" for key in keys)) for o, keys in options.items()}
    low = verl.first(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio")
    # A ratio is above 0, so every bound from 1 on is the same; here, larger ones are refused.
    return {"kind": kind} | ({"clip_low": 1.0} if low > 1 and kind in LOSSES and LOSSES[kind].clips_ratio else {})


def _correction(verl: Settings, loss: Mapping[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Returns the source of the old log-probabilities, and the correction for those of the engine."""
    (weights, threshold), bounds = _weights(verl), _rejection(verl, problems)
    bypass = _bypasses(verl)
    correction: dict[str, Any] = {"against": "current" if bypass else "old"}
    if weights:
        correction |= {"weights": weights, **weight_bounds(threshold)}
        correction["normalise"] = bool(verl[f"{_CORRECTION}.rollout_is_batch_normalize"])
    if bounds:
        correction["rejection"] = bounds
    active = {"correction": {"kind": "custom", **correction}} if weights or bounds else {"correction": "none"}
    if not bypass:
        # verl scores the old log-probabilities with the actor before every step if a loss reads them.
        return active | ({} if loss["kind"] == "reinforce" else {"old_log_prob": "recompute"})
    if verl[f"{_CORRECTION}.loss_type"] == "reinforce":
        return active
    if weights:  # PPO's ratio against the engine is the importance weight
        active = {"correction": {"kind": "custom", "against": "current", "rejection": bounds} if bounds else "none"}
    return active | {"old_log_prob": "rollout"}


def _weights(verl: Settings) -> tuple[str | None, object]:
    """Returns (level of the importance weights, or None, and their threshold), from the keys of any version."""
    section, cap = "algorithm.rollout_is", verl[f"{ACTOR}.tis_imp_ratio_cap"]
    threshold = verl.first(f"{section}_threshold", f"{_CORRECTION}.rollout_is_threshold")
    if verl[f"{_CORRECTION}.rollout_is"]:
        return verl[f"{_CORRECTION}.rollout_is"], verl[f"{_CORRECTION}.rollout_is_threshold"]
    if verl[section]:
        lower = verl[f"{section}_threshold_lower"] or 1 / float(threshold)
        masks = verl[f"{section}_mode"] == "mask"
        return verl[f"{section}_level"], f"{lower}_{threshold}" if masks else threshold
    return ("token", cap) if (cap or 0) > 0 else (None, threshold)


def _gdpo(verl: Settings, kind: str, problems: list[Problem]) -> dict[str, Any]:
    """Returns the weights of GDPO's rewards by name."""
    names, weights = verl["algorithm.gdpo_reward_keys"], verl["algorithm.gdpo_reward_weights"]
    if kind != "gdpo" or not weights:
        return {}
    if len(weights) != len(names or []):
        cause, do = f"gdpo_reward_keys has {len(names or [])} name(s)", "give one weight for each name"
        problems.append(Problem("algorithm.gdpo_reward_weights", repr(weights), cause, do))
    return {"weights": dict(zip(names or [], weights, strict=False))}


def distillation_of(verl: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Returns the algorithm of on-policy distillation, which replaces that of the other keys."""
    paths = [path for key in ("teacher_models", "teacher_model") for path in _paths(verl[f"distillation.{key}"])]
    if len(paths) != 1:
        cause = f"{len(paths)} teachers"
        do = "name one: distillation.teacher_models.teacher_model.model_path"
        problems.append(Problem("distillation.teacher_models", "the model_path of one teacher", cause, do))
        return {"kind": "reinforce"}
    mode = str(verl["distillation.distillation_loss.loss_mode"])
    top_k = verl["distillation.distillation_loss.topk"]
    teacher: dict[str, Any] = {"path": paths[0]}
    loss: dict[str, Any] = {"kind": "distill"}
    if mode.endswith(("topk", "full_vocab")):
        loss = {"kind": "distill_top_k", "direction": "reverse" if mode.startswith("reverse") else "forward"}
        teacher |= {"top_k": top_k} if top_k else {}
    updates = verl[f"{ACTOR}.ppo_epochs"] * _mini_batches(verl)
    kind: dict[str, Any] = {"kind": "distill"}
    if loss["kind"] == "distill" and updates > 1:  # later updates need a ratio
        kind, loss = {"kind": "grpo", "advantage": {"kind": "on_policy_distill"}}, {"kind": "ppo"}
    return {
        **kind,
        "teacher": teacher,
        "policy_loss": loss,
        "aggregate": verl[f"{ACTOR}.loss_agg_mode"],
        "epochs": verl[f"{ACTOR}.ppo_epochs"],
        "mini_batches": _mini_batches(verl),
    }


def _paths(teachers: Mapping[str, Any] | None) -> list[str]:
    """Returns the model paths of a section with teachers, or of one teacher."""
    teachers = teachers or {}
    entries = [teachers, *(entry for entry in teachers.values() if isinstance(entry, Mapping))]
    return [str(entry["model_path"]) for entry in entries if entry.get("model_path")]


def _rejection(verl: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Returns {option: bound or (low, high)}, with the bound of a veto."""
    where = f"{_CORRECTION}.rollout_rs"
    threshold = verl.first("algorithm.rollout_is_veto_threshold", f"{_CORRECTION}.rollout_token_veto_threshold")
    vetoes = veto(threshold) if threshold else {}
    if not verl.has(where):
        return vetoes
    threshold = verl[f"{where}_threshold"]
    try:
        return vetoes | rejection(str(verl[where]), threshold)
    except ConfigError as error:
        problems.append(Problem(f"{where}_threshold", repr(threshold), error.found, error.do))
        return {}
