"""A recorded step computed again: equal where nothing was touched, and named by its stage where something was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from failing import refused
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.processes import Forked, trivium
from trivium.buffers.journal import read_recorded, write_groups
from trivium.buffers.step_log import STEPS, StepLog, read_steps
from trivium.config import config_from_mapping
from trivium.foundation.atomic import MANIFEST
from trivium.foundation.errors import DataError, RunDirError
from trivium.inspection.replay_step import StepReplay, replay
from trivium.inspection.rollouts import read_rollouts
from trivium.runtime.launch import run
from trivium.schedule import Schedule
from trivium.tasks.served import ServedTasks
from trivium.types import Group, Trajectory

GUESS = Path(__file__).parents[3] / "recipes" / "guess.py"
SUMS: dict[str, Any] = {
    "model": {"kind": "tiny", "alphabet": "0123456789+=", "layers": 1, "hidden": 16, "heads": 2, "max_position": 24},
    "cluster": {"threads": 1},
    "tasks": {"train": {"kind": "arithmetic", "max_operand": 9}},
    "rewards": [{"kind": "exact"}, {"kind": "regex", "pattern": "[0-4]", "name": "low"}],
    "algorithm": {"kind": "ppo", "mini_batches": 2, "kl": {"coef": 0.05, "place": "reward"}},
    "engine": {"sampling": {"max_new_tokens": 3}},
    "schedule": {"steps": 5, "groups_per_step": 3, "group_size": 4},
    "checkpoint": {"save_every": 2, "keep": 9},
    "monitors": [{"kind": "jsonl"}],
}
TURNS: dict[str, Any] = {
    "model": {"kind": "tiny", "layers": 1, "hidden": 16, "heads": 2, "max_position": 64},
    "cluster": {"threads": 1},
    "tasks": {"train": {"kind": "python", "source": f"{GUESS}:tasks", "id": "id"}},
    "workflow": {"kind": "multi_turn", "environment": f"{GUESS}:Guess", "max_turns": 4},
    "engine": {"sampling": {"max_new_tokens": 2}},
    "checkpoint": {"save_every": 4, "keep": 9},
    "monitors": [{"kind": "jsonl"}],
    "stages": [
        {
            "buffer": {"kind": "files"},
            "algorithm": {"kind": "sft"},
            "schedule": {"steps": 2, "groups_per_step": 10, "group_size": 1},
        },
        {
            "algorithm": {"kind": "grpo", "entropy": {"coef": 0.02}},
            "schedule": {"steps": 4, "groups_per_step": 4, "group_size": 4, "max_staleness": 1},
        },
    ],
}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PPO with a critic and mini-batches, tokens kept."""
    path = tmp_path_factory.mktemp("replay") / "sums"
    run(config_from_mapping({**SUMS, "run": {"dir": str(path), "keep": "tokens"}}))
    return path


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Supervised steps, then several turns with an environment, one step off and in order of arrival."""
    path = tmp_path_factory.mktemp("replay") / "turns"
    run(config_from_mapping({**TURNS, "run": {"dir": str(path)}}))
    return path


@pytest.fixture
def copied(sums: Path, tmp_path: Path) -> Path:
    """A run directory that a test may damage."""
    return Path(shutil.copytree(sums, tmp_path / "copied"))


def statuses(result: StepReplay) -> dict[str, str]:
    return {name: stage.status for name, stage in result.comparison.stages.items()}


def test_a_hundred_rollouts_and_five_whole_steps_are_equal_bit_for_bit(sums: Path, turns: Path) -> None:
    rollouts = 0
    for run_dir, steps in ((sums, (1, 2, 4, 5)), (turns, (3, 4, 6))):
        for step in steps:
            result = replay(run_dir, step, update=True)
            assert result.ok, result.text
            found = statuses(result)
            assert found.pop("advantage") == "equal"
            assert set(found.values()) == {"equal"}, result.text
            rollouts += result.rollouts
            assert {"policy"} <= set(result.chosen_metrics)
    assert rollouts >= 90


def test_a_task_is_replayed_with_its_own_loss_and_gradient(sums: Path) -> None:
    rollout = next(each for each in read_rollouts(sums, step=4) if each.sequences[0].columns["advantages"].any())
    result = replay(sums, 4, task=rollout.group.task.task_id)
    assert result.ok, result.text
    assert result.rollouts == 4
    assert statuses(result)["update"] == "not compared"
    assert result.chosen_metrics["policy"]["train/grad_norm/policy"] > 0
    assert result.chosen_metrics["critic"]["train/grad_norm/value"] > 0
    with refused(RunDirError, "'other'"):
        replay(sums, 4, task="other")


def test_supervised_steps_have_a_loss_and_an_update(turns: Path) -> None:
    result = replay(turns, 2, update=True)
    assert result.ok, result.text
    assert statuses(result)["loss"] == "equal"
    assert statuses(result)["update"] == "equal"  # with the checkpoint of the stage's end
    assert statuses(result)["tokens"] == "not compared"


# --------------------------------------------------------------------------- damage


def rewrite(run_dir: Path, step: int, change: Callable[[Trajectory], Trajectory]) -> None:
    """Changes the second rollout of each group of a journal file, with valid checksums."""
    path = run_dir / "rollouts" / "stage-0" / f"step-{step:06d}.msgpack"
    groups = [group for _, group in read_recorded(path)]

    def changed(group: Group) -> Group:
        first, second, *rest = group.trajectories
        return replace(group, trajectories=(first, change(second), *rest))

    write_groups(path, map(changed, groups))


def with_turn(change: Callable[[Any], dict[str, Any]]) -> Callable[[Trajectory], Trajectory]:
    return lambda t: replace(t, turns=(replace(t.turns[0], **change(t.turns[0])), *t.turns[1:]))


def kept(run_dir: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    path = run_dir / "tokens" / f"step-{step:06d}.safetensors"
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path, metadata)


def edit_lines(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def other_token(turn: Any) -> dict[str, Any]:
    return {"tokens": np.where(np.arange(len(turn.tokens)) == 0, (turn.tokens + 1) % 12, turn.tokens)}


def damage_weights(run_dir: Path, step: int) -> None:
    """Changes one weight of a checkpoint, with a manifest that agrees."""
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    path = folder / "policy" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + np.float32(0.5) * (np.arange(tensors[name].size) == 3).reshape(tensors[name].shape)
    save_file(tensors, path, {"format": "pt"})
    manifest = json.loads((folder / MANIFEST).read_text())
    content = path.read_bytes()
    manifest["files"]["policy/model.safetensors"] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "weights": lambda run: damage_weights(run, 2),
    "tokens": lambda run: rewrite(run, 3, with_turn(other_token)),
    "log-probs": lambda run: rewrite(run, 3, with_turn(lambda turn: {"log_prob": turn.log_prob - 1e-6})),
    "reward": lambda run: rewrite(run, 3, lambda t: replace(t, rewards={**t.rewards, "low": t.rewards["low"] + 0.5})),
    "advantage": lambda run: kept(run, 3, lambda arrays: arrays["advantages"].__imul__(np.float32(1.5))),
    "loss": lambda run: edit_lines(
        run / "metrics.jsonl", lambda row: row.update({"train/loss/policy": 0.25}) if row["step"] == 3 else None
    ),
    "update": lambda run: edit_lines(
        run / STEPS, lambda row: row.update(weights="0" * 32) if row.get("step") == 3 and "weights" in row else None
    ),
}


@pytest.mark.parametrize("stage", DAMAGES)
def test_damage_is_found_at_its_stage(stage: str, copied: Path) -> None:
    DAMAGES[stage](copied)
    result = replay(copied, 3, update=True)
    assert not result.ok
    first = result.comparison.first
    assert first is not None
    assert first.name == stage, result.text
    assert f"the first difference is of the stage {stage}: " in result.text


def test_another_machine_is_named_and_tolerated(copied: Path) -> None:
    edit_lines(copied / STEPS, lambda row: row.get("machine", {}).update(processor="another", threads="1"))
    rewrite(copied, 3, with_turn(lambda turn: {"log_prob": turn.log_prob - 1e-6}))
    result = replay(copied, 3, update=True)
    assert result.ok, result.text
    assert statuses(result)["log-probs"] == "within tolerance"
    assert "processor: another there" in result.text
    rewrite(copied, 3, with_turn(lambda turn: {"log_prob": turn.log_prob - 0.5}))
    assert replay(copied, 3).comparison.first is not None


def test_rollouts_that_go_another_way_elsewhere_are_scored_as_recorded(copied: Path) -> None:
    edit_lines(copied / STEPS, lambda row: row.get("machine", {}).update(processor="another"))
    rewrite(copied, 3, with_turn(other_token))
    result = replay(copied, 3)
    assert "differs at turn 1, token 0" in result.text
    first = result.comparison.first
    assert first is not None
    assert first.name == "log-probs"  # these tokens never had these probabilities
    assert "by the trainer" in first.differences[0]


# --------------------------------------------------------------------------- what is missing


def test_what_is_missing_is_named(copied: Path, tmp_path: Path) -> None:
    with refused(RunDirError, "1 to 5"):
        replay(copied, 9)
    with refused(RunDirError, tmp_path / "none"):
        replay(tmp_path / "none", 1)
    (copied / "rollouts" / "stage-0" / "step-000003.msgpack").unlink()
    with refused(DataError, "step"):
        replay(copied, 3)
    (copied / STEPS).unlink()
    with refused(RunDirError, copied / STEPS):
        replay(copied, 3)


def test_rewards_of_servers_are_not_asked_again(copied: Path) -> None:
    path = copied / "config.yaml"
    served = {"kind": "remote", "urls": ["http://127.0.0.1:9/none"], "name": "served"}
    config = yaml.safe_load(path.read_text())
    config["rewards"].append(served)
    path.write_text(yaml.safe_dump(config))
    for step in (1, 2, 3):
        rewrite(copied, step, lambda t: replace(t, rewards={**t.rewards, "served": 0.0}))
    result = replay(copied, 3)
    assert statuses(result)["reward"] == "equal", result.text
    assert "served asks a server" in result.text


def test_a_run_directory_that_moved_is_replayed(turns: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    turns.rename(moved)
    try:
        command = Forked("replay", tmp_path / "out", trivium, "replay", str(moved), "--step", "5", "--update").ended()
        assert "everything compared is equal" in command.text
    finally:
        moved.rename(turns)


def test_a_difference_ends_the_command_with_1(copied: Path, tmp_path: Path) -> None:
    DAMAGES["reward"](copied)
    command = Forked("replay", tmp_path / "out", trivium, "replay", str(copied), "--step", "3").ended(1)
    assert "the first difference is of the stage reward" in command.text


# --------------------------------------------------------------------------- steps.jsonl


def test_a_step_made_again_replaces_what_was_noted_of_it_and_of_later_ones(tmp_path: Path) -> None:
    tasks = ServedTasks(ServedTasks.Config(kind="served"), name="train", seed=0)
    schedule = Schedule(tasks, seed=0, groups_per_step=1)
    log = StepLog(tmp_path, schedule, {"threads": "1"})
    log.published(0, "a")
    for step, weights in ((1, "b"), (2, "c"), (3, "d")):
        log.took(step, [])
        log.published(step, weights)
    with (tmp_path / STEPS).open("a") as file:
        file.write('{"step": 4, "st')  # a process was killed here
    again = StepLog(tmp_path, schedule, {"threads": "2"})
    again.published(1, "b")
    again.took(2, [])
    records = read_steps(tmp_path)
    assert {step: record.weights for step, record in records.items()} == {0: "a", 1: "b", 2: ""}
    assert records[2].machine == {"threads": "2"}
    assert records[1].machine == {"threads": "1"}
    assert records[1].taken == ()
