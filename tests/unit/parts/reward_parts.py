"""Reward models, images and trajectories for the tests of rewards."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from trivium.models.heads.classifier import classifier_of
from trivium.models.heads.trained_models import ScoreModel
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.text import hf_tokenizer
from trivium.text.tiny import TinyModel
from trivium.types import Media, Message, StopReason, Task, Trajectory, Turn

CPU = torch.device("cpu")
MESSAGES = [{"role": "system", "content": "12"}, {"role": "user", "content": "3+4="}]


def reward_model(directory: Path, architecture: str = "qwen3") -> Path:
    """A checkpoint's `reward/`, with the head that training draws."""
    config = TinyModel.Config(architecture=architecture, hidden=32, heads=2, mlp=32, max_position=24)
    path = TinyModel(config, seed=1).materialize(directory / "model")
    model = ScoreModel(path, dtype=torch.float32, device=CPU, seed=3)
    model.module.save_pretrained(path)
    save_file({name: 100 * value for name, value in model.value_head.state_dict().items()}, head_of(path))
    return path


def head_of(path: Path) -> Path:
    return path / f"{VALUE_HEAD}.safetensors"


def exported(path: Path, out: Path, pad: int | None = 17) -> Path:
    classifier_of(path, pad_token_id=pad).save_pretrained(out)
    hf_tokenizer(path).save_pretrained(out)
    return out


def picture(mode: str, colour: Any, mime: str = "image/png") -> Media:
    written = io.BytesIO()
    Image.new(mode, (8, 8), colour).save(written, format="PNG" if mime == "image/png" else "JPEG")
    return Media(mime, written.getvalue())


def judged(completion: str) -> Trajectory:
    return Trajectory(0, (Turn([1], [2], [0.0], [0], StopReason.EOS, completion),))


def task(*media: Media, **columns: Any) -> Task:
    return Task("t", (Message("system", "be brief"), Message("user", "how?", media)), columns)
