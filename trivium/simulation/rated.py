"""The parts of a planned run: engine, train engine and workflow whose times follow from the rates of a machine."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trivium.concurrency import Turns
from trivium.config import EngineConfig, WorkflowConfig
from trivium.engines.load_gate import LoadGate
from trivium.policy import Policy
from trivium.protocols import Objective, Weights
from trivium.randomness import stream, uniforms
from trivium.simulation.hardware import SimulatedTrainEngine
from trivium.simulation.rates import Quantiles
from trivium.types import Batch, Capabilities, Completion, FloatArray, Metrics, Request, StopReason, Task

_LENGTH = 2**40 + 8
"""The position of the key's uniform number that the length of a completion follows from."""
_SLICES = 20
"""The trainer looks this many times in a train step whether it shares its device."""
_TOKEN = 5


def drawn(uniform: float, quantiles: Quantiles) -> float:
    """The value of a distribution at a uniform number; the distribution is given as equally spaced quantiles."""
    if len(quantiles) == 1:
        return quantiles[0]
    place = uniform * (len(quantiles) - 1)
    low = min(int(place), len(quantiles) - 2)
    return quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (place - low)


class Device:
    """The device of a planned run. Engine and trainer may share it, and then are slower while both compute."""

    def __init__(self, shared_speed: float = 1.0) -> None:
        self.shared_speed = shared_speed
        self.engines: list[RatedEngine] = []
        self.engine_speed = 1.0

    def train(self, seconds: float) -> None:
        """Blocks for these seconds of training, or longer while an engine computes on the same device."""
        if self.shared_speed == 1.0:
            time.sleep(seconds)
            return
        self._set_engine_speed(self.shared_speed)
        for _ in range(_SLICES):
            is_shared = any(engine.is_busy for engine in self.engines)
            time.sleep(seconds / _SLICES / (self.shared_speed if is_shared else 1.0))
        self._set_engine_speed(1.0)

    def _set_engine_speed(self, speed: float) -> None:
        self.engine_speed = speed
        for engine in self.engines:
            engine.speed_changed()


DEVICE = [Device()]
"""The device of the planned run in progress: its parts are built from configs, which hold plain values."""


class RatedEngine:
    """An engine whose rows share its rate: a decoding step takes `step_s`, and `row_s` more for each row in flight."""

    class Config(EngineConfig):
        kind: str = "trivium.simulation.rated:RatedEngine"
        start_s: float = 0.0
        step_s: float = 0.0
        row_s: float = 0.0
        load_s: float = 0.0
        max_rows: int = 256
        response_tokens: tuple[float, ...] = (1.0,)

    capabilities = Capabilities(exact_sampling=True, batch_invariant=True, updates_in_flight=True)
    max_context = 2**30

    def __init__(self, config: Config, **_: object) -> None:
        self.config, self.version, self.device = config, 0, DEVICE[0]
        self.busy_s = 0.0
        """Seconds with a row in flight."""
        self._gate, self._turns, self._numbers = LoadGate(), Turns(config.max_rows), itertools.count()
        self._rows, self._speed = 0, 1.0
        self._decoded = self._at = 0.0
        """Decoding steps up to the time `_at`."""
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        """A heap of (decoding step, number, future) of the rows' last tokens."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._adoptions: list[tuple[float, int]] = [(0.0, 0)]
        """(decoding step, version) of the last loads."""
        self.device.engines.append(self)

    @property
    def is_busy(self) -> bool:
        return self._rows > 0

    async def generate(self, request: Request) -> Completion:
        wanted = drawn(float(uniforms(np.uint64(request.key.digest()), _LENGTH)), self.config.response_tokens)
        tokens = min(max(1, round(wanted)), request.sampling.max_new_tokens)
        self._loop = asyncio.get_running_loop()
        async with self._gate.completion(), self._turns:
            if self.config.start_s:
                await asyncio.sleep(self.config.start_s)
            began = await self._decode(tokens)
        steps, versions = zip(*self._adoptions, strict=True)
        sampled_by = np.maximum(np.searchsorted(steps, began + np.arange(tokens), side="right") - 1, 0)
        return Completion(
            np.full(tokens, _TOKEN, np.int32),
            np.full(tokens, -0.5, np.float32),
            np.array(versions, np.int32)[sampled_by],
            StopReason.EOS if tokens >= wanted else StopReason.LENGTH,
            text="",
        )

    async def _decode(self, tokens: int) -> float:
        """Waits for the row's last token. Returns the decoding step that it began at."""
        self._advance()
        began, done = self._decoded, asyncio.get_running_loop().create_future()
        self._rows += 1
        heapq.heappush(self._ends, (began + tokens, next(self._numbers), done))
        self._set_timer()
        try:
            await done
        except asyncio.CancelledError:
            self._advance()
            self._rows -= 1
            self._set_timer()
            raise
        return began

    def speed_changed(self) -> None:
        """The trainer, in its thread, begins or ends to compute on the same device."""
        if self._loop is not None and not self._loop.is_closed():
            self._advance()
            self._loop.call_soon_threadsafe(self._set_timer)

    def _advance(self) -> None:
        """Counts the decoding steps since the last call, which had the same rows and speed."""
        now = time.monotonic()
        if self._rows:
            self._decoded += (now - self._at) / self._step_s()
            self.busy_s += now - self._at
        self._at, self._speed = now, self.device.engine_speed

    def _step_s(self) -> float:
        return max(1e-9, self.config.step_s + self.config.row_s * self._rows) / self._speed

    def _set_timer(self) -> None:
        """Ends the rows that are due, and waits for the next one."""
        if self._timer is not None:
            self._timer.cancel()
        self._advance()
        while self._ends and (self._ends[0][2].done() or self._ends[0][0] <= self._decoded + 1e-6):
            done = heapq.heappop(self._ends)[2]
            if not done.done():  # else it was cancelled
                self._rows -= 1
                done.set_result(None)
        if self._ends and self._loop is not None:
            left_s = (self._ends[0][0] - self._decoded) * self._step_s()
            self._timer = self._loop.call_later(left_s, self._set_timer)

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        del weights
        if in_flight == "update":
            await self._adopt(version)
            return
        async with self._gate.load():
            await self._adopt(version)

    async def _adopt(self, version: int) -> None:
        await asyncio.sleep(self.config.load_s)
        self._advance()
        self.version = version
        self._adoptions = [*self._adoptions[-63:], (self._decoded, version)]

    async def close(self) -> None:
        for _, _, done in self._ends:
            done.cancel()


class RatedTrainEngine(SimulatedTrainEngine):
    """A train engine whose steps take the time of their tokens."""

    class Config(SimulatedTrainEngine.Config):
        kind: str = "trivium.simulation.rated:RatedTrainEngine"
        update_s: float = 0.0
        score_token_s: float = 0.0
        sync_s: float = 0.0
        speedup: float = 1.0
        """How much faster the ranks train than one of them."""

    config: Config

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._device, self._updated = DEVICE[0], -1

    def score(self, batch: Batch, what: str) -> Sequence[FloatArray]:
        self._device.train(self.config.score_token_s * batch.num_tokens / self.config.speedup)
        return super().score(batch, what)

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        del role, objective
        first_s = self.config.update_s if self._updated != self.version else 0.0
        self._updated = self.version
        self._device.train((first_s + self.config.token_s * batch.num_tokens) / self.config.speedup)
        return {"train/loss/policy": 0.0}

    def export_weights(self) -> Any:
        time.sleep(self.config.sync_s)
        return super().export_weights()


class RatedWorkflow:
    """Turns whose number, and the time between them, follow from the rates. The reward is 0 or 1."""

    capabilities = Capabilities(gives_rewards=True)

    class Config(WorkflowConfig):
        kind: str = "trivium.simulation.rated:RatedWorkflow"
        prompt_tokens: tuple[float, ...] = (1.0,)
        turns: tuple[float, ...] = (1.0,)
        environment_s: tuple[float, ...] = (0.0,)
        reward_s: tuple[float, ...] = (0.0,)

    def __init__(self, config: Config) -> None:
        self.config = config
        self._rollouts = Counter[str]()

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float]:
        self._rollouts[task.task_id] += 1
        config, address = self.config, stream("planned", task.task_id, self._rollouts[task.task_id])
        length, count, pause, reward, gain = (float(each) for each in uniforms(np.uint64(address), np.arange(5)))
        turns = max(1, round(drawn(count, config.turns)))
        tokens = np.full(max(1, math.ceil(drawn(length, config.prompt_tokens))), _TOKEN, np.int32)
        for _ in range(turns):
            turn = await policy.generate(task.prompt, tokens=tokens)
            tokens = np.concatenate([tokens, turn.tokens])
            await asyncio.sleep(drawn(pause, config.environment_s) / turns)
        await asyncio.sleep(drawn(reward, config.reward_s))
        return {"planned": float(gain < 0.5)}
