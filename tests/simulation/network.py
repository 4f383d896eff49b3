"""The network of a simulated computer, and the agents that call the endpoint of a run over it (`run.mode: serve`).

A request reaches the application of the server that the product gives to `serve_app`. Messages take time. While a fault
lasts, they are lost or delivered twice; a client that gets no answer repeats its request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from tests.simulation.computer import Computer, Process
from tests.simulation.filesystem import Replaced
from trivium.serving import connections

Body = Mapping[str, Any]
_LATENCY_S = 0.01
"""The longest time that a message takes."""
_LOST = _TWICE = 0.25
"""The parts of the messages that a fault loses, or delivers twice."""
_PATIENCE_S = 30.0
"""How long a client waits for an answer. A call that the server cannot serve ends within `workflow.deadline_s`."""
_RETRY_S = 0.5
_EXPECTED = (200, 404, 409, 410, 503)
"""404, 409, 410: the session belongs to a server that was killed, was given feedback, or was dropped."""


class _Server(NamedTuple):
    process: Process
    loop: asyncio.AbstractEventLoop
    app: Any


class Network:
    """Delivers the requests of agents."""

    def __init__(self, computer: Computer, problems: list[str]) -> None:
        self._computer, self._problems = computer, problems
        self._servers: dict[str, _Server] = {}
        """By the name of the command."""
        self.sent = set[float]()
        """The rewards of all feedback."""
        self.bad_until = 0.0
        """Until this time messages are lost or delivered twice."""

    def replaced(self) -> list[Replaced]:
        return [(connections, "serve_app", self._serve_app)]

    @asynccontextmanager
    async def _serve_app(self, app: Any, host: str, port: int, max_connections: int = 0) -> AsyncGenerator[str]:
        del max_connections
        process = self._computer.this().process
        server = self._servers[process.name] = _Server(process, asyncio.get_running_loop(), app)
        try:
            yield f"http://{host}:{port}"
        finally:
            if self._servers.get(process.name) is server:
                del self._servers[process.name]

    async def work(self, agent: str, server: str, group_size: int, over: Callable[[], bool]) -> None:
        """An agent: rolls out tasks until the run is over."""
        life = self._computer.random.randrange(10**9)
        for number in itertools.count():
            if over():
                return
            task = f"{agent}, task {number} of {life}"
            rollouts = [
                self._rollout(server, {"task_id": task, "session": f"{task}, {n}"}, over) for n in range(group_size)
            ]
            await asyncio.gather(*rollouts)

    async def _rollout(self, server: str, labels: Body, over: Callable[[], bool]) -> None:
        messages = [{"role": "user", "content": f"{self._computer.random.randrange(9)}+1="}]
        reward = self._computer.random.random()
        self.sent.add(reward)
        calls: tuple[tuple[str, Body], ...] = (
            ("/v1/chat/completions", {**labels, "model": "policy", "messages": messages}),
            ("/feedback", {**labels, "reward": reward}),
        )
        for path, body in calls:
            while True:
                if over():
                    return
                try:
                    status = await self._post(server, path, body)
                except (ConnectionError, TimeoutError):
                    status = 503
                if status != 503:
                    break
                await asyncio.sleep(self._computer.random.random() * _RETRY_S)
            if status != 200:
                return

    async def _post(self, name: str, path: str, body: Body) -> int:
        """The status of the answer. Raises ConnectionError without a server, TimeoutError without an answer."""
        await asyncio.sleep(self._computer.random.random() * _LATENCY_S)
        server = self._servers.get(name)
        if server is None or not server.process.alive:
            raise ConnectionError
        is_bad = self._computer.now < self.bad_until
        luck, began = (self._computer.random.random() if is_bad else 1.0), self._computer.now
        if luck < _LOST / 2:  # the request
            await asyncio.sleep(_RETRY_S)
            raise TimeoutError
        gone = asyncio.Event()
        futures = [
            asyncio.run_coroutine_threadsafe(self._answer(server.app, path, body, gone), server.loop)
            for _ in range(2 if is_bad and luck > 1 - _TWICE else 1)
        ]
        answers = [asyncio.wrap_future(future) for future in futures]
        loop, reset = asyncio.get_running_loop(), asyncio.Event()
        server.process.on_death.append(lambda: loop.is_closed() or loop.call_soon_threadsafe(reset.set))
        died = asyncio.ensure_future(reset.wait())
        done, _ = await asyncio.wait([answers[0], died], timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if died in done:
            raise ConnectionError
        if luck < _LOST:  # the answer
            raise TimeoutError
        if done:
            return answers[0].result()
        if server.process.alive:
            server.loop.call_soon_threadsafe(gone.set)
            if server.process.stopped_until < began and self._computer.now < began + 2 * _PATIENCE_S:
                self._problems.append(f"{name} does not answer {path} within {_PATIENCE_S} s")
        raise TimeoutError

    async def _answer(self, app: Any, path: str, body: Body, gone: asyncio.Event) -> int:
        """Calls the application in the loop of its server, as an HTTP server does."""
        content = json.dumps(body).encode()
        parts: list[dict[str, Any]] = [{"type": "http.request", "body": content, "more_body": False}]
        sent: list[Mapping[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not parts:
                await gone.wait()
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path}
        address = {"root_path": "", "query_string": b"", "headers": headers, "client": ("agent", 1)}
        await app({**scope, **address, "raw_path": path.encode(), "server": ("server", 1)}, receive, send)
        status: int = sent[0]["status"]
        if status not in _EXPECTED:
            text = b"".join(message.get("body", b"") for message in sent[1:]).decode(errors="replace")
            self._problems.append(f"the endpoint answers {path} with {status}: {text:.300}")
        return status
