"""What RayPPOTrainer refuses in a RunConfig, before anything starts."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trivium.config import config_from_mapping, merged
from trivium.errors import ConfigError, DataError
from trivium.tasks.drawings import png
from trivium.tasks.pictures import read_image
from trivium.text import hf_processor, hf_tokenizer
from trivium.text.tiny import TinyModel
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Message

pytest.importorskip("ray")

from trivium.frontdoors.verl import ActorRolloutRefWorker, RayPPOTrainer, Role
from trivium.frontdoors.verl.run_setup import RunSetup
from trivium.frontdoors.verl.user_data import Sources


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = TinyModel.Config(alphabet="0123456789+=", layers=1, hidden=8, heads=1, mlp=8, max_position=64)
    return str(TinyModel(config, seed=0).materialize(tmp_path_factory.mktemp("model") / "tiny"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"checkpoint": {"asynchronous": True}}, "checkpoint.asynchronous with RayPPOTrainer"),
    ({"schedule": {"max_staleness": 1, "deterministic": True}}, "schedule.deterministic ahead of the trainer"),
]


@pytest.mark.parametrize(("more", "says"), REFUSED)
def test_what_its_workers_cannot_do_is_refused(model: str, tmp_path: Path, more: dict[str, Any], says: str) -> None:
    said = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"kind": "hf", "path": model},
        "rewards": ["exact"],
        "tasks": {"train": {"kind": "arithmetic"}},
        "schedule": {"steps": 2, "groups_per_step": 4, "group_size": 2},
    }
    roles = {Role.ActorRollout: ActorRolloutRefWorker}
    assert RayPPOTrainer(config_from_mapping(said), hf_tokenizer(model), roles, None).run_config.schedule.steps == 2
    with pytest.raises(ConfigError, match=says):
        RayPPOTrainer(config_from_mapping(merged(said, more)), hf_tokenizer(model), roles, None)
    assert not (tmp_path / "run").exists()


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
    setup = RunSetup(config, hf_tokenizer(model), lambda prompt, completion: 1.0, sources=Sources(rows[:1] * 2, rows))
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
        return RunSetup(config, hf_tokenizer(path), score, sources=Sources([row] * 2), processor=processor)

    def score(prompt: str, completion: str) -> float:
        return 1.0

    made = setup(hf_processor(path))
    assert len(made.renderer.render([Message("user", "<image>?", (read_image(uri, ""),))])) == 22
    with pytest.raises(ConfigError, match=r"the processor of the model(.|\n)*reads images otherwise"):
        setup(hf_processor(vision(28)))
    with pytest.raises(DataError, match="reads text only"):
        setup(None)
