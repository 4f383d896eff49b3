"""The contract of a buffer whose run is killed and resumed: kept, discarded, counted and retried groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.contract.slot_groups import (
    MakeBuffer,
    lease,
    leases,
    make_group,
    make_schedule,
    opened,
    rolled_out,
    saved,
    slots_of,
)
from trivium.foundation.errors import RunDirError
from trivium.schedule import Schedule
from trivium.testing.promises import require
from trivium.types import SERVED, Failure, Group, Lease, Task

if TYPE_CHECKING:
    from trivium.protocols import Buffer

if TYPE_CHECKING:
    pass


async def _check_restored(make: MakeBuffer) -> None:
    schedule = make_schedule(max_staleness=1, deterministic=True)
    buffer = await opened(make, "restored", schedule)
    held = await leases(buffer, 4)
    for each in held[:3]:
        await buffer.put("e", make_group(each))
    await buffer.take(2, 0)
    state = await saved(buffer)
    await buffer.put("e", make_group(held[3]))
    await buffer.take(2, 1)
    again = await opened(make, "restored", schedule, state, version=1)
    require(slots_of(await again.take(2, 1)) == [2, 3], "what was taken after the checkpoint is taken again")
    require(await lease(again, version=1) == Lease(4), "what was put after the checkpoint is not issued again")
    first = await opened(make, "restored", schedule)
    require(slots_of(await first.take(4, 0)) == [0, 1, 2, 3], "without a checkpoint the stage begins with what was put")


async def _check_any_checkpoint(make: MakeBuffer) -> None:
    schedule = make_schedule(max_staleness=2, deterministic=True)
    buffer = await opened(make, "any-checkpoint", schedule)
    await rolled_out(buffer, 6)
    states = [await saved(buffer)]
    for version in range(3):
        await buffer.take(2, version)
        states.append(await saved(buffer))
    for version in (2, 0, 3, 1):
        again = await opened(make, "any-checkpoint", schedule, states[version], version)
        require(await saved(again) == states[version], "an older checkpoint and then a newer one can be restored")
        if version < 3:
            slots = slots_of(await again.take(2, version))
            require(slots == [2 * version, 2 * version + 1], "a restored buffer continues where the checkpoint was")


async def _check_other_tasks(make: MakeBuffer) -> None:
    await rolled_out(await opened(make, "other-tasks", make_schedule()), 2)
    others: Any = [Task(f"other-{place}", (), {}) for place in range(3)]
    changed = make("other-tasks", Schedule(others, 0, groups_per_step=2, steps=9, shuffle=False))
    try:
        await changed.restore(None, 0)
    except RunDirError:
        pass
    else:
        require(False, "groups of other tasks than those of the schedule are refused: RunDirError")

    serving = await opened(make, "served-tasks", make_schedule())
    group = make_group(await lease(serving))
    await serving.put("e", replace(group, task=replace(group.task, task_id="chat-1", taskset=SERVED)))
    again = await opened(make, "served-tasks", make_schedule())
    require(await lease(again) == Lease(1), "groups of tasks that agents brought are kept")


async def _check_discarded(make: MakeBuffer) -> None:
    schedule = make_schedule(max_staleness=1, deterministic=True)
    buffer = await opened(make, "discarded", schedule)
    for version in range(3):
        await rolled_out(buffer, 4 if version == 0 else 2, version=version)
        await buffer.take(2, version)
    again = await opened(make, "discarded", schedule)
    require(await again.discard(3) == 0, "groups of older versions stay")
    await again.take(2, 0)
    await again.advance("e", 1)
    require(await again.discard(1) == 4, "groups of the version and of newer ones are discarded")
    require(await again.discard(1) == 0, "they are discarded once")
    require(slots_of(await again.take(2, 1)) == [2, 3], "groups of older versions stay")
    require(await rolled_out(again, 2, version=1) == [4, 5], "the slots of discarded groups are issued again")
    require(await again.discard(1) == 0, "groups of this session stay")
    require(slots_of(await again.take(2, 2)) == [4, 5], "new groups take the places of the discarded ones")
    resumed = await opened(make, "discarded", schedule)
    require(slots_of(await resumed.take(6, 0)) == [*range(6)], "a discarded group does not return in a later session")


async def _check_lost_future(make: MakeBuffer) -> None:
    schedule = make_schedule(max_staleness=1)
    buffer = await opened(make, "lost-future", schedule)
    await rolled_out(buffer, 4)
    await buffer.take(2, 0)
    state = await saved(buffer)
    await rolled_out(buffer, 1, version=1)
    again = await opened(make, "lost-future", schedule, state, version=0)
    promise = "an unordered run keeps no group of a version that the checkpoint does not have"
    require(await lease(again, version=1) == Lease(4), promise)
    require(slots_of(await again.take(2, 0)) == [2, 3], "groups of older versions stay")

    # Killed at version 2, resumed at 0, killed at 2 again: version 1 of the first session differs from that of the
    # second.
    schedule = make_schedule(max_staleness=2)
    buffer = await opened(make, "lost-twice", schedule)
    start = await saved(buffer)
    held = await lease(buffer), await lease(buffer, version=1)
    for version, each in enumerate(held):
        await buffer.put("e", make_group(each, version))
    second = await opened(make, "lost-twice", schedule, start)
    require(await lease(second) == Lease(1), promise)
    third = await opened(make, "lost-twice", schedule, await saved(second), version=2)
    require(await lease(third, version=2) == Lease(1), "a group that was lost once does not return")
    require(slots_of(await third.take(1, 2)) == [0], "groups of older versions stay")


async def _check_last_attempt(make: MakeBuffer) -> None:
    schedule = make_schedule(max_staleness=1, max_attempts=3)
    buffer = await opened(make, "last-attempt", schedule)
    start = await saved(buffer)
    await rolled_out(buffer, 4)
    await buffer.take(2, 0)
    taking = asyncio.ensure_future(buffer.take(2, 2))
    while (await buffer.counts())["evicted"] < 2:
        await asyncio.sleep(0.01)
    await buffer.put("e", make_group(await lease(buffer, version=2), version=0))
    taking.cancel()
    await asyncio.wait({taking})
    again = await opened(make, "last-attempt", schedule, start)
    require((await saved(again))["attempts"] == {"2": 1}, "the last attempt at a slot counts")
    taken = [(group.slot, group.attempt) for group in await again.take(4, 1)]
    require(taken == [(0, 0), (1, 0), (3, 0), (2, 1)], "groups are restored in order of arrival")
    require((await saved(again))["attempts"] == {}, "a checkpoint holds the attempts of open slots alone")


async def _check_counts(make: MakeBuffer) -> None:
    schedule = make_schedule()
    buffer = await opened(make, "counts", schedule)
    start = await saved(buffer)
    await buffer.put("e", make_group(await lease(buffer)).refused("unwanted"))
    await rolled_out(buffer, 2)
    await buffer.take(2, 0)
    later = await saved(buffer)
    await buffer.put("e", make_group(await lease(buffer, version=1), 1).refused("unwanted"))
    # In the state of the start, version 1 has dropped nothing. This must not admit another slot to version 0.
    for state, version, count, free in ((later, 1, 2, 4), (start, 0, 1, 3), (start, 0, 1, 3)):
        again = await opened(make, "counts", schedule, state, version)
        counted = {"evicted": 0, "called_off": 0, "given_up": 0, "dropped": count, "refused": 0}
        require(await again.counts() == counted, "a dropped group is counted once, however often the run resumes")
        require(await lease(again, version=1) == Lease(free), "a dropped group is not rolled out again")

    schedule = make_schedule(max_staleness=1)
    buffer = await opened(make, "lost-counts", schedule)
    for version in (0, 1):
        await buffer.put("e", make_group(await lease(buffer, version=version), version).refused("unwanted"))
    again = await opened(make, "lost-counts", schedule, start)
    require((await again.counts())["dropped"] == 1, "dropped groups of lost versions are not counted")
    require(await lease(again) == Lease(1), "their slots are issued again")


# --------------------------------------------------------------------------- failures that ended the run


async def _check_retries(make: MakeBuffer) -> None:
    sides = {2: "reward", 3: "workflow", 4: "prompt", 5: "reward"}
    schedule = make_schedule(groups_per_step=6)
    buffer = await opened(make, "retries", schedule)
    for each in await leases(buffer, 6):
        await buffer.put("e", _failed(each, sides.get(each.slot)))
    kept = await opened(make, "retries", schedule)
    require(slots_of(await kept.take(6, 0)) == [*range(6)], "failures are outcomes where they did not end the run")
    await kept.retry_on_resume(range(6))
    await _retried(await opened(make, "retries", schedule))
    again = await opened(make, "retries", schedule)
    for each in await _retried(again):  # the next session repeats unfinished retries
        await again.put("e", make_group(each))
    taken = await again.take(6, 0)
    require([bool(group.alive) for group in taken] == [True] * 4 + [False, True], "retried groups replace others")
    last = await opened(make, "retries", schedule)
    require(repr(await last.take(6, 0)) == repr(taken), "a retry ends once its group was put")


async def _retried(buffer: Buffer) -> list[Lease]:
    """The leases of the groups that `_check_retries` has failed."""
    held = await leases(buffer, 3)
    require(held == [Lease(2), Lease(3), Lease(5)], "failures that a retry may avert are issued again")
    recorded = [each.recorded and each.recorded.slot for each in held]
    require(recorded == [2, None, 5], "a group of which only rewards failed comes with its slot")
    return held


async def _check_outage(make: MakeBuffer) -> None:
    """Groups that were not trained on are retried, whenever they were put, including those of later steps."""
    schedule = make_schedule(max_staleness=2)
    buffer = await opened(make, "outage", schedule)
    start = await saved(buffer)
    held = [*await leases(buffer, 4), await lease(buffer, version=1), await lease(buffer)]
    for each in held[:3]:
        await buffer.put("e", _failed(each, "reward"))
    await buffer.take(2, 0)
    await buffer.put("e", _failed(held[4], "reward"))
    await buffer.retry_on_resume(slots_of(await buffer.take(2, 1)))
    await buffer.put("e", _failed(held[3], "workflow"))  # before its explorer is stopped
    again = await opened(make, "outage", schedule, start)
    retried = [(each.slot, each.recorded is not None) for each in await leases(again, 4)]
    require(retried == [(2, True), (3, False), (4, True), (5, False)], "groups that were not trained on are retried")
    require(slots_of(await again.take(2, 0)) == [0, 1], "groups that were trained on are not retried")


async def _check_discarded_retries(make: MakeBuffer) -> None:
    schedule = make_schedule(max_staleness=1, deterministic=True)
    buffer = await opened(make, "discarded-retries", schedule)
    await rolled_out(buffer, 4)
    await buffer.take(2, 0)
    for each in [await lease(buffer, version=1), await lease(buffer)]:
        await buffer.put("e", _failed(each, "reward", version=1))
    await buffer.retry_on_resume([4, 5])
    again = await opened(make, "discarded-retries", schedule)
    await again.take(2, 0)
    judging = await lease(again, version=1)
    require(judging.recorded is not None, "failures of rewards come with the group")
    require(await again.discard(1) == 2, "groups whose rewards are to be computed again are discarded as well")
    require([*await again.cancelled_leases("e")] == [judging], "their leases are cancelled")
    again_held = await leases(again, 2)
    require(again_held == [Lease(4, 1), Lease(5)], "the slots of discarded groups are issued again")
    require(not any(each.recorded for each in again_held), "a discarded group is not judged again")


async def _check_dropped_retry(make: MakeBuffer) -> None:
    schedule = make_schedule()
    buffer = await opened(make, "dropped-retry", schedule)
    held = await leases(buffer, 2)
    await buffer.put("e", make_group(held[0]))
    await buffer.put("e", _failed(held[1], "workflow").refused("no member succeeded"))
    await buffer.put("e", _failed(await lease(buffer), "reward"))  # for the first step, in place of the dropped group
    await buffer.retry_on_resume([1])
    again = await opened(make, "dropped-retry", schedule)
    require((await again.counts())["dropped"] == 0, "a dropped group is retried as well")
    require(await rolled_out(again, 1) == [1], "it is rolled out again")
    require(slots_of(await again.take(2, 0)) == [0, 1], "it replaces it in the step")
    last = await lease(again, version=1)
    require((last, last.recorded) == (Lease(2), None), "a slot issued in its place is rolled out again with it")


def _failed(lease: Lease, side: str | None, version: int = 0) -> Group:
    """A group whose members failed on this side."""
    group = make_group(lease, version)
    if side is None:
        return group
    failure = Failure(side, "Error", "an outage")
    return replace(group, trajectories=tuple(replace(t, failure=failure) for t in group.trajectories))


RESUME_CHECKS: tuple[Callable[[MakeBuffer], Awaitable[None]], ...] = (
    _check_restored,
    _check_any_checkpoint,
    _check_other_tasks,
    _check_discarded,
    _check_lost_future,
    _check_last_attempt,
    _check_counts,
    _check_retries,
    _check_outage,
    _check_discarded_retries,
    _check_dropped_retry,
)
