"""The parts of a planned run: engine, train engine and workflow whose times follow from the rates of a machine.

One completion of a planned run stands for all rollouts of a group, or of several groups, with their turns, environments
and rewards. The engine computes their times itself, so that a rollout costs microseconds and not a task.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np

from trivium.config import EngineConfig
from trivium.policy import Policy
from trivium.protocols import Objective, Weights
from trivium.randomness import uniforms
from trivium.simulation.hardware import SimulatedTrainEngine
from trivium.simulation.rates import Quantiles, Rates
from trivium.types import Batch, Capabilities, Completion, FloatArray, Metrics, Request, StopReason, Task

T = TypeVar("T")

_DRAWS = 2**40 + 8
"""The position of the key's first uniform number that the rollouts of a completion follow from."""
_FETCH_S = 0.002
"""Seconds before a load begins. Rollouts of the slots that the previous version admitted begin first, as in real runs,
where a thread fetches the weights."""
_CALL_S = 0.001
"""Seconds in which an explorer of another process leases a slot."""
_SLICES = 20
"""The trainer looks this many times in a train step whether it shares its device."""
_GRID = 200
"""Ends of completions are noticed at multiples of the seconds of a turn divided by this number."""
_LOSES, _WINS = 5, 6
"""The tokens of completions with the rewards 0 and 1."""
_PROMPT = np.array([_LOSES], np.int32)
_BESIDE = 3
"""Tokens of a planned group beside those that its first member samples: two prompts and one token."""


def drawn(uniform: Any, quantiles: Quantiles) -> FloatArray:
    """The values of a distribution at uniform numbers; the distribution is given as equally spaced quantiles."""
    return np.interp(uniform, np.linspace(0, 1, len(quantiles)), quantiles)


@dataclass(eq=False)
class Part:
    """The rollouts that one completion stands for, or a load."""

    left: int
    """Rollouts that have not ended."""
    done: asyncio.Future[None]
    version: int
    """The oldest version that samples a token; the version that is loaded."""


@dataclass(eq=False)
class Rollout:
    """A rollout in progress."""

    part: Part
    turns: list[int]
    """The tokens of the turns that have not begun; the next one is the last element. A load has one until it begins."""
    pause_s: float = 0.0
    """Seconds after each turn, in which an environment or a reward is computed."""


class Replica:
    """One engine. Its rows share its rate: a decoding step takes `step_s`, and `row_s` more for each row."""

    def __init__(self, rates: Rates, now: float) -> None:
        self.rates = rates
        self.version, self.speed = 0, 1.0
        self.busy_s = 0.0
        """Seconds in which it decodes."""
        self.timer: asyncio.TimerHandle | None = None
        self._at, self._decoded = now, 0.0
        """The time of the state, and the decoding steps until then."""
        self._rows: list[tuple[float, int, Rollout]] = []
        """A heap of (decoding step, number, rollout) of the rows' last tokens."""
        self._starting = set[Rollout]()
        """Those that have a row and no token yet."""
        self._delays: list[tuple[float, int, Rollout]] = []
        """A heap of (end, number, rollout) of prefills, environments and loads."""
        self._waiting = deque[Rollout]()
        """What waits for a row, in order. A load waits for the turns before it, and the turns after it wait for it."""
        self._load: Rollout | None = None
        self._numbers = itertools.count()

    @property
    def is_busy(self) -> bool:
        return bool(self._rows or self._starting)

    @property
    def next_at(self) -> float:
        """The time at which something ends if nothing is requested."""
        return min(self._next()[:2])

    def advance(self, now: float) -> None:
        """Computes what happened until now."""
        while True:
            row_at, delay_at, step_s = self._next()
            at = min(row_at, delay_at, max(now, self._at))
            if self._rows:
                self._decoded += (at - self._at) / step_s
                self.busy_s += at - self._at
            self._at = at
            if row_at <= at:
                self._decoded, _, rollout = heapq.heappop(self._rows)
                self._delay(rollout.pause_s, rollout)
            elif delay_at <= at:
                self._end_delay(heapq.heappop(self._delays)[2])
            else:
                return
            self._fill()

    def begin(self, rollouts: Iterable[Rollout]) -> None:
        self._waiting.extend(rollouts)
        self._fill()

    def cancel(self, part: Part) -> None:
        """Ends the rollouts of a part."""
        self._rows = [row for row in self._rows if row[2].part is not part]
        self._delays = [delay for delay in self._delays if delay[2].part is not part]
        heapq.heapify(self._rows)
        heapq.heapify(self._delays)
        self._starting = {rollout for rollout in self._starting if rollout.part is not part}
        self._waiting = deque(rollout for rollout in self._waiting if rollout.part is not part)
        self._fill()

    def load(self, version: int) -> asyncio.Future[None]:
        """Loads weights after the turns that were requested before. Returns the future of its end. A load that has not
        ended continues with the newer version."""
        if self._load is None:
            self._load = Rollout(Part(1, asyncio.get_running_loop().create_future(), version), [0])
            self.begin([self._load])
        self._load.part.version = version
        return self._load.part.done

    def _next(self) -> tuple[float, float, float]:
        """(time of the next end of a row, time of the next end of a delay, seconds of a decoding step)."""
        step_s = max(1e-9, self.rates.step_s + self.rates.row_s * len(self._rows)) / self.speed
        row_at = self._at + max(0.0, self._rows[0][0] - self._decoded) * step_s if self._rows else math.inf
        return row_at, self._delays[0][0] if self._delays else math.inf, step_s

    def _fill(self) -> None:
        """Gives rows to waiting turns, or begins a load once no earlier turn is in flight."""
        while self._waiting and len(self._rows) + len(self._starting) < self.rates.max_rows:
            rollout = self._waiting[0]
            if rollout is self._load:
                if rollout.turns and not self.is_busy:
                    rollout.turns.pop()
                    self._delay(self.rates.load_s, rollout)
                return
            self._starting.add(self._waiting.popleft())
            rollout.part.version = min(rollout.part.version, self.version)
            self._delay(self.rates.start_s, rollout)

    def _delay(self, seconds: float, rollout: Rollout) -> None:
        heapq.heappush(self._delays, (self._at + seconds, next(self._numbers), rollout))

    def _end_delay(self, rollout: Rollout) -> None:
        if rollout in self._starting:
            self._starting.remove(rollout)
            heapq.heappush(self._rows, (self._decoded + rollout.turns.pop(), next(self._numbers), rollout))
        elif rollout.turns:
            self._waiting.append(rollout)
        else:
            rollout.part.left -= 1
            if not rollout.part.left and not rollout.part.done.done():
                rollout.part.done.set_result(None)
            if rollout is self._load:
                self._waiting.popleft()
                self._load, self.version = None, rollout.part.version


class RatedEngine:
    """The engines of all explorers, which get groups in turn."""

    class Config(EngineConfig):
        kind: str = "trivium.simulation.rated:RatedEngine"
        rates: Rates
        group_size: int = 1
        groups: int = 0
        """Groups that the completion of a group's first member stands for, while those of the others take no time; 0:
        each completion is one rollout."""
        token_unit: float = 1.0
        """Tokens that each token of a completion stands for."""
        replicas: int = 1

    capabilities = Capabilities(exact_sampling=True, batch_invariant=True, updates_in_flight=True)
    max_context = 2**30
    latest: ClassVar[RatedEngine | None] = None
    """The engine of the planned run in progress, whose device the trainer may share."""

    def __init__(self, config: Config, **_: object) -> None:
        self.config, self.version, rates = config, 0, config.rates
        RatedEngine.latest = self
        self.replicas = [Replica(rates, time.monotonic()) for _ in range(config.replicas)]
        self._in_turn = itertools.cycle(self.replicas)
        turn_s = rates.start_s + rates.mean("response_tokens") * (rates.step_s + rates.row_s)
        self._grid_s = max(1e-6, turn_s / _GRID)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls = asyncio.Lock()
        self._newest = 0
        """The newest version that a replica holds or loads."""

    @property
    def is_busy(self) -> bool:
        return any(replica.is_busy for replica in self.replicas)

    @property
    def busy_s(self) -> float:
        """Seconds in which a replica decodes, averaged over them."""
        return float(np.mean([replica.busy_s for replica in self.replicas]))

    async def generate(self, request: Request) -> Completion:
        self._loop = asyncio.get_running_loop()
        if self.config.groups and request.key.index:
            return _completion(1, _LOSES, self._newest)
        if len(self.replicas) > 1:
            async with self._calls:
                fresh = sum(replica.version >= self.version for replica in self.replicas)
                await asyncio.sleep(_CALL_S * max(1, self.config.groups) / fresh)
        rollouts, total, token = self._draw(request)
        part, size = rollouts[0].part, self.config.group_size
        replicas = list[Replica]()
        for first in range(0, len(rollouts), size):
            replicas.append(next(replica for replica in self._in_turn if replica.version >= self.version))
            self._ask(replicas[-1], partial(replicas[-1].begin, rollouts[first : first + size]))
        try:
            await part.done
        except asyncio.CancelledError:
            for replica in set(replicas):
                self._ask(replica, partial(replica.cancel, part))
            raise
        tokens = max(1, round(total / self.config.token_unit) - (_BESIDE if self.config.groups else 0))
        return _completion(tokens, token, part.version)

    def _draw(self, request: Request) -> tuple[list[Rollout], float, int]:
        """(rollouts, tokens of all with their prompts, token that tells the reward)."""
        rates, most = self.config.rates, round(self.config.rates.turns[-1])
        count = max(1, self.config.groups) * self.config.group_size
        positions = _DRAWS + np.arange(count * (most + 4)).reshape(count, -1)
        uniform = uniforms(np.uint64(request.key.digest()), positions)
        turns = np.maximum(1, np.rint(drawn(uniform[:, 0], rates.turns)).astype(int))
        pause_s = drawn(uniform[:, 1], rates.environment_s) / turns
        prompts = float(drawn(uniform[:, 2], rates.prompt_tokens).sum())
        token = _WINS if uniform[0, 3] >= rates.equal_groups else _LOSES
        lengths = np.rint(drawn(uniform[:, 4:], rates.response_tokens)).astype(int)
        lengths = np.clip(lengths, 1, request.sampling.max_new_tokens).tolist()
        tokens = [each[:number] for each, number in zip(lengths, turns.tolist(), strict=True)]
        part = Part(count, asyncio.get_running_loop().create_future(), self._newest)
        rollouts = [Rollout(part, *each) for each in zip(tokens, pause_s.tolist(), strict=True)]
        return rollouts, prompts + sum(map(sum, tokens)), token

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Returns when the first replica has loaded; the others continue with what they have in flight."""
        del weights
        self._loop = asyncio.get_running_loop()
        await asyncio.sleep(_FETCH_S)
        self._newest = version
        if in_flight == "update":
            await asyncio.sleep(self.config.rates.load_s)
            for replica in self.replicas:
                self._ask(replica, partial(setattr, replica, "version", version))
        else:
            loads = [self._ask(replica, partial(replica.load, version)) for replica in self.replicas]
            await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
        self.version = version

    def set_speed(self, speed: float) -> None:
        """Called in the thread of the trainer, which begins or ends to compute on the same device."""
        if self._loop is not None and not self._loop.is_closed():
            for replica in self.replicas:
                self._loop.call_soon_threadsafe(self._ask, replica, partial(setattr, replica, "speed", speed))

    def _ask(self, replica: Replica, request: Callable[[], T]) -> T:
        """Makes a request to a replica after it has advanced, and sets the timer of its next event."""
        assert self._loop is not None
        replica.advance(time.monotonic())
        result = request()
        self._set_timer(replica)
        return result

    def _set_timer(self, replica: Replica) -> None:
        assert self._loop is not None
        if replica.timer is not None:
            replica.timer.cancel()
        at = replica.next_at
        if at < math.inf:
            at = max(at, math.ceil(at / self._grid_s) * self._grid_s)
            replica.timer = self._loop.call_at(at, self._advance, replica, at)

    def _advance(self, replica: Replica, now: float) -> None:
        replica.advance(now)
        self._set_timer(replica)

    async def close(self) -> None:
        pass


def _completion(num_tokens: int, token: int, version: int) -> Completion:
    tokens, log_prob = np.full(num_tokens, token, np.int32), np.full(num_tokens, -0.5, np.float32)
    return Completion(tokens, log_prob, np.full(num_tokens, version, np.int32), StopReason.EOS, text="")


class RatedTrainEngine(SimulatedTrainEngine):
    """A train engine whose steps take the time of their tokens."""

    class Config(SimulatedTrainEngine.Config):
        kind: str = "trivium.simulation.rated:RatedTrainEngine"
        rates: Rates
        token_unit: float = 1.0
        ranks: int = 1
        shared_speed: float = 1.0
        """How fast engine and trainer are while both compute."""

    config: Config

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        ranks = config.ranks * config.rates.rank_efficiency ** math.log2(config.ranks)
        self._tokens = config.token_unit / ranks
        """Tokens of a rank for each token of a batch."""
        self._updated = -1

    def score(self, batch: Batch, what: str) -> Sequence[FloatArray]:
        self._compute(self.config.rates.score_token_s * batch.num_tokens * self._tokens)
        return super().score(batch, what)

    def update(self, role: str, batch: Batch, objective: Objective) -> Metrics:
        del role, objective
        first_s = self.config.rates.update_s if self._updated != self.version else 0.0
        self._updated = self.version
        self._compute(first_s + self.config.rates.update_token_s * batch.num_tokens * self._tokens)
        return {"train/loss/policy": 0.0}

    def export_weights(self) -> Any:
        time.sleep(self.config.rates.sync_s)
        return super().export_weights()

    def _compute(self, seconds: float) -> None:
        """Blocks for these seconds, or longer while an engine computes on the same device."""
        speed, engine = self.config.shared_speed, RatedEngine.latest
        if speed == 1.0 or engine is None:
            time.sleep(seconds)
            return
        engine.set_speed(speed)
        for _ in range(_SLICES):
            time.sleep(seconds / _SLICES / (speed if engine.is_busy else 1.0))
        engine.set_speed(1.0)


class RatedWorkflow:
    """One turn. The reward of a group's first member differs from that of the others, unless all are equal."""

    capabilities = Capabilities(gives_rewards=True)

    def __init__(self, config: object) -> None:
        del config

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float]:
        turn = await policy.generate(task.prompt, tokens=_PROMPT)
        return {"planned": float(turn.tokens[0] == _WINS)}
