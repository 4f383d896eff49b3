"""Bad input through the real command line: a three-part error and the right exit code, or a counted failed rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trivium.cli import app
from trivium.text.tiny import TinyModel

TINY = Path(__file__).parent / "tiny.yaml"


def trivium(*arguments: str) -> tuple[int, str]:
    """(exit code, everything printed)."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def refused(code: int, output: str, *words: str) -> None:
    assert code in (1, 2), output
    for word in (*words, "asked:", "found:", "do:"):
        assert word in output, f"{word!r} not in:\n{output}"
    assert "Traceback" not in output


def problems_in(output: str) -> list[str]:
    """Where a report of several problems says that they are."""
    lines = [line.removeprefix("  - ") for line in output.splitlines() if line.startswith("  - ")]
    return sorted(line.partition(": ")[0] for line in lines)


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


BASE = """
run: {dir: DIR/run}
model: {kind: tiny, alphabet: "0123456789+=", layers: 1, hidden: 16, heads: 2, mlp: 16, max_position: 24}
tasks: {train: {kind: arithmetic, max_operand: 9}}
engine: {sampling: {max_new_tokens: 3}}
schedule: {steps: 2, groups_per_step: 2, group_size: 4}
monitors: [{kind: jsonl}]
"""


def run_with(tmp_path: Path, changes: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Runs a config that says `changes` over the base one; exit code, output, metric rows."""
    (tmp_path / "base.yaml").write_text(BASE.replace("DIR", str(tmp_path)), encoding="utf-8")
    code, output = trivium("run", str(config(tmp_path, "extends: base.yaml\n" + changes)))
    rows = tmp_path / "run" / "metrics.jsonl"
    return code, output, [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []


def test_check_reports_every_problem_at_once(tmp_path: Path) -> None:
    bad = config(
        tmp_path,
        """
model: {kind: tiny, hiden: 32}
tasks: {training: {kind: jsonl, path: nowhere.jsonl}}
engine: {sampling: {temperature: 0}}
train: {router_replay: rollout}
schedule: {group_size: 1, stepps: 3}
algorithm: {kind: grpo, critics: {}}
evaluation: {every: 5}
""",
    )
    code, output = trivium("check", str(bad))
    assert code == 2
    assert problems_in(output) == ["algorithm.critics", "model.hiden", "schedule.stepps"]
    for words in ("did you mean 'hidden'", "did you mean 'steps'", "did you mean 'critic'"):
        assert words in output, output
    # With every key known, the sections can be looked at in each other's company.
    text = bad.read_text(encoding="utf-8")
    for wrong, right in (("hiden", "hidden"), ("stepps", "steps"), ("critics", "critic")):
        text = text.replace(wrong, right)
    code, output = trivium("check", str(config(tmp_path, text)))
    assert code == 2
    assert problems_in(output) == [
        "engine.sampling.temperature",
        "evaluation.every",
        "rewards",
        "schedule.group_size",
        "tasks",
        "tasks.training.path",
        "train.router_replay",
    ]
    code, output = trivium(
        "check",
        str(TINY),
        "engine.sampling.temperature=0",
        "schedule.max_staleness=0",
        "sync.interval=2",
        "evaluation.taskset=tset",
    )
    assert code == 2
    wrong = (
        "checkpoint.keep_best",
        "engine.sampling.temperature",
        "evaluation.every",
        "evaluation.taskset",
        "schedule.max_staleness",
    )
    assert problems_in(output) == sorted(f"stages[{stage}].{name}" for stage in (0, 1) for name in wrong)
    assert "did you mean 'test'" in output


REWARDS = """
def raises(prompt, completion, answer):
    if len(completion) < 4: raise KeyError("oops")  # as all completions of the run are
    return 0.0
def none(prompt, completion, answer): return None if len(completion) < 4 else 0.0
def always(prompt, completion, answer): return None
def sometimes(prompt, completion, answer):
    if int(answer) % 2: raise ValueError("odd")
    return float(len(completion))
"""


@pytest.mark.parametrize("reward", ["raises", "none"])
def test_a_reward_that_gives_no_number_ends_the_run_by_name(tmp_path: Path, reward: str) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    code, output, _ = run_with(tmp_path, f"rewards: [{{kind: mine.py:{reward}}}]\n")
    refused(code, output, "failed trajectories", "RewardError", repr(reward))


def test_a_reward_that_never_gives_a_number_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    code, output, _ = run_with(tmp_path, "rewards: [mine.py:always]\n")
    assert (code, problems_in(output), (tmp_path / "run").exists()) == (2, ["rewards"], False)
    assert trivium("check", str(tmp_path / "config.yaml")) == (2, output)


def test_some_failing_rewards_are_counted_and_never_scored(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    code, output, rows = run_with(
        tmp_path, "rewards: [{kind: mine.py:sometimes}]\nworkflow: {max_failed_fraction: 1}\n"
    )
    assert code == 0, output
    failed = sum(row["rollout/failed"] for row in rows)
    trained = sum(row["rollout/trajectories"] for row in rows)
    assert failed + trained == 2 * 2 * 4
    assert 0 < failed < 16
    assert failed == sum(row.get("rollout/failed/reward", 0) for row in rows)


def test_a_run_directory_of_another_config(tmp_path: Path) -> None:
    assert run_with(tmp_path, "rewards: [{kind: exact}]\n")[0] == 0
    code, output = trivium("run", str(tmp_path / "config.yaml"), "schedule.group_size=8")
    assert code == 2
    assert "the run began with 4" in output
    code, output = trivium("run", str(tmp_path / "config.yaml"), "run.resume=false")
    refused(code, output, "it holds a run")
    code, output = trivium("run", str(tmp_path / "config.yaml"), "schedule.steps=3")
    assert code == 0, output


def test_eval_export_and_bench(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changes = """
rewards: [{kind: exact}]
checkpoint: {save_every: 1}
tasks: {test: {kind: arithmetic, max_operand: 9, part: holdout}}
evaluation: {taskset: test, samples: 4, k: [1, 4], sampling: {temperature: 1.0, max_new_tokens: 3}}
"""
    code, output, _ = run_with(tmp_path, changes)
    assert code == 0, output
    path = tmp_path / "config.yaml"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/test/pass@4" in row]
    assert [row["step"] for row in evaluated] == [0, 2]
    code, output = trivium("eval", str(path), "--step", "2")
    assert code == 0, output
    again = json.loads(output)
    for key in ("eval/test/accuracy", "eval/test/pass@4", "eval/test/maj@4", "eval/test/reward"):
        assert again[key] == evaluated[-1][key]
    code, output = trivium("eval", str(path), "--step", "7")
    refused(code, output, "steps [1, 2]")
    code, output = trivium("run", str(path), "run.mode=bench")
    assert code == 0, output
    assert [json.loads(x)["step"] for x in (tmp_path / "run" / "bench.jsonl").read_text().splitlines()] == [1, 2]
    code, output = trivium("export", str(tmp_path / "run"), str(tmp_path / "out"), "--step", "2")
    assert code == 0, output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        assert model(**tokens).logits.shape[-1] == model.config.vocab_size


def test_a_model_without_pad_token_and_generation_config_with_a_padded_embedding_is_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = {"layers": 1, "hidden": 16, "heads": 2, "mlp": 16, "max_position": 24, "alphabet": "0123456789+="}
    directory = TinyModel(TinyModel.Config.model_validate(values), seed=0).materialize(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(32, mean_resizing=False)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    for file, key in (("tokenizer_config.json", "pad_token"), ("config.json", "pad_token_id")):
        content = json.loads((directory / file).read_text())
        del content[key]
        (directory / file).write_text(json.dumps(content))
    capfd.readouterr()
    code, output, rows = run_with(tmp_path, f"model: {{kind: hf, path: {directory}}}\nrewards: [exact]\n")
    assert (code, len(rows)) == (0, 2), output
    assert "Warning" not in output + capfd.readouterr().err
