"""`trivium chat` on tiny runs and models, through the command line: which weights, system message, history and seed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from failing import refused
from typer.testing import CliRunner, Result

from tests.processes import Forked, trivium
from tests.waiting import eventually
from trivium.cli import app
from trivium.config import config_from_mapping
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import ConfigError, DataError, RunDirError
from trivium.inspection.conversation import NEW, ChatModel, converse, opened, read_prompts
from trivium.runtime.launch import run
from trivium.types import Message

pytestmark = pytest.mark.slow

SYSTEM = "Be brief."
NONE: dict[str, float | None] = {}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with LoRA, whose tasks have a system message."""
    directory = tmp_path_factory.mktemp("chat")
    rows = [{"prompt": word, "answer": word} for word in ("red", "green", "blue", "black")]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text("def length(completion):\n    return float(len(completion))\n")
    config: dict[str, Any] = {
        "run": {"dir": str(directory / "run")},
        "model": {"kind": "tiny", "layers": 1, "hidden": 32, "heads": 2, "mlp": 32, "max_position": 160},
        "tasks": {"train": {"kind": "jsonl", "path": str(directory / "rows.jsonl"), "system": SYSTEM}},
        "rewards": [f"{directory}/reward.py:length"],
        "engine": {"sampling": {"max_new_tokens": 8}},
        "train": {"optimizer": {"lr": 0.3}, "lora": {"rank": 2, "alpha": 8}},
        "schedule": {"steps": 2, "groups_per_step": 2, "group_size": 4},
        "checkpoint": {"save_every": 1},
        "monitors": [{"kind": "jsonl"}],
    }
    run(config_from_mapping(config))
    moved = directory / "moved"  # as after a download
    shutil.move(directory / "run", moved)
    return moved


class SilentEngine(TorchEngine):
    """Answers no request."""

    async def _completion(self, *given: Any, **named: Any) -> Any:
        await asyncio.Event().wait()


def chat(*arguments: object, lines: str = "") -> Result:
    result = CliRunner().invoke(app, ["chat", *map(str, arguments)], input=lines)
    assert "Traceback" not in result.output
    return result


def answered(*arguments: object, lines: str = "") -> str:
    result = chat(*arguments, lines=lines)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_prompt_is_answered_with_the_weights_of_the_step_and_the_system_message_of_the_run(run_dir: Path) -> None:
    result = chat(run_dir, "--prompt", "red")
    assert result.exit_code == 0, result.output
    assert f"{run_dir} step 2" in result.stderr
    assert SYSTEM in result.stderr
    assert answered(run_dir, "--prompt", "red", "--system", SYSTEM) == result.stdout
    by_step = [answered(run_dir, "--prompt", "red", "--step", step) for step in (0, 1, 2)]
    assert by_step[2] == result.stdout
    assert len(set(by_step)) == 3, "the adapter is a part of the weights"
    directory = run_dir / "checkpoints" / "step-000002" / "policy"
    same = ("--prompt", "red", "--max-new-tokens", 8)
    assert answered(directory, *same, "--system", SYSTEM) == result.stdout
    without = answered(directory, *same)
    assert without == answered(run_dir, *same, "--system", "") != result.stdout


def test_models_and_steps_stand_side_by_side(run_dir: Path) -> None:
    alone = [answered(run_dir, "--prompt", "red", "--step", step) for step in (0, 2)]
    both = answered(run_dir, "--prompt", "red", "--step", 0, "--step", 2)
    assert both == "".join(f"[{run_dir} step {step}]\n{text}" for step, text in zip((0, 2), alone, strict=True))
    directory = run_dir / "model"
    same = ("--prompt", "red", "--max-new-tokens", 8, "--system", SYSTEM)
    beside = answered(run_dir, directory, *same, "--step", 2)
    assert beside == f"[{run_dir} step 2]\n{alone[1]}[{directory}]\n{alone[0]}"


def test_sampling_is_a_function_of_the_seed(run_dir: Path) -> None:
    sampled = ("--prompt", "red", "--temperature", 1.5, "--max-new-tokens", 12)
    one, again, other = (answered(run_dir, *sampled, "--seed", seed) for seed in (1, 1, 2))
    assert one == again != other
    assert "--max-new-tokens is 1" in chat(run_dir, "--prompt", "red", "--max-new-tokens", 1).stderr


def conversation(model: ChatModel, *lines: str) -> tuple[list[str], list[str]]:
    """The completions, and the notes."""
    written, notes = [""], list[str]()
    converse([model], lines, written.append, notes.append)
    return "".join(written).split("\n"), notes


def test_a_conversation_keeps_its_history_until_a_new_one_begins(run_dir: Path) -> None:
    with opened([str(run_dir)], (), (), None, **NONE) as [model]:
        conversation(model, "red", "", "green")
        first, second = model.policy.turns
        assert model.policy.history == (
            Message("system", SYSTEM),
            Message("user", "red"),
            Message("assistant", first.text),
            Message("user", "green"),
            Message("assistant", second.text),
        )
        seen = [*first.prompt_tokens, *first.tokens]
        assert second.prompt_tokens.tolist()[: len(seen)] == seen
        written, notes = conversation(model, "blue" * 40, NEW, "red")
        assert NEW in notes[0]
        assert written[0] == first.text
        [turn] = model.policy.turns
        assert turn.prompt_tokens.tolist() == first.prompt_tokens.tolist()


def test_lines_of_standard_input_are_a_conversation(run_dir: Path) -> None:
    with opened([str(run_dir)], (), (), None, **NONE) as [model]:
        expected, _ = conversation(model, "red", "green")
    assert answered(run_dir, lines="red\n\ngreen\n").split("\n") == expected


def test_a_file_of_prompts_gives_a_row_each(run_dir: Path, tmp_path: Path) -> None:
    lines, rows = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("red\n\n" + "green " * 40 + "\nblue\n")
    rows.write_text(
        json.dumps({"prompt": "red", "n": 1}) + "\n" + json.dumps({"prompt": [{"role": "user", "content": "blue"}]})
    )
    first, long, last = map(json.loads, answered(run_dir, "--file", lines).splitlines())
    assert first["prompt"] == [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "red"}]
    assert (first["completion"] + "\n", first["model"]) == (answered(run_dir, "--prompt", "red"), f"{run_dir} step 2")
    assert first["stop_reason"] in ("eos", "length")
    assert "completion" not in long
    assert "160" in long["error"]
    by_model = [json.loads(line) for line in answered(run_dir, run_dir / "model", "--file", rows).splitlines()]
    assert by_model[0] == {**first, "n": 1}
    assert by_model[1] == last
    assert [row["model"] for row in by_model[2:]] == [str(run_dir / "model")] * 2


def test_what_cannot_be_chatted_with_is_refused(run_dir: Path, tmp_path: Path) -> None:
    def load(*paths: Path, steps: tuple[int, ...] = ()) -> None:
        with opened([*map(str, paths)], steps, (), None, **NONE):
            raise AssertionError

    with refused(RunDirError, "[1, 2]", "7"):
        load(run_dir, steps=(7,))
    with refused(ConfigError, "--step 1 --step 2 --step 0"):
        load(run_dir, run_dir, steps=(1, 2, 0))
    with refused(ConfigError, "--step 1"):
        load(run_dir / "model", steps=(1,))
    with refused(ConfigError, tmp_path / "mistyped", "config.yaml"):
        load(tmp_path / "mistyped")
    (tmp_path / "untrained").mkdir()
    shutil.copy(run_dir / "config.yaml", tmp_path / "untrained")
    with refused(RunDirError, tmp_path / "untrained", "--step 0"):
        load(tmp_path / "untrained")
    (tmp_path / "empty.txt").write_text("\n")
    with refused(DataError, tmp_path / "empty.txt"):
        read_prompts(tmp_path / "empty.txt")
    assert chat(run_dir, "--prompt", "red", "--file", "x").exit_code == 2
    assert chat(run_dir, "--prompt", "red", "--step", 7).exit_code == 1
    assert chat(run_dir, "--prompt", "red" * 80).exit_code == 1


def test_a_model_may_have_another_template_and_the_checkpoints_of_a_run_have_their_own(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    same = (run_dir / "model", "--file", tmp_path / "one.txt")
    (tmp_path / "one.txt").write_text("red\n")
    plain, own = (json.loads(answered(*same, *more)) for more in (["model.chat_template=plain"], []))
    assert plain["completion"] != own["completion"]
    assert [*tmp_path.iterdir()] == [tmp_path / "one.txt"]
    result = chat(run_dir, "--prompt", "red", "model.chat_template=plain")
    assert (result.exit_code, "model.chat_template=plain" in result.stderr) == (2, True)


def test_without_its_tasks_a_run_says_that_a_system_message_may_be_missing(run_dir: Path) -> None:
    rows = run_dir.parent / "rows.jsonl"
    rows.rename(rows.with_suffix(".away"))
    try:
        result = chat(run_dir, "--prompt", "red", "engine.dtype=float32")
    finally:
        rows.with_suffix(".away").rename(rows)
    assert (result.exit_code, str(rows) in result.stderr) == (0, True), result.output


@pytest.mark.parametrize("file", [False, True], ids=["one prompt", "a file"])
def test_an_engine_that_does_not_answer_is_not_waited_for(file: bool, run_dir: Path, tmp_path: Path) -> None:
    given = ["--prompt", "red"]
    if file:
        (tmp_path / "prompts.txt").write_text("red\nblue\n")
        given = ["--file", str(tmp_path / "prompts.txt")]
    result = chat(run_dir, *given, f"engine.kind={__file__}:SilentEngine", "workflow.deadline_s=0.3")
    assert result.exit_code == (0 if file else 1)
    assert (result.stdout if file else result.stderr).count("not finished within 0.3 s") == (2 if file else 1)


def chat_from(pipe: Path, run_dir: Path) -> None:
    """`trivium chat` with a pipe as its standard input."""
    os.dup2(os.open(pipe, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    trivium("chat", str(run_dir))


def test_ctrl_c_ends_a_chat_without_a_traceback(run_dir: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # writes nothing; without it, the chat would read the end
    started = Forked("chat", tmp_path / "chat.out", chat_from, tmp_path / "pipe", run_dir)
    try:
        eventually(lambda: "Ctrl-D" in started.text, 120, lambda: started.text, started)
        os.kill(started.pid, signal.SIGINT)
        started.ended(130)
        assert "Traceback" not in started.text
    finally:
        started.kill()
        os.close(writer)
