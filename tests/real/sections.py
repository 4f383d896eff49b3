"""What the runs of the real model share: sections of configs, a reward, and plain transformers to compare with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml

from trivium.models.backbone.load import load_lm
from trivium.text.renderer import renderer_of
from trivium.types import Message

QUESTIONS = ("What is the sea?", "Name a fruit.", "Who bakes bread?", "What is snow?")
LORA = {"lora": {"rank": 8, "alpha": 16}, "optimizer": {"lr": 1e-3}}


def written(path: Path, model: Path, **sections: Any) -> Path:
    """A config of the model as a file; the run directory is beside it. One thread, as the bits of a run need."""
    shared = {
        "run": {"dir": str(path.with_name("run"))},
        "model": {"kind": "hf", "path": str(model)},
        "monitors": [{"kind": "jsonl"}],
        "cluster": {"threads": 1},
        "train": LORA,
    }
    path.write_text(yaml.safe_dump({**shared, **sections}), encoding="utf-8")
    return path


def questions(directory: Path) -> dict[str, Any]:
    """The taskset of the questions."""
    return rows(directory / "questions.jsonl", ({"prompt": question} for question in QUESTIONS))


def rows(path: Path, content: Iterable[dict[str, Any]], **columns: str) -> dict[str, Any]:
    """A taskset of these rows, written to `path`."""
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return {"kind": "jsonl", "path": str(path), **columns}


def lowercase(prompt: str, completion: str) -> float:
    """The share of lowercase letters: completions of any group differ in it."""
    return sum(character.islower() for character in completion) / max(1, len(completion))


REWARD = f"{__file__}:lowercase"


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    """The rows of the train steps."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "time/train" in line]


def assert_same_model_samples_and_trains(steps: list[dict[str, float]]) -> None:
    """The engine and the trainer compute the same log-probabilities, up to the rounding of float32."""
    for step in steps:
        assert 0 <= step["mismatch/kl"] < 1e-6
        assert 0 < step["reward/mean"] < 1
        assert 0 < step["train/grad_norm/policy"] < 1e3


def greedy_by_transformers(directory: Path, question: str, num_tokens: int) -> str:
    """The completion that plain transformers writes with a model directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    done = model.generate(**prompt, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(done[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def num_tokens(model: Path, *messages: tuple[str, str]) -> int:
    """Tokens of the completion that ends a conversation, with its end of turn."""
    *before, (_, completion) = messages
    _, tokens = renderer_of(model).expert([Message(*each) for each in before], completion)
    return len(tokens)


def changed(before: Path, after: Path) -> set[str]:
    """The names of the tensors that differ between two model directories."""
    one, other = (load_lm(path, dtype=torch.float32).state_dict() for path in (before, after))
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}
