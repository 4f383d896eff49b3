"""How a run ends: by Ctrl-C with its last complete step saved, and not at all because its console is gone."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.killing import launches
from tests.e2e.test_kill import TINY, outcome_of
from tests.processes import Forked, commands, trivium
from tests.waiting import eventually

OVERRIDES = ("checkpoint.save_every=1000", "stages.1.schedule.steps=40")
FULL = "/dev/full"


def last_step(run_dir: Path) -> int:
    rows = run_dir / "metrics.jsonl"
    steps = re.findall(r'^{"step": (\d+)', rows.read_text() if rows.is_file() else "", re.MULTILINE)
    return max(map(int, steps), default=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of a run that is not interrupted."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert launches(TINY, run_dir, overrides=OVERRIDES) == ["finished"]
    return outcome_of(run_dir)


@pytest.mark.parametrize("own_process", ["false", "true"])
def test_ctrl_c_saves_the_last_complete_step(own_process: str, whole: dict[str, Any], tmp_path: Path) -> None:
    run_dir, overrides = tmp_path / "run", (*OVERRIDES, f"stages.1.train.own_process={own_process}")
    with commands(tmp_path) as start:
        command = start("run", "run", str(TINY), f"run.dir={run_dir}", *overrides)
        # In the second stage, which has no checkpoint of its own.
        eventually(lambda: last_step(run_dir) >= 8, 240, lambda: command.text, command)
        os.kill(command.pid, signal.SIGINT)
        command.ended(130)
    saved = max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))
    assert saved == last_step(run_dir) >= 8
    assert f"continues after step {saved}" in command.text
    assert launches(TINY, run_dir, overrides=overrides) == ["finished"]
    resumed = outcome_of(run_dir)
    last = [name for name in whole["tensors"] if "step-000045" in name]
    assert last
    assert {name: resumed["tensors"][name] for name in last} == {name: whole["tensors"][name] for name in last}
    assert resumed["metrics"] == whole["metrics"]


def with_output(path: str, *arguments: str) -> None:
    """The command `trivium`, whose standard output is `path`."""
    os.dup2(os.open(path, os.O_WRONLY), 1)
    trivium(*arguments)


@pytest.mark.parametrize("output", ["head -1", FULL])
def test_a_run_goes_on_without_its_console(output: str, tmp_path: Path) -> None:
    path, run_dir = FULL, tmp_path / "run"
    if output != FULL:
        os.mkfifo(path := str(tmp_path / "pipe"))
    arguments = ("run", str(TINY), f"run.dir={run_dir}", "monitors=[{kind: jsonl}, {kind: console}]")
    command = Forked("run", tmp_path / "errors", with_output, path, *arguments)
    try:
        if output != FULL:
            with open(path, encoding="utf-8") as pipe:
                assert pipe.readline()
        command.ended(seconds=240)
    finally:
        command.kill()
    log = (run_dir / "log.txt").read_text()
    assert log.count("cannot be written") == 1
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 11
