"""A rollout engine without a model: it says what it was told to say. For tests of everything around an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import Field

from trivium.config import EngineConfig, PluginPath
from trivium.engines.stopping import StopScan
from trivium.errors import ConfigError, RolloutError
from trivium.policy import EngineFailure
from trivium.protocols import Weights
from trivium.randomness import uniforms
from trivium.registry import resolve
from trivium.types import Completion, Request, StopReason

LOG_PROB = -0.5
"""What every sampled token reports; 0 at temperature 0."""

_CHOICE, _FAIL, _HANG = 2**40, 2**40 + 1, 2**40 + 2
"""Positions of the key's uniforms that no token can reach: which reply, whether it fails, whether it hangs."""


@dataclass(eq=False)
class _Playing:
    """A request in flight."""

    finished: asyncio.Event = field(default_factory=asyncio.Event)
    began: float | None = None
    """When its reply began; None while it waits for weights."""
    spans: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(seconds after which, version): weights that were exchanged in mid-reply."""


class ScriptedEngine:
    """Answers from a script. The answer is a function of the request's key and prompt, never of time or company.

    The one exception are weights that change in flight: a reply's tokens come evenly over `delay_s`, and those that had
    not come when the weights did are what the new version would have said in their place.
    """

    class Config(EngineConfig):
        kind: str = "scripted"
        replies: tuple[str | tuple[int, ...], ...] = ()
        """Texts or token ids, one of which each request's key picks; end of sequence is added where it lacks."""
        script: PluginPath | None = None
        """Instead of `replies`: a function of (Request, policy version) that returns a text or token ids."""
        delay_s: float = Field(default=0.0, ge=0)
        """Seconds each reply takes."""
        fail_fraction: float = Field(default=0.0, ge=0, le=1)
        """Part of the requests, picked by key, that raise a RolloutError after the delay."""
        hang_fraction: float = Field(default=0.0, ge=0, le=1)
        """Part of the requests, picked by key, that never end by themselves."""
        break_after: int | None = Field(default=None, ge=0)
        """After so many requests the engine itself is broken and fails every call."""
        max_context: int = Field(default=4096, ge=2)
        """Longest prompt and reply together, in tokens."""

    exact_sampling = True
    batch_invariant = True
    updates_in_flight = True

    def __init__(
        self,
        config: Config,
        *,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], Sequence[int]] | None = None,
        model_dir: Path | None = None,
        threads: int = 1,
    ) -> None:
        """`encode` is needed for replies that are text. `model_dir` and `threads` are there to be kept, not used."""
        if bool(config.replies) == (config.script is not None):
            raise ConfigError(
                "an engine with a script", "both or neither of engine.replies and engine.script", "set one"
            )
        if encode is None and any(isinstance(reply, str) for reply in config.replies):
            raise ConfigError("replies as text", "no encode function", "give token ids, or pass encode")
        self.config, self.model_dir, self.threads = config, model_dir, threads
        self._eos, self._decode, self._encode = eos_token_ids, decode, encode
        self._script = resolve("engines", config.script) if config.script is not None else self._choose
        self._version = 0
        self.loaded: list[int] = []
        """Every version that was loaded, in order."""
        self.weight_names: list[str] = []
        """Names of the weights loaded last."""
        self.requests: list[Request] = []
        """Everything that was asked, in order of arrival."""
        self._in_flight: set[_Playing] = set()
        """The requests since the last load was asked for that waits for them."""
        self._gate: asyncio.Event | None = None
        """The load that requests arriving now must wait for."""
        self._closing = asyncio.Event()

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        """Longest prompt and reply together, in tokens."""
        return self.config.max_context

    async def generate(self, request: Request) -> Completion:
        """The scripted reply. Raises RolloutError where the script says so, EngineFailure once broken or closed."""
        self._refuse_broken()
        room = self.config.max_context - len(request.prompt_tokens)
        if room < 1 or request.sampling.max_new_tokens < 1:
            raise RolloutError(
                "room for a reply", f"{room} tokens of context left, max_new_tokens {request.sampling.max_new_tokens}",
                "shorten the prompt, or raise engine.max_context",
            )  # fmt: skip
        self.requests.append(request)
        gate, playing = self._gate, _Playing()
        self._in_flight.add(playing)
        try:
            if gate is not None:
                await gate.wait()
            playing.began, playing.spans = time.monotonic(), [(0.0, self._version)]
            closed = await self._pause(self._drawn(request, _HANG, self.config.hang_fraction))
            if self._drawn(request, _FAIL, self.config.fail_fraction):
                raise RolloutError("a scripted reply", "a scripted failure", "lower engine.fail_fraction")
            limit = min(room, request.sampling.max_new_tokens)
            return self._reply(request, limit, [] if closed else playing.spans)
        finally:
            self._in_flight.discard(playing)
            playing.finished.set()

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Adopts a version once everything submitted before has finished, or at once with `update`; keeps the names of
        the weights."""
        self._refuse_broken()
        names = [name for name, _ in weights]
        if in_flight == "update":
            self._adopt(version, names)
            for playing in self._in_flight:
                if playing.began is not None:
                    playing.spans.append((time.monotonic() - playing.began, version))
            return
        before, earlier, gate = self._in_flight, self._gate, asyncio.Event()
        self._in_flight, self._gate = set(), gate
        try:
            for event in (*(playing.finished for playing in before), *([earlier] if earlier else [])):
                await event.wait()
            self._adopt(version, names)
        finally:
            gate.set()

    def _adopt(self, version: int, names: list[str]) -> None:
        self._version, self.weight_names = version, names
        self.loaded.append(version)

    async def close(self) -> None:
        """Replies in progress end at once with `abort` and no tokens."""
        self._closing.set()

    def _refuse_broken(self) -> None:
        limit = self.config.break_after
        if self._closing.is_set() or (limit is not None and len(self.requests) >= limit):
            found = (
                "the engine was closed" if self._closing.is_set() else f"a scripted breakdown after {limit} requests"
            )
            raise EngineFailure("a reply from the engine", found, "build a new engine")

    async def _pause(self, hang: bool) -> bool:
        """Takes the scripted time; True when the engine was closed meanwhile."""
        waits = [asyncio.ensure_future(self._sleep(hang)), asyncio.ensure_future(self._closing.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._closing.is_set()

    async def _sleep(self, hang: bool) -> None:
        await asyncio.sleep(self.config.delay_s)
        while hang:
            await asyncio.sleep(3600)

    def _drawn(self, request: Request, position: int, fraction: float) -> bool:
        return float(uniforms(np.uint64(request.key.digest()), position)) < fraction

    def _choose(self, request: Request, version: int) -> str | Sequence[int]:
        index = float(uniforms(np.uint64(request.key.digest()), _CHOICE)) * len(self.config.replies)
        return self.config.replies[int(index)]

    def _reply(self, request: Request, limit: int, spans: Sequence[tuple[float, int]]) -> Completion:
        """What was said under the versions of the spans; nothing, and `abort`, without any."""
        tokens, versions = list[int](), list[int]()
        for after_s, version in spans:
            part = min(1.0, after_s / self.config.delay_s) if self.config.delay_s else 0.0
            kept = int(part * len(tokens))  # what had come before these weights did
            if tokens and kept == len(tokens):
                break
            said = self._said(request, version)
            rest = said[kept:] or said[-1:]  # a version that would have said less ends at once
            tokens, versions = [*tokens[:kept], *rest], [*versions[:kept], *[version] * len(rest)]
        tokens, reason = self._cut(request, tokens, limit) if spans else ([], StopReason.ABORT)
        log_prob = LOG_PROB if request.sampling.temperature > 0 else 0.0
        return Completion(
            np.array(tokens, np.int32), np.full(len(tokens), log_prob, np.float32),
            np.array(versions[: len(tokens)], np.int32), reason,
        )  # fmt: skip

    def _said(self, request: Request, version: int) -> list[int]:
        """The script's tokens, end of sequence included."""
        said = self._script(request, version)
        if isinstance(said, str):
            if self._encode is None:
                raise ConfigError("replies as text", "no encode function", "give token ids, or pass encode")
            said = self._encode(said)
        return [*said, min(self._eos)] if self._eos and not (said and said[-1] in self._eos) else list(said)

    def _cut(self, request: Request, tokens: list[int], limit: int) -> tuple[list[int], StopReason]:
        """The tokens up to where an engine would stop."""
        scan = StopScan(request.sampling.stop, self._decode) if request.sampling.stop else None
        for count in range(1, min(limit, len(tokens)) + 1):
            if tokens[count - 1] in self._eos:
                return tokens[:count], StopReason.EOS
            if scan is not None and scan.hit(tokens[:count]):
                return tokens[:count], StopReason.STOP
        return tokens[:limit], StopReason.LENGTH
