"""Parts of the section `algorithm` that several of LightRFT's flags determine, and contradictions between flags.

The rows of `keys_of_training` set the other parts. PPOTrainerVL and `trivium run` share `shaped` and `conflicts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trivium.errors import Problem
from trivium.frontdoors.lightrft.config.keys_of_training import ESTIMATORS, KL_ESTIMATORS
from trivium.frontdoors.tables import Settings
from trivium.registry import CATALOGUE, suggest

OF_GROUPS = ("group_norm", "grpo", "rloo", "reinforce_baseline", "cpgd")
"""Estimators that compare the completions of a prompt."""
_NORMALISED = ("gae", "reinforce", "reinforce++", "reinforce_baseline")
"""Estimators whose advantages are normalised over the step. The others compare rewards within a group."""


def shaped(lightrft: Settings) -> dict[str, Any]:
    """Returns the normalisation of advantages, and the reward shaping before the estimator: overlong penalty, running
    norm, clip."""
    section: dict[str, Any] = {"old_log_prob": "recompute"}
    estimator, steps = lightrft["advantage_estimator"], list[dict[str, Any]]()
    if estimator in _NORMALISED or (estimator == "rloo" and lightrft["advantages_norm"]):
        section["normalise_advantages"] = "mean" if lightrft["no_advantage_std_norm"] else "std"
    if lightrft["overlong_buffer"]:
        factor, longest = lightrft["overlong_buffer_penalty_factor"], lightrft["generate_max_len"]
        part = lightrft["overlong_buffer_len"] / longest
        steps.append({"kind": "overlong_penalty", "factor": factor, "buffer": part, "limit": longest})
    if lightrft["reward_running_norm"]:
        steps.append({"kind": "running_normalise", "minus_mean": lightrft["reward_running_norm_minus_mean"]})
    if lightrft["reward_clip"] > 0:
        steps.append({"kind": "clip", "low": -lightrft["reward_clip"], "high": lightrft["reward_clip"]})
    return section | ({"shaping": steps} if steps else {})


def algorithm_of(lightrft: Settings) -> dict[str, Any]:
    """Returns the parts of the section `algorithm` of `trivium run`."""
    critic = lightrft["advantage_estimator"] == "gae"
    algorithm: dict[str, Any] = {
        "kind": "ppo" if critic else "grpo",
        **shaped(lightrft),
        "mini_batches": max(1, sequences_per_step(lightrft) // max(1, lightrft["train_batch_size"])),
        "correction": "none",
    }
    if critic:
        algorithm["critic"] = {"clip": lightrft["value_clip"] or None, "aggregate": lightrft["loss_agg_mode"]}
    if lightrft["init_kl_coef"] and lightrft["use_kl_loss"] and lightrft["kl_estimator"] == "k1":
        algorithm["kl"] = {"estimator": "k1+"}
    return algorithm


def sequences_per_step(lightrft: Settings) -> int:
    """Returns the number of completions in a rollout batch."""
    return lightrft["rollout_batch_size"] * lightrft["n_samples_per_prompt"]


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
    if lightrft["dynamic_sampling"] and samples < 2:
        found = "a prompt has one completion, whose reward equals that of all others"
        problems.append(Problem("dynamic_sampling", "on", found, "set n_samples_per_prompt to 2 or more"))
    if lightrft["use_cpg_loss"] and lightrft["use_gspo"]:
        problems.append(Problem("use_gspo", "a loss", "use_cpg_loss names another one", "leave one of the two out"))
    longest, buffer = lightrft["generate_max_len"], lightrft["overlong_buffer_len"]
    if lightrft["overlong_buffer"] and not 0 < buffer <= longest:
        found = f"a completion has at most {longest} tokens (generate_max_len)"
        problems.append(Problem("overlong_buffer_len", str(buffer), found, "make it a part of them"))
    return problems


def launch_conflicts(lightrft: Settings) -> Iterator[Problem]:
    """Yields a problem for each contradiction between the flags of a launch, and for each missing or invalid value."""
    yield from conflicts(lightrft)
    estimator = lightrft["advantage_estimator"]
    if lightrft["dynamic_sampling"] and estimator not in OF_GROUPS and lightrft["n_samples_per_prompt"] > 1:
        found = f"{estimator} compares no completions of a prompt"
        yield Problem("dynamic_sampling", "on", found, "leave it out, or use group_norm")
    if lightrft["freezing_actor_steps"] > 0 and estimator != "gae":
        found = f"{estimator} trains no critic, which could train alone"
        yield Problem("freezing_actor_steps", str(lightrft["freezing_actor_steps"]), found, "leave it out")
    if lightrft["load_in_4bit"] and not lightrft["lora_rank"]:
        found = "every weight is trained, and weights in 4 bits are frozen"
        yield Problem("load_in_4bit", "True", found, "set lora_rank, or leave it out")
    if not lightrft["prompt_data"]:
        yield Problem("prompt_data", "prompts to train on", "nothing", "name a file or a folder")
    if freezes_vision(lightrft) is None:
        do = "give it no value, or `visual`"
        yield Problem("freeze_prefix", repr(lightrft["freeze_prefix"]), "the vision tower alone is frozen", do)
    yield from _batch_conflicts(lightrft)


def freezes_vision(lightrft: Settings) -> bool | None:
    """Whether freeze_prefix freezes the vision tower. Returns None for any other prefix."""
    value = lightrft["freeze_prefix"]
    prefixes = value if isinstance(value, list) else [value]
    if value in (None, False, []):
        return False
    return True if all(each is True or str(each).rstrip(".").endswith("visual") for each in prefixes) else None


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


def uneven(lightrft: Settings) -> list[Problem]:
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
