"""Bad input through the real command line: a three-part error and the right exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trivium.cli import app
from trivium.text.tiny import TinyModel


def trivium(*arguments: str) -> tuple[int, str]:
    """(exit code, everything printed)."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def refused(code: int, output: str, *words: str) -> None:
    assert code in (1, 2), output
    for word in (*words, "asked:", "found:", "do:"):
        assert word in output, f"{word!r} not in:\n{output}"
    assert "Traceback" not in output


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
