"""What scripts of the tinker-cookbook find by names of a hub, as folders of their working directory: the tokenizer of
the served model, and a few rows of each data set that the recipes name. No script is changed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name that the cookbook knows, with a renderer of the same template as the served model's."""
_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo")
_THINGS = ("apples", "coins", "books", "cards")


def make_hub(directory: Path, model_dir: Path) -> Path:
    """Writes the folders, and returns the directory."""
    tokenizer = directory / MODEL
    tokenizer.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        if (model_dir / name).is_file():
            shutil.copy(model_dir / name, tokenizer / name)
    counts, chats = [*_counts(48)], [*_chats(48)]
    _data(directory / "openai/gsm8k", {"main": {"train": counts, "test": counts[:8]}})
    _data(directory / "HuggingFaceH4/no_robots", {"default": {"train": chats, "test": chats[:8]}})
    prompts = [{"messages": each["messages"][:1]} for each in chats]
    _data(directory / "allenai/tulu-3-sft-mixture", {"default": {"train": prompts}})
    _data(directory / "Anthropic/hh-rlhf", {"default": {"train": [*_pairs(32)], "test": [*_pairs(4)]}})
    return directory


def _data(folder: Path, configs: Mapping[str, Mapping[str, Iterable[Mapping[str, Any]]]]) -> None:
    """A data set as `datasets` loads it from a folder: rows by config and split."""
    listed = []
    for config, splits in configs.items():
        files = []
        for split, rows in splits.items():
            path = folder / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            files.append({"split": split, "path": f"{config}/{split}.jsonl"})
        listed.append({"config_name": config, "data_files": files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(listed)}\n---\n")


def _counts(number: int) -> Iterable[Mapping[str, Any]]:
    """Rows in the format of GSM8K, each with its own answer: one of two numbers of the question, so that only a policy
    that reads the question is right more often than every second time."""
    rng = random.Random(1)
    for _ in range(number):
        name, things, counts = rng.choice(_NAMES), rng.sample(_THINGS, 2), rng.sample(range(2, 10), 2)
        asked, answer = rng.choice([*zip(things, counts, strict=True)])
        has = f"{counts[0]} {things[0]} and {counts[1]} {things[1]}"
        question = f"{name} has {has}. How many {asked} does {name} have?"
        yield {"question": question, "answer": f"{name} has {answer} {asked}.\n#### {answer}"}


def _chats(number: int) -> Iterable[Mapping[str, Any]]:
    rng = random.Random(2)
    for _ in range(number):
        name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
        said = [("user", f"What does {name} like?"), ("assistant", f"{name} likes {thing}, and nothing but {thing}.")]
        yield {"messages": [{"role": role, "content": content} for role, content in said], "prompt": said[0][1]}


def _pairs(number: int) -> Iterable[Mapping[str, Any]]:
    rng = random.Random(3)
    for _ in range(number):
        asked = f"\n\nHuman: What does {rng.choice(_NAMES)} like?\n\nAssistant: "
        thing = rng.choice(_THINGS)
        yield {"chosen": f"{asked}I would say {thing}.", "rejected": f"{asked}Who knows? Certainly no {thing}!"}
