"""A run with an environment of verifiers, offline, by its own programs. `make test-verifiers` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_environments import GAME, config, contents, outcome, rollouts_in
from tests.e2e.test_kill import outcome_of

pytest.importorskip("verifiers", reason="verifiers is not installed here; `make test-verifiers` has it")

TASKSET = {"id": "verifiers_game"}
ENV = {
    "taskset": TASKSET,
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 12},
}


def test_a_taskset_trains_as_the_same_game_in_a_class(tmp_path: Path) -> None:
    few = {"size": 3, "seed": 8}
    by_class = {"kind": "multi_turn", "environment": f"{GAME}:Guess", "max_turns": 12}
    weights, expected = outcome(tmp_path / "class", **few, **by_class)
    assert sorted(len(rollout.turns) for rollout in expected) == [1, 1, 1, 1, 2, 3]

    run_dir, file = tmp_path / "run", tmp_path / "run.yaml"
    tasks = {"kind": "python", "source": "trivium.api:verifiers_rows", "args": TASKSET, "id": "key"}
    file.write_text(json.dumps(config(run_dir, **few, tasks=tasks, kind="verifiers", env=ENV)))
    ended = subprocess.run(
        [sys.executable, "-m", "trivium.cli", "run", str(file)], env=offline(tmp_path), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    rollouts = rollouts_in(run_dir)
    assert contents(rollouts) == contents(expected)  # the prompts, the sampled tokens and the rewards of every turn
    assert outcome_of(run_dir)["tensors"] == weights
    for rollout in rollouts:
        assert rollout.rewards.keys() == {"hit", "misses"}
        assert rollout.metrics["guesses"] == len(rollout.turns) - 1


def offline(folder: Path) -> dict[str, Any]:
    """An environment in which programs of verifiers run with the packages of this one: `uv`, which would download them,
    names this Python."""
    uv = folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\ncase "$*" in *--help) echo --script;; "python find"*) echo {sys.executable};; esac\n')
    uv.chmod(0o755)
    path = {"PATH": f"{uv.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**os.environ, **path, "HOME": str(folder)}
