"""A link between two processes: calls of either end, errors, weights, cancellation, and the end of a process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from multiprocessing import AuthenticationError, Pipe
from threading import Event, Thread
from typing import Any

import pytest
import torch
from failing import refused

from tests.waiting import until
from trivium.foundation.errors import ConfigError, RoleFailed, TriviumError
from trivium.models.weights.stream import Named
from trivium.processes.answers import Answer, Failures
from trivium.processes.link import CANCEL, CLOSE, Call, Disconnected, Link, serve
from trivium.processes.sockets import Listening, connect
from trivium.processes.transfer import Outgoing, send_to_all

FAILURES = Failures("the other process", lambda text: RoleFailed("other", text))
PATIENCE_S = 30.0


@pytest.fixture
def links() -> Generator[tuple[Link, Link]]:
    one, other = (Link(end, name) for end, name in zip(Pipe(), ("one", "other"), strict=True))
    yield one, other
    one.disconnect()
    other.disconnect()


def answering(link: Link, answer: Callable[[Call], Answer]) -> Thread:
    """Answers the calls of the other end, in a thread."""

    def run() -> None:
        for call in iter(link.calls.get, None):
            call.answer(answer(call))

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_calls_have_answers_and_errors(links: tuple[Link, Link]) -> None:
    one, other = links

    def refuse() -> None:
        raise ConfigError("a model", "none", "name one")

    served = {"divide": lambda a, b: a / b, "refuse": refuse}
    answering(other, lambda call: FAILURES.answer_of(lambda: served[call.method](*call.args)))
    assert [one.call("divide", n, 2).result(PATIENCE_S) for n in (4, 5)] == [2.0, 2.5]
    with refused(ConfigError, "name one"):
        one.call("refuse").result(PATIENCE_S)
    with refused(RoleFailed, "other failed", "ZeroDivisionError"):
        one.call("divide", 1, 0).result(PATIENCE_S)


def test_an_answer_gives_its_value_or_raises_its_error() -> None:
    assert Answer(3).unwrap() == 3
    with refused(RoleFailed, "other failed", "ValueError: no"):
        FAILURES.answer(ValueError("no")).unwrap()


def test_parts_of_an_answer_arrive_in_order_before_it_until_the_call_is_cancelled(links: tuple[Link, Link]) -> None:
    one, other = links
    parts: list[tuple[object, ...]] = []
    whole = one.call("count", on_part=lambda *part: parts.append(part))
    dropped = one.call("count", on_part=lambda *part: parts.append(part))
    calls = [other.calls.get(timeout=PATIENCE_S) for _ in range(2)]
    assert dropped.cancel()
    assert getattr(other.calls.get(timeout=PATIENCE_S), "method", "") == CANCEL
    for call in reversed(calls):
        assert call is not None
        call.report([1], "a")
        call.report([2, 3], "b")
        call.answer(Answer(call.number))
    assert whole.result(PATIENCE_S) == 0
    assert parts == [([1], "a"), ([2, 3], "b")]


class Unreadable:
    """An object that can be pickled, and not be read."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return int, ("no number",)


def test_what_the_other_process_cannot_read_fails_its_call_alone(links: tuple[Link, Link]) -> None:
    one, other = links
    answering(other, lambda call: Answer(Unreadable() if call.args[0] == "answer" else call.args[0]))
    for argument in (Unreadable(), "answer"):
        with refused(TriviumError, "invalid literal"):
            one.call("echo", argument).result(PATIENCE_S)
    assert one.call("echo", 3).result(PATIENCE_S) == 3


def test_a_process_that_runs_a_call_may_call_back(links: tuple[Link, Link]) -> None:
    one, other = links
    answering(one, lambda call: Answer(call.args[0] + 1))
    answering(other, lambda call: Answer(other.call("increment", call.args[0]).result(PATIENCE_S) * 2))
    assert one.call("double", 3).result(PATIENCE_S) == 8


def test_the_death_of_a_process_fails_every_call_and_the_later_ones(links: tuple[Link, Link]) -> None:
    one, other = links
    outgoing = Outgoing()
    waiting = one.call("rest", weights=outgoing)
    outgoing.give([("w", torch.zeros(2))])
    call = other.calls.get(timeout=PATIENCE_S)
    assert call is not None
    one.disconnect()
    with pytest.raises(Disconnected):
        list(call.weights)
    assert other.calls.get(timeout=PATIENCE_S) is None
    for failed in (waiting, one.call("rest")):
        with pytest.raises(Disconnected):
            failed.result(PATIENCE_S)
    assert outgoing.has_taken.wait(PATIENCE_S)


def test_weights_are_read_once_the_receiver_has_taken_the_ones_before(links: tuple[Link, Link]) -> None:
    one, other = links
    tensors = [torch.arange(3.0), torch.ones(2, dtype=torch.bfloat16), torch.tensor([True])]
    groups: list[list[Named]] = [[("a", tensors[0]), ("b", tensors[1])], [("c", tensors[2])], [("d", tensors[0])]]
    outgoing, read, may_go_on = Outgoing(), [0], Event()
    sent = one.call("load", weights=outgoing)

    def reading() -> Any:
        for group in groups:
            read[0] += 1
            yield group

    sender = Thread(target=send_to_all, args=(reading(), [outgoing]), daemon=True)
    sender.start()
    call = other.calls.get(timeout=PATIENCE_S)
    assert call is not None
    assert not may_go_on.wait(0.1)
    assert read == [1]
    weights = iter(call.weights)
    arrived = [next(weights) for _ in range(3)]
    assert [name for name, _ in arrived] == ["a", "b", "c"]
    assert all(torch.equal(tensor, expected) for (_, tensor), expected in zip(arrived, tensors, strict=True))
    call.answer(Answer("enough"))  # without the last group
    assert sent.result(PATIENCE_S) == "enough"
    sender.join(PATIENCE_S)
    assert not sender.is_alive()


async def test_concurrent_calls_are_cancelled_one_by_one_and_all_by_the_last_call(links: tuple[Link, Link]) -> None:
    one, other = links
    cancelled = set[str]()

    async def start(call: Call) -> str:
        try:
            await asyncio.sleep(0 if call.args[0] == "quick" else 600)
        except asyncio.CancelledError:
            cancelled.add(call.args[0])
            raise
        return call.args[0]

    serving = asyncio.ensure_future(serve(other, start, FAILURES))
    slow, stays = one.call("sleep", "slow"), one.call("sleep", "stays")
    assert await asyncio.wrap_future(one.call("sleep", "quick")) == "quick"
    slow.cancel()
    with pytest.raises(CancelledError):
        slow.result(0)
    await until(lambda: cancelled == {"slow"}, PATIENCE_S)
    assert not stays.done()
    one.call(CLOSE)
    await asyncio.wait_for(serving, PATIENCE_S)
    await until(lambda: cancelled == {"slow", "stays"}, PATIENCE_S)


def test_a_cancelled_call_is_reported_to_the_process_that_runs_it(links: tuple[Link, Link]) -> None:
    one, other = links
    one.call("rest").cancel()
    methods = [call.method for call in (other.calls.get(timeout=PATIENCE_S) for _ in range(2)) if call is not None]
    assert methods == ["rest", CANCEL]


def test_only_a_process_with_the_key_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trivium.processes.sockets._CHALLENGE_S", 1)
    with closing(Listening("127.0.0.1", b"key")) as listening, ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(listening.accept, PATIENCE_S)
        with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
            connect(listening.address, b"another")
        with socket.create_connection(listening.address) as silent:
            with connect(listening.address, b"key") as mine, accepting.result(PATIENCE_S) as theirs:
                mine.send_bytes(b"hello")
                assert theirs.recv_bytes() == b"hello"
                reading = threads.submit(theirs.recv_bytes)
                time.sleep(1.2)  # an accepted connection has no limit
                mine.send_bytes(b"late")
                assert reading.result(PATIENCE_S) == b"late"
            silent.settimeout(PATIENCE_S)
            while silent.recv(4096):  # the challenge, then the end
                pass
        with pytest.raises(TimeoutError):
            listening.accept(0.05)
