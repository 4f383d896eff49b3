"""Translates verl's trainer config to a RunConfig, by the keys of `config_table.TABLE`.

One error lists all keys that cannot be translated, before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from trivium.config import config_from_mapping, merged
from trivium.errors import ConfigError, Problem
from trivium.frontdoors.plain_values import plain, resolved
from trivium.frontdoors.tables import Settings, Translation, refuse
from trivium.frontdoors.verl.algorithm_section import algorithm_of, names_of
from trivium.frontdoors.verl.config_table import TABLE
from trivium.frontdoors.verl.conflicts import ACTOR, ROLLOUT, conflicts
from trivium.frontdoors.verl.registered import advantage_address, loss_address
from trivium.frontdoors.verl.sourced_sections import (
    listed,
    notes_of,
    rewards_of,
    rows_of_files,
    shaping_of,
    tasks_of,
)

_KEEP_ALL = 1_000_000
_MONITORS = {"console": "console", "file": "jsonl", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def settings_of(config: object) -> Settings:
    """Returns the values of a config in verl's layout. Raises ConfigError with all keys that cannot be translated."""
    verl = _with_own_keys(TABLE.read(config), config)
    problems = list(verl.problems)
    for strategy in [problem.where for problem in problems if problem.where.endswith(".strategy")]:
        section = strategy.removesuffix("strategy")  # the other keys belong to that backend
        problems = [p for p in problems if p.where == strategy or not p.where.startswith(section)]
    for name in listed(verl["trainer.logger"]):
        if name not in _MONITORS:
            do = f"use some of {', '.join(_MONITORS)}"
            problems.append(Problem("trainer.logger", repr(name), "no monitor of that name", do))
    refuse(problems)
    return verl


def _with_own_keys(verl: Settings, config: object) -> Settings:
    """Returns the values with additional keys that a user's estimator or loss reads."""
    sections = {
        "algorithm.": advantage_address(str(verl["algorithm.adv_estimator"])),
        f"{ACTOR}.policy_loss.": loss_address(str(verl[f"{ACTOR}.policy_loss.loss_mode"])),
    }
    prefixes = tuple(prefix for prefix, address in sections.items() if address is not None)
    own = [p.where for p in verl.problems if p.where.startswith(prefixes) and TABLE.entry_of(p.where) is None]
    if not own:
        return verl
    values, whole = dict(verl.values), resolved(plain(config))
    for key in own:
        values[key] = reduce(lambda section, name: section[name], key.split("."), whole)
    return replace(verl, values=values, problems=tuple(p for p in verl.problems if p.where not in own))


def translate(config: object) -> Translation:
    """Translates a whole config in verl's layout, including data files and rewards.

    Raises ConfigError with all keys that cannot be translated.
    """
    verl, problems = settings_of(config), list[Problem]()
    problems += [
        Problem(key, repr(verl[key]), "a class of data needs a script", "use RayPPOTrainer, or a taskset")
        for key in ("data.custom_cls.path", "data.sampler.class_path")
        if verl.has(key)
    ]
    splits = ("train", "val") if verl["data.val_files"] else ("train",)
    tasks = {split: tasks_of(verl, split, problems) for split in splits}
    rewards, shaping = rewards_of(verl, problems), shaping_of(verl)
    device = _device(verl, problems)
    refuse(problems)
    rows = rows_of_files(verl)
    known = rows or verl["data.train_batch_size"]
    mapping = translated(verl, rows=known, has_validation="val" in tasks, device=device)
    mapping["engine"].setdefault("max_context", _longest(verl))
    if template := _template(verl):
        mapping["model"]["chat_template"] = template
    mapping["algorithm"] |= {"shaping": shaping} if shaping else {}
    mapping |= {"tasks": tasks, "rewards": rewards}
    refuse(problem for problem in _run_problems(mapping) if not problem.where.endswith("path"))
    return Translation(mapping, (*notes_of(verl, rows), *verl.notes()))


def _template(verl: Settings) -> str | None:
    """Returns the chat template that the config sets; it overrides that of the model's tokenizer."""
    if not verl["data.apply_chat_template_kwargs"]:
        return verl["actor_rollout_ref.model.custom_chat_template"]
    from trivium.frontdoors.verl.prompts import template_of
    from trivium.text import hf_tokenizer

    return template_of(verl, hf_tokenizer(verl["actor_rollout_ref.model.path"]))


def _device(verl: Settings, problems: list[Problem]) -> str:
    """Returns the device of the config. `cuda`, verl's default, becomes `cpu` on a machine without a GPU."""
    import torch

    name = verl["trainer.device"].partition(":")[0]
    if name not in ("cpu", "cuda"):
        problems.append(Problem("trainer.device", repr(name), "this device is not supported", "use cuda or cpu"))
    return name if name == "cpu" or torch.cuda.is_available() else "cpu"


def _run_problems(mapping: dict[str, Any]) -> Sequence[Problem]:
    """Returns the problems of a RunConfig."""
    try:
        config_from_mapping(mapping)
    except ConfigError as error:
        return error.problems
    return ()


# --------------------------------------------------------------------------- sections


def translated(verl: Settings, *, rows: int, has_validation: bool, device: str) -> dict[str, Any]:
    """Returns the RunConfig as a mapping, without its tasks. `rows` is the size of the training set.

    Raises ConfigError with all keys that contradict each other.
    """
    problems: list[Problem] = []
    steps = total_steps(verl, rows)
    gae = verl["algorithm.adv_estimator"] == "gae"
    algorithm = algorithm_of(verl, problems)
    run = merged(
        {
            "run": {"dir": run_dir_of(verl), "seed": 0},
            "model": {"kind": "hf"},
            "engine": {"kind": _engine_of(verl), "device": device, "dtype": _default_dtype(device)},
            "train": {"kind": "torch", "device": device, "dtype": _default_dtype(device)},
            "checkpoint": {"keep": _KEEP_ALL},
            "evaluation": {"taskset": "val"},
        },
        verl.mapped(device=device, engine=_engine_of(verl), **names_of(verl)),
    )
    run["engine"] |= _engine(verl, run["engine"])
    run["train"]["optimizer"]["warmup_steps"] = _warmup(verl, f"{ACTOR}.optim", steps)
    if gae:
        run["train"]["critic_optimizer"]["warmup_steps"] = _warmup(verl, "critic.optim", steps)
    if verl[f"{ACTOR}.router_replay.mode"] == "R3":
        run["train"]["router_replay"] = "rollout"
    run["schedule"]["steps"] = steps
    run["monitors"] = _monitors(verl)
    if has_validation:
        run["evaluation"] |= _evaluation(verl, run["evaluation"])
    else:
        del run["evaluation"]
    problems += conflicts(verl, has_validation)
    refuse(problems, "a config whose keys fit together")
    return merged(run, {"algorithm": algorithm})


def run_dir_of(verl: Settings) -> str:
    """Returns the run directory."""
    named = f"checkpoints/{verl['trainer.project_name']}/{verl['trainer.experiment_name']}"
    return verl["trainer.default_local_dir"] or named


def total_steps(verl: Settings, rows: int) -> int:
    """Returns the configured train steps, else whole batches per epoch times epochs. Incomplete batches are dropped.

    Raises ConfigError if the rows do not fill one batch.
    """
    batch = verl["data.train_batch_size"]
    if rows < batch:
        raise ConfigError(
            f"a batch of {batch} prompts (data.train_batch_size)",
            f"the training set has {rows} (after filtering)",
            "lower data.train_batch_size, or give more rows",
        )
    return int(verl["trainer.total_training_steps"] or rows // batch * verl["trainer.total_epochs"])


def _engine_of(verl: Settings) -> str:
    """Returns the kind of the rollout engine."""
    return "vllm" if verl[f"{ROLLOUT}.name"] == "vllm" else "torch"


def _engine(verl: Settings, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the engine that follow from several keys."""
    fields: dict[str, Any] = {}
    if verl.has(f"{ROLLOUT}.max_model_len"):
        fields["max_context"] = min(verl[f"{ROLLOUT}.max_model_len"], _longest(verl))
    if engine["kind"] != "vllm":
        return fields
    fields["options"] = {**engine.get("options", {})}
    if verl[f"{ACTOR}.router_replay.mode"] == "R3":
        fields["options"]["enable_return_routed_experts"] = True
    if engine["device"] != "cpu":
        sleeps = verl[f"{ROLLOUT}.free_cache_engine"] and verl[f"{ROLLOUT}.enable_sleep_mode"]
        fields["sleep_level"] = 2 if sleeps else 0  # every step sends all weights again
    return fields


def _default_dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def _longest(verl: Settings) -> int:
    """Returns the maximum number of tokens of a sequence."""
    return verl["data.max_prompt_length"] + verl["data.max_response_length"]


def _evaluation(verl: Settings, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the evaluation that follow from several keys."""
    samples, greedy = evaluation["samples"], not verl[f"{ROLLOUT}.val_kwargs.do_sample"]
    powers = tuple(2**power for power in range(int(math.log2(samples)) + 1))
    sampling = evaluation["sampling"] | ({"temperature": 0.0} if greedy else {})
    return {"k": tuple(dict.fromkeys((*powers, samples))), "sampling": sampling}


def _monitors(verl: Settings) -> list[dict[str, Any]]:
    project, experiment = verl["trainer.project_name"], verl["trainer.experiment_name"]
    about = {
        "wandb": {"project": project, "name": experiment},
        "mlflow": {"experiment": project, "name": experiment},
    }
    names = [_MONITORS[name] for name in listed(verl["trainer.logger"])]
    return [{"kind": name, **about.get(name, {})} for name in dict.fromkeys([*names, "jsonl"])]


def _warmup(verl: Settings, where: str, steps: int) -> int:
    """Returns the warm-up of a learning rate, in steps."""
    warmup = verl[f"{where}.lr_warmup_steps"]
    return warmup if warmup >= 0 else int(verl[f"{where}.lr_warmup_steps_ratio"] * steps)
