"""Translates LightRFT's flags to the section `algorithm`: estimator, losses, KL and reward shaping.

PPOTrainerVL and `trivium run` share `estimated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trivium.errors import Problem
from trivium.frontdoors.tables import Settings
from trivium.registry import CATALOGUE, suggest

ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "gae": {"kind": "gae", "whiten": False},
    "reinforce": {"kind": "reinforce"},
    "reinforce++": {"kind": "reinforce"},
    "group_norm": {"kind": "group_norm"},
    "grpo": {"kind": "group_norm"},
    "rloo": {"kind": "reinforce_baseline", "baseline": "others"},
    "reinforce_baseline": {"kind": "reinforce_baseline"},
    "cpgd": {"kind": "cpgd"},
}
"""advantage_estimator -> algorithm.advantage."""
UNDISCOUNTED = ("reinforce_baseline", "cpgd")
"""Estimators without discounting."""
OF_GROUPS = ("group_norm", "grpo", "rloo", "reinforce_baseline", "cpgd")
"""Estimators that compare the completions of a prompt."""
_NORMALISED = ("gae", "reinforce", "reinforce++", "reinforce_baseline")
"""Estimators whose advantages are normalised over the step. The others compare rewards within a group."""
KL_ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "k1": {"kind": "k1"},
    "k2": {"kind": "k2"},
    "k3": {"kind": "k3", "cap": None},
}
"""kl_estimator -> algorithm.kl.estimator."""


class Values(Protocol):
    """A mapping from flag to value."""

    def __getitem__(self, key: str, /) -> Any: ...


def estimated(values: Values) -> dict[str, Any]:
    """Returns the part of the section `algorithm` for reward shaping, advantages and the policy loss."""
    estimator = values["advantage_estimator"]
    advantage = dict(ESTIMATORS.get(estimator, {"kind": estimator}))
    if estimator not in UNDISCOUNTED:
        advantage["gamma"] = values["gamma"]
    if estimator == "gae":
        advantage["lam"] = values["lambd"]
    section: dict[str, Any] = {
        "advantage": advantage,
        "policy_loss": _policy_loss(values),
        "aggregate": values["loss_agg_mode"],
        "old_log_prob": "recompute",
    }
    if estimator in _NORMALISED or (estimator == "rloo" and values["advantages_norm"]):
        section["normalise_advantages"] = "mean" if values["no_advantage_std_norm"] else "std"
    if values["advantage_clip"] > 0:
        section["clip_advantages"] = values["advantage_clip"]
    if values["dynamic_sampling"]:
        section["filters"] = ["zero_variance"]
    return section | ({"shaping": shaping} if (shaping := _shaping(values)) else {})


def _policy_loss(values: Values) -> dict[str, Any]:
    clips = {"clip_low": values["eps_clip"], "clip_high": values["eps_clip"]}
    if values["use_cpg_loss"]:
        return {"kind": "cpgd", **clips}
    return {"kind": "gspo", **clips} if values["use_gspo"] else {"kind": "ppo", **clips, "dual_clip": None}


def _shaping(values: Values) -> list[dict[str, Any]]:
    """Returns the reward shaping before the estimator: overlong penalty, running norm, clip."""
    steps: list[dict[str, Any]] = []
    if values["overlong_buffer"]:
        factor, longest = values["overlong_buffer_penalty_factor"], values["generate_max_len"]
        part = values["overlong_buffer_len"] / longest
        steps.append({"kind": "overlong_penalty", "factor": factor, "buffer": part, "limit": longest})
    if values["reward_running_norm"]:
        steps.append({"kind": "running_normalise", "minus_mean": values["reward_running_norm_minus_mean"]})
    if values["reward_clip"] > 0:
        steps.append({"kind": "clip", "low": -values["reward_clip"], "high": values["reward_clip"]})
    return steps


# --------------------------------------------------------------------------- `trivium run`


def algorithm_of(lightrft: Settings, problems: list[Problem]) -> dict[str, Any]:
    """Returns the section `algorithm`. Adds contradicting flags to `problems`."""
    problems += conflicts(lightrft) or _uneven(lightrft)
    critic = lightrft["advantage_estimator"] == "gae"
    algorithm: dict[str, Any] = {
        "kind": "ppo" if critic else "grpo",
        **estimated(lightrft),
        "mini_batches": max(1, sequences_per_step(lightrft) // max(1, lightrft["train_batch_size"])),
        "correction": "none",
    }
    if 0 < lightrft["high_entropy_token_ratio"] < 1:
        gate = {"kind": "top_entropy", "fraction": lightrft["high_entropy_token_ratio"], "per": "sequence"}
        algorithm["gates"] = [gate]
    if critic:
        algorithm["critic"] = {"clip": lightrft["value_clip"] or None, "aggregate": lightrft["loss_agg_mode"]}
    return algorithm | ({"kl": kl} if (kl := _kl(lightrft, problems)) else {})


def sequences_per_step(lightrft: Settings) -> int:
    """Returns the number of completions in a rollout batch."""
    return lightrft["rollout_batch_size"] * lightrft["n_samples_per_prompt"]


def _kl(lightrft: Settings, problems: list[Problem]) -> dict[str, Any]:
    coef, in_loss, estimator = lightrft["init_kl_coef"], lightrft["use_kl_loss"], lightrft["kl_estimator"]
    if not coef:
        return {}
    kl = {"coef": coef, "place": "loss" if in_loss else "reward"}
    kl["estimator"] = "k1+" if in_loss and estimator == "k1" else KL_ESTIMATORS.get(estimator)
    if not lightrft["kl_target"]:
        return kl
    if in_loss:
        do = "leave one of the two out, or use python -m trivium.frontdoors.lightrft"
        found = "use_kl_loss adds the penalty to the loss, and a run steers one in the reward"
        problems.append(Problem("kl_target", str(lightrft["kl_target"]), found, do))
    return kl | {"controller": "adaptive", "target": lightrft["kl_target"], "horizon": lightrft["kl_horizon"]}


# --------------------------------------------------------------------------- what does not fit together


def conflicts(lightrft: Settings) -> list[Problem]:
    """Returns a problem for each contradiction between flags, and for each unknown name."""
    problems = [
        Problem(flag, repr(lightrft[flag]), "no such name", suggest(lightrft[flag], known))
        for flag, known in (
            ("advantage_estimator", ESTIMATORS),
            ("kl_estimator", KL_ESTIMATORS),
            ("loss_agg_mode", CATALOGUE["aggregations"]),
        )
        if lightrft[flag] not in known
    ]
    estimator, samples = lightrft["advantage_estimator"], lightrft["n_samples_per_prompt"]
    if estimator in OF_GROUPS and samples < 2:
        found = f"{estimator} compares the completions of a prompt"
        problems.append(Problem("n_samples_per_prompt", str(samples), found, "set it to 2 or more"))
    if lightrft["dynamic_sampling"] and (estimator not in OF_GROUPS or samples < 2):
        found = f"{estimator} compares no completions of a prompt"
        problems.append(Problem("dynamic_sampling", "on", found, "leave it out, or use group_norm"))
    if lightrft["use_cpg_loss"] and lightrft["use_gspo"]:
        problems.append(Problem("use_gspo", "a loss", "use_cpg_loss names another one", "leave one of the two out"))
    if lightrft["freezing_actor_steps"] > 0 and estimator != "gae":
        found = f"{estimator} trains no critic, which could train alone"
        problems.append(Problem("freezing_actor_steps", str(lightrft["freezing_actor_steps"]), found, "leave it out"))
    if lightrft["load_in_4bit"] and not lightrft["lora_rank"]:
        found = "every weight is trained, and weights in 4 bits are frozen"
        problems.append(Problem("load_in_4bit", "True", found, "set lora_rank, or leave it out"))
    longest, buffer = lightrft["generate_max_len"], lightrft["overlong_buffer_len"]
    if lightrft["overlong_buffer"] and not 0 < buffer <= longest:
        found = f"a completion has at most {longest} tokens (generate_max_len)"
        problems.append(Problem("overlong_buffer_len", str(buffer), found, "make it a part of them"))
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
    return []


def _uneven(lightrft: Settings) -> list[Problem]:
    """Returns a problem for batch sizes that only PPOTrainerVL supports: a run splits groups into equal
    mini-batches."""
    whole, batch = sequences_per_step(lightrft), lightrft["train_batch_size"]
    where = f"a rollout batch has {whole} (rollout_batch_size * n_samples_per_prompt)"
    if whole % batch:
        return [Problem("train_batch_size", f"{batch} sequences", where, "make it a divisor of that")]
    if batch < lightrft["n_samples_per_prompt"]:
        found = f"a prompt has {lightrft['n_samples_per_prompt']} completions, which train together"
        return [Problem("train_batch_size", f"{batch} sequences", found, "set it to as many or more")]
    return []
