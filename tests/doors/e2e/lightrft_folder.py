"""The working directory of LightRFT's examples, cut to tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trivium.text.tiny import TinyModel
from trivium.text.tiny_vision import TinyVisionModel


def examples_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes `folder` the working directory, with a model that reads text, one that sees, and prompts for each."""
    sizes: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "mlp": 16, "max_position": 1024}
    TinyModel(TinyModel.Config(**sizes), seed=0).materialize(folder / "reading")
    seeing = TinyVisionModel.Config(**sizes, vision_layers=1, vision_hidden=8, vision_heads=1, image_size=28)
    TinyVisionModel(seeing, seed=0).materialize(folder / "seeing")
    for name, images in (("texts", False), ("pictures", True)):
        (folder / name).mkdir()
        for split in ("train", "test"):
            rows = "".join(json.dumps(_row(folder / name, number, images)) + "\n" for number in range(4))
            (folder / name / f"{split}.jsonl").write_text(rows)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(folder)
    return folder


def _row(folder: Path, number: int, images: bool) -> dict[str, Any]:
    """A row as the examples' preprocessing writes it."""
    row = {"question": f"{number}+1?", "label": "gsm8k_rule", "reward_model": {"ground_truth": str(number + 1)}}
    if not images:
        return {**row, "prompt": [{"role": "user", "content": f"{number}+1?"}]}
    path = folder / f"picture-{number}.png"
    Image.fromarray(np.full((28, 28, 3), 50 * number, np.uint8)).save(path)
    prompt = [{"role": "user", "content": "<image>How bright?"}]
    return {**row, "prompt": prompt, "label": "geo3k_rule", "images": [str(path)]}
