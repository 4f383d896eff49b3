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
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trivium.config import EngineConfig, WorkflowConfig
from trivium.policy import Policy
from trivium.protocols import Objective, Weights
from trivium.randomness import stream, uniforms
from trivium.simulation.hardware import SimulatedTrainEngine
from trivium.simulation.rates import Quantiles
from trivium.types import Batch, Capabilities, Completion, FloatArray, IntArray, Metrics, Request, StopReason, Task

_DRAWS = 2**40 + 8
"""The position of the key's first uniform number that the rollouts of a completion follow from."""
_FETCH_S = 0.002
"""Seconds before a load begins. Rollouts of the slots that the previous version admitted begin first, as in real runs,
where a thread fetches the weights."""
_SLICES = 20
"""The trainer looks this many times in a train step whether it shares its device."""
_TOKEN = 5
_PROMPT = np.array([_TOKEN], np.int32)
_BESIDE = 3
"""Tokens of a planned group beside those that its first member samples: two prompts and one token."""


def drawn(uniform: Any, quantiles: Quantiles) -> FloatArray:
    """The values of a distribution at uniform numbers; the distribution is given as equally spaced quantiles."""
    return np.interp(uniform, np.linspace(0, 1, len(quantiles)), quantiles)


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
        for engine in self.engines:
            engine.speed_changed()  # counts what was decoded with the old speed
        self.engine_speed = speed

    @property
    def busy_s(self) -> float:
        """Seconds in which an engine decodes, averaged over the engines."""
        return float(np.mean([replica.busy_s for engine in self.engines for replica in engine.replicas]))


DEVICE = [Device()]
"""The device of the planned run in progress: its parts are built from configs, which hold plain values."""


@dataclass(eq=False)
class Part:
    """The rollouts of one group, which run on one replica."""

    tokens: list[list[int]]
    """By rollout, the tokens of each turn."""
    pause_s: list[float]
    """By rollout, the seconds after each turn."""
    reward_s: list[float]
    done: asyncio.Future[float]
    """Gets the time of its end."""
    began: float = math.inf
    """When its first turn got a row."""


Turn = tuple[Part, int, int]
"""(part, rollout, turn)."""
Event = Literal["first token", "pause ends", "load ends"]


class Replica:
    """One engine. Its rows share its rate: a decoding step takes `step_s`, and `row_s` more for each row.

    `advance` computes what happened until now. `next_end` looks ahead to the next time at which a part or a load ends:
    nothing outside of the replica happens before.
    """

    def __init__(self, config: RatedEngine.Config, device: Device, now: float) -> None:
        self.config, self._device = config, device
        self.busy_s = 0.0
        """Seconds in which it decodes."""
        self.timer: asyncio.TimerHandle | None = None
        self._at, self._decoded = now, 0.0
        """The time of the state, and the decoding steps until then."""
        self._rows: list[tuple[float, int, Turn]] = []
        """A heap of (decoding step, number, turn) of the rows' last tokens."""
        self._starting = 0
        """Rows before their first token."""
        self._events: list[tuple[float, int, Event, Turn | None]] = []
        """A heap of (time, number, what, turn)."""
        self._waiting = deque[Turn]()
        """Turns without a row."""
        self._left: dict[Part, int] = {}
        """Rollouts in progress."""
        self._load: asyncio.Future[float] | None = None
        """The load that waits for earlier turns, and that later turns wait for."""
        self._before_load = 0
        """Turns without a row that precede the load."""
        self._looks_ahead = False
        self._numbers = itertools.count()

    @property
    def is_busy(self) -> bool:
        return bool(self._rows or self._starting)

    # ------------------------------------------------------------------ what the engine asks for

    def begin(self, part: Part) -> None:
        self._left[part] = len(part.tokens)
        self._waiting.extend((part, rollout, 0) for rollout in range(len(part.tokens)))
        self._fill()

    def earliest_end(self, part: Part) -> float:
        """A time before which a part that begins now cannot end."""
        token_s, start_s, seconds = self.config.step_s + self.config.row_s, self.config.start_s, 0.0
        for tokens, pause_s, reward_s in zip(part.tokens, part.pause_s, part.reward_s, strict=True):
            seconds = max(seconds, sum(tokens) * token_s + len(tokens) * (start_s + pause_s) + reward_s)
        return self._at + seconds

    def cancel(self, part: Part) -> None:
        if self._left.pop(part, None) is None:
            return
        self._starting -= sum(what == "first token" and turn[0] is part for _, _, what, turn in self._events if turn)
        self._events = [event for event in self._events if event[3] is None or event[3][0] is not part]
        self._rows = [row for row in self._rows if row[2][0] is not part]
        heapq.heapify(self._events)
        heapq.heapify(self._rows)
        self._waiting = deque(turn for turn in self._waiting if turn[0] is not part)
        self._before_load = min(self._before_load, len(self._waiting))
        self._fill()

    def load(self) -> asyncio.Future[float]:
        """Loads weights after the turns that were requested before. Returns the future of its end."""
        load = self._load = asyncio.get_running_loop().create_future()
        self._before_load = len(self._waiting)
        self._fill()
        return load

    def advance(self, now: float) -> None:
        """Computes what happened until now, and ends what is done."""
        while (ended := self._next(now)) is not None:
            if not ended.done():
                ended.set_result(self._at)

    def next_end(self) -> float:
        """The time of the next end of a part or a load if nothing else is requested."""
        ahead = copy(self)
        ahead._looks_ahead = True
        ahead._rows, ahead._events, ahead._waiting = self._rows[:], self._events[:], self._waiting.copy()
        ahead._left = self._left.copy()
        return math.inf if ahead._next(math.inf) is None else ahead._at

    # ------------------------------------------------------------------ the inside

    def _next(self, until: float) -> asyncio.Future[float] | None:
        """Advances to the next end of a part or a load, and returns its future. Returns None at the time `until`."""
        rows, events, speed = self._rows, self._events, self._device.engine_speed
        while True:
            step_s = max(1e-9, self.config.step_s + self.config.row_s * len(rows)) / speed
            row_at = self._at + max(0.0, rows[0][0] - self._decoded) * step_s if rows else math.inf
            event_at = events[0][0] if events else math.inf
            at = min(row_at, event_at, max(until, self._at))
            if at == math.inf:
                return None
            if rows:
                self._decoded += (at - self._at) / step_s
                self.busy_s += at - self._at
            self._at = at
            ended = None
            if row_at <= at:
                self._decoded, _, turn = heapq.heappop(rows)
                ended = self._end_turn(turn)
            elif event_at <= at:
                ended = self._happen(*heapq.heappop(events)[2:])
            else:
                return None
            if self._waiting or self._load is not None:
                self._fill()
            if ended is not None:
                return ended

    def _end_turn(self, turn: Turn) -> asyncio.Future[float] | None:
        part, rollout, number = turn
        is_last = number + 1 == len(part.tokens[rollout])
        pause_s = part.pause_s[rollout] + (part.reward_s[rollout] if is_last else 0.0)
        if pause_s:
            self._push(pause_s, "pause ends", turn)
            return None
        return self._happen("pause ends", turn)

    def _happen(self, what: Event, turn: Turn | None) -> asyncio.Future[float] | None:
        if turn is None:
            ended, self._load = self._load, None
            return ended
        part, rollout, number = turn
        if what == "first token":
            self._starting -= 1
            end = self._decoded + part.tokens[rollout][number]
            heapq.heappush(self._rows, (end, next(self._numbers), turn))
        elif number + 1 < len(part.tokens[rollout]):
            self._waiting.append((part, rollout, number + 1))
        else:
            self._left[part] -= 1
            if not self._left[part]:
                del self._left[part]
                return part.done
        return None

    def _fill(self) -> None:
        """Gives rows to waiting turns, or begins the load once no earlier turn is in flight."""
        while (
            self._waiting
            and len(self._rows) + self._starting < self.config.max_rows
            and (self._load is None or self._before_load > 0)
        ):
            self._before_load -= 1
            self._starting += 1
            turn = self._waiting.popleft()
            if not self._looks_ahead:
                turn[0].began = min(turn[0].began, self._at)
            self._push(self.config.start_s, "first token", turn)
        is_free = not self.is_busy and self._before_load <= 0
        if self._load is not None and is_free and not any(event[2] == "load ends" for event in self._events):
            self._push(self.config.load_s, "load ends", None)

    def _push(self, seconds: float, what: Event, turn: Turn | None) -> None:
        heapq.heappush(self._events, (self._at + seconds, next(self._numbers), what, turn))


class RatedEngine:
    """Replicas of an engine, which get groups in turn."""

    class Config(EngineConfig):
        kind: str = "trivium.simulation.rated:RatedEngine"
        start_s: float = 0.0
        step_s: float = 0.0
        row_s: float = 0.0
        load_s: float = 0.0
        max_rows: int = 256
        response_tokens: tuple[float, ...] = (1.0,)
        prompt_tokens: tuple[float, ...] = (0.0,)
        turns: tuple[float, ...] = (1.0,)
        environment_s: tuple[float, ...] = (0.0,)
        reward_s: tuple[float, ...] = (0.0,)
        group_size: int = 1
        groups: int = 0
        """Groups that the completion of a group's first member stands for, while those of the others take no time; 0:
        each completion is one rollout."""
        token_unit: float = 1.0
        """Tokens that each token of a completion stands for."""
        replicas: int = 1

    capabilities = Capabilities(exact_sampling=True, batch_invariant=True, updates_in_flight=True)
    max_context = 2**30

    def __init__(self, config: Config, **_: object) -> None:
        self.config, self.version, device = config, 0, DEVICE[0]
        self.replicas = [Replica(config, device, time.monotonic()) for _ in range(config.replicas)]
        device.engines.append(self)
        self._in_turn = itertools.cycle(self.replicas)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._adoptions: list[tuple[float, int]] = [(-math.inf, 0)]
        """(time, version) of the last loads."""
        self._loads_version = 0
        """The version of a load that new turns wait for; 0: none."""

    @property
    def is_busy(self) -> bool:
        return any(replica.is_busy for replica in self.replicas)

    async def generate(self, request: Request) -> Completion:
        self._loop, began = asyncio.get_running_loop(), time.monotonic()
        if self.config.groups and request.key.index:
            return _completion(np.array([self._loads_version or self.version]))
        rollouts = max(1, self.config.groups) * self.config.group_size
        tokens, prompts, pause_s, reward_s = self._draw(request, rollouts)
        placed = list[tuple[Replica, Part]]()
        for first in range(0, rollouts, self.config.group_size):
            members = slice(first, first + self.config.group_size)
            part = Part(tokens[members], pause_s[members], reward_s[members], self._loop.create_future())
            replica = next(self._in_turn)
            replica.advance(began)
            replica.begin(part)
            self._look(replica, replica.earliest_end(part))
            placed.append((replica, part))
        try:
            for _, part in placed:
                await part.done
        except asyncio.CancelledError:
            for replica, part in placed:
                replica.advance(time.monotonic())
                replica.cancel(part)
                self._look(replica, time.monotonic())
            raise
        total = round((prompts + sum(map(sum, tokens))) / self.config.token_unit)
        tokens_made = max(2, total - _BESIDE) if self.config.groups else total
        return _completion(self._sampled_by(tokens_made, min(part.began for _, part in placed)))

    def _draw(self, request: Request, rollouts: int) -> tuple[list[list[int]], float, list[float], list[float]]:
        """(tokens of each turn, tokens of all prompts, seconds after each turn, seconds of the reward) of rollouts."""
        config, most = self.config, round(self.config.turns[-1])
        positions = _DRAWS + np.arange(rollouts * (most + 4)).reshape(rollouts, -1)
        uniform = uniforms(np.uint64(request.key.digest()), positions)
        turns = np.maximum(1, np.rint(drawn(uniform[:, 0], config.turns)).astype(int))
        lengths = np.rint(drawn(uniform[:, 4:], config.response_tokens)).astype(int)
        lengths = np.clip(lengths, 1, request.sampling.max_new_tokens).tolist()
        tokens = [each[:count] for each, count in zip(lengths, turns.tolist(), strict=True)]
        pause_s = drawn(uniform[:, 1], config.environment_s) / turns
        prompts = float(drawn(uniform[:, 3], config.prompt_tokens).sum())
        return tokens, prompts, pause_s.tolist(), drawn(uniform[:, 2], config.reward_s).tolist()

    def _sampled_by(self, tokens: int, began: float) -> IntArray:
        """The version of each token, sampled at equal intervals since `began`."""
        times, versions = zip(*self._adoptions, strict=True)
        at = np.linspace(began, time.monotonic(), tokens)
        return np.array(versions)[np.searchsorted(times, at, side="right") - 1]

    def speed_changed(self) -> None:
        """The trainer, in its thread, begins or ends to compute on the same device."""
        if self._loop is None or self._loop.is_closed():
            return
        for replica in self.replicas:
            replica.advance(time.monotonic())
            self._loop.call_soon_threadsafe(self._look, replica, time.monotonic())

    def _look(self, replica: Replica, at: float) -> None:
        """Advances the replica at this time, unless it is due earlier."""
        if self._loop is None or (replica.timer is not None and replica.timer.when() <= at) or at == math.inf:
            return
        if replica.timer is not None:
            replica.timer.cancel()
        replica.timer = self._loop.call_at(at, self._advance, replica)

    def _advance(self, replica: Replica) -> None:
        replica.timer = None
        replica.advance(time.monotonic() + 1e-6)
        self._look(replica, replica.next_end())

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        del weights
        self._loop = asyncio.get_running_loop()
        await asyncio.sleep(_FETCH_S)
        if in_flight == "update":
            await asyncio.sleep(self.config.load_s)
            loaded_at = time.monotonic()
        else:
            self._loads_version = version
            loads = list[asyncio.Future[float]]()
            for replica in self.replicas:
                replica.advance(time.monotonic())
                loads.append(replica.load())
                self._look(replica, time.monotonic())
            loaded_at = min([await load for load in loads])  # turns that waited begin at once
        self.version, self._loads_version = version, 0
        self._adoptions = [*self._adoptions[-63:], (loaded_at, version)]

    async def close(self) -> None:
        for replica in self.replicas:
            if replica.timer is not None:
                replica.timer.cancel()


def _completion(sampled_by: IntArray) -> Completion:
    tokens, log_prob = np.full(len(sampled_by), _TOKEN, np.int32), np.full(len(sampled_by), -0.5, np.float32)
    return Completion(tokens, log_prob, sampled_by.astype(np.int32), StopReason.EOS, text="")


class RatedTrainEngine(SimulatedTrainEngine):
    """A train engine whose steps take the time of their tokens."""

    class Config(SimulatedTrainEngine.Config):
        kind: str = "trivium.simulation.rated:RatedTrainEngine"
        update_s: float = 0.0
        score_token_s: float = 0.0
        sync_s: float = 0.0
        speedup: float = 1.0
        """How much faster the ranks train on tokens than one of them."""

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
        self._device.train(first_s + self.config.token_s * batch.num_tokens / self.config.speedup)
        return {"train/loss/policy": 0.0}

    def export_weights(self) -> Any:
        time.sleep(self.config.sync_s)
        return super().export_weights()


class RatedWorkflow:
    """One turn. The reward of a group's first member differs from that of the others, unless all are equal."""

    capabilities = Capabilities(gives_rewards=True)

    class Config(WorkflowConfig):
        kind: str = "trivium.simulation.rated:RatedWorkflow"
        equal_groups: float = 0.0
        """Part of the groups whose rewards are all equal, which a filter may refuse."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._groups = Counter[str]()

    async def run(self, task: Task, policy: Policy) -> Mapping[str, float]:
        turn = await policy.generate(task.prompt, tokens=_PROMPT)
        if len(turn.tokens) == 1:
            return {"planned": 0.0}
        self._groups[task.task_id] += 1
        address = stream("planned", task.task_id, self._groups[task.task_id])
        return {"planned": float(uniforms(np.uint64(address), 0) >= self.config.equal_groups)}
