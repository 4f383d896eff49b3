"""An engine of another process: its errors arrive as errors that any process can read, and its silence is one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Listener
from threading import Event, Semaphore, Thread
from typing import Any

import numpy as np
import pytest
import torch
from failing import refused
from torch import Tensor

from tests.sessions import RENDERER
from tests.waiting import until
from trivium.engines.process_pool import EngineHost, ProcessPool
from trivium.engines.scripted import ScriptedEngine
from trivium.foundation.errors import RolloutError
from trivium.models.weights import stream
from trivium.models.weights.stream import Described, spec
from trivium.policy import EngineFailure
from trivium.protocols import RestingEngine, TensorSpec


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
        (_Unreadable("heat", "dust"), (EngineFailure, "_Unreadable", "rank 1")),
        (RolloutError("a completion", "a limit of 0", "raise it"), (RolloutError, "a limit of 0")),
    ],
)
async def test_an_error_of_any_class_reaches_the_caller(raised: Exception, expected: tuple[Any, ...]) -> None:
    broken = scripted()

    async def generate(request: object) -> None:
        raise raised

    broken.generate = generate  # pyright: ignore[reportAttributeAccessIssue]
    host = EngineHost(broken, "127.0.0.1", b"key")
    pool = ProcessPool(scripted(), [("rank 1", host.address)], b"key", 60.0)
    _, other = pool.replicas
    request: Any = None  # the broken engine does not look at it
    with refused(*expected):
        await asyncio.wait_for(other.generate(request), 60)
    await pool.close()


async def test_an_engine_that_does_not_load_within_the_deadline_is_named() -> None:
    """Not those that wait for it."""
    hanging = scripted()

    async def load(version: int, weights: object, *, in_flight: str) -> None:
        await asyncio.Event().wait()

    hanging.load = load  # pyright: ignore[reportAttributeAccessIssue]
    addresses = [EngineHost(engine, "127.0.0.1", b"key").address for engine in (scripted(), hanging)]
    pool = ProcessPool(scripted(), [("rank 1", addresses[0]), ("rank 2", addresses[1])], b"key", 2.0)
    with refused(EngineFailure, "version 3", "rank 2", "2 s"):
        await asyncio.wait_for(pool.load(3, [("v", np.zeros(2)), ("w", np.zeros(2))]), 60)
    await asyncio.wait_for(pool.close(), 60)


class _Resting(ScriptedEngine):
    rests = 0

    async def rest(self) -> None:
        self.rests += 1


async def test_every_engine_of_the_pool_rests_if_the_first_one_can() -> None:
    config = ScriptedEngine.Config(replies=((1, 2),))
    own, other = (_Resting(config, eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode) for _ in range(2))
    pool = ProcessPool(own, [("rank 1", EngineHost(other, "127.0.0.1", b"key").address)], b"key", 60.0)
    assert isinstance(pool, RestingEngine)
    await pool.rest()
    assert (own.rests, other.rests) == (1, 1)
    await pool.close()
    awake = ProcessPool(scripted(), [], b"key", 60.0)
    assert not isinstance(awake, RestingEngine)
    await awake.close()


async def test_an_engine_that_fails_to_load_or_to_rest_is_named() -> None:
    config = ScriptedEngine.Config(replies=((1, 2),))
    own, other = (_Resting(config, eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode) for _ in range(2))

    async def fail(*_: object, **__: object) -> None:
        raise EngineFailure("a version", "no workers", "see its log")

    other.load = other.rest = fail  # pyright: ignore[reportAttributeAccessIssue]
    pool = ProcessPool(own, [("rank 1", EngineHost(other, "127.0.0.1", b"key").address)], b"key", 60.0)
    assert isinstance(pool, RestingEngine)
    with refused(EngineFailure, "rank 1", "workers"):
        await asyncio.wait_for(pool.load(1, [("w", np.zeros(2))]), 60)
    with refused(EngineFailure, "rank 1", "workers"):
        await asyncio.wait_for(pool.rest(), 60)
    await pool.close()


async def test_an_engine_that_does_not_rest_within_the_deadline_is_named() -> None:
    config = ScriptedEngine.Config(replies=((1, 2),))
    own, other = (_Resting(config, eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode) for _ in range(2))
    other.rest = asyncio.Event().wait  # pyright: ignore[reportAttributeAccessIssue]
    pool = ProcessPool(own, [("rank 1", EngineHost(other, "127.0.0.1", b"key").address)], b"key", 0.2)
    assert isinstance(pool, RestingEngine)
    with refused(EngineFailure, "rank 1", "0.2 s"):
        await asyncio.wait_for(pool.rest(), 60)
    await asyncio.wait_for(pool.close(), 60)


async def test_a_process_that_reads_nothing_holds_up_neither_the_event_loop_nor_the_end() -> None:
    """One that was stopped: weights fill the connection, and what is sent behind them waits in a thread."""
    stopped, listener = Event(), Listener(("127.0.0.1", 0), authkey=b"key")

    def accept() -> None:
        with listener, listener.accept():
            stopped.wait(120)

    silent = Thread(target=accept)
    silent.start()
    address: Any = listener.address
    pool = ProcessPool(scripted(), [("rank 1", address)], b"key", 0.2)
    request: Any = None  # nothing reads it
    waiting = asyncio.ensure_future(pool.replicas[1].generate(request))
    loading = asyncio.ensure_future(pool.load(1, [("w", np.zeros(8_000_000))]))
    await asyncio.sleep(0)  # both have begun
    waiting.cancel()
    with refused(EngineFailure, "rank 1"):
        await asyncio.wait_for(loading, 60)
    await asyncio.wait_for(pool.close(), 60)
    stopped.set()
    await asyncio.to_thread(silent.join)


async def test_no_message_waits_until_the_one_before_is_acknowledged() -> None:
    """As TCP would have it: 40 ms for each tensor."""
    pool = ProcessPool(scripted(), [("rank 1", EngineHost(scripted(), "127.0.0.1", b"key").address)], b"key", 60.0)
    replica: Any = pool.replicas[1]
    with socket.socket(fileno=os.dup(replica._link._connection.fileno())) as connected:
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await pool.close()


def ending(after: int) -> Iterator[tuple[str, Any]]:
    for number in range(after):
        yield f"w{number}", np.full(4, number)
    raise ConnectionResetError("the network is gone")


async def test_what_the_weights_raise_ends_every_load_and_the_next_one_is_whole() -> None:
    """Also in another process, whose engine has taken a part of them."""
    hosted, own = scripted(), scripted()
    pool = ProcessPool(own, [("rank 1", EngineHost(hosted, "127.0.0.1", b"key").address)], b"key", 60.0)
    tensors = tuple(TensorSpec(f"w{number}", "int64", (4,)) for number in range(5))
    for version in (1, 2):
        with pytest.raises(ConnectionResetError, match="the network is gone"):
            await asyncio.wait_for(pool.load(version, Described(tensors, ending(3))), 60)
    whole = [(f"w{number}", np.full(4, number)) for number in range(5)]
    await asyncio.wait_for(pool.load(3, whole), 60)
    names = [name for name, _ in whole]
    assert (own.weight_names, hosted.weight_names) == (names, names)
    assert (own.loaded, hosted.loaded, pool.version) == ([3], [3], 3)
    await pool.close()


KINDS = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.tensor([True, False]),
    torch.arange(5, dtype=torch.int64)[1:],
    torch.nn.Parameter(torch.ones(2)),
]


async def test_tensors_of_any_kind_arrive_bit_for_bit_and_no_sooner_than_the_slowest_engine_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole and in parts; no load waits for an engine that leaves before the last one."""
    monkeypatch.setattr(stream, "_MESSAGE_BYTES", 5)
    read, arrived, may_take = list[int](), list[Tensor](), Semaphore(0)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number, tensor in enumerate(KINDS):
            read.append(number)
            yield f"w{number}", tensor

    def slowly(weights: Any) -> None:
        for _, tensor in weights:
            arrived.append(tensor)
            assert may_take.acquire(timeout=60)

    async def slow(version: int, weights: Any, *, in_flight: str) -> None:
        await asyncio.to_thread(slowly, weights)

    async def leaving(version: int, weights: Any, *, in_flight: str) -> None:
        await asyncio.to_thread(next, iter(weights))

    engines = [scripted(), scripted(), scripted()]
    engines[1].load, engines[2].load = slow, leaving  # pyright: ignore[reportAttributeAccessIssue]
    addresses = [EngineHost(engine, "127.0.0.1", b"key").address for engine in engines[1:]]
    pool = ProcessPool(engines[0], [("rank 1", addresses[0]), ("rank 2", addresses[1])], b"key", 60.0)
    loading = asyncio.ensure_future(pool.load(1, Described(tuple(map(spec, "abcdef", KINDS)), weights())))
    for number in range(len(KINDS)):
        await until(lambda number=number: len(arrived) > number)
        assert len(read) <= number + 2  # the one after what the slow one has is on its way
        may_take.release()
    await asyncio.wait_for(loading, 60)
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(arrived, KINDS, strict=True))
    assert engines[0].weight_names == [f"w{number}" for number in range(len(KINDS))]
    await pool.close()
