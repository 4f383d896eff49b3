"""An engine of another process: its errors arrive as errors that any process can read, and its silence is one."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Listener
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tests.sessions import RENDERER
from trivium.engines.processes import EngineHost, ProcessPool
from trivium.engines.scripted import ScriptedEngine
from trivium.errors import RolloutError
from trivium.policy import EngineFailure


def scripted() -> ScriptedEngine:
    config = ScriptedEngine.Config(replies=((1, 2),))
    return ScriptedEngine(config, eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode)


class _Unreadable(Exception):
    """What cannot be made again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (_Unreadable("heat", "dust"), (EngineFailure, "_Unreadable: heat and dust")),
        (RolloutError("a completion", "a limit of 0", "raise it"), (RolloutError, "a limit of 0")),
    ],
)
async def test_an_error_of_any_class_reaches_the_caller(raised: Exception, expected: tuple[Any, str]) -> None:
    broken = scripted()

    async def generate(request: object) -> None:
        raise raised

    broken.generate = generate  # pyright: ignore[reportAttributeAccessIssue]
    host = EngineHost(broken, "127.0.0.1", b"key")
    pool = ProcessPool(scripted(), [("rank 1", host.address)], b"key", 60.0)
    _, other = pool.replicas
    request: Any = None  # the broken engine does not look at it
    with pytest.raises(expected[0], match=expected[1]):
        await asyncio.wait_for(other.generate(request), 60)
    await pool.close()


async def test_an_engine_that_does_not_load_within_the_deadline_is_named() -> None:
    hanging = scripted()

    async def load(version: int, weights: object, *, in_flight: str) -> None:
        await asyncio.Event().wait()

    hanging.load = load  # pyright: ignore[reportAttributeAccessIssue]
    pool = ProcessPool(scripted(), [("rank 1", EngineHost(hanging, "127.0.0.1", b"key").address)], b"key", 0.05)
    with pytest.raises(EngineFailure, match=r"version 3 in the engine of rank 1(.|\n)*within 0\.05 s"):
        await asyncio.wait_for(pool.load(3, [("w", np.zeros(2))]), 60)
    await asyncio.wait_for(pool.close(), 60)


async def test_a_process_that_reads_nothing_holds_up_neither_the_event_loop_nor_the_end() -> None:
    """One that was stopped: weights fill the connection, and what is sent behind them waits in a thread."""
    stopped, listener = Event(), Listener(("127.0.0.1", 0), authkey=b"key")

    def accept() -> None:
        with listener, listener.accept():
            stopped.wait(60)

    silent = Thread(target=accept)
    silent.start()
    address: Any = listener.address
    pool = ProcessPool(scripted(), [("rank 1", address)], b"key", 0.2)
    request: Any = None  # nothing reads it
    waiting = asyncio.ensure_future(pool.replicas[1].generate(request))
    loading = asyncio.ensure_future(pool.load(1, [("w", np.zeros(8_000_000))]))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(EngineFailure, match="rank 1"):
        await asyncio.wait_for(loading, 60)
    await asyncio.wait_for(pool.close(), 60)
    stopped.set()
    await asyncio.to_thread(silent.join)
