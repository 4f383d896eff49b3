"""Trinity-RFT's CheckpointMonitor is one for all processes of a namespace, with Ray and without."""

from __future__ import annotations

import asyncio
import pickle
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.doors.e2e import trinity_savers
from tests.doors.e2e.trinity_savers import STEP, Start, intervals, on_ray
from tests.failing import refused
from trivium.foundation.errors import ConfigError, DataError, RoleFailed, RunDirError, SyncError, UnknownName
from trivium.frontdoors.trinity import CheckpointMonitor, SaveStrategy
from trivium.frontdoors.trinity.objects.boards.actors import forget


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


PLACES = [("n0", "a"), ("n0", "a"), ("n0", "b"), ("n1", "b")]


@pytest.mark.parametrize(
    ("strategy", "together"),
    [
        (SaveStrategy.SINGLE_THREAD, [[0], [1], [2], [3]]),
        (SaveStrategy.SINGLE_PROCESS, [[0, 1], [2], [3]]),
        (SaveStrategy.SINGLE_NODE, [[0, 1, 2], [3]]),
    ],
)
def test_savers_of_other_processes_take_turns(
    strategy: SaveStrategy, together: list[list[int]], start: Start, directory: Path, namespace: str
) -> None:
    monitor = CheckpointMonitor.get_actor(namespace, strategy, str(directory))
    asyncio.run(monitor.register_thread_count(STEP, checkpoint_thread_count=len(PLACES)))
    asyncio.run(monitor.monitor_step(STEP))
    of = {number: group for group in together for number in group}
    ends = [
        start(trinity_savers.save, namespace, strategy.value, place, number, of[number])
        for number, place in enumerate(PLACES)
    ]
    assert [end() for end in ends] == [0] * len(PLACES)
    spans = intervals(directory)
    for one, (began, ended) in enumerate(spans):
        for other, (began_too, ended_too) in enumerate(spans):
            assert other in of[one] or began >= ended_too or began_too >= ended, (one, other)
    assert monitor.latest_checkpoint_step == STEP
    assert (directory / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEP)


def test_a_saver_that_is_killed_gives_up_its_turn_and_its_step(start: Start, directory: Path, namespace: str) -> None:
    """With the arguments that Trinity's users pass."""
    monitor = CheckpointMonitor.get_actor(namespace, SaveStrategy.SINGLE_THREAD, str(directory))
    assert start(trinity_savers.die_while_saving, namespace, 7)() == -9

    async def next_saver() -> None:
        async with asyncio.timeout(60):
            await monitor.notify_started("node", "next")
            await monitor.notify_finished(8)
            with refused(RunDirError, "step 7", "doomed"):
                await monitor.completed(7)

    asyncio.run(next_saver())
    asyncio.run(monitor.monitor_step(7))
    assert monitor.latest_checkpoint_step == 0


def test_every_process_refuses_other_settings_and_finds_the_monitor_by_its_namespace(
    start: Start, directory: Path, namespace: str
) -> None:
    with refused(UnknownName, "checkpoint_monitor", namespace):
        CheckpointMonitor.get_actor(namespace)
    with refused(UnknownName, "'single'"):
        CheckpointMonitor.get_actor(namespace, "single", str(directory))  # type: ignore[arg-type]
    monitor = CheckpointMonitor.get_actor(namespace, SaveStrategy.SINGLE_NODE, str(directory))
    for other in (
        {"save_strategy": SaveStrategy.UNRESTRICTED},
        {"default_local_dir": str(directory / "b")},
        {"default_hdfs_dir": "file:///tmp/x"},
    ):
        for _ in range(2):
            with refused(ConfigError, next(iter(other))):
                CheckpointMonitor.get_actor(namespace, **other)  # type: ignore[arg-type]
    assert start(check_settings, namespace)() == 0
    assert CheckpointMonitor.get_actor(namespace) is monitor
    forget(namespace)  # no process has it: another one may be made
    again = CheckpointMonitor.get_actor(namespace, SaveStrategy.SINGLE_THREAD, str(directory))
    assert (again.save_strategy, again.latest_checkpoint_step) == (SaveStrategy.SINGLE_THREAD, 0)


def check_settings(directory: str, namespace: str) -> None:
    with refused(ConfigError, "save_strategy", "'single_thread'", "'single_node'"):
        CheckpointMonitor.get_actor(namespace, SaveStrategy.SINGLE_THREAD, directory)
    assert CheckpointMonitor.get_actor(namespace).save_strategy is SaveStrategy.SINGLE_NODE
    forget(namespace)  # a worker of Ray outlives its task


def test_a_complete_step_survives_the_monitor_whoever_wrote_it(start: Start, directory: Path, namespace: str) -> None:
    for step in (12, 4):
        assert start(trinity_savers.complete_elsewhere, namespace, step)() == 0
    monitor = CheckpointMonitor.get_actor(namespace, None, str(directory))
    assert (monitor.latest_checkpoint_step, monitor.latest_state_dict_step) == (12, 12)
    monitor.update_latest_state_dict_step(14)
    assert (monitor.latest_checkpoint_step, monitor.latest_state_dict_step) == (12, 14)
    (directory / "latest_state_dict_iteration.txt").write_text("fourteen")
    with refused(RunDirError, "latest_state_dict_iteration.txt", "fourteen"):
        _ = monitor.latest_state_dict_step


@pytest.mark.parametrize("step", [-1, 2.0, True, "3", None])
async def test_steps_are_integers_from_0(step: Any, tmp_path: Path) -> None:
    monitor = CheckpointMonitor(SaveStrategy.UNRESTRICTED, str(tmp_path))
    for update in (monitor.update_latest_checkpoint_step, monitor.update_latest_state_dict_step):
        with refused(DataError, "step", repr(step)):
            update(step)
    for call in (monitor.register_thread_count, monitor.monitor_step, monitor.notify_finished):
        with refused(DataError, "step", repr(step)):
            await call(step)
    with refused(DataError, "checkpoint_thread_count", repr(step)):
        await monitor.register_thread_count(1, checkpoint_thread_count=step)
    assert monitor.latest_state_dict_step == 0
    with refused(SyncError, "ray.init", "update_latest_checkpoint_step"):
        monitor.update_latest_checkpoint_step.remote(1)  # type: ignore[attr-defined]


def test_calls_as_users_of_ray_write_them(ray_address: str, directory: Path, namespace: str) -> None:
    """`.remote`, from Ray's workers, to a monitor whose first process is gone; handed over as an argument too."""
    import ray

    with on_ray(ray_address, directory) as start:
        first = CheckpointMonitor.get_actor(namespace, SaveStrategy.SINGLE_THREAD, str(directory))
        ends = [start(trinity_savers.save_as_users_of_ray_do, namespace, number) for number in range(3)]
        assert [end() for end in ends] == [0, 0, 0]
        spans = sorted(intervals(directory))
        assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))
        assert first.latest_checkpoint_step == 0
        monitor: Any = pickle.loads(pickle.dumps(first))
        ray.get(monitor.monitor_step.remote(STEP))
        assert first.latest_checkpoint_step == STEP

        async def awaited() -> None:
            await monitor.monitor_step.remote(STEP + 1, is_state_dict=True)
            with pytest.raises(DataError, match="step of 0"):  # a RayTaskError of that type
                await monitor.monitor_step.remote(-1)

        asyncio.run(awaited())
        assert first.latest_state_dict_step == STEP + 1


def test_a_process_that_has_left_ray_says_so(ray_address: str, directory: Path, namespace: str) -> None:
    """Ray itself would start an instance of its own for the next call."""
    import ray

    with on_ray(ray_address, directory):
        monitor = CheckpointMonitor.get_actor(namespace, None, str(directory))
    with refused(RoleFailed, "Ray"):
        asyncio.run(monitor.monitor_step(1))
    assert not ray.is_initialized()
    assert CheckpointMonitor.get_actor(namespace, None, str(directory)) is not monitor
