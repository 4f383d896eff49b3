"""Who holds a run directory: a run, and the processes that write for it, which may be there before it and after it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from failing import refused

from tests.processes import Forked
from tests.waiting import eventually
from trivium.config import RunConfig, load_config
from trivium.foundation.concurrency import ProcessLife
from trivium.foundation.errors import RunDirError
from trivium.runtime.run_dir import FORM, hold_with, open_run_dir

TINY = Path(__file__).parents[2] / "e2e" / "tiny.yaml"


def config_in(run_dir: Path) -> RunConfig:
    return load_config(TINY, [f"run.dir={run_dir}"])


def join(run_dir: Path, owner: int) -> None:
    hold_with(ProcessLife.of(owner), run_dir)
    os.write(1, b"held")
    threading.Event().wait(60)


def run(run_dir: Path) -> None:
    with open_run_dir(config_in(run_dir)):
        os.write(1, b"held")
        threading.Event().wait(60)


@contextmanager
def process(tmp_path: Path, name: str, work: object, *arguments: object) -> Generator[Forked]:
    forked = Forked(name, tmp_path / f"{name}.out", work, *arguments)  # pyright: ignore[reportArgumentType]
    try:
        eventually(lambda: "held" in forked.text, 60, lambda: forked.text, forked)
        yield forked
    finally:
        forked.kill()


@pytest.mark.parametrize("before", ["nothing", "a run that ended", "a killed run"])
def test_workers_may_be_there_before_their_run(before: str, tmp_path: Path) -> None:
    """As those of RayPPOTrainer, which starts them before `fit`."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if before == "a run that ended":
        (run_dir / ".lock").write_text('ended: {"host": "elsewhere", "pid": 1, "started": ""}')
    if before == "a killed run":
        with process(tmp_path, "killed", run, run_dir) as killed:
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait(120)
    workers = [process(tmp_path, f"worker-{n}", join, run_dir, os.getpid()) for n in range(2)]
    with workers[0], workers[1]:
        for _ in range(2):
            with (
                open_run_dir(config_in(run_dir)),
                refused(RunDirError, run_dir, "run.dir"),
                open_run_dir(config_in(run_dir)),  # of this process as well
            ):
                pass


def test_a_worker_is_refused_while_another_process_runs_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with process(tmp_path, "run", run, run_dir) as other:
        worker = Forked("worker", tmp_path / "worker.out", join, run_dir, os.getpid()).ended(1, seconds=60)
        assert f"process {other.pid} on host" in worker.text


@pytest.mark.parametrize(("plan", "form"), [(f"form: {FORM + 1}\nthreads: 1\n", FORM + 1), ("threads: 1\n", 0)])
def test_a_directory_of_another_form_is_refused(plan: str, form: int, tmp_path: Path) -> None:
    for _ in range(2):
        with open_run_dir(config_in(tmp_path)):
            pass
    (tmp_path / "plan.yaml").write_text(plan)
    with refused(RunDirError, tmp_path, form, FORM), open_run_dir(config_in(tmp_path)):
        pass
