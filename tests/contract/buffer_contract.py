"""The contract of a buffer: slots, admission, order, staleness. `buffer_resume_contract` covers resumed runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.contract.buffer_resume_contract import RESUME_CHECKS
from tests.contract.slot_groups import (
    MakeBuffer,
    lease,
    leases,
    make_group,
    make_schedule,
    opened,
    refused,
    rolled_out,
    saved,
    slots_of,
)
from trivium.testing.promises import require
from trivium.types import Group, Lease, capabilities_of

if TYPE_CHECKING:
    from trivium.protocols import Buffer


async def check_buffer(make: MakeBuffer, *, shared: bool = False, patience_s: float = 60.0) -> None:
    """A buffer admits, orders, evicts, cancels and replaces groups by the schedule, without loss or repetition.

    `make(name, schedule)` builds an end of the buffer `name`, which is empty the first time. The next end of the same
    name continues with the content of the previous one. With `shared`, several ends of one name work at the same time.
    The deadline of the buffer must not be shorter than `patience_s`.
    """
    checks = (
        _check_order,
        _check_equal_parts,
        _check_admission,
        _check_drain,
        _check_eviction,
        _check_release,
        _check_cancelled_leases,
        _check_over_rollout,
        _check_dropped,
        _check_refused,
        _check_cancelled_waits,
        _check_close,
        *RESUME_CHECKS,
    )
    for check in checks:
        async with asyncio.timeout(patience_s):
            await check(make)
    async with asyncio.timeout(patience_s):
        await _check_company(make, shared)


async def check_read_buffer(make: Callable[[], Buffer], *, patience_s: float = 60.0) -> None:
    """A buffer over existing data returns it in the same order to every caller, without an explorer.

    `make()` builds an end of it before version 0 of a stage, over data for at least three steps of two groups.
    """
    async with asyncio.timeout(patience_s):
        buffer, again = make(), make()
        await buffer.restore(None, 0)
        await again.restore(None, 0)
        unfilled = not capabilities_of(buffer).explored
        require(unfilled, "a buffer that no explorer fills declares Capabilities(explored=False)")
        first, second = await buffer.take(2, 0), await buffer.take(2, 1)
        state = await saved(buffer)
        third = await buffer.take(2, 2)
        slots = slots_of([*first, *second, *third])
        require(len(set(slots)) == 6, "no group is given twice")
        require(repr(await again.take(2, 0)) == repr(first), "the data and its order are the same for every caller")
        require(
            repr(await again.taken_groups(slots[1::-1])) == repr(first[::-1]),
            "taken_groups returns groups that were taken",
        )
        resumed = make()
        await resumed.restore(state, 2)
        require(repr(await resumed.take(2, 2)) == repr(third), "what was taken after the checkpoint is taken again")
        await refused(buffer.lease("e", wait=False), "there are no slots to explore")
        await refused(buffer.put("e", first[0]), "nothing is put")
        require(await buffer.release("e") == 0, "there are no leases to release")
        await buffer.drain(0)
        await buffer.close()


async def _check_order(make: MakeBuffer) -> None:
    buffer = await opened(make, "order", make_schedule())
    held = await leases(buffer, 2)
    require(held == [Lease(0), Lease(1)], "slots are issued from 0, in order")
    await buffer.put("e", make_group(held[1]))
    taking = await _blocked(buffer.take(2, 0), "take waits for as many groups as were asked for")
    await refused(buffer.put("e", make_group(held[1])), "a group is put once")
    await buffer.put("e", make_group(held[0]))
    taken: list[Group] = await taking
    require(slots_of(taken) == [0, 1], "with max_staleness 0 groups are taken in slot order")
    again = await buffer.taken_groups([1, 0])
    require(slots_of(again) == [1, 0], "taken_groups returns groups that were taken, as asked for")
    require(repr(again[1]) == repr(taken[0]), "a group comes out as it went in")

    buffer = await opened(make, "arrival", make_schedule(max_staleness=4))
    held = await leases(buffer, 3)
    for place in (2, 0, 1):
        await buffer.put("e", make_group(held[place]))
    taken = await buffer.take(2, 0) + await buffer.take(1, 0)
    require(slots_of(taken) == [2, 0, 1], "with staleness groups are taken in order of arrival")


async def _check_admission(make: MakeBuffer) -> None:
    buffer = await opened(make, "admission", make_schedule(max_staleness=1))
    require(await buffer.lease("late", wait=False) is None, "an explorer without a version gets no slot")
    held = await leases(buffer, 4)
    promise = "version v admits (v + max_staleness + 1) * groups_per_step slots"
    require(held == [*map(Lease, range(4))], promise)
    require(await buffer.lease("e", wait=False) is None, "without wait, lease returns None if no slot is free")
    waiting = await _blocked(buffer.lease("e"), "lease waits for a slot")
    await buffer.advance("e", 1)
    require(await waiting == Lease(4), "a newer version admits more slots, and wakes an explorer that waits for one")
    await refused(buffer.put("other", make_group(Lease(4))), "only the explorer that leased a slot puts its group")
    await refused(buffer.put("e", make_group(Lease(77))), "only leased slots are put")

    buffer = await opened(make, "left-behind", make_schedule(max_staleness=1))
    await buffer.advance("slow", 0)
    await rolled_out(buffer, 4)
    for version in (0, 1):
        await buffer.take(2, version)
    promise = "an explorer whose groups could only be too stale gets no slot"
    require(await buffer.lease("slow", wait=False) is None, promise)
    require(await lease(buffer, "slow", 1) == Lease(4), "it gets one with a newer version")


async def _check_equal_parts(make: MakeBuffer) -> None:
    buffer = await opened(make, "equal-parts", make_schedule(groups_per_step=4))
    await buffer.advance("other", 0)
    await leases(buffer, 2)
    promise = "an explorer leases at most an equal part of the slots of a synchronous step"
    waiting = await _blocked(buffer.lease("e"), promise)
    require(await lease(buffer, "other") == Lease(2), "the other part is for the other explorers")
    await buffer.release("other")
    require(await waiting == Lease(2), "an explorer that leaves leaves its part to the others")
    require(await lease(buffer) == Lease(3), "an explorer that is alone leases every slot")

    buffer = await opened(make, "equal-parts-behind", make_schedule(groups_per_step=4, max_staleness=1))
    await buffer.advance("behind", 0)
    await leases(buffer, 4)
    require(await buffer.lease("e", wait=False) is None, "with a staleness of 1 two steps are divided")
    await leases(buffer, 3, "behind")
    await buffer.advance("e", 1)
    require((await leases(buffer, 2))[0] == Lease(7), "a newer version has an equal part of the slots it admits")
    require(await buffer.lease("e", wait=False) is None, "slots of a step that is not trained count")

    buffer = await opened(make, "unequal-parts", make_schedule(groups_per_step=4, max_staleness=2))
    await buffer.advance("other", 0)
    require(len(await leases(buffer, 12)) == 12, "with more staleness an explorer leases all slots that are free")


async def _check_drain(make: MakeBuffer) -> None:
    buffer = await opened(make, "drain", make_schedule(max_staleness=1, deterministic=True))
    held = [*await leases(buffer, 3), await lease(buffer, "dying", 0)]
    for each in held[:3]:
        await buffer.put("e", make_group(each))
    draining = await _blocked(buffer.drain(0), "drain waits for every slot that the version admits")
    await buffer.release("dying")
    require(await lease(buffer) == held[3], "a slot is issued again when its explorer is gone")
    await asyncio.sleep(0.1)
    require(not draining.done(), "drain waits for slots that are issued again")
    await buffer.put("e", make_group(held[3]))
    await draining
    await buffer.take(2, 0)
    await buffer.advance("e", 1)
    await leases(buffer, 2)
    await buffer.drain(0)  # returns, since slots of version 1 do not block version 0

    buffer = await opened(make, "drain-stale", make_schedule())
    await rolled_out(buffer, 2)
    await buffer.take(2, 0)
    await buffer.release("e")
    await buffer.advance("ahead", 1)
    later = [await buffer.lease("ahead") for _ in range(2)]
    assert later[1] is not None
    await buffer.put("ahead", make_group(later[1], 1).refused("a filter"))
    await buffer.release("ahead")  # the slot before the dropped one is free again
    draining = asyncio.ensure_future(buffer.drain(0))
    done, _ = await asyncio.wait({draining}, timeout=60)
    require(bool(done), "drain returns where a version is too old for any slot")
    require(await lease(buffer, version=1) == later[0], "a slot is issued again when its explorer is gone")


async def _check_eviction(make: MakeBuffer) -> None:
    buffer = await opened(make, "eviction", make_schedule(max_staleness=1, max_attempts=2))
    await rolled_out(buffer, 4)
    await buffer.take(1, 0)
    taking = await _blocked(buffer.take(1, 2), "take never returns groups older than max_staleness")
    first = await lease(buffer, version=2)
    require(first == Lease(1, attempt=1), "the slot of a group that became too stale is issued again, as an attempt")
    await buffer.put("e", make_group(first, version=0))
    await _until(buffer, evicted=4, given_up=1)  # another slot replaces it after max_attempts
    rest = await leases(buffer, 6)
    promised = [Lease(2, 1), Lease(3, 1), *map(Lease, range(4, 8))]
    require(rest == promised, "evicted slots come first, then new ones")
    last = await buffer.lease("e", wait=False)
    require(last == Lease(8), "a slot that is given up is replaced by another one")
    await buffer.put("e", make_group(rest[3], version=2))
    require(slots_of(await taking) == [5], "take never returns groups older than max_staleness")


async def _check_release(make: MakeBuffer) -> None:
    buffer = await opened(make, "release", make_schedule())
    held = await leases(buffer, 2)
    await buffer.put("e", make_group(held[0]))
    require(await buffer.release("e") == 1, "release returns the number of leases")
    require(await buffer.release("e") == 0, "leases are released once")
    require(await buffer.lease("e", wait=False) is None, "a released explorer gets nothing before it adopts a version")
    require(await lease(buffer, "heir", 0) == held[1], "a released lease is issued again, as the same attempt")
    await refused(buffer.put("e", make_group(held[1])), "a released explorer no longer owns its lease")
    await buffer.put("heir", make_group(held[1]))
    require(slots_of(await buffer.take(2, 0)) == [0, 1], "groups that were put before a release stay")

    buffer = await opened(make, "release-cancelled", make_schedule(max_staleness=1))
    held = await leases(buffer, 4)
    for each in held[:2]:
        await buffer.put("e", make_group(each))
    for version in range(2):
        await buffer.take(1, version)  # the second cancels the leases of the last two slots
    await buffer.release("e")
    await buffer.advance("e", 1)
    waiting = await _blocked(buffer.cancelled_leases("e"), "a released explorer has no cancelled leases")
    waiting.cancel()
    await asyncio.wait({waiting})


async def _check_cancelled_leases(make: MakeBuffer) -> None:
    buffer = await opened(make, "stale-leases", make_schedule(max_staleness=1))
    listening = asyncio.ensure_future(buffer.cancelled_leases("e"))
    held = await leases(buffer, 4)
    for each in held[:2]:
        await buffer.put("e", make_group(each))
    await buffer.take(1, 0)
    await asyncio.sleep(0.1)
    require(not listening.done(), "a lease whose group can still be trained on is not cancelled")
    await buffer.take(1, 1)
    require([*await listening] == held[2:], "leases whose groups would be too stale are cancelled")
    require((await buffer.counts())["called_off"] == 2, "cancelled leases are counted")
    second = [await lease(buffer, version=1), await lease(buffer)]
    require(second == [Lease(2, 1), Lease(3, 1)], "cancelled slots are issued again")
    await buffer.put("e", make_group(held[2]))  # its owner has not noticed the cancellation yet
    await buffer.put("e", make_group(second[0], version=1))
    await buffer.release("e")
    require(await lease(buffer, "heir", 1) == second[1], "a later attempt may be another explorer's")
    await buffer.put("e", make_group(held[3]))
    await buffer.put("heir", make_group(second[1], version=1))
    taken = await buffer.take(2, 2)
    require([(g.slot, g.attempt) for g in taken] == [(2, 1), (3, 1)], "groups of cancelled leases are never taken")
    await buffer.put("e", make_group(held[3]))  # is dropped, even after the slot was trained on
    await refused(buffer.put("e", make_group(Lease(8), version=2)), "only leased slots are put")


async def _check_over_rollout(make: MakeBuffer) -> None:
    buffer = await opened(make, "over-rollout", make_schedule(over_rollout=1, max_attempts=2))
    trained: list[tuple[int, int]] = []
    for version in range(3):
        await buffer.advance("e", version)
        slow, *others = await leases(buffer, 3)
        for each in others:
            await buffer.put("e", make_group(each, version))
        trained += [(group.slot, group.version) for group in await buffer.take(2, version)]
        require([*await buffer.cancelled_leases("e")] == [slow], "a step cancels what it no longer needs, once")
        require(await buffer.lease("e", wait=False) is None, "a cancelled slot is not issued to the same version")
    first = [(1, 0), (2, 0), (3, 1), (4, 1), (6, 2), (7, 2)]
    require(trained == first, "with over_rollout a step takes the groups that are finished first")
    counted = {"evicted": 0, "called_off": 3, "given_up": 1, "dropped": 0, "refused": 0}
    require(await buffer.counts() == counted, "cancelled leases and slots that were given up are counted")


async def _check_dropped(make: MakeBuffer) -> None:
    buffer = await opened(make, "dropped", make_schedule())
    held = await leases(buffer, 2)
    await buffer.put("e", make_group(held[0]).refused("unwanted"))
    third = await lease(buffer)
    require(third == Lease(2), "another slot is issued for a group that was dropped")
    for each in (held[1], third):
        await buffer.put("e", make_group(each))
    require(slots_of(await buffer.take(2, 0)) == [1, 2], "a group that was dropped is never taken")
    counts = await buffer.counts()
    require((counts["dropped"], counts["given_up"]) == (1, 0), "dropped groups are counted as that")


async def _check_refused(make: MakeBuffer) -> None:
    buffer = await opened(make, "refused", make_schedule())
    await rolled_out(buffer, 2, "late")
    await buffer.take(2, 0)
    require(await buffer.lease("late", wait=False) is None, "a version admits no slot of the next step")
    await rolled_out(buffer, 2, version=1)
    await buffer.take(2, 1)
    for _ in range(2):
        await buffer.refuse(2)
        promise = "slots for refused groups are of the version of their step"
        require(await buffer.lease("late", wait=False) is None, promise)
        slots = await rolled_out(buffer, 2, version=1)
        require(slots_of(await buffer.take(2, 1)) == slots, "a slot is issued for each group that the trainer refused")


async def _check_cancelled_waits(make: MakeBuffer) -> None:
    buffer = await opened(make, "cancelled", make_schedule())
    waits: list[asyncio.Future[Any]] = []
    for number in range(4):
        waits += [asyncio.ensure_future(buffer.take(2, 0)), asyncio.ensure_future(buffer.lease(f"w{number}"))]
        await asyncio.sleep(0.01 * number)
        for wait in waits[-2:]:
            wait.cancel()
    await asyncio.wait(waits)
    for number in range(20):  # cancelled at different moments
        await buffer.advance("gone", 0)
        leasing = asyncio.ensure_future(buffer.lease("gone"))
        await asyncio.sleep(0.0005 * number)
        leasing.cancel()
        await asyncio.wait({leasing})
        await buffer.release("gone")
    held = await leases(buffer, 2)
    require(held == [Lease(0), Lease(1)], "a lease that was cancelled holds no slot")
    for each in held:
        await buffer.put("e", make_group(each))
    require(slots_of(await buffer.take(2, 0)) == [0, 1], "a take that was cancelled keeps no group")


async def _check_close(make: MakeBuffer) -> None:
    buffer = await opened(make, "close", make_schedule())
    taking, leasing = asyncio.ensure_future(buffer.take(2, 0)), asyncio.ensure_future(buffer.lease("waiting"))
    await asyncio.sleep(0.05)
    await buffer.close()
    ends = await asyncio.gather(taking, leasing, buffer.lease("e", wait=False), return_exceptions=True)
    closed = all(isinstance(end, StopAsyncIteration) for end in ends)
    require(closed, f"close wakes every waiter, with StopAsyncIteration from then on, not {ends!r}")


async def _check_company(make: MakeBuffer, shared: bool) -> None:
    """Four writers and two readers at once; one explorer dies and its leases go to the others."""
    number = 96
    schedule = make_schedule(groups_per_step=number, max_staleness=8)
    trainer = await opened(make, "company", schedule)
    ends = [make("company", schedule) if shared else trainer for _ in range(6)]
    await trainer.advance("dead", 0)
    for _ in range(5):
        await trainer.lease("dead")
    await trainer.release("dead")

    async def write(buffer: Buffer, name: str) -> list[int]:
        await buffer.advance(name, 0)
        return [slot for _ in range(number // 4) for slot in await rolled_out(buffer, 1, name)]

    async def read(buffer: Buffer) -> list[int]:
        return [group.slot for _ in range(number // 6) for group in await buffer.take(3, 0)]

    writing = [write(end, f"writer-{place}") for place, end in enumerate(ends[:4])]
    *written, first, second = await asyncio.gather(*writing, *map(read, ends[4:]))
    everything = list(range(number))
    require(sorted(slot for slots in written for slot in slots) == everything, "every slot is issued once")
    require(sorted(first + second) == everything, "every group is delivered once, to one reader")


async def _blocked(call: Any, promise: str) -> asyncio.Future[Any]:
    """Starts the call and checks that it waits."""
    running = asyncio.ensure_future(call)
    await asyncio.sleep(0.1)
    require(not running.done(), promise)
    return running


async def _until(buffer: Buffer, **counts: int) -> None:
    """Waits until the buffer reports these counts."""
    while counts.items() - (await buffer.counts()).items():
        await asyncio.sleep(0.01)
