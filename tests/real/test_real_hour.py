"""An hour with the real model, as a researcher spends it: a script of TRL is translated, checked, run, interrupted,
continued, looked at and diagnosed, each by the command that a shell would run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import commands
from tests.real.sections import questions, written
from tests.waiting import eventually
from trivium import run
from trivium.config import load_config

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

SCRIPT = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(
    output_dir="run", learning_rate=3e-2, per_device_train_batch_size=8, num_generations=4, max_completion_length=12,
    max_steps=6, temperature=1.0, beta=0.0, bf16=False, save_steps=100, seed=1,
)
trainer = GRPOTrainer(
    model={model!r}, args=args, train_dataset=rows(), reward_funcs=[silence],
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
)
"""
REWARDS = """
def silence(completion):
    return -float(len(completion))

def forgotten(completion):
    value = float(len(completion))
"""


def command(directory: Path, *words: str, code: int | None = 0) -> str:
    """What `trivium` prints, on both outputs."""
    done = subprocess.run(
        [sys.executable, "-m", "trivium", *words], cwd=directory, capture_output=True, text=True, timeout=300
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def directory(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config that a script of TRL becomes, and with what no script states: rows and rewards."""
    directory = tmp_path_factory.mktemp("hour")
    (directory / "train.py").write_text(SCRIPT.format(model=str(model)))
    (directory / "rewards.py").write_text(REWARDS)
    translated = command(directory, "translate", "--from", "trl", "train.py")
    assert "silence" in translated  # a note: the function is not read
    config = yaml.safe_load(re.sub(r"(?m)^note: .*\n", "", translated))
    assert config["model"]["path"] == str(model)
    assert config["train"]["optimizer"]["lr"] == 3e-2
    config |= {
        "tasks": {"train": questions(directory)},
        "rewards": ["rewards.py:silence"],
        "run": {"dir": "run", "seed": 1},
        "cluster": {"threads": 1},
        "schedule": config["schedule"] | {"groups_per_step": 2},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(config))
    return directory


def test_check_calls_the_reward_and_plans_the_memory(directory: Path) -> None:
    assert "memory" in command(directory, "check", "run.yaml")
    refused = command(directory, "check", "run.yaml", 'rewards=["rewards.py:forgotten"]', code=2)
    assert "forgotten" in refused
    assert "None" in refused


def test_a_run_that_ctrl_c_ends_is_continued_and_diagnosed(directory: Path) -> None:
    metrics, run_dir = directory / "run" / "metrics.jsonl", directory / "run"

    def steps() -> int:
        return metrics.read_text().count('"time/train"') if metrics.is_file() else 0

    with commands(directory) as start:
        started = start("run", "run", str(directory / "run.yaml"), f"run.dir={run_dir}")
        eventually(lambda: steps() >= 1, 240, lambda: started.text, started)
        os.kill(started.pid, signal.SIGINT)
        started.ended(130)
    assert f"continues after step {steps()}" in started.text
    interrupted = [json.loads(state.read_text()) for state in run_dir.glob("checkpoints/step-*/state.json")]

    assert "bfloat16" not in command(directory, "run", "run.yaml")  # advice for a machine that has instructions for it
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == len(summary["rewards"]) == steps() == 6
    for name, seconds in interrupted[-1]["time"].items():
        assert summary["time"][name] >= seconds > 0
    assert summary["memory"]["measured"]["host"] > 0

    diagnosis = command(directory, "doctor", "run", code=1)
    assert "6 steps, 48 rollouts of 6 steps" in diagnosis
    assert "truncation: " in diagnosis


def test_a_model_and_a_policy_answer_side_by_side(directory: Path, model: Path) -> None:
    answers = command(directory, "chat", str(model), "--prompt", "What is the capital of France?", "--temperature", "0")
    assert "Paris" in answers
    both = command(directory, "chat", "run", "--step", "0", "--step", "6", "--prompt", "What is the sea?")
    assert "step 0" in both
    assert "step 6" in both


def test_an_evaluation_without_rewards_keeps_completions(directory: Path) -> None:
    saved = directory / "answers.jsonl"
    command(
        directory, "eval", "run.yaml", "--step", "0", "--save", str(saved), "rewards=[]", "evaluation.taskset=train"
    )
    rows = [json.loads(line) for line in saved.read_text().splitlines()]
    assert {row["stop_reason"] for row in rows} <= {"eos", "length", "stop"}
    assert all(row["completion"] and "sample_index" in row and "reward" not in row for row in rows)


def test_python_gets_the_rewards_of_the_steps(model: Path, tmp_path: Path) -> None:
    config = written(
        tmp_path / "run.yaml",
        model,
        tasks={"train": questions(tmp_path)},
        rewards=[{"kind": "regex", "pattern": "[.]"}],
        engine={"sampling": {"max_new_tokens": 8}},
        schedule={"steps": 1, "groups_per_step": 1, "group_size": 4},
    )
    result = run(load_config(config))
    assert len(result["rewards"]) == 1
