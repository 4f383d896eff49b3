"""Translates verl's trainer config to a RunConfig, by the keys of `config_table.TABLE`.

One error lists all keys that cannot be translated, before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError, Problem, TriviumError
from trivium.frontdoors.plain_values import plain, resolved, unescaped
from trivium.frontdoors.tables import KEEP_ALL, Settings, TranslatedConfig, numbers_of_samples, refuse
from trivium.frontdoors.verl.config.algorithm_section import algorithm_of, distillation_of, names_of
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.frontdoors.verl.config.conflicts import ACTOR, ROLLOUT, conflicts
from trivium.frontdoors.verl.config.conversation_section import has_conversation, workflow_of
from trivium.frontdoors.verl.config.keys_of_models import REPLACED_ENGINES
from trivium.frontdoors.verl.config.sourced_sections import (
    UNSUPPORTED_MONITORS,
    listed,
    notes_of,
    rewards_of,
    rows_of_files,
    shaping_of,
    tasks_of,
)
from trivium.frontdoors.verl.registered import advantage_address, loss_address

_MONITORS = {"console": "console", "file": "jsonl", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def settings_of(config: object) -> Settings:
    """Returns the values of a config in verl's layout. Raises ConfigError with all keys that cannot be translated."""
    verl = _read(config)
    refuse(verl.problems)
    return verl


def _read(config: object) -> Settings:
    """Returns the values and the problems of a config."""
    verl = _with_own_keys(TABLE.read(config), config)
    problems = list(verl.problems)
    for strategy in [problem.where for problem in problems if problem.where.endswith(".strategy")]:
        section = strategy.removesuffix("strategy")  # the other keys belong to that backend
        problems = [p for p in problems if p.where == strategy or not p.where.startswith(section)]
    for name in listed(verl["trainer.logger"]):
        if name not in (*_MONITORS, *UNSUPPORTED_MONITORS):
            do = f"use some of {', '.join(_MONITORS)}"
            problems.append(Problem("trainer.logger", repr(name), "no monitor of that name", do))
    return replace(verl, problems=tuple(problems))


def _with_own_keys(verl: Settings, config: object) -> Settings:
    """Returns the values with additional keys that a user's estimator or loss reads."""
    sections = {
        "algorithm.": advantage_address(str(verl["algorithm.adv_estimator"])),
        f"{ACTOR}.policy_loss.": loss_address(str(verl[f"{ACTOR}.policy_loss.loss_mode"])),
    }
    prefixes = tuple(prefix for prefix, address in sections.items() if address is not None)
    user_keys = [p.where for p in verl.problems if p.where.startswith(prefixes) and TABLE.entry_of(p.where) is None]
    if not user_keys:
        return verl
    values, whole = dict(verl.values), unescaped(resolved(plain(config)))
    for key in user_keys:
        values[key] = reduce(lambda section, name: section[name], key.split("."), whole)
    return replace(verl, values=values, problems=tuple(p for p in verl.problems if p.where not in user_keys))


def translate(config: object) -> TranslatedConfig:
    """Translates a whole config in verl's layout, including data files and rewards.

    Raises ConfigError with all keys that cannot be translated.
    """
    verl = _read(config)
    problems = list(verl.problems)
    splits = ("train", "val") if verl["data.val_files"] else ("train",)
    tasks = {split: tasks_of(verl, split, problems) for split in splits}
    rewards, shaping = rewards_of(verl, problems), shaping_of(verl)
    device = _device(verl, problems)
    rows = rows_of_files(verl)
    # Without the files, an epoch counts as one batch, which a note says.
    num_rows = rows or verl["data.train_batch_size"]
    mapping = translated(verl, rows=num_rows, has_validation="val" in tasks, device=device, problems=problems)
    mapping["engine"].setdefault("max_context", _longest(verl))
    notes = [*_with_template(mapping, verl), *notes_of(verl, mapping, rows), *verl.notes()]
    mapping["algorithm"] |= {"shaping": shaping} if shaping else {}
    mapping |= {"tasks": tasks, "rewards": [] if verl["distillation.enabled"] and len(tasks) == 1 else rewards}
    # A path need not exist where the config is translated.
    of_run = [problem for problem in _run_problems(mapping) if not problem.where.endswith("path")]
    if problems:  # these sections may be incomplete because of a problem that is listed
        of_run = [problem for problem in of_run if not problem.where.startswith(("tasks", "rewards"))]
    refuse([*problems, *of_run])
    return TranslatedConfig(mapping, tuple(notes))


def _with_template(mapping: dict[str, Any], verl: Settings) -> list[str]:
    """Writes the variables of the chat template into it. Returns a note if the model is not on this machine."""
    key = "data.apply_chat_template_kwargs"
    if not verl[key] or not verl["actor_rollout_ref.model.path"]:
        return []
    from trivium.frontdoors.verl.objects.datasets.prompts import template_of
    from trivium.text import hf_tokenizer

    try:
        tokenizer = hf_tokenizer(verl["actor_rollout_ref.model.path"])
    except TriviumError as error:
        return [f"{key}: {error.found}: write the chat template with these variables into model.chat_template"]
    mapping["model"]["chat_template"] = template_of(verl, tokenizer)
    return []


def _device(verl: Settings, problems: list[Problem]) -> str:
    """Returns the device of the config. `cuda`, verl's default, is `auto`: the machine that runs the config decides."""
    name = verl["trainer.device"].partition(":")[0]
    if name not in ("cpu", "cuda"):
        problems.append(Problem("trainer.device", repr(name), "this device is not supported", "use cuda or cpu"))
    return "cpu" if name == "cpu" else "auto"


def _run_problems(mapping: dict[str, Any]) -> Sequence[Problem]:
    """Returns the problems of a RunConfig."""
    try:
        config_from_mapping(mapping)
    except ConfigError as error:
        return error.problems
    return ()


# --------------------------------------------------------------------------- sections


def translated(
    verl: Settings, *, rows: int, has_validation: bool, device: str, problems: list[Problem] | None = None
) -> dict[str, Any]:
    """Returns the RunConfig as a mapping, without its tasks. `rows` is the size of the training set. With the device
    `auto` it has the keys of a GPU, and device and dtype are those of the machine that runs it.

    Appends keys that contradict each other to `problems`; raises them in a ConfigError without such a list.
    """
    conflicting: list[Problem] = []
    steps = total_steps(verl, rows, conflicting)
    gae = verl["algorithm.adv_estimator"] == "gae"
    algorithm = algorithm_of(verl, conflicting)
    run = merged(
        {
            "run": {"dir": run_dir_of(verl), "seed": 0},
            "model": {"kind": "hf"},
            "engine": {"kind": _engine_of(verl, device), "device": device, "dtype": _default_dtype(device)},
            "train": {"kind": "torch", "device": device, "dtype": _default_dtype(device)},
            "checkpoint": {"keep": KEEP_ALL},
            "evaluation": {"taskset": "val"},
        },
        verl.mapped(
            device="cpu" if device == "cpu" else "cuda",
            engine=_engine_of(verl, device),
            conversation=has_conversation(verl),
            **names_of(verl),
        ),
    )
    if workflow := workflow_of(verl, conflicting):
        run["workflow"] = merged(workflow, run.get("workflow", {}))
    run["engine"] |= _engine(verl, run["engine"])
    run["train"]["optimizer"]["warmup_steps"] = _warmup(verl, f"{ACTOR}.optim", steps)
    if gae:
        run["train"]["critic_optimizer"]["warmup_steps"] = _warmup(verl, "critic.optim", steps)
        run["train"] |= _critic(verl)
    if verl[f"{ACTOR}.router_replay.mode"] == "R3":
        run["train"]["router_replay"] = "rollout"
    run["schedule"]["steps"] = steps
    run["monitors"] = _monitors(verl)
    if has_validation:
        run["evaluation"] |= _evaluation(verl, run["evaluation"])
    else:
        del run["evaluation"]
    distilled = distillation_of(verl, conflicting) if verl["distillation.enabled"] else {}
    conflicting += conflicts(verl, has_validation, run["engine"]["kind"])
    if problems is None:
        refuse(conflicting, "a config whose keys fit together")
    else:
        problems += conflicting
    if verl["distillation.enabled"]:
        for name in ("critic_optimizer", "critic_path", "critic_max_grad_norm"):
            run["train"].pop(name, None)
        return run | {"algorithm": distilled}
    return merged(run, {"algorithm": algorithm})


def run_dir_of(verl: Settings) -> str:
    """Returns the run directory."""
    named = f"checkpoints/{verl['trainer.project_name']}/{verl['trainer.experiment_name']}"
    return verl["trainer.default_local_dir"] or named


def total_steps(verl: Settings, rows: int, problems: list[Problem]) -> int:
    """Returns the configured train steps, else whole batches per epoch times epochs. Incomplete batches are dropped.

    Appends a problem if the rows do not fill one batch.
    """
    batch = verl["data.train_batch_size"]
    if rows < batch:
        cause = f"the training set has {rows} (after filtering)"
        do = "lower data.train_batch_size, or give more rows"
        problems.append(Problem("data.train_batch_size", f"a batch of {batch} prompts", cause, do))
    return int(verl["trainer.total_training_steps"] or max(1, rows // batch) * verl["trainer.total_epochs"])


def _engine_of(verl: Settings, device: str) -> str:
    """Returns the kind of the rollout engine. vLLM replaces the engines that exist only on GPUs."""
    name = verl[f"{ROLLOUT}.name"]
    return "vllm" if name == "vllm" or (name in REPLACED_ENGINES and device != "cpu") else "torch"


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
    return {"cpu": "float32", "auto": "auto"}.get(device, "bfloat16")


def _longest(verl: Settings) -> int:
    """Returns the maximum number of tokens of a sequence."""
    return verl["data.max_prompt_length"] + verl["data.max_response_length"]


def _evaluation(verl: Settings, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the evaluation that follow from several keys."""
    # verl validates greedily unless do_sample is set, whatever the temperature.
    temperature = evaluation["sampling"]["temperature"] if verl[f"{ROLLOUT}.val_kwargs.do_sample"] else 0.0
    samples = evaluation["samples"] if temperature else 1  # greedy samples of a task are equal
    sampling = evaluation["sampling"] | {"temperature": temperature}
    return {"samples": samples, "k": tuple(numbers_of_samples(samples)), "sampling": sampling}


def _monitors(verl: Settings) -> list[dict[str, Any]]:
    project, experiment = verl["trainer.project_name"], verl["trainer.experiment_name"]
    about = {
        "wandb": {"project": project, "name": experiment},
        "mlflow": {"experiment": project, "name": experiment},
    }
    names = [_MONITORS[name] for name in listed(verl["trainer.logger"]) if name in _MONITORS]
    return [{"kind": name, **about.get(name, {})} for name in dict.fromkeys([*names, "jsonl"])]


def _critic(verl: Settings) -> dict[str, Any]:
    """Returns the model of the critic and its gradient norm, where they are not the actor's."""
    path, clip = verl["critic.model.path"], verl.first("critic.grad_clip", "critic.optim.clip_grad")
    # verl's default is a path of its authors, not a choice of the user.
    own_path = path not in (verl["actor_rollout_ref.model.path"], verl.table.default_of("critic.model.path"))
    own_clip = clip != verl.first(f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad")
    return ({"critic_path": path} if own_path else {}) | ({"critic_max_grad_norm": clip} if own_clip else {})


def _warmup(verl: Settings, where: str, steps: int) -> int:
    """Returns the warm-up of a learning rate, in steps."""
    warmup = verl[f"{where}.lr_warmup_steps"]
    return warmup if warmup >= 0 else int(verl[f"{where}.lr_warmup_steps_ratio"] * steps)
