"""`trivium doctor` on the metrics of real runs: it finds what is wrong in sick ones, and nothing in healthy ones.

A directory of tests/data/runs has the config of a run and its metrics; `tools/record_runs.py` records them again. The
demos and `-real` are runs of SmolLM2-135M-Instruct with an adapter, the others of a tiny model that writes sums.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from record_runs import as_rows
from typer.testing import CliRunner

from trivium.cli import app
from trivium.monitors.health import RULES

RUNS = Path(__file__).parents[2] / "data" / "runs"
HEALTHY = sorted(path.name for path in RUNS.glob("healthy-*"))
SICK: dict[str, tuple[str, set[str]]] = {
    "sick-empty": ("empty completions", {"saturated rewards"}),
    "sick-one-answer": ("one answer", {"saturated rewards"}),
    "sick-length": ("reward hacking", {"length explosion", "truncation"}),
    "sick-high-lr": ("falling reward", {"equal rewards", "one answer"}),
    "sick-high-lr-real": ("kl drift", {"equal rewards", "truncation"}),
    "sick-sft-high-lr": ("rising loss", set()),
    "sick-dpo-high-lr": ("entropy collapse", set()),
    "sick-low-lr": ("learning rate too low", set()),
    "sick-zero-reward": ("equal rewards", set()),
    "sick-truncated": ("truncation", set()),
    "sick-truncated-real": ("truncation", {"equal rewards"}),
    "sick-stale": ("staleness", {"falling reward", "equal rewards"}),
    "sick-mismatch": ("engine mismatch", set()),
    "sick-entropy": ("entropy collapse", {"equal rewards", "one answer"}),
    "sick-kl": ("kl drift", set()),
}
"""By run: the rule of the illness, and the rules of its consequences."""


def doctor(name: str, run_dir: Path) -> tuple[int, set[str]]:
    """Writes the directory of the run; returns the exit code of the command and the rules that it names."""
    (run_dir / "config.yaml").write_text(f"extends: {RUNS / name / 'config.yaml'}\n")
    rows = as_rows(json.loads((RUNS / name / "metrics.json").read_text()))
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = CliRunner().invoke(app, ["doctor", str(run_dir)])
    names = {line.partition(": ")[0] for line in result.output.splitlines()}
    return result.exit_code, names & set(RULES.by_name)


@pytest.mark.parametrize("name", HEALTHY)
def test_doctor_is_silent_about_a_healthy_run(name: str, tmp_path: Path) -> None:
    assert doctor(name, tmp_path) == (0, set())


@pytest.mark.parametrize("name", SICK)
def test_doctor_finds_the_illness_of_a_run(name: str, tmp_path: Path) -> None:
    illness, consequences = SICK[name]
    assert doctor(name, tmp_path) == (1, {illness, *consequences})


def test_there_are_ten_of_each_and_none_is_left_out() -> None:
    assert len(HEALTHY) >= 10
    assert len(SICK) >= 10
    assert {path.parent.name for path in RUNS.glob("*/metrics.json")} == {*HEALTHY, *SICK}
