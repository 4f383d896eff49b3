"""RunConfigs, data and samplers that RayPPOTrainer refuses before it starts a process."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.failing import refused
from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError, DataError
from trivium.models.heads.trained_models import ScoreModel
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.monitors.jsonl import JsonlMonitor
from trivium.runtime.stage import Stage, StageSpec
from trivium.tasks.drawings import png
from trivium.tasks.pictures import read_image
from trivium.text import hf_processor, hf_tokenizer
from trivium.text.tiny import TinyModel
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Batch, Experience, Message

pytest.importorskip("ray")

from trivium.frontdoors.verl import ActorRolloutRefWorker, RayPPOTrainer, RewardModelWorker, Role
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.frontdoors.verl.config.sourced_sections import reward_model_dtype
from trivium.frontdoors.verl.objects.datasets.user_data import DataSources
from trivium.frontdoors.verl.objects.overridable import OverridableMonitor, numbers
from trivium.frontdoors.verl.objects.run_setup import RunSetup
from trivium.frontdoors.verl.objects.workers.model_workers import Work, WorkerConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = TinyModel.Config(alphabet="0123456789+=", layers=1, hidden=8, heads=1, mlp=8, max_position=64)
    return str(TinyModel(config, seed=0).materialize(tmp_path_factory.mktemp("model") / "tiny"))


def plain_config(model: str, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"kind": "hf", "path": model},
        "rewards": ["exact"],
        "tasks": {"train": {"kind": "arithmetic"}},
        "schedule": {"steps": 2, "groups_per_step": 4, "group_size": 2},
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"checkpoint": {"asynchronous": True}}, "checkpoint.asynchronous"),
    ({"schedule": {"max_staleness": 1, "deterministic": True}}, "schedule.deterministic"),
]


@pytest.mark.parametrize(("more", "name"), REFUSED)
def test_what_its_workers_cannot_do_is_refused(model: str, tmp_path: Path, more: dict[str, Any], name: str) -> None:
    plain = plain_config(model, tmp_path)
    roles = {Role.ActorRollout: ActorRolloutRefWorker}
    assert RayPPOTrainer(config_from_mapping(plain), hf_tokenizer(model), roles, None).run_config.schedule.steps == 2
    with refused(ConfigError, name):
        RayPPOTrainer(config_from_mapping(merged(plain, more)), hf_tokenizer(model), roles, None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "dtype"),
    [
        ({}, torch.float32),
        ({"reward_model": {"rollout": {"name": "vllm", "dtype": "bfloat16"}}}, torch.bfloat16),
        ({"reward": {"reward_model": {"rollout": {"name": "vllm", "dtype": "bf16"}}}}, torch.bfloat16),
        ({"reward_model": {"model": {"fsdp_config": {"dtype": "bf16"}}, "rollout": {"dtype": None}}}, torch.bfloat16),
        (
            {"reward_model": {"model": {"fsdp_config": {"model_dtype": "fp32"}}, "rollout": {"dtype": "bf16"}}},
            torch.float32,
        ),
    ],
)
def test_a_reward_model_has_the_type_that_its_keys_name(
    model: str, tmp_path: Path, section: dict[str, Any], dtype: torch.dtype
) -> None:
    scorer = ScoreModel(Path(model), dtype=torch.float32, device=torch.device("cpu"), seed=0)
    scorer.module.save_pretrained(tmp_path)
    save_file(scorer.value_head.state_dict(), tmp_path / f"{VALUE_HEAD}.safetensors")
    stage = Stage(config_from_mapping(plain_config(model, tmp_path)), 0, 0, True, tmp_path, Path(model))
    chosen = reward_model_dtype(TABLE.read(section)) or "auto"
    worker = RewardModelWorker(WorkerConfig(StageSpec.of(stage), tmp_path, chosen), "reward_model")
    worker.init_model()
    assert worker._learner is not None
    assert {each.dtype for each in worker._learner.model.module.parameters()} == {dtype}
    tokens = np.arange(6, dtype=np.int32)
    one = Experience(tokens, tokens > 2, np.zeros(6, np.float32), np.zeros(6, np.int32), "g", 0)
    (score,) = worker.compute_rm_score(Work(0, Batch((one,))))
    assert np.isfinite(score)


def test_long_validation_prompts_are_left_out_of_their_one_batch(model: str, tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": "2"},
        }
        for text in ("1+1=", "1" * 30 + "=", "2+0=")
    ]
    config = {
        "data": {
            "train_batch_size": 2,
            "max_prompt_length": 16,
            "max_response_length": 4,
            "filter_overlong_prompts": True,
        },
        "actor_rollout_ref": {
            "model": {"path": model},
            "actor": {"ppo_mini_batch_size": 2},
            "rollout": {"name": "torch", "n": 2},
        },
        "trainer": {"logger": ["console"], "default_local_dir": str(tmp_path / "run"), "total_training_steps": 1},
    }
    setup = RunSetup(
        config, hf_tokenizer(model), lambda prompt, completion: 1.0, sources=DataSources(rows[:1] * 2, rows)
    )
    assert [vars(setup.run_config.tasks[name])["rows"] for name in ("train", "val")] == [2, 2]


def test_images_are_read_with_the_processor_that_is_the_models(model: str, tmp_path: Path) -> None:
    def vision(size: int) -> str:
        config = TinyVisionModel.Config(layers=1, hidden=32, mlp=8, vision_layers=1, image_size=size)
        return str(TinyVisionModel(config, seed=0).materialize(tmp_path / str(size)))

    path, uri = vision(56), f"data:image/png;base64,{base64.b64encode(png(np.zeros((56, 56, 3), np.uint8))).decode()}"
    row = {
        "data_source": "pictures",
        "prompt": [{"role": "user", "content": "<image>?"}],
        "pictures": [uri],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    config = {
        "data": {"train_batch_size": 2, "image_key": "pictures", "max_prompt_length": 32, "max_response_length": 4},
        "actor_rollout_ref": {"model": {"path": path}, "actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 2}},
        "trainer": {"logger": ["console"], "default_local_dir": str(tmp_path / "run"), "total_training_steps": 1},
    }

    def setup(processor: object) -> RunSetup:
        return RunSetup(config, hf_tokenizer(path), score, sources=DataSources([row] * 2), processor=processor)

    def score(prompt: str, completion: str) -> float:
        return 1.0

    made = setup(hf_processor(path))
    assert len(made.renderer.render([Message("user", "<image>?", (read_image(uri, ""),))])) == 22
    with refused(ConfigError, path):
        setup(hf_processor(vision(28)))
    with refused(DataError, "`media`"):
        setup(None)


class NotASampler:
    """A class that `data.sampler` must not name."""


def verl_config(model: str, tmp_path: Path, **data: Any) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": 2, "max_prompt_length": 8, "max_response_length": 4, **data},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {
            "model": {"path": model},
            "actor": {"ppo_mini_batch_size": 2},
            "rollout": {"name": "torch", "n": 2},
        },
        "trainer": {"logger": ["console"], "default_local_dir": str(tmp_path / "run"), "total_training_steps": 1},
    }


def rows_of_pairs(*lengths: int) -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": "1" * length}], "extra_info": {"index": number}}
        for number, length in enumerate(lengths)
    ]


SAMPLERS: list[tuple[dict[str, Any], str]] = [
    ({"dataloader_num_workers": 8}, "data.dataloader_num_workers"),
    ({"sampler": {"class_name": "NotASampler", "class_path": f"pkg://{__name__}"}}, "AbstractSampler"),
    ({"sampler": {"class_name": None}}, "data.sampler.class_name"),
]


@pytest.mark.parametrize(("more", "name"), SAMPLERS)
def test_a_sampler_of_the_config_that_cannot_work_is_refused(
    model: str, tmp_path: Path, more: dict[str, Any], name: str
) -> None:
    sampler = {"sampler": {"class_path": "pkg://tests.doors.e2e.verl_user", "class_name": "Hardest"}}
    data = merged({**sampler, "dataloader_num_workers": 0, "filter_overlong_prompts": True}, more)
    config = verl_config(model, tmp_path, **data)
    with refused(ConfigError, name):
        RunSetup(config, hf_tokenizer(model), lambda prompt, completion: 1.0, sources=DataSources(rows_of_pairs(1, 1)))


def test_a_sampler_of_the_config_counts_the_rows_that_are_left(model: str, tmp_path: Path) -> None:
    sampler = {"sampler": {"class_path": "pkg://tests.doors.e2e.verl_user", "class_name": "Hardest"}}
    config = verl_config(model, tmp_path, **sampler, filter_overlong_prompts=True)
    rows = DataSources(rows_of_pairs(1, 30, 1))
    setup = RunSetup(config, hf_tokenizer(model), lambda prompt, completion: 1.0, sources=rows)
    assert setup.train is not None
    assert [row["extra_info"]["index"] for row in setup.train.rows] == [0, 2]
    assert len(setup.train_sampler) == 2


def test_what_an_override_measured_is_in_the_row_of_its_step(tmp_path: Path) -> None:
    monitor = OverridableMonitor(JsonlMonitor(JsonlMonitor.Config(), run_dir=tmp_path, resume_step=0))
    monitor.measured |= numbers({"mine/balanced": 1}, "_balance_batch")
    monitor.log(2, {"val-aux/mine": 0.5})
    monitor.log(3, {"train/version": 3.0})
    monitor.log(4, {"train/version": 4.0})
    monitor.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row.get("mine/balanced") for row in rows] == [None, 1.0, None]


@pytest.mark.parametrize("metrics", [None, {"mine/text": "good"}])
def test_an_override_that_measures_no_numbers_is_named(metrics: Any) -> None:
    with refused(DataError, "_validate"):
        numbers(metrics, "_validate")
