"""Who waits for whom, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from trivium.board import MemoryBoard
from trivium.errors import SyncError
from trivium.synchronizer import RunningStatus, Synchronizer


def synchronizer(deadline_s: float = 5.0) -> Synchronizer:
    return Synchronizer(MemoryBoard(), deadline_s=deadline_s)


async def test_statuses_are_counted() -> None:
    sync = synchronizer()
    assert sync.trainer_status is RunningStatus.STOPPED
    sync.set_trainer_status(RunningStatus.RUNNING)
    sync.set_explorer_status("a", RunningStatus.RUNNING)
    sync.set_explorer_status("b", RunningStatus.REQUIRE_SYNC)
    sync.set_explorer_status("a", RunningStatus.REQUIRE_SYNC)
    assert sync.trainer_status is RunningStatus.RUNNING
    assert sync.get_explorer_status_counts()[RunningStatus.REQUIRE_SYNC] == 2


async def test_next_version_waits_for_publish_from_another_thread() -> None:
    sync = synchronizer()
    await sync.join("a")
    waiting = asyncio.create_task(sync.next_version("a", None, newest=True))
    await asyncio.sleep(0)
    assert sync.get_explorer_status_counts()[RunningStatus.REQUIRE_SYNC] == 1
    await asyncio.to_thread(sync.publish, 0)
    assert await waiting == 0
    sync.adopted("a", 0)
    assert sync.get_explorer_status_counts()[RunningStatus.RUNNING] == 1


@pytest.mark.parametrize(("newest", "expected"), [(True, 4), (False, 3)])
async def test_an_explorer_follows_every_version_or_jumps_to_the_newest(newest: bool, expected: int) -> None:
    sync = synchronizer()
    for version in (1, 3, 4):
        sync.publish(version)
    assert await sync.next_version("a", 1, newest=newest) == expected


async def test_versions_only_grow_and_repeat_harmlessly() -> None:
    sync = synchronizer()
    sync.publish(2)
    sync.publish(2)
    assert sync.published == (2,)
    with pytest.raises(SyncError, match="version 2 is published already"):
        sync.publish(1)


async def test_a_wait_that_is_not_answered_names_both_sides() -> None:
    with pytest.raises(SyncError, match=r"explorer 'a' .version None. waits for the trainer's next version"):
        await synchronizer(0.02).next_version("a", None, newest=True)
    with pytest.raises(SyncError, match="trainer waits for an evaluation of version 1"):
        await synchronizer(0.02).evaluation(1)


async def test_the_deadline_counts_from_the_last_sign_of_life() -> None:
    sync = synchronizer(0.3)
    waiting = asyncio.create_task(sync.next_version("a", None, newest=True))
    for step in range(5):
        await asyncio.sleep(0.15)
        sync.trained(step)
    sync.publish(1)
    assert await waiting == 1
