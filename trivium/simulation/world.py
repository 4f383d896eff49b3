"""A world: the commands of one run, the faults that happen to them, and how it ends.

Everything is drawn from the seed: the config of the run, the times of its hardware, the moments at which processes are
killed or suspended. Killed commands are started again after a while, as an operator or a cluster does.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trivium.config import RunConfig, load_config
from trivium.errors import TriviumError, first_cause, one_line
from trivium.runtime.launch import run as run_command
from trivium.simulation.computer import Computer, Process
from trivium.simulation.disk import Disk
from trivium.simulation.hardware import SimulatedTrainEngine
from trivium.simulation.history import Update, check_end, check_update, is_complete
from trivium.simulation.system import Conditions, installed
from trivium.types import Batch

LIMIT_S = 400.0
"""Virtual seconds after which a world counts as hanging."""
_STARTS = 40
"""The most times that a command is started."""
_LASTS_S = 70.0
"""How long after a fault a command may end with an error: `sync.deadline_s` and the time to notice it."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a world."""

    at: float
    """When it happens, as a part of the events of the same world without faults."""
    kind: str
    """`kill` (a command), `power` (the computer, with what it had not synced), `pause` (a command, for `seconds`),
    `clock` (the wall clock jumps by up to 1000 `seconds`), `slow_disk` (`fsync` takes up to a tenth of `seconds`),
    `full_disk` (for `seconds`), `cut` (a command cannot reach the database for `seconds`), `twin` (the trainer's
    command is started a second time), `abandon` (the trainer is killed and never started again)."""
    command: str = "trainer"
    seconds: float = 0.0


_KINDS = ("kill", "kill", "kill", "power", "pause", "clock", "slow_disk", "full_disk", "cut", "twin")
_CHANGES: tuple[Mapping[str, Any], ...] = ({}, {}, {"workflow.max_concurrent": 3}, {"checkpoint.keep": 4})
"""Fields that an operator may change when a command is started again."""


@dataclass(frozen=True)
class Spec:
    """What a seed draws."""

    seed: int
    shared: bool
    """Whether trainer and explorers are separate commands over a database; else one command does everything."""
    explorers: int
    overrides: Mapping[str, Any]
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int) -> Spec:
        draw = random.Random(f"world {seed}")
        shared = draw.random() < 0.1
        explorers = draw.choice((1, 2, 3)) if shared else 0
        staleness = draw.choice((0, 0, 1, 2, 4))
        interval = draw.choice((1, 1, 1, 2)) if staleness else 1
        deterministic = draw.random() < 0.4
        overrides = {
            "schedule.steps": draw.choice((3, 4, 6)),
            "schedule.groups_per_step": draw.choice((1, 2, 4)),
            "schedule.group_size": draw.choice((2, 3)),
            "schedule.max_staleness": staleness,
            "schedule.deterministic": deterministic,
            "sync.interval": interval,
            "sync.in_flight": "finish" if deterministic else draw.choice(("finish", "update")),
            "engine.mean_s": round(draw.uniform(0.02, 0.4), 2),
            "engine.spread": draw.choice((0, 0.5, 1.5)),
            "engine.fail_fraction": draw.choice((0, 0, 0.1)),
            "train.token_s": draw.choice((0.0001, 0.002, 0.01)),
            "train.save_s": draw.choice((0, 0.1, 1)),
            "checkpoint.save_every": draw.choice((0, 1, 1, 2)),
            "checkpoint.asynchronous": draw.random() < 0.5,
        }
        names = ("trainer", *(f"explorer-{number}" for number in range(explorers)))
        faults = [
            Fault(draw.random(), draw.choice(_KINDS), draw.choice(names), draw.choice((0.1, 1, 5)))
            for _ in range(draw.choice((0, 1, 1, 2, 4)))
        ]
        if shared and draw.random() < 0.1:
            faults.append(Fault(draw.random(), "abandon"))
        return cls(seed, shared, explorers, overrides, tuple(sorted(faults, key=lambda fault: fault.at)))

    @property
    def deterministic(self) -> bool:
        return bool(self.overrides["schedule.deterministic"])

    @property
    def synchronous(self) -> bool:
        return self.overrides["schedule.max_staleness"] == 0


@dataclass
class Outcome:
    """How a world ended."""

    spec: Spec
    problems: list[str] = field(default_factory=list[str])
    """The promises that were broken."""
    digest: str = ""
    """The weights of the last checkpoint."""
    trained: tuple[str, ...] = ()
    """The groups that led to these weights, in order."""
    events: int = 0
    seconds: float = 0.0
    """Virtual seconds."""
    starts: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])


BASE = Path(__file__).with_name("world.yaml")


def config_of(
    spec: Spec, directory: Path, model: Path, mode: str, explorer: str, changes: Mapping[str, Any]
) -> RunConfig:
    """The config of one command of a world. `explorer` is the name of an explorer; empty for the trainer."""
    overrides = {"run.dir": directory / "run", "model": f"{{kind: hf, path: {model}}}", **spec.overrides, **changes}
    if spec.shared:
        database = f"{{kind: sql, url: 'sqlite:///{directory / 'buffer.db'}'}}"
        overrides |= {"buffer": database, "sync.method": "checkpoint", "sync.heartbeat_s": 2, "run.mode": mode}
    if explorer:
        overrides["run.explorer"] = explorer
    return load_config(
        BASE, [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in overrides.items()]
    )


class World:
    """Runs the commands of a spec on a computer."""

    def __init__(self, spec: Spec, directory: Path, model: Path, calm_events: int = 0) -> None:
        """`calm_events` is the number of events of the same world without faults."""
        self.spec, self._directory, self._model = spec, directory, model
        self.computer, self.outcome = Computer(spec.seed), Outcome(spec)
        self._disk, self._conditions = Disk(directory), Conditions()
        self._draw = random.Random(f"faults {spec.seed}")
        self._updates: list[Update] = []
        self._commands: dict[str, Callable[[], object]] = {"trainer": lambda: run_command(self._config("train"))}
        for number in range(spec.explorers):
            name = f"explorer-{number}"
            self._commands[name] = lambda name=name: run_command(self._config("explore", name))
        self.processes: dict[str, Process] = {}
        self._left = [(int(fault.at * calm_events), fault) for fault in spec.faults]
        self._happened: list[tuple[float, Fault]] = []
        """(time, fault) of those that have happened."""
        self._changes: Mapping[str, Any] = {}
        self._abandoned = False
        self._staleness = self._config("train").max_staleness

    def _config(self, mode: str, explorer: str = "") -> RunConfig:
        return config_of(self.spec, self._directory, self._model, mode, explorer, self._changes)

    def run(self) -> Outcome:
        """Runs the world to its end, and checks what it promises."""
        logger, outcome = logging.getLogger("trivium"), self.outcome
        handlers = list(logger.handlers)
        random.seed(self.spec.seed)  # the module's own generator, which libraries use
        SimulatedTrainEngine.on_update = self._updated
        try:
            with installed(self.computer, self._disk, self._conditions):
                for name in self._commands:
                    self._start(name, self.computer.random.uniform(0, 1))
                self.computer.watchers.append(self._happen)
                self.computer.run(self._over, LIMIT_S)
        except Exception as error:
            outcome.problems.append(f"the world does not end: {one_line(error)}")
        finally:
            SimulatedTrainEngine.on_update = None
            logger.handlers[:] = handlers
        outcome.events, outcome.seconds = self.computer.events, self.computer.now
        if not outcome.problems and not self._abandoned:
            outcome.digest, outcome.trained = check_end(self._config("train"), self._updates, outcome.problems)
        return outcome

    # ------------------------------------------------------------------ commands

    def _start(self, name: str, delay_s: float) -> None:
        process = self.processes[name] = Process(name)
        self.outcome.starts += 1
        self.computer.spawn(process, self._commands[name], "main", delay_s)

    def _over(self) -> bool:
        """Starts ended commands again. Whether all have ended well, or a promise was broken."""
        ended = [(name, process) for name, process in self.processes.items() if not process.alive]
        for name, process in ended:
            for error in (process.error, *process.thread_errors):
                if error is not None and not self._excused(name, error):
                    self.outcome.problems.append(f"{name} ended without a reason: {one_line(first_cause(error))}")
            if process.code == 0 or name.startswith("twin") or self._abandoned:
                continue
            if self.outcome.problems:
                return True
            if self.outcome.starts > _STARTS:
                self.outcome.problems.append(f"{name} does not end well after {_STARTS} starts")
            else:
                self._changes = self._draw.choice(_CHANGES)
                self._start(name, self.computer.random.uniform(0.1, 4))
        well = [name for name, process in ended if process.code == 0]
        if self._abandoned and well and not is_complete(self._config("train")):
            self.outcome.problems.append(f"{well} ended with 0 although the trainer was killed")
        return bool(self.outcome.problems) or not any(process.alive for process in self.processes.values())

    def _excused(self, name: str, error: BaseException) -> bool:
        """Whether a recent fault may end this command with this error. A dead explorer must not end the trainer."""
        if not isinstance(first_cause(error), TriviumError):
            return False
        recent = [fault for at, fault in self._happened if self.computer.now - at < fault.seconds + _LASTS_S]
        if name == "trainer":
            everyone = {"twin", "full_disk"}
            return any(f.kind in everyone or (f.kind in ("pause", "cut") and f.command == name) for f in recent)
        return bool(recent)

    # ------------------------------------------------------------------ faults

    def _happen(self) -> None:
        while self._left and self.computer.events >= self._left[0][0]:
            _, fault = self._left.pop(0)
            self._happened.append((self.computer.now, fault))
            self.outcome.faults[fault.kind] += 1
            getattr(self, f"_{fault.kind}")(fault)

    def _kill(self, fault: Fault) -> None:
        self.computer.kill(self.processes[fault.command])

    def _power(self, fault: Fault) -> None:
        for process in self.processes.values():
            self.computer.kill(process)
        self._disk.lose_power(self._draw)

    def _pause(self, fault: Fault) -> None:
        self.processes[fault.command].stopped_until = self.computer.now + fault.seconds

    def _clock(self, fault: Fault) -> None:
        self._conditions.clock_error_s += self._draw.choice((-1, 1)) * 1000 * fault.seconds

    def _slow_disk(self, fault: Fault) -> None:
        self._conditions.sync_s = fault.seconds / 10

    def _full_disk(self, fault: Fault) -> None:
        self._conditions.full_until = self.computer.now + fault.seconds

    def _cut(self, fault: Fault) -> None:
        self._conditions.cut_until[fault.command] = self.computer.now + fault.seconds

    def _twin(self, fault: Fault) -> None:
        name = f"twin-{len(self._happened)}"
        process = self.processes[name] = Process(name)
        self.computer.spawn(process, self._commands["trainer"], "main")

    def _abandon(self, fault: Fault) -> None:
        if self.processes["trainer"].alive:
            self._abandoned = True
            self.computer.kill(self.processes["trainer"])

    def _updated(self, version: int, digest: tuple[bytes, bytes], batch: Batch) -> None:
        update = Update.of(version, digest, batch)
        self._updates.append(update)
        check_update(self._staleness, update, self.outcome.problems)


def compare(calm: Outcome, outcome: Outcome) -> None:
    """Adds a problem if the result of a world depends on its faults. `calm` is the same world without them."""
    if outcome.spec.deterministic and calm.digest != outcome.digest:
        outcome.problems.append(f"faults changed the weights: {_difference(calm, outcome)}")
    elif outcome.spec.synchronous and sorted(calm.trained) != sorted(outcome.trained):
        outcome.problems.append(f"faults changed the groups: {_difference(calm, outcome)}")


def _difference(calm: Outcome, outcome: Outcome) -> str:
    return f"{list(calm.trained)} without faults, {list(outcome.trained)} with them"
