"""Reward models of image pairs through whole runs, and the rows that they learn from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from PIL import Image
from safetensors.torch import load_file

from trivium.buffers.files import conversation_of
from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError, DataError
from trivium.models.heads.classifier import load_score_model
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.rewards.model import ModelReward
from trivium.runtime.export import export
from trivium.runtime.launch import run
from trivium.tasks.conversations import as_json
from trivium.tasks.files import JsonlTasks
from trivium.types import IMAGE, Media, Message

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "cluster": {"threads": 1},
    "model": {
        "kind": "tiny_vision",
        "alphabet": "abcdefghijklmnopqrstuvwxyz? ",
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "mlp": 64,
        "max_position": 64,
        "vision_layers": 1,
        "vision_hidden": 32,
        "vision_heads": 2,
        "image_size": 28,
    },
    "buffer": {"kind": "files"},
    "algorithm": {"kind": "reward_model", "score_loss": {"kind": "hps", "scale": 14, "learned": True}},
    "train": {"optimizer": {"lr": 3e-3}},
    "schedule": {"steps": 14, "groups_per_step": 16, "group_size": 2},
    "checkpoint": {"save_every": 12, "keep": 4},
    "monitors": [{"kind": "jsonl"}],
}


def picture(path: Path, red: bool, seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 40, (28, 28, 3), np.uint8)
    pixels[..., 0 if red else 2] += 200
    Image.fromarray(pixels).save(path)
    return path.name


def drawn(colour: str, image: str) -> list[dict[str, Any]]:
    """A conversation in which the assistant drew an image."""
    return [
        {"role": "user", "content": f"draw {colour}"},
        {"role": "assistant", "content": [{"type": "image", "image": image}]},
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each asks for a colour, which the first side drew."""
    folder = tmp_path_factory.mktemp("pairs")
    rows: list[dict[str, Any]] = []
    for n in range(32):
        colour = "red" if n % 2 else "blue"
        right = picture(folder / f"right-{n}.png", n % 2 == 1, n)
        wrong = picture(folder / f"wrong-{n}.png", n % 2 == 0, 100 + n)
        rows.append({"first": drawn(colour, right), "second": drawn(colour, wrong)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


def config(run_dir: Path, rows: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    data = merged(BASE, {"run": {"dir": str(run_dir)}})
    data["tasks"] = {"train": {"kind": "jsonl", "path": str(rows), "conversations": ["first", "second"]}}
    data["buffer"] = {"kind": "files", "chosen": "first", "rejected": "second"}
    for change in changes:
        data = merged(data, change)
    return data


def test_image_pairs_teach_a_reward_model_with_a_learned_scale(rows: Path, tmp_path: Path) -> None:
    best = "eval/train/preference_accuracy"
    measured = {"evaluation": {"held_out": "train", "every": 14}, "checkpoint": {"keep_best": best}}
    data = config(tmp_path / "run", rows, measured)
    run(config_from_mapping(data))
    log = tmp_path / "run" / "metrics.jsonl"
    metrics = [json.loads(line) for line in log.read_text().splitlines()]
    held_out = [row[best] for row in metrics if best in row]
    assert held_out[0] < 0.9 < held_out[-1]
    metrics = [row for row in metrics if "rollout/groups" in row]
    assert metrics[-1]["train/preference_accuracy"] > 0.9
    assert metrics[-1]["train/preference_margin"] > 0.5

    last = tmp_path / "run" / "checkpoints" / "step-000014"
    before = {file.relative_to(last): load_file(file) for file in sorted(last.rglob("*.safetensors"))}
    head = before[Path("reward") / f"{VALUE_HEAD}.safetensors"]
    assert head["weight"].shape == (1, 32)
    assert 0.001 < abs(float(head["log_scale"]) - float(torch.tensor(14.0).log())) < 0.2  # it has learned
    shutil.rmtree(last)
    run(config_from_mapping(data))
    for file, tensors in before.items():
        for name, tensor in load_file(last / file).items():
            assert torch.equal(tensor, tensors[name]), (file, name)

    out = export(tmp_path / "run", None, tmp_path / "out", "reward")
    how: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    factor = float(head["log_scale"].exp())
    for directory in (out, last / "reward"):
        torch.testing.assert_close(load_score_model(directory, **how).value_head.weight, factor * head["weight"])
    judge = ModelReward(ModelReward.Config(kind="model", path=str(out)))
    asked = [{"role": "user", "content": "draw red"}, {"role": "assistant", "content": IMAGE}]
    red, blue = (Media("image/png", (rows.parent / f"{name}-1.png").read_bytes()) for name in ("right", "wrong"))
    assert judge("", "", asked, [red]) > judge("", "", asked, [blue])


def test_single_completions_about_images_teach_which_are_desirable(tmp_path: Path) -> None:
    """KTO on rows of prompt, image, completion and label."""
    lines: list[dict[str, Any]] = []
    for n in range(16):
        image = picture(tmp_path / f"{n}.png", n % 2 == 0, n)
        color = "red" if n % 4 < 2 else "blue"
        right = (color == "red") == (n % 2 == 0)
        lines.append({"prompt": f"{IMAGE} colour?", "images": [image], "completion": color, "label": right})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    data = merged(BASE, {"run": {"dir": str(tmp_path / "run")}, "schedule": {"steps": 8, "group_size": 1}})
    data |= {"algorithm": {"kind": "kto"}, "tasks": {"train": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}}}
    run(config_from_mapping(data))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["train/reference_point"] == 0  # the reference itself
    assert abs(metrics[0]["train/preference_chosen"]) < 1e-6
    assert all(row["train/reference_point"] >= 0 for row in metrics)
    assert metrics[-1]["train/preference_chosen"] > metrics[-1]["train/preference_rejected"] + 0.02
    assert metrics[-1]["train/loss/policy"] < metrics[0]["train/loss/policy"]


def test_only_a_reward_model_scores_conversations_of_their_own(rows: Path, tmp_path: Path) -> None:
    with refused(ConfigError, "tasks.train.conversations"):
        config_from_mapping(config(tmp_path / "run", rows) | {"algorithm": {"kind": "dpo"}})


def sides(folder: Path, row: dict[str, Any], **options: Any) -> list[list[tuple[str, str, int]]]:
    """(role, text, images) of the messages of both sides."""
    file = folder / "one.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    section = JsonlTasks.Config(kind="jsonl", path=str(file), conversations=("a", "b"), **options)
    task = JsonlTasks(section, name="train", seed=0)[0]
    json.dumps(task.columns)
    return [
        [(m["role"], m["content"], len(m["images"])) for m in task.columns[name]["conversation"]] for name in ("a", "b")
    ]


def test_a_side_is_messages_or_the_images_that_the_prompt_is_shown_with(tmp_path: Path) -> None:
    one, two = picture(tmp_path / "1.png", True, 1), picture(tmp_path / "2.png", False, 2)
    flat = sides(tmp_path, {"prompt": f"is {IMAGE} red", "a": one, "b": [two]})
    assert flat == [[("user", f"is {IMAGE} red", 1)]] * 2
    templated = sides(tmp_path, {"text": "red", "a": one, "b": two}, template="like {text}", system="judge")
    assert templated == [[("system", "judge", 0), ("user", "like red", 1)]] * 2
    asked = [{"role": "user", "content": f"which {IMAGE}{IMAGE}"}, {"role": "assistant", "content": "one"}]
    plain = [{"role": "user", "content": "none"}]
    marked = sides(tmp_path, {"a": asked, "a_images": [one, two], "b": plain})
    assert marked == [[("user", f"which {IMAGE}{IMAGE}", 2), ("assistant", "one", 0)], [("user", "none", 0)]]


@pytest.mark.parametrize("side", [None, [], "missing.png", "../outside.png", 3])
def test_a_side_that_is_nothing_is_refused(side: object, tmp_path: Path) -> None:
    one = picture(tmp_path / "1.png", True, 1)
    with refused(DataError, "'b'"):
        sides(tmp_path, {"prompt": "is it red", "a": one, "b": side})


def test_a_conversation_that_ends_with_text_is_scored_behind_it() -> None:
    ask, answer = Message("user", "why"), Message("assistant", "so")
    assert conversation_of(as_json([ask, answer])) == ([ask], answer)
    assert conversation_of(as_json([ask])) == ([ask], Message("assistant", ""))
    assert conversation_of("text") is None
