"""Translates verl's trainer config to a RunConfig, by the keys of `config_table.TABLE`.

One error lists all keys that cannot be translated, before anything is built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from trivium.config import config_from_mapping
from trivium.errors import ConfigError, Problem
from trivium.frontdoors.plain_values import plain, resolved
from trivium.frontdoors.tables import Settings, Translation, refuse
from trivium.frontdoors.verl.algorithm_section import algorithm_of
from trivium.frontdoors.verl.config_table import TABLE
from trivium.frontdoors.verl.conflicts import ACTOR, ROLLOUT, conflicts, max_grad_norm, sequence_parallel
from trivium.frontdoors.verl.keys_of_models import DTYPES
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
    run: dict[str, Any] = {
        "run": {
            "dir": run_dir_of(verl),
            "seed": verl["data.seed"] or 0,
            "resume": verl["trainer.resume_mode"] != "disable",
        },
        "model": {"kind": "hf", "path": verl["actor_rollout_ref.model.path"]},
        "engine": _engine(verl, device),
        "algorithm": algorithm_of(verl, problems),
        "train": _train(verl, device, steps),
        "schedule": {
            "steps": steps,
            "groups_per_step": verl["data.train_batch_size"],
            "group_size": verl[f"{ROLLOUT}.n"],
            "shuffle": bool(verl["data.shuffle"]),
        },
        "checkpoint": _checkpoint(verl),
        "monitors": _monitors(verl),
    }
    if has_validation:
        run["evaluation"] = _evaluation(verl)
    problems += conflicts(verl, has_validation)
    refuse(problems, "a config whose keys fit together")
    return run


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


def _engine(verl: Settings, device: str) -> dict[str, Any]:
    engine: dict[str, Any] = {"kind": "torch", "device": device, "sampling": _sampling(verl, ROLLOUT)}
    if verl.has(f"{ROLLOUT}.max_model_len"):
        engine["max_context"] = min(verl[f"{ROLLOUT}.max_model_len"], _longest(verl))
    if verl.has(f"{ROLLOUT}.max_num_seqs"):
        engine["max_rows"] = verl[f"{ROLLOUT}.max_num_seqs"]
    dtype = verl[f"{ROLLOUT}.dtype"]
    engine["dtype"] = DTYPES.get(str(dtype), dtype) if dtype else "float32" if device == "cpu" else "bfloat16"
    return engine | (_vllm(verl, device) if verl[f"{ROLLOUT}.name"] == "vllm" else {})


def _vllm(verl: Settings, device: str) -> dict[str, Any]:
    """Returns the fields that a vLLM section has in addition to the section of the built-in engine."""
    of_gpus = () if device == "cpu" else ("enable_chunked_prefill", "cudagraph_capture_sizes")
    names = ("enable_prefix_caching", "scheduling_policy", *of_gpus)
    options = {name: verl[f"{ROLLOUT}.{name}"] for name in names if verl.has(f"{ROLLOUT}.{name}")}
    if verl.has(f"{ROLLOUT}.limit_images"):
        options["limit_mm_per_prompt"] = {"image": verl[f"{ROLLOUT}.limit_images"]}
    given = verl[f"{ROLLOUT}.engine_kwargs.vllm"] or {}
    options |= {name: value for name, value in given.items() if value is not None}
    if verl[f"{ACTOR}.router_replay.mode"] == "R3":
        options["enable_return_routed_experts"] = True
    fields: dict[str, Any] = {"kind": "vllm", "options": options}
    if device != "cpu":
        fields["prefill_tokens"] = verl[f"{ROLLOUT}.max_num_batched_tokens"]
        fields["gpu_memory_utilization"] = verl[f"{ROLLOUT}.gpu_memory_utilization"]
        fields["enforce_eager"] = bool(verl[f"{ROLLOUT}.enforce_eager"])
        sleeps = verl[f"{ROLLOUT}.free_cache_engine"] and verl[f"{ROLLOUT}.enable_sleep_mode"]
        fields["sleep_level"] = 2 if sleeps else 0  # every step sends all weights again
    return fields


def _longest(verl: Settings) -> int:
    """Returns the maximum number of tokens of a sequence."""
    return verl["data.max_prompt_length"] + verl["data.max_response_length"]


def _sampling(verl: Settings, where: str) -> dict[str, Any]:
    return {
        "max_new_tokens": verl["data.max_response_length"],
        "temperature": verl[f"{where}.temperature"],
        "top_p": verl[f"{where}.top_p"],
        "top_k": max(0, verl[f"{where}.top_k"]),
    }


def _evaluation(verl: Settings) -> dict[str, Any]:
    where = f"{ROLLOUT}.val_kwargs"
    sampling, samples = _sampling(verl, where), verl[f"{where}.n"]
    if not verl[f"{where}.do_sample"]:
        sampling["temperature"] = 0.0
    powers = tuple(2**power for power in range(int(math.log2(samples)) + 1))
    return {
        "taskset": "val",
        "every": max(0, verl["trainer.test_freq"]),
        "samples": samples,
        "k": tuple(dict.fromkeys((*powers, samples))),
        "sampling": sampling,
    }


def _checkpoint(verl: Settings) -> dict[str, Any]:
    keep = verl.first("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep")
    checkpoint: dict[str, Any] = {"save_every": max(0, verl["trainer.save_freq"]), "keep": keep or _KEEP_ALL}
    if verl.has("trainer.default_hdfs_dir"):
        checkpoint["remote"] = verl["trainer.default_hdfs_dir"]
    return checkpoint


def _monitors(verl: Settings) -> list[dict[str, Any]]:
    project, experiment = verl["trainer.project_name"], verl["trainer.experiment_name"]
    about = {
        "wandb": {"project": project, "name": experiment},
        "mlflow": {"experiment": project, "name": experiment},
    }
    names = [_MONITORS[name] for name in listed(verl["trainer.logger"])]
    return [{"kind": name, **about.get(name, {})} for name in dict.fromkeys([*names, "jsonl"])]


def _train(verl: Settings, device: str, steps: int) -> dict[str, Any]:
    fsdp, model = f"{ACTOR}.fsdp_config", "actor_rollout_ref.model"
    dtype = verl.first(f"{fsdp}.dtype", f"{fsdp}.mixed_precision.param_dtype")
    dtype = dtype or ("fp32" if device == "cpu" else "bf16")
    train: dict[str, Any] = {
        "kind": "torch",
        "device": device,
        "dtype": DTYPES.get(str(dtype), dtype),
        "max_tokens_per_micro_batch": verl[f"{ACTOR}.ppo_max_token_len_per_gpu"],
        "gradient_checkpointing": bool(verl[f"{model}.enable_gradient_checkpointing"]),
        "max_grad_norm": max_grad_norm(verl),
        "optimizer": _optimizer(verl, f"{ACTOR}.optim", steps),
    }
    if verl["algorithm.adv_estimator"] == "gae":
        train["critic_optimizer"] = _optimizer(verl, "critic.optim", steps)
    if (shares := verl[f"{ACTOR}.use_prefix_grouper"]) is not None:
        train["share_prefix"] = shares
    if (sequence := sequence_parallel(verl)) != 1:
        train["sequence_parallel"] = sequence
    if any(verl[f"{fsdp}.{name}"] for name in ("param_offload", "optimizer_offload", "offload_policy")):
        train["cpu_offload"] = True
    if verl[f"{fsdp}.full_determinism"]:
        train["deterministic_kernels"] = True
    if verl[f"{fsdp}.fsdp_size"] > 0:
        train["shard"] = verl[f"{fsdp}.fsdp_size"]
    if verl[f"{ACTOR}.router_replay.mode"] == "R3":
        train["router_replay"] = "rollout"
    if verl[f"{ACTOR}.freeze_vision_tower"]:
        train["vision_tower"] = "frozen"
    if verl[f"{model}.lora_rank"]:
        targets = verl[f"{model}.target_modules"]
        train["lora"] = {"rank": verl[f"{model}.lora_rank"], "alpha": verl[f"{model}.lora_alpha"]}
        train["lora"] |= {} if targets == "all-linear" else {"targets": targets}
    elif (frozen := verl["actor_rollout_ref.ref.fsdp_config.model_dtype"]) not in ("fp32", "float32"):
        train["frozen_dtype"] = DTYPES.get(frozen, frozen)
    return train


def _optimizer(verl: Settings, where: str, steps: int) -> dict[str, Any]:
    optimizer = {name: verl[f"{where}.{name}"] for name in ("lr", "betas", "weight_decay", "min_lr_ratio")}
    optimizer["schedule"] = verl.first(f"{where}.lr_scheduler_type", f"{where}.warmup_style")
    warmup = verl[f"{where}.lr_warmup_steps"]
    optimizer["warmup_steps"] = warmup if warmup >= 0 else int(verl[f"{where}.lr_warmup_steps_ratio"] * steps)
    return optimizer
