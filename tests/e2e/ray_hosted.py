"""What the tests of Ray host in processes of their own. It imports no torch, so that such a process starts soon."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.buffers.memory import MemoryBuffer
from trivium.cluster.actors import Host
from trivium.engines.scripted import ScriptedEngine, log_probs_of
from trivium.foundation.errors import SyncError
from trivium.policy import EngineFailure
from trivium.schedule import Schedule
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Completion, Request

if TYPE_CHECKING:
    from trivium.protocols.rollout import OnTokens

EOS = frozenset({1, 2})


class Anything:
    """Something to host."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.colour = "red"

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]

    def doubled(self, number: int) -> int:
        return 2 * number

    async def fail(self, error: BaseException) -> None:
        raise error

    async def fail_alone(self) -> None:
        class Unheard(Exception):
            pass

        raise Unheard("nobody else knows this class")

    async def sleep(self, name: str) -> None:
        self.log.append(f"{name} began")
        try:
            await asyncio.sleep(3600)
        finally:
            self.log.append(f"{name} ended")

    def all(self) -> list[str]:
        return self.log


class CountingHost(Host):
    """A host whose numbers of cancelled calls can be counted."""

    async def num_cancelled(self) -> int:
        return len(self._cancelled)


class Buffers:
    """Several buffers in one process, because processes cost seconds."""

    def __init__(self) -> None:
        self._buffers: list[MemoryBuffer] = []

    def make(self, rollouts: Path, schedule: Schedule) -> int:
        config, renderer = MemoryBuffer.Config(), ChatRenderer(tiny_tokenizer("0123456789="))
        self._buffers.append(
            MemoryBuffer(config, schedule=schedule, rollouts=rollouts, renderer=renderer, deadline_s=60)
        )
        return len(self._buffers) - 1

    async def on(self, number: int, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return await getattr(self._buffers[number], method)(*args, **named)

    async def undo(self, on: str, answer: Any, number: int, method: str, *args: Any) -> None:
        await self._buffers[number].undo(method, answer)


def raise_in_a_group(name: str) -> None:
    async def fail() -> None:
        raise SyncError("collect version 3", "a cause of its own", "look at the log")

    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(3600))
            tasks.create_task(fail())

    asyncio.run(both())


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def scripted(delay_s: float) -> ScriptedEngine:
    config = ScriptedEngine.Config(replies=((5, 6, 7, 1), (9,), tuple(range(3, 30)), (4, 2)), delay_s=delay_s)
    return ScriptedEngine(config, eos_token_ids=EOS, decode=decode)


class NeverLoads(ScriptedEngine):
    """It waits for ever where it should adopt weights."""

    async def load(self, *_: Any, **__: Any) -> None:
        await asyncio.Event().wait()


def scripted_that_never_loads(delay_s: float) -> NeverLoads:
    return NeverLoads(scripted(delay_s).config, eos_token_ids=EOS, decode=decode)


class FirstAtOnce(ScriptedEngine):
    """Its streams report the first token at once, and the others at the end."""

    async def stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        first = self._scripted(request, self.version)[:1]
        on_tokens(first, log_probs_of(first).tolist())
        done = await self.generate(request)
        on_tokens(done.tokens[1:].tolist(), done.log_prob[1:].tolist())
        return done


def scripted_that_begins_at_once(delay_s: float) -> FirstAtOnce:
    return FirstAtOnce(scripted(delay_s).config, eos_token_ids=EOS, decode=decode)


class ArrivesLate(ScriptedEngine):
    """Its completions arrive after calls that were made later: Ray does not guarantee their order."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0.2)
        return await super().generate(request)


def scripted_that_arrives_late(delay_s: float) -> ArrivesLate:
    return ArrivesLate(scripted(delay_s).config, eos_token_ids=EOS, decode=decode)


class Whole:
    """It reports no tokens while it samples."""

    max_context, version, capabilities = 4096, 0, ScriptedEngine.capabilities

    def __init__(self, engine: ScriptedEngine) -> None:
        self.generate, self.load, self.close = engine.generate, engine.load, engine.close


def scripted_that_does_not_stream(delay_s: float) -> Whole:
    return Whole(scripted(delay_s))


class Fails(ScriptedEngine):
    """What it needs for completions has died."""

    async def generate(self, request: Request) -> Completion:
        raise EngineFailure("completions from vLLM", "its process died", "fix the cause")


def scripted_that_fails(delay_s: float) -> Fails:
    return Fails(scripted(delay_s).config, eos_token_ids=EOS, decode=decode)
