"""RayPPOTrainer from a script that trains on pictures: a processor, and an images column of Parquet files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from trivium.tasks.drawings import DrawnTasks
from trivium.text import hf_processor, hf_tokenizer
from trivium.text.tiny_vision import TinyVisionModel

pytest.importorskip("ray")

from trivium.frontdoors.verl import (
    ActorRolloutRefWorker,
    CriticWorker,
    RayPPOTrainer,
    ResourcePoolManager,
    Role,
)


def write(folder: Path, split: str, count: int) -> None:
    """Every third row is text alone, in the layout of `datasets.Image`."""
    drawn = DrawnTasks(DrawnTasks.Config(kind="drawings", count=count), name=split, seed=0)
    rows = [
        {
            "data_source": "colors",
            "prompt": [{"role": "user", "content": "<image>color?" if number % 3 else "red?"}],
            "images": [{"bytes": drawn[number].prompt[0].media[0].data, "path": None}] if number % 3 else [],
            "reward_model": {"style": "rule", "ground_truth": drawn[number].columns["answer"]},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return len({*solution_str} & {*ground_truth}) / 6


def config(folder: Path, model: str, steps: int) -> dict[str, Any]:
    optimizer = {"lr": 1e-2, "weight_decay": 0.0}
    return {
        "data": {
            "train_files": str(folder / "train.parquet"),
            "val_files": str(folder / "val.parquet"),
            "image_key": "images",
            "train_batch_size": 4,
            "max_prompt_length": 32,
            "max_response_length": 4,
            "seed": 1,
        },
        "algorithm": {"adv_estimator": "gae"},
        "actor_rollout_ref": {
            "model": {"path": model},
            "actor": {"ppo_mini_batch_size": 2, "optim": optimizer},
            "rollout": {"name": "torch", "n": 1},
        },
        "critic": {"optim": optimizer},
        "trainer": {
            "total_training_steps": steps,
            "test_freq": 1,
            "save_freq": 1,
            "logger": [],
            "default_local_dir": str(folder / "run"),
        },
    }


def fitted(folder: Path, model: str, steps: int) -> dict[str, Any]:
    roles = {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: CriticWorker}
    trainer = RayPPOTrainer(
        config(folder, model, steps),
        hf_tokenizer(model),
        roles,
        ResourcePoolManager({"global_pool": [2]}, dict.fromkeys(roles, "global_pool"), device_name="cpu"),
        processor=hf_processor(model),
        reward_fn=score,
        device_name="cpu",
    )
    trainer.init_workers()
    try:
        return trainer.fit()
    finally:
        trainer.shutdown()


def test_pictures_of_parquet_files_train_on_two_workers_and_a_run_goes_on(connected: None, tmp_path: Path) -> None:
    sizes = {"layers": 1, "hidden": 32, "mlp": 32, "vision_layers": 1, "vision_hidden": 16, "image_size": 28}
    made = TinyVisionModel(TinyVisionModel.Config(architecture="qwen2_5_vl", **sizes), seed=0)  # pyright: ignore[reportArgumentType]
    model = made.materialize(tmp_path / "model")
    write(tmp_path, "train", 12)
    write(tmp_path, "val", 3)
    assert fitted(tmp_path, str(model), 1)["steps"] == 1
    assert fitted(tmp_path, str(model), 2)["steps"] == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "train/loss/policy" in row]
    assert [row["step"] for row in trained] == [1, 2]
    assert all(row["rollout/failed"] == 0 and row["train/grad_norm/value"] > 0 for row in trained)
    (weights,) = (tmp_path / "run" / "checkpoints" / "step-000002" / "policy").glob("*.safetensors")
    before, after = load_file(model / "model.safetensors"), load_file(weights)
    tower = [name for name in after if "visual" in name and name.endswith("weight")]
    assert tower
    assert not any(torch.equal(after[name], before[name]) for name in tower)
