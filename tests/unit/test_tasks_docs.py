"""The examples in docs/extend-tasks.md and docs/extend-workflow.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from trivium.config import build, plugin
from trivium.engines.scripted import ScriptedEngine
from trivium.policy import Policy
from trivium.randomness import SampleKey
from trivium.registry import resolve
from trivium.testing import check_workflow
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Message, Request, Sampling, Task

DOCS = Path(__file__).parents[2] / "docs"
GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "train.jsonl"
RENDERER = ChatRenderer(tiny_tokenizer())


def unpacked(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes each code block of a page to the file that its first line names; paths are seen from there."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.S)
    assert blocks
    for name, text in blocks:
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


def tasks_in(file: Path) -> list[Task]:
    section = yaml.safe_load(file.read_text())["train"]
    source = build("tasks", plugin("tasks")(section), name="train", seed=0)
    return [source[index] for index in range(len(source))]


def test_tasks_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unpacked("extend-tasks.md", tmp_path, monkeypatch)
    (folder / "rows.jsonl").write_bytes(GSM8K.read_bytes())
    first = tasks_in(folder / "rows.yaml")[0]
    assert first.prompt[0].content.endswith("\nAnswer with a number.")
    assert first.columns["answer"] == "72"
    assert [task.columns["answer"] for task in tasks_in(folder / "squares.yaml")][-1] == "361"
    last = tasks_in(folder / "countdown.yaml")[-1]
    assert (last.task_id, last.columns["answer"]) == ("from-5", "5 4 3 2 1")


def doubles(request: Request, version: int) -> str:
    """The script of the engine: twice the number it reads; anything else it answers with `ok`."""
    last = re.findall(r"<\|user\|>(.*?)<\|end\|>", tiny_tokenizer().decode(request.prompt_tokens.tolist()))[-1]
    return str(2 * int(last)) if last.isdecimal() else "ok"


def make_policy() -> Policy:
    engine = ScriptedEngine(
        ScriptedEngine.Config(script=f"{__file__}:doubles"),
        eos_token_ids=RENDERER.eos_token_ids,
        decode=RENDERER.decode,
        encode=lambda text: tiny_tokenizer().encode(text),
    )
    return Policy(engine, RENDERER, Sampling(8), SampleKey(0, "train", "train", "t"), 400)


async def test_workflow_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = unpacked("extend-workflow.md", tmp_path, monkeypatch)
    task = Task("t", (Message("user", "2"),), {"start": 3})
    doubling, second_thought = (
        build("workflows", plugin("workflows")(yaml.safe_load((folder / name).read_text())))
        for name in ("doubling.yaml", "second_thought.yaml")
    )
    assert await doubling.run(task, make_policy()) == {"environment": 3.0}
    policy = make_policy()
    assert await second_thought.run(task, policy) is None
    assert [turn.text for turn in policy.turns] == ["4", "ok"]
    assert policy.metrics == {"changed": 1.0}
    await check_workflow(doubling, task, make_policy)
    await resolve("workflows", "test_second_thought.py:test_second_thought")(second_thought, task, make_policy)
