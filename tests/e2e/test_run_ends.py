"""How a run ends: by Ctrl-C with its last complete step saved, and not at all because its console is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.killing import launches
from tests.e2e.test_kill import TINY, outcome_of

pytestmark = pytest.mark.slow

UNSAVED = ("checkpoint.save_every=1000",)


def started(run_dir: Path, *overrides: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trivium.cli", "run", str(TINY), f"run.dir={run_dir}", *overrides]
    # A background job of a shell, such as these tests may be, ignores SIGINT, and so would its children.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, preexec_fn=listen)


def last_step(run_dir: Path) -> int:
    rows = run_dir / "metrics.jsonl"
    steps = re.findall(r'^{"step": (\d+)', rows.read_text() if rows.is_file() else "", re.MULTILINE)
    return max(map(int, steps), default=0)


@pytest.mark.parametrize("own_process", ["false", "true"])
def test_ctrl_c_saves_the_last_complete_step(own_process: str, tmp_path: Path) -> None:
    overrides = (*UNSAVED, "stages.1.schedule.steps=40", f"train.own_process={own_process}")
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    process = started(run_dir, *overrides)
    deadline = time.monotonic() + 120
    while last_step(run_dir) < 8:  # in the second stage, which has no checkpoint of its own
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 130, text
    saved = max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))
    assert saved == last_step(run_dir) >= 8
    assert f"continues after step {saved}" in text
    assert launches(TINY, run_dir, overrides=overrides) == ["finished"]
    assert launches(TINY, whole, overrides=overrides) == ["finished"]
    resumed, expected = outcome_of(run_dir), outcome_of(whole)
    assert resumed["tensors"].keys() >= {name for name in expected["tensors"] if "step-000045" in name}
    for name in (name for name in expected["tensors"] if "step-000045" in name):
        assert resumed["tensors"][name] == expected["tensors"][name]
    assert resumed["metrics"] == expected["metrics"]


@pytest.mark.parametrize("output", ["head -1", "/dev/full"])
def test_a_run_goes_on_without_its_console(output: str, tmp_path: Path) -> None:
    console = "monitors=[{kind: jsonl}, {kind: console}]"
    if output == "/dev/full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
        process = started(tmp_path / "run", console, stdout=descriptor)
        os.close(descriptor)
    else:
        process = started(tmp_path / "run", console)
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        process.stdout = None
    _, text = process.communicate(timeout=120)
    assert process.returncode == 0, text
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("cannot be written") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 11
