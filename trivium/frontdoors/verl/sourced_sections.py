"""The RunConfig sections that RayPPOTrainer replaces by objects: tasks from data files, rewards by name, steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trivium.errors import Problem
from trivium.frontdoors.tables import Settings
from trivium.frontdoors.verl.data import read_files
from trivium.frontdoors.verl.group_filter import OF_REWARD
from trivium.frontdoors.verl.keys_of_models import dtype_of
from trivium.frontdoors.verl.keys_of_rewards import REWARD_MODEL_TYPES
from trivium.frontdoors.verl.reward_loading import reward_kwargs_of

_HERE = "set it, or use RayPPOTrainer (python -m trivium.frontdoors.verl)"


def listed(value: object) -> list[Any]:
    """Returns a list, one value as a list of one, or None as an empty list."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def tasks_of(verl: Settings, split: str, problems: list[Problem]) -> dict[str, Any]:
    """Returns the task source of a split's files. All files must have the same type."""
    files, limit = listed(verl[f"data.{split}_files"]), verl[f"data.{split}_max_samples"]
    kinds = {"jsonl" if Path(file).suffix in (".jsonl", ".json") else "parquet" for file in files}
    if len(kinds) != 1:
        found = "files of JSON lines and Parquet files" if kinds else "none"
        problems.append(Problem(f"data.{split}_files", "data files of one kind", found, "name one kind"))
    path = files[0] if len(files) == 1 else files
    images = {} if verl["data.image_key"] == "images" else {"images": verl["data.image_key"]}
    return {"kind": min(kinds, default=""), "path": path, "prompt": verl["data.prompt_key"], **images} | (
        {"limit": limit} if limit > 0 else {}
    )


def rows_of_files(verl: Settings) -> int | None:
    """Returns the number of rows of the training set, or None if its files are not on this machine."""
    files = listed(verl["data.train_files"])
    if not all(Path(file).is_file() for file in files):
        return None
    rows, limit = len(read_files(files, "data.train_files")), verl["data.train_max_samples"]
    return min(rows, limit) if limit >= 0 else rows


def rewards_of(verl: Settings, problems: list[Problem]) -> list[Any]:
    """Returns the reward that the config names: a reward model, a scorer, or the grader of each `data_source`."""
    manager = verl["reward_manager.name"]
    if manager not in ("naive", "dapo", "prime") or verl["reward_manager.source"] == "importlib":
        found = "a RunConfig calls a reward for each completion"
        problems.append(Problem("reward_manager.name", repr(manager), found, f"use naive, or {_HERE}"))
    metric, scorer = verl["algorithm.filter_groups.metric"], verl["custom_reward_function.path"]
    if verl["algorithm.filter_groups.enable"] and metric not in (OF_REWARD if scorer else (*OF_REWARD, "acc")):
        found = "a RunConfig keeps the score of a completion alone"
        problems.append(Problem("algorithm.filter_groups.metric", repr(metric), found, f"use reward, or {_HERE}"))
    if verl["reward_model.enable"]:
        dtype = reward_model_dtype(verl)
        return [{"kind": "model", "path": verl["reward_model.model.path"]} | ({"dtype": dtype} if dtype else {})]
    if path := verl["custom_reward_function.path"]:
        function = f"{path.removeprefix('pkg://').removeprefix('file://')}:{verl['custom_reward_function.name']}"
        options = verl["custom_reward_function.reward_kwargs"] or {}
        kind = "trivium.frontdoors.verl.scored_reward:ScoredReward"
        return [{"kind": kind, "function": function} | ({"options": options} if options else {})]
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


def notes_of(verl: Settings, rows: int | None) -> Iterator[str]:
    """Yields notes on keys that the RunConfig does not cover or that need a change by hand."""
    for key in _OBJECTS:
        if verl[key] != verl.table.default_of(key):
            yield f"{key}: RayPPOTrainer alone reads it"
    if verl["trainer.device"] == "cuda":
        yield "trainer.device: cuda is the GPU of this machine where it has one, else its CPU"
    if (processes := verl["trainer.nnodes"] * verl["trainer.n_gpus_per_node"]) > 1:
        do = "set cluster.kind: ray and cluster.ranks"
        yield f"trainer.n_gpus_per_node: {processes} processes are asked for, and one is written: {do}"
    if rows is None and not verl["trainer.total_training_steps"]:
        epochs = verl["trainer.total_epochs"]
        yield (
            f"schedule.steps: data.train_files are not on this machine, so {epochs} epoch(s) are {epochs} step(s); "
            "multiply it by the batches of an epoch"
        )
    if verl["data.filter_overlong_prompts"]:
        yield "data.filter_overlong_prompts: `trivium check` counts prompts that are too long; their rows stay"
