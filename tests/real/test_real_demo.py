"""`trivium demo` trains the real model, shows its answers before and after, and only reads a complete run. The README's
own reward trains it, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.real.sections import metrics_of
from trivium.cli import show_demo
from trivium.config import load_config
from trivium.runtime.demo import demo, is_installed, questions
from trivium.runtime.launch import run

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TWO_STEPS = (
    "schedule={steps: 2, groups_per_step: 2, group_size: 4}",
    "algorithm.mini_batches=1",
    "train.optimizer.lr=1.0e-2",
)


def test_the_demo_trains_and_shows_its_answers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_installed() == model.is_dir()
    # In 16 rollouts hardly one earns the demo's own reward.
    (tmp_path / "reward.py").write_text("def letters(completion):\n    return float(len(completion))\n")
    overrides = (*TWO_STEPS, f"rewards=[{tmp_path}/reward.py:letters]")
    summary, answers = demo(tmp_path / "run", 0, *overrides)
    assert summary["steps"] == len(summary["rewards"]) == 2
    assert answers.prompts == [row["prompt"] for row in questions(held_out=True)]
    for rows in (answers.before, answers.after):
        assert [row["prompt"][-1]["content"] for row in rows] == answers.prompts
        assert [row["reward"] for row in rows] == [len(row["completion"]) for row in rows]
    assert [row["completion"] for row in answers.before] != [row["completion"] for row in answers.after]

    written = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again, same = demo(tmp_path / "run", 0, *overrides)
    assert (again["rewards"], same) == (summary["rewards"], answers)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == written

    show_demo({**summary, "report": "report.html"}, answers)
    shown = capsys.readouterr().out
    for text in (
        "in one sentence of at most twelve words.",
        answers.prompts[0],
        repr(answers.after[7]["completion"].strip()),
        str(tmp_path / "run"),
    ):
        assert text in shown


def test_the_reward_of_the_readme_trains_its_model(model: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"```(?:python|yaml)\n# (my_[\w.]+)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    run_dir = tmp_path / "run"
    smaller = (f"run.dir={run_dir}", "schedule={steps: 2, groups_per_step: 2, group_size: 4}")
    config = load_config(tmp_path / "my_run.yaml", smaller)
    assert getattr(config.model, "path", None) == str(model)
    run(config)
    rewards = [step["reward/mean"] for step in metrics_of(run_dir)]
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)
    assert max(step["reward/max"] - step["reward/min"] for step in metrics_of(run_dir)) > 0
