"""Every buffer keeps its contract: in memory, in a SQLite file, on a PostgreSQL server, over rows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postgres import Server

from tests.contract.buffer_contract import check_buffer, check_read_buffer
from trivium.buffers.files import FileBuffer
from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.sql.buffer import SqlBuffer
from trivium.schedule import Schedule
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Message, Task

RENDERER = ChatRenderer(tiny_tokenizer("0123456789="))


def sql_ends(url: str, path: Path) -> Callable[[str, Schedule], SqlBuffer]:
    def make(name: str, schedule: Schedule) -> SqlBuffer:
        return SqlBuffer(
            SqlBuffer.Config(url=url),
            schedule=schedule,
            rollouts=path / name,
            renderer=RENDERER,
            deadline_s=60,
            name=f"{path.name}/{name}",
        )

    return make


async def test_the_memory_buffer_keeps_the_contract(tmp_path: Path) -> None:
    def make(name: str, schedule: Schedule) -> MemoryBuffer:
        return MemoryBuffer(
            MemoryBuffer.Config(), schedule=schedule, rollouts=tmp_path / name, renderer=RENDERER, deadline_s=60
        )

    await check_buffer(make)


async def test_the_sql_buffer_keeps_the_contract_on_sqlite(tmp_path: Path) -> None:
    await check_buffer(sql_ends(f"sqlite:///{tmp_path / 'buffer.db'}", tmp_path), shared=True)


async def test_the_sql_buffer_keeps_the_contract_on_postgresql(postgres: Server, tmp_path: Path) -> None:
    await check_buffer(sql_ends(postgres.create_database(uuid.uuid4().hex), tmp_path), shared=True)


async def test_a_buffer_over_rows(tmp_path: Path) -> None:
    tasks: Any = [Task(f"t{i}", (Message("user", str(i)),), {"completion": str(i)}) for i in range(6)]
    schedule = Schedule(tasks, seed=0, groups_per_step=2, group_size=1, steps=50)
    await check_read_buffer(
        lambda: FileBuffer(FileBuffer.Config(), schedule=schedule, rollouts=tmp_path, renderer=RENDERER, deadline_s=1)
    )
