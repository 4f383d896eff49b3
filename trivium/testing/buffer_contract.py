"""What a buffer promises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trivium.errors import DataError
from trivium.schedule import Schedule
from trivium.testing.promises import require
from trivium.types import Failure, Group, Lease, Message, StopReason, Task, Trajectory, Turn, capabilities_of

if TYPE_CHECKING:
    from trivium.protocols import Buffer


MakeBuffer = Callable[[str, Schedule], "Buffer"]


async def check_buffer(make: MakeBuffer, *, shared: bool = False, patience_s: float = 60.0) -> None:
    """A buffer admits, orders, evicts, calls off and replaces as the schedule says, and loses and repeats nothing.

    `make(name, schedule)` builds an end of the buffer `name`, empty the first time; the next end of the same name finds
    what the one before it left. `shared`: several ends of one name work at the same time. Its own deadline must not be
    shorter than `patience_s`.
    """
    checks = (
        _check_order,
        _check_admission,
        _check_eviction,
        _check_release,
        _check_calling_off,
        _check_dropped,
        _check_refused,
        _check_cancelled_waits,
        _check_restored,
        _check_discarded,
        _check_lost_future,
        _check_retries,
        _check_close,
    )
    for check in checks:
        async with asyncio.timeout(patience_s):
            await check(make)
    async with asyncio.timeout(patience_s):
        await _check_company(make, shared)


async def check_read_buffer(make: Callable[[], Buffer], *, patience_s: float = 60.0) -> None:
    """A buffer over data that exists already gives it in one order, to every caller, and needs no explorer.

    `make()` builds an end of it before version 0 of a stage, over data for at least three steps of two groups.
    """
    async with asyncio.timeout(patience_s):
        buffer, again = make(), make()
        await buffer.restore(None, 0)
        await again.restore(None, 0)
        unfilled = not capabilities_of(buffer).explored
        require(unfilled, "a buffer that no explorer fills declares Capabilities(explored=False)")
        first, second = await buffer.take(2, 0), await buffer.take(2, 1)
        state = json.loads(json.dumps(await buffer.state()))
        third = await buffer.take(2, 2)
        slots = _slots([*first, *second, *third])
        require(len(set(slots)) == 6, "no group is given twice")
        require(repr(await again.take(2, 0)) == repr(first), "the data and its order are the same for every caller")
        require(
            repr(await again.taken_groups(slots[1::-1])) == repr(first[::-1]),
            "taken_groups returns groups that were taken",
        )
        resumed = make()
        await resumed.restore(state, 2)
        require(repr(await resumed.take(2, 2)) == repr(third), "what was taken after the checkpoint is taken again")
        await _refused(buffer.lease("e", wait=False), "there are no slots to explore")
        await _refused(buffer.put("e", first[0]), "nothing is put")
        require(await buffer.release("e") == 0, "there are no leases to release")
        await buffer.drain(0)
        await buffer.close()


async def _check_order(make: MakeBuffer) -> None:
    buffer = await _opened(make, "order", _schedule())
    held = [await _lease(buffer) for _ in range(2)]
    require([lease.slot for lease in held] == [0, 1], "slots are issued from 0, in order")
    await buffer.put("e", _group(held[1]))
    taking = asyncio.ensure_future(buffer.take(2, 0))
    await asyncio.sleep(0.1)
    require(not taking.done(), "take waits for as many groups as were asked for")
    await _refused(buffer.put("e", _group(held[1])), "a group is put once")
    await buffer.put("e", _group(held[0]))
    taken = await taking
    require(_slots(taken) == [0, 1], "with max_staleness 0 groups are taken in slot order")
    again = await buffer.taken_groups([1, 0])
    require(_slots(again) == [1, 0], "taken_groups returns groups that were taken, as asked for")
    require(repr(again[1]) == repr(taken[0]), "a group comes out as it went in")

    buffer = await _opened(make, "arrival", _schedule(max_staleness=4))
    held = [await _lease(buffer) for _ in range(3)]
    for lease in (held[2], held[0], held[1]):
        await buffer.put("e", _group(lease))
    taken = await buffer.take(2, 0) + await buffer.take(1, 0)
    require(_slots(taken) == [2, 0, 1], "with staleness groups are taken in order of arrival")


async def _check_admission(make: MakeBuffer) -> None:
    buffer = await _opened(make, "admission", _schedule(max_staleness=1))
    require(await buffer.lease("late", wait=False) is None, "who has adopted no version gets no slot")
    slots = [(await _lease(buffer)).slot for _ in range(4)]
    require(slots == [0, 1, 2, 3], "version v admits (v + max_staleness + 1) * groups_per_step slots")
    require(await buffer.lease("e", wait=False) is None, "without wait, lease returns None where nothing is free")
    waiting = asyncio.ensure_future(buffer.lease("e"))
    draining = asyncio.ensure_future(buffer.drain(0))
    await asyncio.sleep(0.1)
    require(not waiting.done(), "lease waits for a slot")
    for slot in slots[:3]:
        await buffer.put("e", _group(Lease(slot)))
    await asyncio.sleep(0.1)
    require(not draining.done(), "drain waits for every slot that the version admits")
    await buffer.put("e", _group(Lease(3)))
    await draining
    await buffer.advance("e", 1)
    require(await waiting == Lease(4), "a newer version admits more slots, and wakes who waits for one")
    await _refused(buffer.put("other", _group(Lease(4))), "only who leased a slot puts its group")
    await _refused(buffer.put("e", _group(Lease(77))), "only what was leased is put")

    buffer = await _opened(make, "left behind", _schedule())
    for lease in [await _lease(buffer) for _ in range(2)]:
        await buffer.put("e", _group(lease))
    await buffer.take(2, 0)
    await buffer.advance("ahead", 1)
    later = [await buffer.lease("ahead") for _ in range(2)]
    assert later[1] is not None
    await buffer.put("ahead", _group(later[1], 1).refused("a filter"))
    await buffer.release("ahead")  # the slot before the one that was dropped is free again
    draining = asyncio.ensure_future(buffer.drain(0))
    require(
        bool((await asyncio.wait({draining}, timeout=5))[0]), "drain returns where a version is too old for any slot"
    )
    await buffer.advance("e", 1)
    require(await buffer.lease("e") == later[0], "a slot is issued again when its explorer is gone")


async def _check_eviction(make: MakeBuffer) -> None:
    buffer = await _opened(make, "eviction", _schedule(max_staleness=1, max_attempts=2))
    for lease in [await _lease(buffer) for _ in range(4)]:
        await buffer.put("e", _group(lease))
    await buffer.take(1, 0)
    taking = asyncio.ensure_future(buffer.take(1, 2))
    await asyncio.sleep(0.1)
    await buffer.advance("e", 2)
    first = await _lease(buffer)
    require(first == Lease(1, attempt=1), "what became too stale is issued again, as another attempt")
    await buffer.put("e", _group(first, version=0))
    await _until(buffer, evicted=4, given_up=1)  # after max_attempts another slot takes its place
    rest = [await _lease(buffer) for _ in range(6)]
    promised = [Lease(2, 1), Lease(3, 1), *map(Lease, range(4, 8))]
    require(rest == promised, "evicted slots come first, then new ones")
    last = await buffer.lease("e", wait=False)
    require(last == Lease(8), "a slot that is given up for good is replaced by another one")
    await buffer.put("e", _group(rest[3], version=2))
    require(_slots(await taking) == [5], "take never returns what is staler than max_staleness")


async def _check_release(make: MakeBuffer) -> None:
    buffer = await _opened(make, "release", _schedule())
    await buffer.advance("heir", 0)
    held = [await _lease(buffer) for _ in range(2)]
    await buffer.put("e", _group(held[0]))
    require(await buffer.release("e") == 1, "release says how many leases came back")
    require(await buffer.lease("e", wait=False) is None, "who was released gets nothing before it adopts a version")
    require(await buffer.lease("heir") == held[1], "a released lease is issued again, as the same attempt")
    await _refused(buffer.put("e", _group(held[1])), "the lease of who was released is no longer its own")
    await buffer.put("heir", _group(held[1]))
    require(_slots(await buffer.take(2, 0)) == [0, 1], "what was put before a release stays")


async def _check_calling_off(make: MakeBuffer) -> None:
    buffer = await _opened(make, "calling-off", _schedule(max_staleness=1))
    hearing = asyncio.ensure_future(buffer.cancelled_leases("e"))
    held = [await _lease(buffer) for _ in range(4)]
    for lease in held[:2]:
        await buffer.put("e", _group(lease))
    await buffer.take(1, 0)
    await asyncio.sleep(0.1)
    require(not hearing.done(), "what can still be trained on is not cancelled")
    await buffer.take(1, 1)
    require(
        sorted(await hearing, key=lambda lease: lease.slot) == held[2:], "what could only be too stale is called off"
    )
    await buffer.put("e", _group(held[2]))
    require((await buffer.counts())["called_off"] == 2, "what was cancelled is counted")
    await buffer.advance("e", 1)
    require(await _lease(buffer) == Lease(2, attempt=1), "a slot that was cancelled is issued again")
    await buffer.put("e", _group(Lease(2, 1), version=1))
    require([g.attempt for g in await buffer.take(1, 2)] == [1], "a group that was cancelled is never taken")


async def _check_dropped(make: MakeBuffer) -> None:
    buffer = await _opened(make, "dropped", _schedule())
    held = [await _lease(buffer) for _ in range(2)]
    await buffer.put("e", _group(held[0]).refused("unwanted"))
    third = await _lease(buffer)
    require(third == Lease(2), "another slot is issued for a group that was dropped")
    for lease in (held[1], third):
        await buffer.put("e", _group(lease))
    require(_slots(await buffer.take(2, 0)) == [1, 2], "a group that was dropped is never taken")
    counts = await buffer.counts()
    require((counts["dropped"], counts["given_up"]) == (1, 0), "what was dropped is counted as that")


async def _check_refused(make: MakeBuffer) -> None:
    buffer = await _opened(make, "refused", _schedule())
    for _ in range(2):
        await buffer.put("e", _group(await _lease(buffer)))
    await buffer.take(2, 0)
    require(await buffer.lease("e", wait=False) is None, "a version admits no slot of the next step")
    await buffer.refuse(1)
    await buffer.put("e", _group(await _lease(buffer)))
    require(_slots(await buffer.take(1, 0)) == [2], "a slot is issued for a group that the trainer refused")


async def _check_cancelled_waits(make: MakeBuffer) -> None:
    buffer = await _opened(make, "cancelled", _schedule())
    waits: list[asyncio.Future[Any]] = []
    for number in range(4):
        waits += [asyncio.ensure_future(buffer.take(2, 0)), asyncio.ensure_future(buffer.lease(f"w{number}"))]
        await asyncio.sleep(0.01 * number)
        for wait in waits[-2:]:
            wait.cancel()
    await asyncio.wait(waits)
    for number in range(20):  # at whatever moment they are cancelled
        await buffer.advance("gone", 0)
        leasing = asyncio.ensure_future(buffer.lease("gone"))
        await asyncio.sleep(0.0005 * number)
        leasing.cancel()
        await asyncio.wait({leasing})
        if not leasing.cancelled():
            await buffer.release("gone")
    held = [await _lease(buffer) for _ in range(2)]
    require(held == [Lease(0), Lease(1)], "a lease that was cancelled holds no slot")
    for lease in held:
        await buffer.put("e", _group(lease))
    require(_slots(await buffer.take(2, 0)) == [0, 1], "a take that was cancelled keeps no group")


async def _check_restored(make: MakeBuffer) -> None:
    schedule = _schedule(max_staleness=1, deterministic=True)
    buffer = await _opened(make, "restored", schedule)
    held = [await _lease(buffer) for _ in range(4)]
    for lease in held[:3]:
        await buffer.put("e", _group(lease))
    await buffer.take(2, 0)
    state = json.loads(json.dumps(await buffer.state()))
    await buffer.put("e", _group(held[3]))
    await buffer.take(2, 1)
    again = await _opened(make, "restored", schedule, state, version=1)
    require(_slots(await again.take(2, 1)) == [2, 3], "what was taken after the checkpoint is taken again")
    await again.advance("e", 1)
    require(await _lease(again) == Lease(4), "what was put after the checkpoint is not issued again")
    first = await _opened(make, "restored", schedule)
    require(_slots(await first.take(4, 0)) == [0, 1, 2, 3], "without a checkpoint the stage begins with what was put")


async def _check_discarded(make: MakeBuffer) -> None:
    schedule = _schedule(max_staleness=1, deterministic=True)
    buffer = await _opened(make, "discarded", schedule)
    for version in range(3):
        await buffer.advance("e", version)
        for lease in [await _lease(buffer) for _ in range(4 if version == 0 else 2)]:
            await buffer.put("e", _group(lease, version=version))
        await buffer.take(2, version)
    again = await _opened(make, "discarded", schedule)
    require(await again.discard(3) == 0, "groups of older versions stay")
    await again.take(2, 0)
    await again.advance("e", 1)
    require(await again.discard(1) == 4, "groups of the version and of newer ones are discarded")
    require(await again.discard(1) == 0, "they are discarded once")
    require(_slots(await again.take(2, 1)) == [2, 3], "what older versions sampled stays")
    held = [await _lease(again) for _ in range(2)]
    require(held == [Lease(4), Lease(5)], "the slots of discarded groups are issued again, as they were")
    for lease in held:
        await again.put("e", _group(lease, version=1))
    require(await again.discard(1) == 0, "groups of this session stay")
    require(_slots(await again.take(2, 2)) == [4, 5], "new groups take the places of the discarded ones")
    resumed = await _opened(make, "discarded", schedule)
    require(_slots(await resumed.take(6, 0)) == [*range(6)], "a discarded group does not return in a later session")


async def _check_lost_future(make: MakeBuffer) -> None:
    schedule = _schedule(max_staleness=1)
    buffer = await _opened(make, "lost-future", schedule)
    for lease in [await _lease(buffer) for _ in range(4)]:
        await buffer.put("e", _group(lease))
    await buffer.take(2, 0)
    state = json.loads(json.dumps(await buffer.state()))
    await buffer.advance("e", 1)
    await buffer.put("e", _group(await _lease(buffer), version=1))
    again = await _opened(make, "lost-future", schedule, state, version=0)
    await again.advance("e", 1)
    require(await _lease(again) == Lease(4), "in an unordered run nothing is left of versions that are lost")
    require(_slots(await again.take(2, 0)) == [2, 3], "what older versions sampled stays")


async def _check_retries(make: MakeBuffer) -> None:
    sides = {2: "reward", 3: "workflow", 4: "prompt", 5: "reward"}
    schedule = _schedule(groups_per_step=6)

    def failed(lease: Lease) -> Group:
        group = _group(lease)
        if lease.slot not in sides:
            return group
        failure = Failure(sides[lease.slot], "Error", "an outage")
        return replace(group, trajectories=tuple(replace(t, failure=failure) for t in group.trajectories))

    buffer = await _opened(make, "retries", schedule)
    for lease in [await _lease(buffer) for _ in range(6)]:
        await buffer.put("e", failed(lease))
    kept = await _opened(make, "retries", schedule)
    require(_slots(await kept.take(6, 0)) == [*range(6)], "failures are outcomes where they did not end the run")
    await kept.retry_on_resume(range(6))
    held = await _retried(await _opened(make, "retries", schedule))
    again = await _opened(make, "retries", schedule)
    require(await _retried(again) == held, "what is not finished in one session is left to the next")
    for lease in held:
        await again.put("e", _group(lease))
    taken = await again.take(6, 0)
    require([bool(group.alive) for group in taken] == [True] * 4 + [False, True], "retried groups replace others")
    last = await _opened(make, "retries", schedule)
    require(repr(await last.take(6, 0)) == repr(taken), "a retry ends once its group was put")


async def _retried(buffer: Buffer) -> list[Lease]:
    """The slots of `_check_retries` that are issued again."""
    held = [await _lease(buffer) for _ in range(3)]
    require(held == [Lease(2), Lease(3), Lease(5)], "what a retry may avert is issued again, as the same attempt")
    recorded = [lease.recorded and lease.recorded.slot for lease in held]
    require(recorded == [2, None, 5], "a group of which only rewards failed comes with its slot")
    return held


async def _check_close(make: MakeBuffer) -> None:
    buffer = await _opened(make, "close", _schedule())
    taking, leasing = asyncio.ensure_future(buffer.take(2, 0)), asyncio.ensure_future(buffer.lease("waiting"))
    await asyncio.sleep(0.05)
    await buffer.close()
    ends = await asyncio.gather(taking, leasing, buffer.lease("e", wait=False), return_exceptions=True)
    closed = all(isinstance(end, StopAsyncIteration) for end in ends)
    require(closed, f"close wakes every waiter, with StopAsyncIteration from then on, not {ends!r}")


async def _check_company(make: MakeBuffer, shared: bool) -> None:
    """Four writers and two readers at once; one explorer dies and its leases go to the others."""
    number = 96
    schedule = _schedule(groups_per_step=number, max_staleness=8)
    trainer = await _opened(make, "company", schedule)
    ends = [make("company", schedule) if shared else trainer for _ in range(6)]
    await trainer.advance("dead", 0)
    for _ in range(5):
        await trainer.lease("dead")
    await trainer.release("dead")

    async def write(buffer: Buffer, name: str) -> list[int]:
        await buffer.advance(name, 0)
        slots: list[int] = []
        while len(slots) < number // 4:
            lease = await buffer.lease(name)
            assert lease is not None
            await buffer.put(name, _group(lease))
            slots.append(lease.slot)
        return slots

    async def read(buffer: Buffer) -> list[int]:
        return [group.slot for _ in range(number // 6) for group in await buffer.take(3, 0)]

    writing = [write(end, f"writer-{place}") for place, end in enumerate(ends[:4])]
    *written, first, second = await asyncio.gather(*writing, *map(read, ends[4:]))
    everything = list(range(number))
    require(sorted(slot for slots in written for slot in slots) == everything, "every slot is issued once")
    require(sorted(first + second) == everything, "every group is delivered once, to one reader")


def _schedule(**change: object) -> Schedule:
    tasks: Any = [Task(f"t{place}", (Message("user", f"{place}="),), {"answer": place}) for place in range(8)]
    options: dict[str, Any] = {"groups_per_step": 2, "steps": 50, "shuffle": False, **change}
    return Schedule(tasks, 0, **options)


async def _opened(
    make: MakeBuffer, name: str, schedule: Schedule, state: Mapping[str, Any] | None = None, version: int = 0
) -> Buffer:
    """An end of the buffer as a trainer opens it, and an explorer `e` that has loaded version 0."""
    buffer = make(name, schedule)
    await buffer.restore(state, version)
    await buffer.advance("e", 0)
    return buffer


async def _lease(buffer: Buffer) -> Lease:
    lease = await buffer.lease("e")
    assert lease is not None
    return lease


def _group(lease: Lease, version: int = 0) -> Group:
    """A group of an explorer that has loaded `version`."""
    turn = Turn(
        np.arange(3, dtype=np.int32),
        np.array([5, 6 + lease.slot], np.int32),
        np.array([-0.5, -1.25], np.float32),
        np.full(2, version, np.int32),
        StopReason.EOS,
        "six",
    )
    task = Task(f"t{lease.slot % 8}", (Message("user", f"{lease.slot % 8}="),), {"answer": lease.slot % 8})
    rollouts = (Trajectory(0, (turn,), {"exact": 1.0}), Trajectory(1, (turn,), {"exact": 0.0}, metrics={"n": 2.0}))
    return Group(lease.slot, task, rollouts, lease.slot // 8, lease.attempt, version)


def _slots(groups: Sequence[Group]) -> list[int]:
    return [group.slot for group in groups]


async def _until(buffer: Buffer, **counts: int) -> None:
    """Waits until the buffer counts so many."""
    while counts.items() - (await buffer.counts()).items():
        await asyncio.sleep(0.01)


async def _refused(putting: Awaitable[object], promise: str) -> None:
    try:
        await putting
    except DataError:
        return
    require(False, promise + ": DataError for anything else")
