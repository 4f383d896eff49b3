"""Recorded rollouts come once more as they were, in slot order, to the end of the data; damage is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from configs import tiny_model
from failing import refused

from tests.contract.buffer_contract import check_read_buffer
from tests.sessions import RENDERER, TASKS
from trivium.buffers.journal import Journal, write_groups
from trivium.buffers.recorded import RecordedBuffer
from trivium.config import config_from_mapping
from trivium.errors import ConfigError, DataError, RunDirError
from trivium.runtime.launch import run as launch
from trivium.schedule import Schedule
from trivium.types import Failure, Group, StopReason, Trajectory, Turn


def group(slot: int, *, version: int = 0, members: int = 2, attempt: int = 0, dropped: str = "") -> Group:
    turn = Turn(
        np.array([3, 4 + slot], np.int32),
        np.array([5, 6, 7], np.int32),
        np.array([-0.5, -1.25, -slot], np.float32),
        np.array([version, version, version + 1], np.int32),
        StopReason.EOS,
        "567",
    )
    played = [Trajectory(i, (turn,), {"exact": float(i)}) for i in range(members - 1)]
    failed = Trajectory(members - 1, (), failure=Failure("reward", "ValueError", "no digits"))
    task = TASKS[slot % len(TASKS)]
    return Group(slot, task, (*played, failed), slot // len(TASKS), attempt, version, dropped=dropped)


def recorded(*paths: Path, group_size: int = 2) -> RecordedBuffer:
    tasks: Any = TASKS
    schedule = Schedule(tasks, seed=0, groups_per_step=2, group_size=group_size, steps=50, first_version=3)
    config = RecordedBuffer.Config.model_validate({"path": [str(path) for path in paths]})
    return RecordedBuffer(config, schedule=schedule, rollouts=Path("unused"), renderer=RENDERER, deadline_s=1)


async def everything(buffer: RecordedBuffer, at_once: int = 1) -> list[Group]:
    await buffer.restore(None, 3)
    groups: list[Group] = []
    try:
        while True:
            groups += await buffer.take(at_once, 3 + len(groups) // at_once)
    except StopAsyncIteration:
        return groups


def same(found: Sequence[Group], expected: Sequence[Group]) -> bool:
    return [repr(one) for one in found] == [repr(one) for one in expected]


async def test_it_keeps_the_contract_of_buffers_over_data(tmp_path: Path) -> None:
    write_groups(tmp_path / "recorded", [group(slot) for slot in (4, 1, 0, 2, 3, 5)])
    await check_read_buffer(lambda: recorded(tmp_path / "recorded"))


async def test_what_a_run_journaled_comes_back_as_it_was_in_slot_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    played = {slot: group(slot, version=slot // 2) for slot in range(6)}
    for slot in (1, 0, 3, 2, 5, 4):
        journal.append(slot // 2 + 1, played[slot])
    assert same(await everything(recorded(tmp_path)), list(played.values()))
    assert same(await everything(recorded(tmp_path), at_once=4), list(played.values())[:4])  # a whole step or none
    assert [g.oldest_version for g in await everything(recorded(tmp_path))] == [0, 0, 1, 1, 2, 2]


async def test_of_a_slot_the_last_attempt_counts_and_nothing_of_what_was_dropped(tmp_path: Path) -> None:
    kept = [group(0), group(1, version=2, attempt=1), group(3)]
    spoiled = [group(1), group(2), group(2, attempt=1, dropped="dull")]
    write_groups(tmp_path / "file", [*spoiled, *kept])
    found = await everything(recorded(tmp_path / "file"))
    assert same(found, [kept[0], kept[1], replace(kept[2], slot=2)])  # slots are counted without gaps


async def test_several_recordings_follow_one_another_and_no_two_groups_pass_for_one(tmp_path: Path) -> None:
    first, second = [group(slot) for slot in (1, 0)], [group(slot, version=9) for slot in range(9)]
    for number, groups in (("10", second), ("2", first)):
        write_groups(tmp_path / f"stage-{number}" / "step-000001.msgpack", groups)
    for paths in ([tmp_path], [tmp_path / "stage-2", tmp_path / "stage-10" / "step-000001.msgpack"]):
        found = await everything(recorded(*paths))
        assert [g.slot for g in found] == list(range(11))
        assert [g.oldest_version for g in found] == [0] * 2 + [9] * 9
        assert len({g.group_id for g in found}) == 11
        assert [g.epoch for g in found] == [0, 0, *[1] * 7, 2, 2]


async def test_a_torn_tail_is_left_out_and_left_alone_and_damage_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    write_groups(path, [group(0), group(1)])
    whole = path.read_bytes()
    for torn in (whole[:-1], whole + b"\x01\x02"):  # the run that writes it may be at it
        path.write_bytes(torn)
        found = await everything(recorded(path))
        assert same(found, [group(0), group(1)][: len(found)])
        assert len(found) == (1 if len(torn) < len(whole) else 2)
        assert path.read_bytes() == torn
        assert "an incomplete record" in caplog.text
    path.write_bytes(whole[:20] + b"?" + whole[21:])
    with refused(DataError, path, "byte 0", "bytes differ"):
        await recorded(path).restore(None, 0)
    path.write_bytes(b"\x00" * 8)
    with refused(DataError, path, "byte 0", "no group"):
        await recorded(path).restore(None, 0)
    buffer = recorded(path)
    write_groups(path, [group(0), group(1)])
    await buffer.restore(None, 0)
    write_groups(path, [group(7)])
    with refused(DataError, path, "has changed"):
        await buffer.taken_groups([1])


async def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with refused(DataError, tmp_path / "nowhere", "no such"):
        recorded(tmp_path / "nowhere")
    with refused(DataError, tmp_path, ".msgpack"):
        recorded(tmp_path)
    write_groups(tmp_path / "file", [group(0), group(1)])
    with refused(DataError, "schedule.group_size", "group 0", "2 members"):
        await recorded(tmp_path / "file", group_size=5).take(1, 0)
    state = {"cursor": 2, "recorded": 3}
    with refused(RunDirError, "2 groups", "3"):
        await recorded(tmp_path / "file").restore(state, 0)


# --------------------------------------------------------------------------- in a run


def config(run_dir: Path, **more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {
        "run": {"dir": str(run_dir)},
        "model": tiny_model(hidden=16, mlp=16),
        "tasks": {"train": {"kind": "arithmetic", "max_operand": 4}},
        "rewards": [{"kind": "exact"}],
        "engine": {"sampling": {"max_new_tokens": 3}},
        "schedule": {"steps": 3, "groups_per_step": 2, "group_size": 2},
        "algorithm": {"kind": "ppo", "refill": 0},
        "train": {"optimizer": {"lr": 1.0e-2}},
        "checkpoint": {"save_every": 1, "keep": 1},
        "monitors": [{"kind": "jsonl"}],
    }
    return said | more


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run_dir / "checkpoints").rglob("*.safetensors"))]


def test_training_on_what_a_run_recorded_is_that_run_again_resumed_or_not(tmp_path: Path) -> None:
    live = config_from_mapping(config(tmp_path / "live"))
    assert launch(live)["steps"] == 3
    buffer = {"kind": "recorded", "path": str(tmp_path / "live" / "rollouts")}
    said = config(tmp_path / "again", buffer=buffer)
    launch(config_from_mapping(said | {"schedule": {**said["schedule"], "steps": 2}}))
    summary = launch(config_from_mapping(said | {"schedule": {**said["schedule"], "steps": 9}}))  # there is no more
    assert summary["steps"] == 3
    lived, again = rows(tmp_path / "live"), rows(tmp_path / "again")
    learned = [key for key in lived[0] if key.startswith(("train/", "reward/", "sample/", "rollout/staleness"))]
    assert len(learned) > 10
    assert [{key: row[key] for key in learned} for row in again] == [
        {key: row[key] for key in learned} for row in lived
    ]
    assert weights(tmp_path / "again") == weights(tmp_path / "live")
    assert not list((tmp_path / "again" / "rollouts").rglob("*.msgpack"))  # nobody explored


def test_a_config_that_nothing_can_come_of_is_refused(tmp_path: Path) -> None:
    buffer = {"kind": "recorded", "path": "x", "operators": [{"kind": "dedup"}], "strategy": {"kind": "replay"}}
    with refused(ConfigError) as caught:
        config_from_mapping(config(tmp_path, buffer=buffer))
    assert {problem.where for problem in caught.value.problems} == {"buffer.operators[0]", "buffer.strategy.kind"}
    with refused(ConfigError, "buffer.path"):
        config_from_mapping(config(tmp_path, buffer={"kind": "recorded"}))
