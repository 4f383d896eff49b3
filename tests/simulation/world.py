"""A world: the commands of one run, the faults that happen to them, and how it ends.

Killed commands are started again after a while, as an operator or a cluster does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.simulation.computer import Computer, Process
from tests.simulation.disk import Disk, lose_commits
from tests.simulation.filesystem import Conditions
from tests.simulation.hardware import SimulatedTrainEngine
from tests.simulation.history import History, Tables, is_complete
from tests.simulation.network import Network
from tests.simulation.spec import Fault, Outcome, Spec
from tests.simulation.system import installed
from trivium.config import RunConfig, load_config
from trivium.foundation.errors import TriviumError, first_cause, one_line
from trivium.runtime.launch import run as run_command
from trivium.types import Batch

LIMIT_S = 1000.0
"""Virtual seconds after which a world counts as hanging."""
_STARTS = 40
"""The most times that a command is started."""
_LASTS_S = 75.0
"""How long after a fault a command may end with an error: `sync.deadline_s` and the time to notice it."""
_STALLS_S = 2 * _LASTS_S
"""How long a run may make no progress: a role waits for another one, which then waits for the return of the first."""

_AGENTS = 3
_FULL = (0.1, 1.0)
"""Shares of the writes that a full disk refuses."""
_CHANGES: tuple[Mapping[str, Any], ...] = ({}, {}, {"workflow.max_concurrent": 3}, {"checkpoint.keep": 4})
"""Fields that an operator may change when a command is started again."""

BASE = Path(__file__).with_name("world.yaml")


class World:
    """Runs the commands of a spec on a computer."""

    def __init__(self, spec: Spec, directory: Path, model: Path, calm_events: int = 0) -> None:
        """`calm_events` is the number of events of the same world without faults."""
        self.spec, self._directory, self._model = spec, directory, model
        self.computer, self.outcome = Computer(spec.seed), Outcome(spec)
        self._disk, self._conditions = Disk(directory), Conditions()
        self._draw = random.Random(f"faults {spec.seed}")
        self._commands: dict[str, Callable[[], object]] = {"trainer": lambda: run_command(self._config("train"))}
        for number in range(spec.explorers):
            name = f"explorer-{number}"
            self._commands[name] = lambda name=name: run_command(self._config("explore", name))
        self._network = Network(self.computer, self.outcome.problems)
        if spec.served:
            servers, size = [*self._commands][1:] or ["trainer"], int(spec.overrides["schedule.group_size"])
            for number in range(_AGENTS):
                name, server = f"agent-{number}", servers[number % len(servers)]
                self._commands[name] = lambda name=name, server=server: asyncio.run(
                    self._network.work(name, server, size, self._agents_end)
                )
        self.processes: dict[str, Process] = {}
        self._left = [(int(fault.at * calm_events), fault) for fault in spec.faults]
        self._happened: list[tuple[float, Fault]] = []
        """(time, fault) of those that have happened."""
        self._doomed: list[tuple[Process, int]] = []
        """Processes that are killed when they have written more often than this."""
        self._changes: Mapping[str, Any] = {}
        self._abandoned_at: float | None = None
        self._progress_at = 0.0
        """When a train step, a fault or a start of a command happened last."""
        self._deaths = 0
        self._ended = set[Process]()
        """The deaths that `_over` has handled, and their processes."""
        self._history = History(self._config("train"), self.outcome.problems, self._network.sent)
        self._tables = (
            Tables(self.computer, self._database, directory / "run", self.outcome.problems) if spec.shared else None
        )

    @property
    def _database(self) -> Path:
        return self._directory / "buffer.db"

    def _config(self, mode: str, explorer: str = "") -> RunConfig:
        """The config of a command. `explorer` is the name of an explorer; empty for the trainer."""
        model = f"{{kind: hf, path: {self._model}}}"
        overrides = {"run.dir": self._directory / "run", "model": model, **self.spec.overrides, **self._changes}
        if self.spec.shared:
            database = f"{{kind: sql, url: 'sqlite:///{self._database}'}}"
            overrides |= {"buffer": database, "sync.method": "checkpoint"}
            overrides["run.mode"] = "serve" if self.spec.served and explorer else mode
        if explorer:
            overrides["run.explorer"] = explorer
        return _config(*(f"{name}={_yaml(value)}" for name, value in overrides.items()))

    def run(self) -> Outcome:
        """Runs the world to its end, and checks what it promises."""
        logger, outcome = logging.getLogger("trivium"), self.outcome
        handlers = list(logger.handlers)
        random.seed(self.spec.seed)  # the module's own generator, which libraries use
        SimulatedTrainEngine.on_update = self._updated
        try:
            with installed(self.computer, self._disk, self._conditions, self._network.replaced()):
                for name in self._commands:
                    self._start(name, self.computer.random.uniform(0, 1))
                self.computer.watchers.append(self._happen)
                if self._tables is not None:
                    self.computer.watchers.append(self._tables.check)
                self.computer.run(self._over, LIMIT_S)
        except TriviumError as error:
            outcome.problems.append(f"the world does not end: {one_line(error)}")
        finally:
            SimulatedTrainEngine.on_update = None
            logger.handlers[:] = handlers
        outcome.events, outcome.seconds = self.computer.events, self.computer.now
        if not outcome.problems and self._abandoned_at is None:
            outcome.digest, outcome.trained = self._history.check_end()
            if self._tables is not None:
                self._tables.check_end()
        if self._tables is not None:
            self._tables.close()
        return outcome

    # ------------------------------------------------------------------ commands

    def _start(self, name: str, delay_s: float) -> None:
        process = self.processes[name] = Process(name)
        self.outcome.starts += 1
        self._progress_at = self.computer.now + delay_s
        self.computer.spawn(process, self._commands[name], "main", delay_s)

    def _over(self) -> bool:
        """Handles the deaths of commands. Returns whether all have ended well, or a promise was broken."""
        if self.computer.deaths > self._deaths:
            self._deaths = self.computer.deaths
            for name, process in [*self.processes.items()]:
                if not process.alive and process not in self._ended:
                    self._ended.add(process)
                    self._handle_end(name, process)
            if not any(process.alive for process in self.processes.values()):
                return True
        return len(self.outcome.problems) > 0

    def _handle_end(self, name: str, process: Process) -> None:
        """Checks how a command has ended. Starts it again, unless it has ended well."""
        for error in (process.error, *process.thread_errors):
            if error is not None and not self._excused(name, error):
                self.outcome.problems.append(f"{name} ended without a reason: {_described(error)}")
        if self._abandoned_at is not None:
            if process.code == 0 and not name.startswith("agent") and not is_complete(self._config("train")):
                self.outcome.problems.append(f"{name} ended with 0 although the trainer was killed")
        elif process.code != 0 and not name.startswith("twin") and not self.outcome.problems:
            if self.outcome.starts > _STARTS:
                self.outcome.problems.append(f"{name} does not end well after {_STARTS} starts")
            else:
                self._changes = self._draw.choice(_CHANGES)
                self._start(name, self.computer.random.uniform(0.1, 4))

    def _agents_end(self) -> bool:
        """Whether the operator stops the agents: the run has ended, or its trainer never returns."""
        return self._abandoned_at is not None or self.processes["trainer"].code == 0

    def _excused(self, name: str, error: BaseException) -> bool:
        """Whether a recent fault may end this command with this error. A dead explorer must not end the trainer."""
        if not isinstance(first_cause(error), TriviumError):
            return False
        recent = [fault for at, fault in self._happened if self.computer.now - at < fault.seconds + _LASTS_S]
        return any(self._may_end(fault, name) for fault in recent)

    def _may_end(self, fault: Fault, name: str) -> bool:
        """Whether a fault is a reason for a command to end with an error."""
        if fault.kind in ("pause", "cut"):  # it sends no heartbeats, the last of them up to a quarter before the fault
            limit_s = self.spec.overrides.get("sync.heartbeat_s", math.inf) * 0.6
            return fault.command == name and fault.seconds > limit_s
        # A trainer that is started again is back before the deadline of its explorers, one that is abandoned never.
        return fault.kind in ("twin", "full_disk") or (fault.kind == "abandon" and name != "trainer")

    def _updated(self, version: int, digest: tuple[bytes, bytes], batch: Batch) -> None:
        self._progress_at = self.computer.now
        self._history.updated(version, digest, batch)

    def _check_waits(self) -> None:
        """Checks that every wait ends within its deadline: with progress, or with an error that ends its command."""
        if self._abandoned_at is not None and self.computer.now > self._abandoned_at + _LASTS_S:
            self.outcome.problems.append(f"{self._running()} still run {_LASTS_S} s after the trainer was killed")
        if self.computer.now > self._progress_at + _STALLS_S:
            self.outcome.problems.append(f"{self._running()} make no progress for {_STALLS_S} s")

    def _running(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.alive]

    # ------------------------------------------------------------------ faults

    def _happen(self) -> None:
        self._check_waits()
        while self._left and self.computer.events >= self._left[0][0]:
            _, fault = self._left.pop(0)
            self._happened.append((self.computer.now, fault))
            self._progress_at = self.computer.now
            self.outcome.faults[fault.kind] += 1
            getattr(self, f"_{fault.kind}")(fault)
        for process, writes in self._doomed:
            if process.writes > writes:
                self.computer.kill(process)
        if self._doomed:
            self._doomed = [each for each in self._doomed if each[0].alive]

    def _kill(self, fault: Fault) -> None:
        self.computer.kill(self.processes[fault.command])

    def _kill_writing(self, fault: Fault) -> None:
        process = self.processes[fault.command]
        self._doomed.append((process, process.writes))

    def _power(self, fault: Fault) -> None:
        """All commands are started again afterwards, those that had ended well as well."""
        ended = [name for name in self._commands if self.processes[name].code == 0]
        for process in self.processes.values():
            self.computer.kill(process)
        if self._tables is not None:
            lose_commits(self._database, self._conditions.synchronous, self._draw, self._tables.close)
        self._disk.lose_power(self._draw, self.computer.now)
        for name in ended if self._abandoned_at is None else ():
            self._start(name, self.computer.random.uniform(0.1, 4))

    def _pause(self, fault: Fault) -> None:
        self.processes[fault.command].stopped_until = self.computer.now + fault.seconds

    def _clock(self, fault: Fault) -> None:
        self._conditions.clock_error_s += self._draw.choice((-1, 1)) * 1000 * fault.seconds

    def _slow_disk(self, fault: Fault) -> None:
        self._conditions.sync_s = fault.seconds / 10

    def _full_disk(self, fault: Fault) -> None:
        self._conditions.full_until = self.computer.now + fault.seconds
        self._conditions.full_share = self._draw.choice(_FULL)

    def _messages(self, fault: Fault) -> None:
        self._network.bad_until = self.computer.now + fault.seconds

    def _cut(self, fault: Fault) -> None:
        self._conditions.cut_until[fault.command] = self.computer.now + fault.seconds

    def _lost_answers(self, fault: Fault) -> None:
        self._conditions.silent_until[fault.command] = self.computer.now + fault.seconds

    def _twin(self, fault: Fault) -> None:
        name = f"twin-{len(self._happened)}"
        process = self.processes[name] = Process(name)
        self.computer.spawn(process, self._commands["trainer"], "main")

    def _abandon(self, fault: Fault) -> None:
        if self.processes["trainer"].alive:
            self._abandoned_at = self.computer.now
            self.computer.kill(self.processes["trainer"])


@lru_cache
def _config(*overrides: str) -> RunConfig:
    return load_config(BASE, overrides)


def _described(error: BaseException) -> str:
    cause = first_cause(error)
    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(cause.__traceback__)]
    return f"{one_line(cause)} ({' > '.join(places[-4:])})"


def _yaml(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
