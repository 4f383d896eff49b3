"""Samples with the weights of any saved state: one engine, which adopts them in turn.

Requests for the weights that the engine holds are sampled together. Once requests for other weights wait, those that
arrive later wait as well; the engine adopts the next weights when the completions in progress have ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from trivium.foundation.concurrency import Turns, gather_or_cancel
from trivium.foundation.randomness import SampleKey
from trivium.protocols import RolloutEngine, SteppedEngine
from trivium.serving.tinker.futures import PendingResult
from trivium.serving.tinker.lora_models import Adapters, Named, adapter_in, top_tokens
from trivium.serving.tinker.saved_states import SavedState
from trivium.serving.tinker.verbs import SampleForm
from trivium.serving.tinker.wire import floats, write_message, write_top
from trivium.types import MIN_TEMPERATURE, SERVED, Completion, IntArray, Request, StopReason

_TOGETHER = 16
"""Of how many completions the most probable tokens are computed together: their tables take memory."""
Adopted = SavedState | None | Literal["unknown"]
"""What an engine holds; None: the base model."""


@dataclass(eq=False)
class SamplingSession:
    """The weights that a sampling client samples from, and its results."""

    id: str
    session_id: str
    base_model: str
    address: tuple[int | str, ...]
    """Addresses the random numbers of its requests."""
    weights: SavedState | None = None
    """None: those of the base model."""
    model_path: str | None = None
    clones: int = 0
    finished: dict[int, dict[int, dict[str, str]]] = field(default_factory=dict[int, dict[int, dict[str, str]]])
    """By clone: the finished requests by cursor, from the first one that the clone may not know."""
    cursors: Counter[int] = field(default_factory=Counter[int])
    """By clone: how many requests have finished."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, clone: int, result: PendingResult) -> None:
        """Takes a request that has finished."""
        self.cursors[clone] += 1
        row = {"request_id": result.id, "state": "failed" if result.failed else "finished"}
        self.finished.setdefault(clone, {})[self.cursors[clone]] = row
        self.changed.set()

    async def completions(self, clone: int, cursor: int, timeout_s: float) -> dict[str, object]:
        """The requests of a clone that have finished after the cursor; waits for one."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.cursors[clone] <= cursor:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            pass
        rows = {number: row for number, row in self.finished.get(clone, {}).items() if number > cursor}
        self.finished[clone] = rows
        return {"completions": [*rows.values()], "cursor": self.cursors[clone]}


class Sampler:
    """The rollout engine of the service."""

    def __init__(
        self,
        engine: RolloutEngine,
        adapters: Adapters,
        seed: int,
        keep: Callable[[str | None, IntArray, Sequence[Completion]], object],
    ) -> None:
        """`keep` takes the id of a model (None: the base model), a prompt and its completions, in a thread."""
        self.engine, self._adapters, self._seed, self._keep = engine, adapters, seed, keep
        self._held: Adopted = None
        self._version = self._running = 0
        """`_running`: how many requests and loads use the engine."""
        self._wanted = Counter[SavedState | None]()
        """How many requests wait for weights, those that the engine adopts next first."""
        self._changed = asyncio.Event()
        self._scoring: tuple[SavedState | None, float, SteppedEngine] | None = None
        """The last weights and temperature of which the most probable tokens were asked for, and their engine."""

    async def sample(
        self, weights: SavedState | None, form: SampleForm, address: tuple[int | str, ...], turns: Turns
    ) -> bytes:
        """The `SampleResponse` of a request for the weights of a state (None: the base model). Its random numbers
        are a function of the seed of the run and this address, or of its own seed. `turns` admits what computes with
        train engines. Raises DataError if the state was deleted or replaced."""
        if weights is not None:
            weights.check()
        seed, prompt = form.sampling_params.seed, form.tokens
        path = address if seed is None else ("seed", seed)
        sampling = form.sampling(self.engine.max_context - len(prompt))
        keys = (SampleKey(self._seed, "tinker", SERVED, "", index=n, path=path) for n in range(form.num_samples))
        async with self._holding(weights):
            requests = (Request(prompt, sampling, key) for key in keys)
            completions = await gather_or_cancel(self.engine.generate(request) for request in requests)
        await asyncio.to_thread(self._keep, weights and weights.model_id, prompt, completions)
        tops: list[bytes | None] = [None] * (1 + len(completions))
        if form.topk_prompt_logprobs or form.topk_sample_logprobs:
            async with turns:
                tops = await asyncio.to_thread(self._tops, weights, form, prompt, completions)
        log_probs: bytes | None = None
        if form.prompt_logprobs:
            of_prompt = completions[0].extra["prompt_log_prob"][: len(prompt)].copy()
            of_prompt[: _skipped(form, prompt)] = np.nan
            log_probs = floats(of_prompt)
        sequences = [(1, _sequence(each, top)) for each, top in zip(completions, tops[1:], strict=True)]
        return write_message(*sequences, (2, log_probs), (3, tops[0]))

    @asynccontextmanager
    async def _holding(self, weights: SavedState | None) -> AsyncGenerator[None]:
        """The engine holds these weights while the block runs."""
        self._wanted[weights] += 1
        try:
            while next(iter(self._wanted)) != weights or (weights != self._held and self._running):
                self._changed.clear()
                await self._changed.wait()
            self._running += 1
        finally:
            self._wanted[weights] -= 1
            if not self._wanted[weights]:
                del self._wanted[weights]
            self._changed.set()
        try:
            if weights != self._held:
                self._held, self._running = "unknown", self._running + 1  # until the load has succeeded
                # To its end, also if this request is cancelled: the engine adopts weights one after the other.
                await asyncio.shield(asyncio.create_task(self._adopt(weights)))
            yield
        finally:
            self._running -= 1
            self._changed.set()

    async def _adopt(self, weights: SavedState | None) -> None:
        self._version += 1
        try:
            await self.engine.load(self._version, await asyncio.to_thread(self._read, weights))
            self._held = weights
        finally:
            self._running -= 1
            self._changed.set()

    def _read(self, weights: SavedState | None) -> Named:
        """The weights of a state. Raises DataError if it was deleted or replaced meanwhile."""
        if weights is None:
            return self._adapters.weights(None)
        try:
            return self._adapters.weights(adapter_in(weights.directory))
        finally:
            weights.check()  # after reading: files of another state may have been among them, or none

    def _scorer(self, weights: SavedState | None, temperature: float) -> SteppedEngine:
        """The engine that scores with the weights of a state at a temperature."""
        if self._scoring is None or self._scoring[:2] != (weights, temperature):
            old, self._scoring = self._scoring, None
            if old is not None:
                old[2].close()
            directory = None if weights is None else adapter_in(weights.directory)
            try:
                engine = self._adapters.scoring(directory, temperature)
            finally:
                if weights is not None:
                    weights.check()
            self._scoring = weights, temperature, engine
        return self._scoring[2]

    def _tops(
        self, weights: SavedState | None, form: SampleForm, prompt: IntArray, completions: Sequence[Completion]
    ) -> list[bytes | None]:
        """The most probable tokens of the prompt and of each completion, where they are asked for: as the
        log-probabilities beside them, those of a prompt are the model's own, and those of a completion are at the
        temperature of the request."""
        tops: list[bytes | None] = [None] * (1 + len(completions))
        if k := form.topk_prompt_logprobs:
            [top] = top_tokens(self._scorer(weights, 1.0), [prompt], _skipped(form, prompt), k)
            tops[0] = write_top(top)
        if k := form.topk_sample_logprobs:
            engine = self._scorer(weights, max(form.sampling_params.temperature, MIN_TEMPERATURE))
            whole = [np.concatenate([prompt, each.tokens]) for each in completions]
            for at in range(0, len(whole), _TOGETHER):
                for number, top in enumerate(top_tokens(engine, whole[at : at + _TOGETHER], len(prompt), k), at + 1):
                    tops[number] = write_top(top[len(prompt) :])
        return tops


def _skipped(form: SampleForm, prompt: IntArray) -> int:
    """How many tokens of the prompt get no log-probability."""
    last = form.prompt_logprobs_last_n
    return 1 if last is None else len(prompt) - last


def _sequence(completion: Completion, top: bytes | None) -> bytes:
    is_cut = completion.stop_reason in (StopReason.LENGTH, StopReason.ABORT)
    tokens = completion.tokens.astype("<i4").tobytes()
    return write_message((1, int(is_cut)), (2, tokens), (3, floats(completion.log_prob)), (4, top))
