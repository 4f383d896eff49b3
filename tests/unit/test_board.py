"""A board holds JSON values, changes as a whole, and wakes who waits: in one process, and in a database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import until
from trivium.buffers.sql.database import Database, SqlTable
from trivium.foundation.board import Board, MemoryBoard, SharedBoard, Values

Boards = Callable[[], Board]
"""Ends of one board, as different roles hold them."""


@pytest.fixture(params=["memory", "database"])
def boards(request: pytest.FixtureRequest, tmp_path: Path) -> Boards:
    if request.param == "memory":
        board = MemoryBoard()
        return lambda: board
    return lambda: SharedBoard(SqlTable(Database(f"sqlite:///{tmp_path / 'board.db'}"), "run"))


def counted(values: Values) -> Values:
    return {**values, "count": values.get("count", 0) + 1}


def test_an_empty_board_has_no_values(boards: Boards) -> None:
    assert boards().read() == {}


async def test_no_change_is_lost_when_many_write_at_once(boards: Boards) -> None:
    async def writes(board: Board) -> None:
        for _ in range(20):
            await asyncio.to_thread(board.write, counted)

    await asyncio.gather(*(writes(boards()) for _ in range(4)))
    assert boards().read() == {"count": 80}


async def test_who_waits_is_woken_by_others_and_sees_what_they_wrote(boards: Boards) -> None:
    looks = list[int]()

    def look(values: Values) -> bool:
        looks.append(values.get("count", 0))
        return looks[-1] >= 2

    waiting = asyncio.create_task(boards().poll(look, 60.0))
    await until(lambda: looks == [0])
    await asyncio.to_thread(boards().write, counted)
    await until(lambda: looks == [0, 1])
    assert not waiting.done()
    await asyncio.to_thread(boards().write, counted)
    assert await asyncio.wait_for(waiting, 60) == {"count": 2}


async def test_patience_ends_with_the_board_as_it_is(boards: Boards) -> None:
    board, started = boards(), time.monotonic()
    board.write(counted)
    assert await board.poll(lambda v: v["count"] == 2, 0.1) == {"count": 1}
    assert 0.1 <= time.monotonic() - started < 60
    assert await board.poll(lambda v: v["count"] == 2, 0.0) == {"count": 1}


async def test_what_changes_nothing_wakes_nobody(boards: Boards) -> None:
    board, looked = boards(), list[Values]()

    def look(values: Values) -> bool:
        looked.append(values)
        return False

    waiting = asyncio.create_task(board.poll(look, 60.0))
    await until(lambda: looked)
    for _ in range(10):
        await asyncio.to_thread(board.write, lambda values: values)
    await asyncio.to_thread(board.write, counted)
    await until(lambda: {"count": 1} in looked)
    assert looked == [{}, {"count": 1}]
    waiting.cancel()


async def test_a_change_that_raises_changes_nothing(boards: Boards) -> None:
    board = boards()
    board.write(counted)
    with pytest.raises(ZeroDivisionError):
        board.write(lambda values: {"count": 1 // 0})
    board.write(counted)
    assert board.read() == {"count": 2}
