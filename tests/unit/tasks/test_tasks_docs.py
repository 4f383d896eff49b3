"""The examples in docs/extend-tasks.md and docs/extend-workflow.md run as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from trivium.config import RunConfig, build, config_from_mapping, merged, plugin, read_yaml
from trivium.engines.scripted import ScriptedEngine
from trivium.foundation.metrics import declared
from trivium.foundation.randomness import SampleKey
from trivium.foundation.registry import resolve
from trivium.policy import Policy
from trivium.testing import check_workflow
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel, tiny_tokenizer
from trivium.types import Message, Request, Sampling, Task

DOCS = Path(__file__).parents[3] / "docs"
GSM8K = Path(__file__).parents[2] / "data" / "gsm8k" / "train.jsonl"
RENDERER = ChatRenderer(tiny_tokenizer())
BYTES = ChatRenderer(tiny_tokenizer("bytes"))


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


async def test_the_calculator_of_the_workflow_page_runs_the_calls_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpacked("extend-workflow.md", tmp_path, monkeypatch)
    workflow = build("workflows", plugin("workflows")(yaml.safe_load((folder / "calculator.yaml").read_text())))

    async def episode(*completions: str) -> tuple[float, str]:
        script = folder / f"says_{len(list(folder.glob('says_*')))}.py"
        script.write_text(f"def says(request, version): return {list(completions)!r}[int(request.key.path[-1])]\n")
        engine = ScriptedEngine(
            ScriptedEngine.Config(script=f"{script}:says"),
            eos_token_ids=BYTES.eos_token_ids,
            decode=BYTES.decode,
            encode=lambda text: tiny_tokenizer("bytes").encode(text),
        )
        policy = Policy(engine, BYTES, Sampling(80), SampleKey(0, "train", "train", "t"), 4000)
        earned = await workflow.run(Task("t", (Message("user", "17 + 25?"),), {"answer": "42"}), policy)
        return earned["environment"], BYTES.decode(policy.turns[-1].prompt_tokens)

    call = '<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>'
    earned, seen = await episode(call, "42")
    assert earned == 1.0
    assert '"description": "Adds two numbers."' in seen
    assert seen.index(call) < seen.index("42")
    assert (await episode("41"))[0] == 0.0
    assert "error: KeyError" in (await episode(call.replace('"b"', '"c"'), "42"))[1]


def test_rows_bring_their_tools(tmp_path: Path) -> None:
    page = (DOCS / "extend-tasks.md").read_text(encoding="utf-8")
    (row,) = re.findall(r'```json\n(\{"prompt": \[\{"role": "tools".*?)```', page, re.S)
    (tmp_path / "rows.jsonl").write_text(row.replace("\n", " "))
    (tmp_path / "rows.yaml").write_text(f"train: {{kind: jsonl, path: {tmp_path}/rows.jsonl, system: Be brief.}}")
    (task,) = tasks_in(tmp_path / "rows.yaml")
    assert [message.role for message in task.prompt] == ["tools", "system", "user"]
    assert '"name": "add"' in BYTES.text(task.prompt)


def config_on(page: str, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The config of a page, with a tiny model in place of the one that it names."""
    unpacked(page, folder, monkeypatch)
    tiny = TinyModel(TinyModel.Config(alphabet="bytes", max_position=2048), seed=0).materialize(folder / "tiny")
    return config_from_mapping(merged(read_yaml(folder / name), {"model": {"path": str(tiny)}}), folder)


def test_the_page_about_benchmarks_reads_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    for part in ("train", "test"):
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / "gsm8k" / "main" / f"{part}-00000-of-00001.parquet"
        )
    config = config_on("benchmark.md", tmp_path, "gsm8k.yaml", monkeypatch)
    assert build("tasks", config.tasks["test"], name="test", seed=0)[0].columns["answer"] == "72"
    assert (config.evaluation.samples, config.evaluation.k) == (8, (1, 4, 8))
    page = (DOCS / "benchmark.md").read_text(encoding="utf-8")
    assert [key for key in re.findall(r"`(eval/[^`]+)`", page) if declared(key) is None] == []
