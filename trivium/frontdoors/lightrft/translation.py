"""Translates LightRFT's launch arguments to a RunConfig, by `config_table.TABLE`.

All problems are reported at once, before anything is built.
"""

from __future__ import annotations

import math
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from trivium.config import config_from_mapping, merged
from trivium.errors import ConfigError, Problem
from trivium.frontdoors.lightrft.config.algorithm_section import (
    algorithm_of,
    freezes_vision,
    launch_conflicts,
    uneven,
)
from trivium.frontdoors.lightrft.config.config_table import OPENRLHF, TABLE
from trivium.frontdoors.lightrft.config.data_section import prompts, tasks_of
from trivium.frontdoors.lightrft.config.keys_of_training import WANDB, betas_of
from trivium.frontdoors.lightrft.config.launch_args import PROCESSES, flags_of
from trivium.frontdoors.lightrft.config.reward_section import rewards_of
from trivium.frontdoors.plain_values import plain
from trivium.frontdoors.tables import Settings, Translation, refuse

_VARIABLE = re.compile(r"[-_.]?\$\{\w+\}")
_MIN_LR_RATIO = 0.1
"""The final learning rate of the original's cosine schedule, as a fraction of the initial rate."""
_HERE = "python -m trivium.frontdoors.lightrft"


def settings_of(config: object) -> Settings:
    """Reads launch arguments: a Namespace, a mapping, or a list of words.

    Raises a ConfigError that lists everything that cannot be translated.
    """
    flags = flags_of([str(word) for word in config]) if isinstance(config, list | tuple) else plain(config)
    lightrft = TABLE.read({flag: _without_variables(value) for flag, value in flags.items()})
    problems = [_named(problem) for problem in lightrft.problems]
    betas = lightrft["adam_betas"]
    if not lightrft["pretrain"]:
        problems.append(Problem("pretrain", "a model", "nothing", "name a Hugging Face directory: --pretrain PATH"))
    if betas_of(betas) is None:
        problems.append(Problem("adam_betas", repr(betas), "it must be two numbers below 1", "write 0.9 0.95"))
    refuse(problems, "launch arguments that can be translated")
    return lightrft


def _named(problem: Problem) -> Problem:
    """Rewords the problem of an unknown flag for a command line."""
    if problem.found != "no key of that name is translated":
        return problem
    return problem._replace(found="no such flag")


def _without_variables(value: object) -> object:
    """Expands environment variables and removes unset ones. A text of only unset variables stays unchanged, so that it
    is reported as an error."""
    if not isinstance(value, str) or "${" not in value:
        return value
    text = os.path.expandvars(value)
    return _VARIABLE.sub("", text) or text


def namespace_of(config: object) -> Namespace:
    """Converts a Namespace, a mapping or a list of words to a Namespace for `fit`, the strategy and the data sets.

    The result has every flag of the table; unset flags have LightRFT's defaults. Raises a ConfigError that lists
    everything unsupported.
    """
    return of_settings(settings_of(config))


def of_settings(lightrft: Settings) -> Namespace:
    """Converts settings to a Namespace, as `namespace_of`."""
    values = {flag: lightrft[flag] for flag in lightrft.table.entries}
    return Namespace(**values | {"adam_betas": betas_of(values["adam_betas"])})


def translate(config: object) -> Translation:
    """Translates LightRFT's launch arguments to a Trivium config.

    Raises a ConfigError that lists everything that cannot be translated.
    """
    lightrft, problems = settings_of(config), list[Problem]()
    tasks, rewards = tasks_of(lightrft, problems), rewards_of(lightrft, problems)
    problems += [*launch_conflicts(lightrft)] or uneven(lightrft)
    problems += _only_in_the_launcher(lightrft)
    refuse(problems, "launch arguments whose values fit together")
    rows = prompts(lightrft)
    per_episode = _rollouts_per_episode(lightrft, rows)
    mapping = merged(
        lightrft.mapped(),
        {
            "model": {"kind": "hf"},
            "tasks": tasks,
            "rewards": rewards,
            "workflow": {"kind": "single_turn"},
            "engine": _engine(lightrft),
            "algorithm": algorithm_of(lightrft),
            "train": _train(lightrft, lightrft["num_episodes"] * per_episode),
            "schedule": {"steps": lightrft["num_episodes"] * per_episode},
            "monitors": _monitors(lightrft),
        },
    )
    if lightrft["advantage_estimator"] != "gae":
        del mapping["train"]["critic_optimizer"]
    if "eval" in tasks:
        mapping["evaluation"] = _evaluation(lightrft, per_episode)
    refuse(problem for problem in _run_problems(mapping) if not problem.where.endswith("path"))
    return Translation(mapping, (*_notes(lightrft, config, rows, mapping), *lightrft.notes()))


def _run_problems(mapping: dict[str, Any]) -> Sequence[Problem]:
    try:
        config_from_mapping(mapping)
    except ConfigError as error:
        return error.problems
    return ()


def _only_in_the_launcher(lightrft: Settings) -> Iterator[Problem]:
    """Yields a problem for each option that only PPOTrainerVL supports, and for each invalid option."""
    if lightrft["pretrain_data"] and lightrft["ptx_coef"]:
        found = "a run learns from rollouts, or in a stage of its own from rows"
        yield Problem(
            "pretrain_data", lightrft["pretrain_data"], found, f"use {_HERE}, or stages with algorithm.kind sft"
        )
    critic = lightrft["critic_pretrain"]
    if lightrft["advantage_estimator"] == "gae" and critic not in (None, "", lightrft["pretrain"]):
        do = f"name the same, or leave it out; {_HERE} starts the critic from any model"
        yield Problem("critic_pretrain", critic, f"the critic starts from {lightrft['pretrain']} (pretrain)", do)
    if lightrft["kl_target"] and lightrft["init_kl_coef"] and lightrft["use_kl_loss"]:
        do = f"leave one of the two out, or use {_HERE}"
        found = "use_kl_loss adds the penalty to the loss, and a run steers one in the reward"
        yield Problem("kl_target", str(lightrft["kl_target"]), found, do)
    if lightrft["max_norm"] <= 0:
        yield Problem("max_norm", str(lightrft["max_norm"]), "it must be above 0", "write a large number for no bound")
    template = lightrft["input_template"]
    if template and not lightrft["apply_chat_template"] and template.count("{}") != 1:
        yield Problem("input_template", repr(template), "the prompt has no place in it", "write {} where it goes, once")


def _rollouts_per_episode(lightrft: Settings, rows: int | None) -> int:
    """Returns the number of full batches in an episode; a partial batch is dropped. Returns 1 if `rows` is unknown."""
    batch = lightrft["rollout_batch_size"]
    if rows is None:
        return 1
    if rows < batch:
        found = f"prompt_data has {rows}"
        do = "lower rollout_batch_size, or give more rows"
        raise ConfigError(f"a batch of {batch} prompts (rollout_batch_size)", found, do)
    return rows // batch


# --------------------------------------------------------------------------- sections


def _sees(lightrft: Settings) -> bool:
    """Whether the model reads images. Without a local model directory, `text_only` decides."""
    from trivium.models.vision.families import family_in

    here = os.path.isfile(os.path.join(lightrft["pretrain"], "config.json"))
    return family_in(lightrft["pretrain"]) is not None if here else not lightrft["text_only"]


def _engine(lightrft: Settings) -> dict[str, Any]:
    engine: dict[str, Any] = {"kind": "torch"}
    return engine | ({"max_context": _longest(lightrft)} if lightrft["text_only"] else {})


def _sampling(lightrft: Settings, *temperature: str) -> dict[str, Any]:
    return {"temperature": lightrft.first(*temperature), "top_p": lightrft["top_p"]}


def _longest(lightrft: Settings) -> int:
    """Returns the maximum length of a sequence in tokens, without images."""
    return lightrft["prompt_max_len"] + lightrft["generate_max_len"]


def _train(lightrft: Settings, steps: int) -> dict[str, Any]:
    warmup = math.ceil(lightrft["lr_warmup_ratio"] * steps)
    optimizer = {"warmup_steps": warmup, "schedule": "cosine", "min_lr_ratio": _MIN_LR_RATIO}
    train: dict[str, Any] = {
        "kind": "torch",
        "max_tokens_per_micro_batch": lightrft["micro_train_batch_size"] * _longest(lightrft),
        "optimizer": optimizer,
        "critic_optimizer": optimizer,
    }
    return train | ({"vision_tower": "frozen"} if freezes_vision(lightrft) and _sees(lightrft) else {})


def _evaluation(lightrft: Settings, per_episode: int) -> dict[str, Any]:
    """Returns the section `evaluation`. Sampling is as in training, unless flags override it."""
    samples, every = lightrft["eval_n_samples"], lightrft["eval_steps"]
    return {
        "taskset": "eval",
        "every": per_episode if every == -1 else max(0, every),
        "samples": samples,
        "k": sorted({1, samples}),
        "sampling": _sampling(lightrft, "eval_temperature", "temperature"),
    }


def _monitors(lightrft: Settings) -> list[dict[str, Any]]:
    monitors: list[dict[str, Any]] = [{"kind": "console"}, {"kind": "jsonl"}]
    if lightrft["use_wandb"]:
        monitors.append({"kind": "wandb"} | {name: lightrft[flag] for name, flag in WANDB.items() if lightrft[flag]})
    return [*monitors, {"kind": "tensorboard"}] if lightrft["use_tensorboard"] else monitors


# --------------------------------------------------------------------------- notes


def _notes(lightrft: Settings, config: object, rows: int | None, mapping: dict[str, Any]) -> Iterator[str]:
    """Yields notes on steps that remain for the user, and on differences from LightRFT."""
    if lightrft[PROCESSES] > 1:
        number = lightrft[PROCESSES]
        yield f"torchrun: {number} processes: start `torchrun --nproc-per-node {number} -m trivium run FILE`"
    flags = flags_of(list(config)) if isinstance(config, list | tuple) else plain(config)
    for flag, value in flags.items():
        if isinstance(value, str) and _VARIABLE.search(os.path.expandvars(value)):
            yield f"{flag}: {value}: commands are not run, and a variable that is not set here is left out"
    if rows is None:
        yield (
            "schedule.steps: prompt_data is not on this machine, so an episode counts as one step; multiply "
            "schedule.steps, evaluation.every and warmup_steps by the number of batches in an episode"
        )
    if any(flag in OPENRLHF for flag in flags):
        yield "flags of OpenRLHF: what is not set has LightRFT's default, which is another one for some"
    if lightrft["use_wandb"]:
        yield "use_wandb: the key is not written down: set WANDB_API_KEY, or run `wandb login`"
    if mapping["algorithm"].get("kl", {}).get("estimator") == "k1+":
        yield "kl_estimator: k1 in the loss has a gradient of mean zero; k1+ has its value, and pulls to the reference"
    if lightrft["advantage_estimator"] != "gae" and lightrft["critic_pretrain"]:
        yield f"critic_pretrain: no effect: {lightrft['advantage_estimator']} trains no critic"
    if lightrft["advantage_estimator"] in ("reinforce_baseline", "cpgd") and lightrft["gamma"] != 1:
        yield f"gamma: no effect: {lightrft['advantage_estimator']} does not discount"
    if freezes_vision(lightrft) and "vision_tower" not in mapping["train"]:
        yield "freeze_prefix: no effect: the model reads text alone"
    if lightrft["input_template"] and lightrft["apply_chat_template"]:
        yield "input_template: no effect: apply_chat_template writes the prompts"
    if "eval" not in mapping["tasks"] and any(map(lightrft.has, ("eval_steps", "eval_split", "max_eval_samples"))):
        found = f"prompt_data has no split {lightrft['eval_split']!r}, and eval_data is not set"
        yield f"eval_split: no evaluation: {found}"
    for flag in ("enable_ema", "disable_ds_ckpt"):
        if lightrft[flag]:
            yield f"{flag}: PPOTrainerVL ({_HERE}) alone reads it"
