"""The RunConfig sections that RayPPOTrainer replaces by objects: tasks from data files, rewards by name, steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trivium.foundation.errors import Problem
from trivium.frontdoors.tables import Settings
from trivium.frontdoors.verl.config.keys_of_models import dtype_of
from trivium.frontdoors.verl.config.keys_of_rewards import REWARD_MODEL_TYPES
from trivium.frontdoors.verl.data import read_files
from trivium.frontdoors.verl.group_filter import OF_REWARD
from trivium.frontdoors.verl.rewards.reward_loading import address, reward_kwargs_of

_HERE = "set it, or use RayPPOTrainer (python -m trivium.frontdoors.verl)"


def listed(value: object) -> list[Any]:
    """Returns a list, one value as a list of one, or None as an empty list."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def tasks_of(verl: Settings, split: str, problems: list[Problem]) -> dict[str, Any]:
    """Returns the task source of a split's files. All files must have the same type."""
    files, limit = listed(verl[f"data.{split}_files"]), verl[f"data.{split}_max_samples"]
    if verl.has("data.custom_cls.path") or (split == "train" and verl.has("data.sampler.class_path")):
        kind = "trivium.frontdoors.verl.configured_tasks:ConfiguredTasks"
        model = verl["actor_rollout_ref.model.path"]
        return {"kind": kind, "model": model, "split": split, "data": verl.section("data")}
    kinds = {"jsonl" if Path(file).suffix in (".jsonl", ".json") else "parquet" for file in files}
    if len(kinds) != 1:
        cause = "files of JSON lines and Parquet files" if kinds else "none"
        problems.append(Problem(f"data.{split}_files", "data files of one kind", cause, "name files of one type"))
    path = files[0] if len(files) == 1 else files
    images = {} if verl["data.image_key"] == "images" else {"images": verl["data.image_key"]}
    return {"kind": min(kinds, default=""), "path": path, "prompt": verl["data.prompt_key"], **images} | (
        {"limit": limit} if limit > 0 else {}
    )


def rows_of_files(verl: Settings) -> int | None:
    """Returns the number of rows of the training set, or None if its files are not on this machine."""
    files = listed(verl["data.train_files"])
    if verl.has("data.custom_cls.path") or not all(Path(file).is_file() for file in files):
        return None
    rows, limit = len(read_files(files, "data.train_files")), verl["data.train_max_samples"]
    return min(rows, limit) if limit >= 0 else rows


_EACH = ("naive", "dapo", "prime", "limited", "rate_limited", "remote")
"""Reward managers that call the scorer for each completion."""


def rewards_of(verl: Settings, problems: list[Problem]) -> list[Any]:
    """Returns the reward that the config names: a reward model, a scorer, or the grader of each `data_source`."""
    manager, scorer = verl["reward_manager.name"], verl["custom_reward_function.path"]
    components = (verl["algorithm.gdpo_reward_keys"] or []) if verl["algorithm.adv_estimator"] == "gdpo" else []
    managers = (*_EACH, *(["gdpo"] if components else []), *(["batch"] if scorer else []))
    if manager not in managers or verl["reward_manager.source"] == "importlib":
        cause = "a RunConfig calls a reward for each completion"
        problems.append(Problem("reward_manager.name", repr(manager), cause, f"use naive, or {_HERE}"))
    metric = verl["algorithm.filter_groups.metric"]
    if verl["algorithm.filter_groups.enable"] and metric not in (OF_REWARD if scorer else (*OF_REWARD, "acc")):
        cause = "a RunConfig keeps only the score of a completion"
        problems.append(Problem("algorithm.filter_groups.metric", repr(metric), cause, f"use reward, or {_HERE}"))
    if verl["reward_model.enable"]:
        dtype = reward_model_dtype(verl)
        return [{"kind": "model", "path": verl["reward_model.model.path"]} | ({"dtype": dtype} if dtype else {})]
    if scorer:
        function = address(scorer, verl["custom_reward_function.name"])
        options = verl["custom_reward_function.reward_kwargs"] or {}
        kind = "trivium.frontdoors.verl.scored_reward:ScoredReward"
        reward: dict[str, Any] = {"kind": kind, "function": function} | ({"options": options} if options else {})
        reward |= {"batched": True} if manager == "batch" else {}
        return [reward | {"name": key, "key": key} for key in components] or [reward]
    if components:
        cause = "the scorer of each data_source returns one number"
        do = "name a scorer that returns them: custom_reward_function.path"
        problems.append(Problem("algorithm.gdpo_reward_keys", repr(components), cause, do))
    limit = verl["reward_model.sandbox_fusion.memory_limit_mb"]
    return [{"kind": "by_source", "memory_limit_mb": limit} if limit != 1024 else "by_source"]


def reward_model_dtype(verl: Settings) -> str:
    """Returns the dtype that the config sets for its reward model; empty if unset."""
    return dtype_of(verl.first(*(f"reward_model.{key}" for key in REWARD_MODEL_TYPES)) or "")


def shaping_of(verl: Settings) -> list[dict[str, Any]]:
    """Returns the overlong buffer of the manager `dapo` as a shaping."""
    options = reward_kwargs_of(verl)
    buffer = options.get("overlong_buffer_cfg") or {}
    if verl["reward_manager.name"] != "dapo" or not buffer.get("enable"):
        return []
    longest = options.get("max_resp_len") or verl["data.max_response_length"]
    factor = buffer.get("penalty_factor", 1.0)
    return [{"kind": "overlong_penalty", "factor": factor, "buffer": buffer.get("len", 0) / longest, "limit": longest}]


_OBJECTS = (
    "trainer.val_before_train",
    "trainer.val_only",
    "trainer.log_val_generations",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.resume_from_path",
    "data.truncation",
    "data.reward_fn_key",
)
"""Keys that only RayPPOTrainer reads."""


UNSUPPORTED_MONITORS = ("swanlab", "clearml", "vemlp_wandb", "trackio", "rl_logging_board")
"""Loggers of verl that have no monitor here."""
_ENGINE = "actor_rollout_ref.rollout"


def notes_of(verl: Settings, run: Mapping[str, Any], rows: int | None) -> Iterator[str]:
    """Yields notes on keys that the RunConfig `run` does not cover or that need a change by hand."""
    yield from _engine_notes(verl, run["engine"]["kind"])
    for name in listed(verl["trainer.logger"]):
        if name in UNSUPPORTED_MONITORS:
            yield f"trainer.logger: no monitor is named {name}; metrics.jsonl of the run directory has every metric"
    for name in ("tool_config_path", "function_tool_path", "interaction_config_path"):
        file = verl[f"{_ENGINE}.multi_turn.{name}"]
        if file and not Path(file).is_file():
            yield f"{_ENGINE}.multi_turn.{name}: {file} is not on this machine; the run reads it when it starts"
    if "evaluation" in run and run["evaluation"]["samples"] < verl[f"{_ENGINE}.val_kwargs.n"]:
        yield f"{_ENGINE}.val_kwargs.n: greedy samples of a task are equal, so validation takes one"
    if "evaluation" not in run and verl["trainer.test_freq"] > 0:
        yield "trainer.test_freq: there is no validation set (data.val_files)"
    if verl["algorithm.adv_estimator"] in ("grpo", "rloo") and verl[f"{_ENGINE}.n"] == 1:
        yield f"{_ENGINE}.n: a group of one has no baseline, so the advantage is the reward itself"
    algorithm, mode = run["algorithm"], "seq-mean-token-mean"
    if algorithm["policy_loss"]["kind"] == "gspo" and algorithm["aggregate"] != mode:
        yield (
            f"actor_rollout_ref.actor.loss_agg_mode: gspo averages by {algorithm['aggregate']}; verl before 0.9.1 "
            f"always uses {mode}"
        )
    for key in _OBJECTS:
        if verl[key] != verl.table.default_of(key):
            yield f"{key}: only RayPPOTrainer reads it"
    if verl["trainer.device"] == "cuda":
        yield "trainer.device: auto takes the GPU of the machine that runs the config where it has one, else its CPU"
    if (processes := verl["trainer.nnodes"] * verl["trainer.n_gpus_per_node"]) > 1:
        do = "set cluster.kind: ray and cluster.ranks"
        yield f"trainer.n_gpus_per_node: {processes} processes are asked for, and one is written: {do}"
    if rows is None and not verl["trainer.total_training_steps"]:
        epochs = verl["trainer.total_epochs"]
        yield (
            f"schedule.steps: the number of rows is not known here, so {epochs} epoch(s) are {epochs} step(s); "
            "multiply it by the batches of an epoch"
        )
    if verl["data.filter_overlong_prompts"]:
        yield "data.filter_overlong_prompts: `trivium check` counts prompts that are too long; their rows stay"


def _engine_notes(verl: Settings, kind: str) -> Iterator[str]:
    name, size = verl[f"{_ENGINE}.name"], verl[f"{_ENGINE}.tensor_model_parallel_size"]
    if name not in (kind, "hf"):
        engine = "vLLM" if kind == "vllm" else "the built-in engine"
        yield f"{_ENGINE}.name: {engine} samples instead of {name}"
    if (size or 1) > 1 and kind == "torch":
        yield f"{_ENGINE}.tensor_model_parallel_size: the built-in engine holds the whole model on one device"
    if verl.has(f"{_ENGINE}.gpu_memory_utilization") and kind == "torch":
        yield f"{_ENGINE}.gpu_memory_utilization: the built-in engine takes the memory that its rows need"
