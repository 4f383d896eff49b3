"""The config section `algorithm` that the trainer's arguments describe, and contradictions between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.foundation.errors import Problem
from trivium.foundation.registry import CATALOGUE, suggest

ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "gae": {"kind": "gae", "whiten": False},
    "reinforce": {"kind": "reinforce"},
    # A choice of LightRFT's command line that its trainer refuses with a ValueError.
    "reinforce++": {"kind": "reinforce"},
    "group_norm": {"kind": "group_norm"},
    "grpo": {"kind": "group_norm"},
    "rloo": {"kind": "reinforce_baseline", "baseline": "others"},
    "reinforce_baseline": {"kind": "reinforce_baseline"},
    "cpgd": {"kind": "cpgd"},
}
"""advantage_estimator -> algorithm.advantage."""
KL_ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "k1": {"kind": "k1"},
    "k2": {"kind": "k2"},
    "k3": {"kind": "k3", "cap": None},
}
"""kl_estimator -> algorithm.kl.estimator."""
_OF_GROUPS = ("group_norm", "grpo", "rloo", "reinforce_baseline", "cpgd")
"""Estimators that compare the completions of a prompt."""
_NORMALISED = ("gae", "reinforce", "reinforce++", "reinforce_baseline")
"""Estimators whose advantages are normalised over the step. The others compare rewards within a group."""
_UNDISCOUNTED = ("reinforce_baseline", "cpgd")


def section_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section `algorithm`. `values` has the arguments by name, and `has_reference`."""
    section: dict[str, Any] = {
        "kind": "grpo",
        # LightRFT scores with the actor before the updates: it asks its engine for no log-probabilities.
        "old_log_prob": "recompute",
        "advantage": _advantage(values),
        "policy_loss": _policy_loss(values),
        "aggregate": values["loss_agg_mode"],
    }
    if values["has_reference"]:
        place = "loss" if values["use_kl_loss"] else "reward"
        # The coefficient is the controller's, which changes during the run: the trainer multiplies by it in each step.
        section["kl"] = {"coef": 1.0, "place": place, "estimator": dict(KL_ESTIMATORS[values["kl_estimator"]])}
    if values["dynamic_sampling"]:
        section |= {"filters": ["zero_variance"], "refill": values["dynamic_sampling_refills"]}
    if values["advantage_clip"] > 0:
        section["clip_advantages"] = values["advantage_clip"]
    estimator = values["advantage_estimator"]
    if estimator in _NORMALISED or (estimator == "rloo" and values["advantages_norm"]):
        section["normalise_advantages"] = "mean" if values["no_advantage_std_norm"] else "std"
    return section | ({"shaping": steps} if (steps := _shaping(values)) else {})


def _advantage(values: Mapping[str, Any]) -> dict[str, Any]:
    estimator = values["advantage_estimator"]
    advantage = dict(ESTIMATORS[estimator])
    if estimator == "gae":
        advantage["lam"] = values["lambd"]
    # LightRFT forces gamma to 1 for these.
    return advantage | ({} if estimator in _UNDISCOUNTED else {"gamma": values["gamma"]})


def _policy_loss(values: Mapping[str, Any]) -> dict[str, Any]:
    clip = {"clip_low": values["eps_clip"], "clip_high": values["eps_clip"]}
    if values["use_cpg_loss"]:
        return {"kind": "cpgd", **clip}
    return {"kind": "gspo", **clip} if values["use_gspo"] else {"kind": "ppo", "dual_clip": None, **clip}


def _shaping(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the reward shaping before the estimator: overlong penalty, running norm, clip."""
    steps: list[dict[str, Any]] = []
    if values["overlong_buffer"]:
        factor, longest = values["overlong_buffer_penalty_factor"], values["max_new_tokens"]
        part = values["overlong_buffer_len"] / longest
        # At most the factor, as in DAPO. LightRFT's penalty has no bound beyond max_new_tokens.
        steps.append({"kind": "overlong_penalty", "factor": factor, "buffer": part, "limit": longest})
    if values["reward_running_norm"]:
        steps.append({"kind": "running_normalise", "minus_mean": values["reward_running_norm_minus_mean"]})
    if values["reward_clip"] > 0:
        steps.append({"kind": "clip", "low": -values["reward_clip"], "high": values["reward_clip"]})
    return steps


def conflicts(values: Mapping[str, Any]) -> list[Problem]:
    """Returns a problem for each contradiction between arguments, and for each unknown name."""
    problems = [
        Problem(name, repr(values[name]), "no such name", suggest(values[name], choices))
        for name, choices in (
            ("advantage_estimator", ESTIMATORS),
            ("kl_estimator", KL_ESTIMATORS),
            ("loss_agg_mode", CATALOGUE["aggregations"]),
        )
        if values[name] not in choices
    ]
    estimator, samples = values["advantage_estimator"], values["n_samples_per_prompt"]
    # LightRFT divides 0 by 0 here, and trains on NaN.
    if estimator in _OF_GROUPS and samples < 2:
        cause = f"{estimator} compares the completions of a prompt"
        problems.append(Problem("n_samples_per_prompt", str(samples), cause, "set it to 2 or more"))
    if values["dynamic_sampling"] and samples < 2:
        cause = "a prompt has one completion, whose reward equals that of all others"
        problems.append(Problem("dynamic_sampling", "on", cause, "set n_samples_per_prompt to 2 or more"))
    if values["use_cpg_loss"] and values["use_gspo"]:
        problems.append(Problem("use_gspo", "a loss", "use_cpg_loss names another one", "leave one of the two out"))
    longest, buffer = values["max_new_tokens"], values["overlong_buffer_len"]
    if values["overlong_buffer"] and not 0 < buffer <= longest:
        cause = f"a completion has at most {longest} tokens (max_new_tokens)"
        problems.append(Problem("overlong_buffer_len", str(buffer), cause, "make it a part of them"))
    return problems
