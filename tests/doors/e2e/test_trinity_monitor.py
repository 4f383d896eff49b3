"""Trinity-RFT's CheckpointMonitor is a Ray actor for all processes of a namespace."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.doors.e2e import trinity_savers
from tests.doors.e2e.trinity_savers import STEP, intervals
from tests.failing import refused
from trivium.foundation.errors import ConfigError, DataError, SyncError, UnknownName
from trivium.frontdoors.trinity import CheckpointMonitor, SaveStrategy
from trivium.frontdoors.trinity.objects.boards import named_actors


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


PLACES = [("n0", "a"), ("n0", "a"), ("n0", "b"), ("n1", "b")]


def test_savers_of_other_processes_take_turns(connected: None, directory: Path, namespace: str) -> None:
    """Which savers of which strategy do: doors/trinity/test_save_monitor."""
    strategy, together = SaveStrategy.SINGLE_PROCESS, [[0, 1], [2], [3]]
    monitor: Any = CheckpointMonitor.get_actor(namespace, strategy, str(directory))
    ray.get(monitor.register_thread_count.remote(STEP, checkpoint_thread_count=len(PLACES)))
    ray.get(monitor.monitor_step.remote(STEP))
    of = {number: group for group in together for number in group}
    task: Any = ray.remote(num_cpus=0)(trinity_savers.save)
    saving = [task.remote(str(directory), namespace, place, n, of[n]) for n, place in enumerate(PLACES)]
    ray.get(saving, timeout=120)
    spans = intervals(directory)
    for one, (began, ended) in enumerate(spans):
        for other, (began_too, ended_too) in enumerate(spans):
            assert other in of[one] or began >= ended_too or began_too >= ended, (one, other)
    assert (directory / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEP)


def test_other_settings_are_refused_and_the_namespace_finds_the_monitor(
    connected: None, directory: Path, namespace: str
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
        with refused(ConfigError, next(iter(other))):
            CheckpointMonitor.get_actor(namespace, **other)  # type: ignore[arg-type]
    assert CheckpointMonitor.get_actor(namespace)._actor_id == monitor._actor_id
    elsewhere = CheckpointMonitor.get_actor(f"{namespace}/other", None, str(directory))
    assert elsewhere._actor_id != monitor._actor_id


def test_an_actor_that_does_not_start_is_an_error_with_all_parts(
    connected: None, directory: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trivium.cluster.actors import ActorDied

    with refused(ConfigError, "nosuch://x"):
        CheckpointMonitor.get_actor(namespace, None, str(directory), "nosuch://x")
    with refused(ActorDied, "broken"):  # Ray may report the end of the process instead of its cause
        named_actors.named_actor(lambda: trinity_savers.Broken, "broken", namespace, (), {})
    monkeypatch.setattr(named_actors, "_STARTS_S", 1.0)
    with refused(SyncError, "hung", namespace):
        named_actors.named_actor(lambda: trinity_savers.Hung, "hung", namespace, (), {})
    named_actors.end_actor(ray.get_actor("hung", namespace=namespace), "hung", namespace)


def test_calls_are_awaited_and_their_errors_are_raised(connected: None, directory: Path, namespace: str) -> None:
    monitor: Any = CheckpointMonitor.get_actor(namespace, None, str(directory))

    async def awaited() -> None:
        await monitor.monitor_step.remote(STEP, is_state_dict=True)
        with pytest.raises(DataError, match="step of 0"):  # a RayTaskError of that type
            await monitor.monitor_step.remote(-1)

    asyncio.run(awaited())
    assert (directory / "latest_state_dict_iteration.txt").read_text().strip() == str(STEP)
