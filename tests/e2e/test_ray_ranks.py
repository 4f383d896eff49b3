"""A run on Ray whose trainer has several ranks: the death of a rank ends it by name, or it continues by itself."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.ray_parts import Run, run_command
from tests.e2e.test_kill import outcome_of
from tests.processes import survivors

PLAIN = str(Path(__file__).parent / "ray.yaml")

pytestmark = pytest.mark.timeout(900)


def test_a_rank_that_is_killed_in_mid_step_ends_the_run_by_name_or_is_started_again(
    ray_address: str, tmp_path: Path
) -> None:
    arguments = [
        PLAIN,
        "cluster.kind=ray",
        f"cluster.address={ray_address}",
        "cluster.ranks=2",
        "schedule.steps=12",
        "evaluation.every=0",
        "sync.method=nccl",
        "cluster.max_restarts=0",
    ]
    killed = 0.0

    def kill(run: Run) -> None:
        nonlocal killed
        run.until(lambda: run.steps >= 3)
        time.sleep(0.05)  # into the step, in which the other rank waits for it
        os.kill(run.pids()["trainer-rank-1"], signal.SIGKILL)
        killed = time.monotonic()

    run = run_command(tmp_path / "run", *arguments, meanwhile=kill)
    assert run.code == 1, run.said
    assert run.ended - killed < 120
    assert "found: trainer-rank-1 failed: " in run.said
    assert {"trainer", "trainer-rank-0", "trainer-rank-1", "explorer-0"} <= run.pids().keys()
    assert not survivors(run.pids().values())

    def kill_again(run: Run) -> None:
        run.until(lambda: run.steps >= 6)
        os.kill(run.pids()["trainer-rank-1"], signal.SIGKILL)

    arguments[-1] = "cluster.max_restarts=1"
    run = run_command(tmp_path / "run", *arguments, meanwhile=kill_again)
    assert run.code == 0, run.said
    assert "continuing from step-" in run.log
    assert "trainer-rank-1 died" in run.said
    whole = run_command(tmp_path / "whole", *arguments)
    assert whole.code == 0, whole.said
    assert outcome_of(run.dir) == outcome_of(whole.dir)
    rows = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/version" in row] == list(range(1, 13))
    checkpoint = run.dir / "checkpoints" / "step-000012"
    assert json.loads((checkpoint / "engine.json").read_text()) == {"version": 12}
