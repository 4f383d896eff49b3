"""Rewards through whole runs: sections that the prompt opens, special tokens, numbers and lists as answers,
lengths over several turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trivium.cli import app
from trivium.config.saved import as_yaml
from trivium.text import tiny
from trivium.text.tiny import TinyModel, tiny_tokenizer

TAGS = ["<plan>", "</plan>", "<answer>", "</answer>"]
OPENS = "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
OPENS += "{%- if add_generation_prompt %}<|assistant|><plan>\n{% endif %}"
REPLIES = """
def opened(request, version):
    return list(b"First one.</plan>\\n<answer>7</answer>")

def tagged(request, version):
    return [262, *b"First one.", 263, 264, *b"7", 265]

def numbers(request, version):
    return list(b"7" if request.key.index else b"It is 7.")

def thrice(request, version):
    return list(b"abcd" if request.key.index else b"abc")

from trivium.api import Message

class Thrice:
    def reset(self, task):
        self.number = 0
        return list(task.prompt)

    def step(self, completion):
        self.number += 1
        return [Message("user", "more")], float(len(completion) == 4) / 3, self.number == 3
"""


def trivium(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has tags as special tokens."""
    path = tmp_path_factory.mktemp("tagged") / "model"
    config = TinyModel.Config(alphabet="bytes", layers=1, hidden=32, heads=2, kv_heads=1, mlp=32, max_position=256)
    tokenizer = tiny_tokenizer("bytes", 256, more=TAGS)
    torch.manual_seed(0)
    tokenizer.save_pretrained(path)
    AutoModelForCausalLM.from_config(tiny._model_config(config, tokenizer)).save_pretrained(path)
    return path


def written(folder: Path, model: Path, reply: str, rows: list[dict[str, Any]], **sections: Any) -> Path:
    """The config of a run of one step in which a script samples."""
    (folder / "replies.py").write_text(REPLIES, encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "run": {"dir": str(folder / "run")},
        "model": {"kind": "hf", "path": str(model), **sections.pop("switches", {})},
        "tasks": {name: {"kind": "jsonl", "path": "rows.jsonl"} for name in ("train", "test")},
        "engine": {"kind": "scripted", "script": f"replies.py:{reply}", "sampling": {"max_new_tokens": 64}},
        "schedule": {"steps": 1, "groups_per_step": 1, "group_size": 2},
        "monitors": ["jsonl"],
        **sections,
    }
    (folder / "run.yaml").write_text(as_yaml(config), encoding="utf-8")
    return folder / "run.yaml"


def rolled_out(config: Path) -> list[dict[str, Any]]:
    code, output = trivium("run", config)
    assert code == 0, output
    code, output = trivium("rollouts", config.parent / "run", "--json")
    assert code == 0, output
    return [json.loads(line) for line in output.splitlines()]


ROWS = [{"prompt": "3+4", "answer": "7"}, {"prompt": "2+5", "answer": "7"}]
FORMAT = [{"kind": "format", "sections": ["plan", "answer"]}]


@pytest.mark.parametrize("path", [True, False])
def test_a_section_that_the_template_opens_counts(tmp_path: Path, model: Path, path: bool) -> None:
    """As a special token, and as text in a tokenizer without such a token."""
    if not path:
        model = TinyModel(TinyModel.Config(alphabet="bytes", layers=1, hidden=32, heads=2, kv_heads=1, mlp=32), seed=0)
        model = model.materialize(tmp_path / "plain")
    rows = rolled_out(written(tmp_path, model, "opened", ROWS, rewards=FORMAT, switches={"chat_template": OPENS}))
    assert [row["reward"] for row in rows] == [1.0] * len(rows)


@pytest.mark.parametrize("strip", [False, True])
def test_special_tokens_reach_the_reward_unless_they_are_stripped(tmp_path: Path, model: Path, strip: bool) -> None:
    switch = {"strip_special_tokens": True} if strip else {}
    rows = rolled_out(written(tmp_path, model, "tagged", ROWS, rewards=FORMAT, switches=switch))
    text = "<plan>First one.</plan><answer>7</answer>"
    assert {row["turns"][0]["written"] for row in rows} == {f"{text}<|end|>"}
    assert {row["turns"][0]["completion"] for row in rows} == {"First one.7" if strip else text}
    assert {row["reward"] for row in rows} == {float(not strip)}
    shown = trivium("rollouts", tmp_path / "run")[1]
    assert text in shown
    assert ("as written" in shown) == strip


def test_numbers_and_lists_are_answers(tmp_path: Path, model: Path) -> None:
    """Which are equal: unit/rewards/test_accepted_answers."""
    rewards = [{"kind": "exact"}, {"kind": "gsm8k", "method": "flexible"}]
    config = written(tmp_path, model, "numbers", [{"prompt": "3+4", "answer": ["seven", 7.0]}], rewards=rewards)
    assert trivium("check", config)[0] == 0
    by_index = {row["index"]: row["rewards"] for row in rolled_out(config)}
    assert by_index == {0: {"exact": 0.0, "gsm8k": 1.0}, 1: {"exact": 1.0, "gsm8k": 1.0}}


def test_null_is_no_answer(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": str(number), "answer": None if number == 2 else "7"} for number in range(4)]
    sections: dict[str, Any] = {"rewards": ["exact"], "schedule": {"steps": 1, "groups_per_step": 4, "group_size": 2}}
    config = written(tmp_path, model, "numbers", rows, **sections)
    code, output = trivium("check", config)
    assert code == 0, output
    assert "1 of 4" in output
    assert "None" in output
    failed = [row for row in rolled_out(config) if row["failure"]]
    assert [(row["prompt"][0]["content"], row["failure"]["side"]) for row in failed] == [("2", "reward")] * 2
    rows = [{**row, "answer": None} for row in rows]
    (tmp_path / "all").mkdir()
    code, output = trivium("check", written(tmp_path / "all", model, "numbers", rows, **sections))
    assert code == 2
    assert "tasks.train" in output


def test_the_penalty_of_dapo_is_for_one_completion_where_there_are_several(tmp_path: Path, model: Path) -> None:
    sections = {
        "workflow": {"kind": "multi_turn", "environment": "replies.py:Thrice", "max_turns": 3},
        "engine": {"kind": "scripted", "script": "replies.py:thrice", "sampling": {"max_new_tokens": 8}},
        "algorithm": "dapo",
    }
    config = written(tmp_path, model, "thrice", ROWS, **sections)
    code, output = trivium("check", config)
    assert code == 0, output
    assert "longest turn" in output
    assert "of the longest turn" in trivium("explain", config)[1]
    rolled_out(config)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["reward/shaped_mean"] for row in metrics if "reward/shaped_mean" in row] == [0.5]
