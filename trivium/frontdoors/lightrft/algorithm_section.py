"""The algorithm of LightRFT's flags: estimator, losses, KL, and what is done to rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.errors import Problem
from trivium.frontdoors.tables import Settings
from trivium.registry import CATALOGUE, suggest

_DISCOUNTED: Mapping[str, Mapping[str, Any]] = {
    "gae": {"kind": "gae", "whiten": False},
    "reinforce": {"kind": "reinforce"},
    "reinforce++": {"kind": "reinforce"},
    "group_norm": {"kind": "group_norm"},
    "grpo": {"kind": "group_norm"},
    "rloo": {"kind": "reinforce_baseline", "baseline": "others"},
}
"""Estimators that read gamma."""
ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    **_DISCOUNTED,
    "reinforce_baseline": {"kind": "reinforce_baseline"},
    "cpgd": {"kind": "cpgd"},
}
"""advantage_estimator -> algorithm.advantage."""
_NORMALISED = ("gae", "reinforce", "reinforce++", "reinforce_baseline")
"""Estimators whose advantages get mean 0 and variance 1 over the step, once; the others compare rewards in a group."""
_OF_GROUPS = ("group_norm", "grpo", "rloo", "reinforce_baseline", "cpgd")


def algorithm_of(lightrft: Settings, problems: list[Problem]) -> dict[str, Any]:
    """The section `algorithm`; what does not fit together goes to `problems`."""
    problems += conflicts(lightrft)
    estimator = lightrft["advantage_estimator"]
    advantage = dict(ESTIMATORS.get(estimator, ESTIMATORS["gae"]))
    if estimator in _DISCOUNTED:
        advantage["gamma"] = lightrft["gamma"]
    if estimator == "gae":
        advantage["lam"] = lightrft["lambd"]
    algorithm: dict[str, Any] = {
        "kind": "ppo" if estimator == "gae" else "grpo",
        "advantage": advantage,
        "policy_loss": _policy_loss(lightrft),
        "aggregate": lightrft["loss_agg_mode"],
        "epochs": lightrft["max_epochs"],
        "mini_batches": max(1, sequences_per_step(lightrft) // max(1, lightrft["train_batch_size"])),
        "correction": "none",
        "old_log_prob": "recompute",
    }
    if estimator in _NORMALISED or (estimator == "rloo" and lightrft["advantages_norm"]):
        algorithm["normalise_advantages"] = "mean" if lightrft["no_advantage_std_norm"] else "std"
    if lightrft["advantage_clip"] > 0:
        algorithm["clip_advantages"] = lightrft["advantage_clip"]
    if 0 < lightrft["high_entropy_token_ratio"] < 1:
        gate = {"kind": "top_entropy", "fraction": lightrft["high_entropy_token_ratio"], "per": "sequence"}
        algorithm["gates"] = [gate]
    if lightrft["dynamic_sampling"]:
        algorithm |= {"filters": ["zero_variance"], "refill": lightrft["dynamic_sampling_refills"]}
    if estimator == "gae":
        algorithm["critic"] = {"clip": lightrft["value_clip"] or None, "aggregate": "seq-mean-token-mean"}
        if lightrft["freezing_actor_steps"] > 0:
            algorithm["critic_warmup"] = lightrft["freezing_actor_steps"]
    sections = {"kl": _kl(lightrft, problems), "shaping": _shaping(lightrft, problems)}
    return algorithm | {name: section for name, section in sections.items() if section}


def sequences_per_step(lightrft: Settings) -> int:
    """The completions of a rollout batch."""
    return lightrft["rollout_batch_size"] * lightrft["n_samples_per_prompt"]


def _policy_loss(lightrft: Settings) -> dict[str, Any]:
    clips = {"clip_low": lightrft["eps_clip"], "clip_high": lightrft["eps_clip"]}
    if lightrft["use_cpg_loss"]:
        return {"kind": "cpgd", **clips}
    return {"kind": "gspo", **clips} if lightrft["use_gspo"] else {"kind": "ppo", **clips, "dual_clip": None}


def _kl(lightrft: Settings, problems: list[Problem]) -> dict[str, Any]:
    coef, in_loss, estimator = lightrft["init_kl_coef"], lightrft["use_kl_loss"], lightrft["kl_estimator"]
    if estimator not in ("k1", "k2", "k3"):
        problems.append(Problem("kl_estimator", repr(estimator), "no such estimator", "use k1, k2 or k3"))
    if not coef:
        return {}
    kl = {"coef": coef, "place": "loss" if in_loss else "reward"}
    kl["estimator"] = "k1+" if in_loss and estimator == "k1" else estimator
    if not lightrft["kl_target"]:
        return kl
    if in_loss:
        do = "leave one of the two out"
        found = "use_kl_loss adds the penalty to the loss, and a target steers one in the reward"
        problems.append(Problem("kl_target", str(lightrft["kl_target"]), found, do))
    return kl | {"controller": "adaptive", "target": lightrft["kl_target"], "horizon": lightrft["kl_horizon"]}


def _shaping(lightrft: Settings, problems: list[Problem]) -> list[dict[str, Any]]:
    """What happens to a completion's reward, in the original's order."""
    steps: list[dict[str, Any]] = []
    if lightrft["overlong_buffer"]:
        longest, buffer = lightrft["generate_max_len"], lightrft["overlong_buffer_len"]
        if not 0 < buffer <= longest:
            found = f"a completion has at most {longest} tokens (generate_max_len)"
            problems.append(Problem("overlong_buffer_len", str(buffer), found, "make it a part of them"))
        factor = lightrft["overlong_buffer_penalty_factor"]
        steps.append({"kind": "overlong_penalty", "factor": factor, "buffer": buffer / longest})
    if lightrft["reward_running_norm"]:
        steps.append({"kind": "running_normalise", "minus_mean": lightrft["reward_running_norm_minus_mean"]})
    if lightrft["reward_clip"] > 0:
        steps.append({"kind": "clip", "low": -lightrft["reward_clip"], "high": lightrft["reward_clip"]})
    return steps


def conflicts(lightrft: Settings) -> list[Problem]:
    """Flags that contradict each other, and values that no name stands for."""
    estimator, samples = lightrft["advantage_estimator"], lightrft["n_samples_per_prompt"]
    problems: list[Problem] = []
    if estimator not in ESTIMATORS:
        found = "no such estimator"
        problems.append(Problem("advantage_estimator", repr(estimator), found, suggest(estimator, ESTIMATORS)))
    if lightrft["loss_agg_mode"] not in CATALOGUE["aggregations"]:
        do = suggest(lightrft["loss_agg_mode"], CATALOGUE["aggregations"])
        problems.append(Problem("loss_agg_mode", repr(lightrft["loss_agg_mode"]), "no such mode", do))
    if estimator in _OF_GROUPS and samples < 2:
        found = f"{estimator} compares the completions of a prompt"
        problems.append(Problem("n_samples_per_prompt", str(samples), found, "set it to 2 or more"))
    if lightrft["dynamic_sampling"] and estimator not in _OF_GROUPS:
        found = f"{estimator} compares no completions of a prompt"
        problems.append(Problem("dynamic_sampling", "on", found, "leave it out, or use group_norm"))
    if lightrft["use_cpg_loss"] and lightrft["use_gspo"]:
        problems.append(Problem("use_gspo", "a loss", "use_cpg_loss names another one", "leave one of the two out"))
    if lightrft["freezing_actor_steps"] > 0 and estimator != "gae":
        found = f"{estimator} trains no critic, which could train alone"
        problems.append(Problem("freezing_actor_steps", str(lightrft["freezing_actor_steps"]), found, "leave it out"))
    return [*problems, *_batch_conflicts(lightrft)]


def _batch_conflicts(lightrft: Settings) -> list[Problem]:
    names = ("rollout_batch_size", "train_batch_size", "micro_train_batch_size", "n_samples_per_prompt", "max_epochs")
    names = (*names, "num_episodes", "generate_max_len", "prompt_max_len")
    if wrong := [name for name in names if lightrft[name] < 1]:
        return [Problem(name, str(lightrft[name]), "there is nothing to do", "set 1 or more") for name in wrong]
    whole, batch = sequences_per_step(lightrft), lightrft["train_batch_size"]
    where = f"a rollout batch has {whole} (rollout_batch_size * n_samples_per_prompt)"
    if batch > whole:
        do = f"set train_batch_size to {whole} or a divisor of it: an optimizer step never spans rollout batches"
        return [Problem("train_batch_size", f"{batch} sequences", where, do)]
    if whole % batch:
        return [Problem("train_batch_size", f"{batch} sequences", where, "make it a divisor of that")]
    if batch < lightrft["n_samples_per_prompt"]:
        found = f"a prompt has {lightrft['n_samples_per_prompt']} completions, which train together"
        return [Problem("train_batch_size", f"{batch} sequences", found, "set it to as many or more")]
    return []
