"""Turns: so many at once, first come first served, none lost where a task is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from trivium.foundation.concurrency import Turns


async def test_at_most_so_many_at_once_in_order() -> None:
    turns, inside, order = Turns(2), 0, list[int]()

    async def visit(number: int) -> None:
        nonlocal inside
        async with turns:
            inside += 1
            assert inside <= 2
            order.append(number)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(visit(number) for number in range(50)))
    assert order == list(range(50))


@pytest.mark.parametrize("granted", [False, True])
async def test_a_cancelled_task_leaves_its_turn_to_the_next(granted: bool) -> None:
    turns, release = Turns(1), asyncio.Event()

    async def hold() -> None:
        async with turns:
            await release.wait()

    first, second, third = [asyncio.create_task(hold()) for _ in range(3)]
    await asyncio.sleep(0)
    if granted:  # the first leaves, so the second has its turn when it is cancelled, and has not run yet
        first.cancel()
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    release.set()
    await asyncio.wait_for(third, 60)
    await asyncio.wait({first})
    async with turns:  # free again
        pass
    assert second.cancelled()
