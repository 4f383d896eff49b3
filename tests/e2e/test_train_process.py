"""A run whose models are trained in a process of their own: either process is killed, and the command goes on."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.test_kill import TINY, outcome_of
from tests.processes import Forked, commands, eventually, survivors

pytestmark = pytest.mark.slow

STEPS = 5 + 40


def arguments(run_dir: Path, own_process: bool = True) -> list[str]:
    how = f"stages.1.train.own_process={str(own_process).lower()}"
    return ["run", str(TINY), f"run.dir={run_dir}", how, f"stages.1.schedule.steps={STEPS - 5}", "evaluation.every=0"]


def text_of(command: Forked) -> str:
    return command.text


def has_trained(run_dir: Path, step: int) -> bool:
    path = run_dir / "metrics.jsonl"
    return path.is_file() and len(path.read_text().splitlines()) > step


def trainers_of(command: Forked) -> list[int]:
    """The train processes that a command started."""
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    return [int(pid) for pid in children if "train_process_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_either_process_may_be_killed_and_the_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        whole = start("whole", *arguments(tmp_path / "whole", own_process=False))
        assert whole.wait(120) == 0, whole.text
        for step, victim in ((12, "trainer"), (25, "run")):
            command = start(victim, *arguments(tmp_path / "killed"))
            eventually(partial(has_trained, tmp_path / "killed", step), 120, partial(text_of, command), command)
            (trainer,) = trainers_of(command)
            os.kill(trainer if victim == "trainer" else command.pid, signal.SIGKILL)
            assert command.wait(60) == (1 if victim == "trainer" else -9), command.text
            assert not survivors([trainer])
            assert "trainer's process failed: it ended with exit code -9" in command.text or victim == "run"
        last = start("last", *arguments(tmp_path / "killed"))
        assert last.wait(120) == 0, last.text
        replay = start("replay", "replay", str(tmp_path / "killed"), "--step", "30")
        assert replay.wait(120) == 0, replay.text
    assert outcome_of(tmp_path / "killed") == outcome_of(tmp_path / "whole")
