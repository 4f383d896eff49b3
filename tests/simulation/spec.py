"""What a seed draws: the config of a run, the times of its hardware, and the faults that happen to it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from trivium.foundation.errors import ConfigError

FAMILY = 5
"""Seeds in a row with one config. The first of them has no faults: the others are compared with it."""
_SHARED = 0.3
"""The part of the runs that have several commands over a database."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to a world."""

    at: float
    """When it happens, as a part of the events of the same world without faults."""
    kind: str
    """`kill` (a command), `kill_writing` (a command when it next writes, before it has written or after), `power` (the
    computer, with what it had not synced), `pause` (a command, for `seconds`), `clock` (the wall clock jumps by up to
    1000 `seconds`), `slow_disk` (`fsync` takes up to a tenth of `seconds`), `full_disk` (for
    `seconds`, all writes fail or a tenth of them), `cut` (a command cannot reach the database for `seconds`),
    `lost_answers` (for `seconds`, the database commits what a command asks for, and the answer is lost), `messages`
    (between agents and endpoints are lost or arrive twice for `seconds`), `twin` (the trainer's command is started a
    second time), `abandon` (the trainer is killed and never started again)."""
    command: str = "trainer"
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}@{self.at}:{self.command}:{self.seconds}"

    @classmethod
    def parsed(cls, text: str) -> Self:
        """The fault that `str` wrote. Raises ConfigError for another text."""
        try:
            kind, _, rest = text.strip().partition("@")
            at, command, seconds = rest.split(":")
            fault = cls(float(at), kind, command, float(seconds))
        except ValueError as error:
            raise ConfigError(
                "a fault", repr(text), "write KIND@AT:COMMAND:SECONDS, as a broken world prints"
            ) from error
        if kind not in (known := {*_KINDS, "abandon"}):
            raise ConfigError("a kind of fault", repr(kind), f"use one of {sorted(known)}")
        return fault


_KINDS = (
    *("kill", "kill", "kill_writing", "kill_writing", "power", "pause", "clock", "slow_disk", "full_disk"),
    *("cut", "lost_answers", "twin", "messages"),
)
_OF_SHARED, _OF_SERVED = ("cut", "lost_answers"), ("messages",)
"""Kinds that only worlds with a database have, or with agents."""
_SERVED = 0.15
"""The part of the runs that have agents with their own tasks (`run.mode: serve`)."""


@dataclass(frozen=True)
class Spec:
    """What a seed draws."""

    seed: int
    shared: bool
    """Whether trainer and explorers are separate commands over a database; else one command does everything."""
    served: bool
    """Whether agents roll out their own tasks over the endpoint of the run."""
    explorers: int
    overrides: Mapping[str, Any]
    faults: tuple[Fault, ...]

    @classmethod
    def of(cls, seed: int) -> Spec:
        family, place = divmod(seed, FAMILY)
        draw = random.Random(f"run {family}")
        shared = draw.random() < _SHARED
        explorers = draw.choice((1, 2, 3)) if shared else 0
        staleness = draw.choice((0, 0, 1, 2, 4))
        interval = draw.choice((1, 1, 1, 2)) if staleness else 1
        deterministic = draw.random() < 0.4
        fails = draw.random() < 0.3
        overrides = {
            "schedule.steps": draw.choice((2, 3, 4) if shared else (3, 4, 6)),
            "schedule.groups_per_step": draw.choice((1, 2, 4)),
            "schedule.group_size": draw.choice((2, 3)),
            "schedule.max_staleness": staleness,
            "schedule.deterministic": deterministic,
            "sync.interval": interval,
            "sync.in_flight": "finish" if deterministic else draw.choice(("finish", "update")),
            "engine.mean_s": round(draw.uniform(0.02, 0.2 if shared else 0.4), 2),
            "engine.spread": draw.choice((0, 0.5, 1.5)),
            "engine.fail_fraction": 0.1 if fails else 0,
            "engine.replies": "[[5], [6], [7, 8], [9]]" if fails else "[[5], [6], [7, 8]]",
            "train.token_s": draw.choice((0.0001, 0.002, 0.01)),
            "train.save_s": draw.choice((0, 0.1, 0.3 if shared else 1)),
            "checkpoint.save_every": draw.choice((0, 1, 1, 2)),
            "checkpoint.asynchronous": draw.random() < 0.5,
        }
        if shared:
            overrides["sync.heartbeat_s"] = draw.choice((2, 5))
        served = draw.random() < _SERVED
        if served:
            overrides |= {
                "tasks.train": "{kind: served}",
                "rewards": "[]",
                "run.mode": "serve",
                "schedule.deterministic": False,
                "engine.fail_fraction": 0,
                "engine.replies": "[[5], [6], [7, 8]]",
                "workflow.deadline_s": 20,
                "serve.idle_s": 10,
                "serve.unstarted_idle_s": 5,
            }
        names = ("trainer", *(f"explorer-{number}" for number in range(explorers)))
        absent = (*(() if shared else _OF_SHARED), *(() if served else _OF_SERVED))
        kinds = [kind for kind in _KINDS if kind not in absent]
        draw = random.Random(f"faults {seed}")
        faults = [
            Fault(round(draw.random(), 4), draw.choice(kinds), draw.choice(names), draw.choice((0.1, 1, 8)))
            for _ in range(draw.choice((1, 1, 2, 4)) if place else 0)
        ]
        if faults and shared and draw.random() < 0.1:
            faults.append(Fault(round(draw.random(), 4), "abandon"))
        return cls(seed, shared, served, explorers, overrides, tuple(sorted(faults, key=lambda fault: fault.at)))

    @property
    def deterministic(self) -> bool:
        return bool(self.overrides["schedule.deterministic"])

    @property
    def synchronous(self) -> bool:
        return self.overrides["schedule.max_staleness"] == 0 and not self.served


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

    def compare(self, calm: Outcome) -> None:
        """Adds a problem if the result depends on the faults. `calm` is the world without them."""
        difference = f"{list(calm.trained)} without faults, {list(self.trained)} with them"
        if self.spec.deterministic and calm.digest != self.digest:
            self.problems.append(f"faults changed the weights: {difference}")
        elif self.spec.synchronous and sorted(calm.trained) != sorted(self.trained):
            self.problems.append(f"faults changed the groups: {difference}")
