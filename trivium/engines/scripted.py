"""A rollout engine without a model: its completions come from a script. For tests of everything around an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trivium.config import EngineConfig, PluginPath
from trivium.engines.load_gate import LoadGate
from trivium.engines.stopping import StopScan
from trivium.foundation.errors import ConfigError, RolloutError
from trivium.foundation.randomness import uniforms
from trivium.foundation.registry import resolve
from trivium.policy import EngineFailure
from trivium.protocols import DescribedWeights, Weights
from trivium.types import Capabilities, Completion, Request, StopReason

if TYPE_CHECKING:
    from trivium.protocols.rollout import OnTokens

_CHOICE, _FAIL, _HANG = 2**40, 2**40 + 1, 2**40 + 2
"""Positions of the key's uniforms beyond those of tokens: they choose the completion, its failure and its hanging."""


def log_probs_of(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """The log-probabilities of a completion at a temperature above 0. They differ by token and by place, so tests find
    one that stands at another token."""
    places = np.arange(len(tokens))
    return ((-1 - (np.asarray(tokens, np.int64) + 7 * places) % 61) / 64).astype(np.float32)


@dataclass(eq=False)
class _InFlight:
    """A request in flight."""

    began: float | None = None
    """Start of its completion, by the monotonic clock; None while it waits for weights."""
    spans: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(seconds since the start, version) of each change of weights within the completion."""


class ScriptedEngine:
    """Completions from a script: a function of the request's key and prompt, never of time or of other requests.

    The one exception are weights that change in flight: the tokens of a completion come evenly over `delay_s`, and
    those that come after the weights are the ones that the script has for the new version.
    """

    class Config(EngineConfig):
        kind: str = "scripted"
        replies: tuple[str | tuple[int, ...], ...] = ()
        """Texts or token ids. The key of a request picks one; end of sequence is added if it is missing."""
        script: PluginPath | None = None
        """Instead of `replies`: a function of (Request, policy version) that returns a text or token ids."""
        delay_s: float = Field(default=0.0, ge=0)
        """Seconds per completion."""
        fail_fraction: float = Field(default=0.0, ge=0, le=1)
        """Fraction of the requests, picked by key, that raise a RolloutError after the delay."""
        hang_fraction: float = Field(default=0.0, ge=0, le=1)
        """Fraction of the requests, picked by key, that never end by themselves."""
        break_after: int | None = Field(default=None, ge=0)
        """After this number of requests the engine fails every call."""
        max_context: int = Field(default=4096, ge=2)
        """Longest prompt and completion together, in tokens."""

    capabilities = Capabilities(exact_sampling=True, batch_invariant=True, updates_in_flight=True)

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
        """`encode` is needed for `replies` that are text. `model_dir` and `threads` are recorded, not used."""
        if bool(config.replies) == (config.script is not None):
            raise ConfigError(
                "an engine with a script", "both or neither of engine.replies and engine.script", "set one"
            )
        if encode is None and any(isinstance(scripted, str) for scripted in config.replies):
            raise ConfigError("engine.replies as text", "no encode function", "give token ids, or pass encode")
        self.config, self.model_dir, self.threads = config, model_dir, threads
        self._eos, self._decode, self._encode = eos_token_ids, decode, encode
        self._script = resolve("engines", config.script) if config.script is not None else self._choose
        self._version = 0
        self.loaded: list[int] = []
        """Every version that was loaded, in order."""
        self.weight_names: list[str] = []
        """Names of the weights loaded last."""
        self.requests: list[Request] = []
        """All requests, in order of arrival."""
        self._in_flight: set[_InFlight] = set()
        self._gate = LoadGate()
        self._pausing: set[asyncio.Future[None]] = set()
        """Futures that completions in progress wait for."""
        self._closed = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        """Longest prompt and completion together, in tokens."""
        return self.config.max_context

    async def generate(self, request: Request) -> Completion:
        """The scripted completion. Raises RolloutError for a scripted failure, EngineFailure once broken or closed."""
        self._check_open()
        remaining = self.config.max_context - len(request.prompt_tokens)
        if remaining < 1 or request.sampling.max_new_tokens < 1:
            raise RolloutError(
                "context for a completion",
                f"{remaining} tokens of context left, max_new_tokens {request.sampling.max_new_tokens}",
                "shorten the prompt, or raise engine.max_context",
            )
        self.requests.append(request)
        call = _InFlight()
        self._in_flight.add(call)
        try:
            async with self._gate.completion():
                call.began, call.spans = time.monotonic(), [(0.0, self._version)]
                await self._pause(self._drawn(request, _HANG, self.config.hang_fraction))
                if self._drawn(request, _FAIL, self.config.fail_fraction):
                    raise RolloutError("a scripted completion", "a scripted failure", "lower engine.fail_fraction")
                limit = min(remaining, request.sampling.max_new_tokens)
                return self._completion(request, limit, [] if self._closed else call.spans)
        finally:
            self._in_flight.discard(call)

    async def stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        """The scripted completion. Calls `on_tokens` with each token, at the end of `delay_s`."""
        completion = await self.generate(request)
        for token, log_prob in zip(completion.tokens.tolist(), completion.log_prob.tolist(), strict=True):
            on_tokens([token], [log_prob])
            await asyncio.sleep(0)
        return completion

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Adopts a version once everything submitted before has finished, or at once with `update`; keeps the names of
        the weights."""
        self._check_open()
        if in_flight == "update":
            self._adopt(version, await _names(weights))
            for call in self._in_flight:
                if call.began is not None:
                    call.spans.append((time.monotonic() - call.began, version))
            return
        async with self._gate.load():
            self._adopt(version, await _names(weights))

    def _adopt(self, version: int, names: list[str]) -> None:
        self._version, self.weight_names = version, names
        self.loaded.append(version)

    async def close(self) -> None:
        """Completions in progress end at once with `abort` and no tokens."""
        self._closed = True
        for pause in self._pausing:
            _end(pause)

    def _check_open(self) -> None:
        limit = self.config.break_after
        if self._closed or (limit is not None and len(self.requests) >= limit):
            state = "the engine was closed" if self._closed else f"a scripted breakdown after {limit} requests"
            raise EngineFailure("a completion of the engine", state, "build a new engine")

    async def _pause(self, hang: bool) -> None:
        """Waits for the scripted time, or until the engine is closed."""
        if self.config.delay_s == 0 and not hang:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        pause = loop.create_future()
        timer = None if hang else loop.call_later(self.config.delay_s, _end, pause)
        self._pausing.add(pause)
        try:
            await pause
        finally:
            self._pausing.discard(pause)
            if timer is not None:
                timer.cancel()

    def _drawn(self, request: Request, position: int, fraction: float) -> bool:
        return fraction > 0 and float(uniforms(np.uint64(request.key.digest()), position)) < fraction

    def _choose(self, request: Request, version: int) -> str | Sequence[int]:
        index = float(uniforms(np.uint64(request.key.digest()), _CHOICE)) * len(self.config.replies)
        return self.config.replies[int(index)]

    def _completion(self, request: Request, limit: int, spans: Sequence[tuple[float, int]]) -> Completion:
        """The tokens sampled by the versions of the spans; none, and `abort`, without spans."""
        tokens, versions = list[int](), list[int]()
        for after_s, version in spans:
            part = min(1.0, after_s / self.config.delay_s) if self.config.delay_s else 0.0
            # Tokens sampled before these weights were loaded; the last one comes when the completion ends.
            num_before = min(int(part * len(tokens)), max(0, len(tokens) - 1))
            script = self._scripted(request, version)[:limit]
            rest = script[num_before:] or script[-1:]  # with a shorter script, the completion ends at once
            tokens, versions = [*tokens[:num_before], *rest], [*versions[:num_before], *[version] * len(rest)]
        tokens, reason = self._cut(request, tokens, limit) if spans else ([], StopReason.ABORT)
        greedy = request.sampling.temperature == 0
        return Completion(
            np.array(tokens, np.int32),
            np.zeros(len(tokens), np.float32) if greedy else log_probs_of(tokens),
            np.array(versions[: len(tokens)], np.int32),
            reason,
        )

    def _scripted(self, request: Request, version: int) -> list[int]:
        """The script's tokens, end of sequence included."""
        script = self._script(request, version)
        if isinstance(script, str):
            if self._encode is None:
                raise ConfigError("engine.replies as text", "no encode function", "give token ids, or pass encode")
            script = self._encode(script)
        return [*script, min(self._eos)] if self._eos and not (script and script[-1] in self._eos) else list(script)

    def _cut(self, request: Request, tokens: list[int], limit: int) -> tuple[list[int], StopReason]:
        """Cuts the tokens where an engine would stop."""
        scan = StopScan(request.sampling.stop, self._decode) if request.sampling.stop else None
        for count in range(1, min(limit, len(tokens)) + 1):
            if tokens[count - 1] in request.sampling.ends(self._eos):
                return tokens[:count], StopReason.EOS
            if scan is not None and scan.hit(tokens[:count]):
                return tokens[:count], StopReason.STOP
        return tokens[:limit], StopReason.LENGTH


async def _names(weights: Weights) -> list[str]:
    """The names of the weights. Reads streamed weights in a thread, since reading them blocks."""
    if isinstance(weights, DescribedWeights):
        return await asyncio.to_thread(lambda: [name for name, _ in weights])
    return [name for name, _ in weights]


def _end(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)
