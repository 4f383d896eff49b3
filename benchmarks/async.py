"""Tokens trained per second, asynchronous against synchronous, where playing a task takes a long-tailed time.

    python benchmarks/async.py [--repeats 2] [--steps 14] [--staleness 4] [--in-flight update]

A tiny model is trained with GRPO by the real engines through `trivium.run`, one process, one thread for each
side's model work. The environment pays for a reply after 2 s for every twentieth task and after 0 to 0.21 s for the
others, 0.2 s on average; how long a task takes is a function of its id, so every run plays the same world. The two
sides differ in `schedule.max_staleness` (0 against `--staleness`) and `sync.in_flight` alone; they run in turn,
`--repeats` times, and the first steps of each run (loading, first shapes) and its last ones (the asynchronous side runs
dry) are left out.

A bound on staleness costs something where a task takes longer than that many steps: what comes too late is played in
vain, and a task that always does is never trained on. Both are printed; more `--groups` make longer steps.

The ceiling is computed from what one step was measured to need: generation g, from a synchronous run whose environment
answers at once; training t, from the synchronous run; the mean latency e of the world. A synchronous step takes as long
as it was measured to. An asynchronous one can at best hide everything behind the busier side: max(g, t) where each side
has a core, g + t where they share one. Nor can it be faster than its groups in flight allow (Little's law):
(g + e) / (staleness + 1). The ceiling is the synchronous step over the larger of the two.

Exits 1 when the median ratio is below 1.8. Other work on the machine makes both sides slower, and not equally.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from trivium.config import Plugin, config_from_mapping
from trivium.foundation.concurrency import usable_cores
from trivium.foundation.randomness import stream, uniforms
from trivium.foundation.registry import resolve
from trivium.runtime.launch import run
from trivium.types import Message, Task

HERE = Path(__file__).resolve()
TARGET = 1.8
WARM = 3
"""Steps at the start of a run that do not count."""


# --------------------------------------------------------------------------- the world


def latency(task_id: str) -> float:
    """Seconds that the environment takes for a task."""
    slow, long = uniforms(np.uint64(stream("latency", task_id)), np.arange(2))
    return 2.0 if slow < 0.05 else 0.21 * float(long)


def tasks() -> list[dict[str, Any]]:
    """Sums of two numbers below 60."""
    return [{"prompt": f"{a}+{b}=", "id": f"{a}+{b}"} for a in range(60) for b in range(60)]


class World:
    """Pays for the digits of a reply, after a while."""

    def __init__(self, at_once: bool = False) -> None:
        self._at_once = at_once

    async def reset(self, task: Task) -> Sequence[Message]:
        self._seconds = 0.0 if self._at_once else latency(task.task_id)
        return task.prompt

    async def step(self, reply: str) -> tuple[list[Message], float, bool]:
        await asyncio.sleep(self._seconds)
        return [], sum(letter.isdigit() for letter in reply) / max(1, len(reply)), True


ROWS: list[tuple[float, Mapping[str, float]]] = []


class Clock:
    """A monitor that notes when each step was logged."""

    class Config(Plugin):
        kind: str = f"{HERE}:Clock"

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int) -> None:
        ROWS.clear()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        ROWS.append((time.perf_counter(), metrics))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


# --------------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Measured:
    """A run's steps between the first and the last ones, per step."""

    seconds: float
    tokens: float
    wait_s: float
    """The trainer waits for groups."""
    train_s: float
    lost: float
    """Groups played in vain: too stale when they came, or called off."""
    given_up: float
    """Slots whose task came too late every time."""
    staleness: float

    @property
    def rate(self) -> float:
        """Tokens trained per second."""
        return self.tokens / self.seconds

    @property
    def idle(self) -> float:
        """The part of the time in which the trainer waits."""
        return self.wait_s / self.seconds


def measure(said: argparse.Namespace, staleness: int, in_flight: str = "finish", *, at_once: bool = False) -> Measured:
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "run": {"dir": f"{directory}/run", "seed": 0},
            "model": {
                "kind": "tiny",
                "alphabet": "bytes",
                "layers": said.layers,
                "hidden": said.hidden,
                "max_position": 64 + said.new_tokens,
            },
            "tasks": {"train": {"kind": "python", "source": f"{HERE}:tasks", "id": "id"}},
            "workflow": {
                "kind": "multi_turn",
                "environment": f"{HERE}:World",
                "environment_args": {"at_once": at_once},
                "max_turns": 1,
                "deadline_s": 60,
            },
            "engine": {"sampling": {"max_new_tokens": said.new_tokens}},
            "train": {"optimizer": {"lr": 1.0e-4}},
            "schedule": {
                "steps": said.steps,
                "groups_per_step": said.groups,
                "group_size": said.group_size,
                "max_staleness": staleness,
            },
            "sync": {"in_flight": in_flight},
            "cluster": {"threads": 1},
            "monitors": [{"kind": f"{HERE}:Clock"}],
            "checkpoint": {"save_every": 0},
        }
        run(config_from_mapping(config))
    rows = resolve("monitors", f"{HERE}:ROWS")
    rows = rows[WARM - 1 : len(rows) - said.staleness - 1]
    seconds = rows[-1][0] - rows[0][0]
    counted = [metrics for _, metrics in rows[1:]]

    def mean(key: str) -> float:
        return fmean(metrics.get(key, 0.0) for metrics in counted)

    return Measured(
        seconds / len(counted),
        mean("train/tokens"),
        mean("time/wait"),
        mean("time/train"),
        mean("rollout/evicted") + mean("rollout/called_off"),
        mean("rollout/given_up"),
        mean("rollout/staleness"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="train steps of each run")
    parser.add_argument("--staleness", type=int, default=4, help="max_staleness of the asynchronous side")
    parser.add_argument("--in-flight", choices=("finish", "update"), default="finish")
    parser.add_argument("--groups", type=int, default=64, help="groups per step")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=96)
    said = parser.parse_args()
    if said.steps < WARM + said.staleness + 3:
        parser.error(f"--steps must be at least {WARM + said.staleness + 3}")

    generation = measure(said, 0, at_once=True).wait_s
    print(f"generation {generation:.2f} s per step (environment off); {usable_cores()} cores")
    ratios, ceilings = list[float](), list[float]()
    e = fmean(latency(task["id"]) for task in tasks())
    for number in range(said.repeats):
        sync, ahead = measure(said, 0), measure(said, said.staleness, said.in_flight)
        busy = max(generation, sync.train_s) if usable_cores() > 1 else generation + sync.train_s
        ratios.append(ahead.rate / sync.rate)
        ceilings.append(sync.seconds / max(busy, (generation + e) / (said.staleness + 1)))
        for name, each in (("synchronous", sync), ("asynchronous", ahead)):
            print(
                f"{number + 1} {name:12}  {each.rate:7.0f} tokens/s  {each.seconds:5.2f} s per step  train "
                f"{each.train_s:4.2f} s  trainer idle {each.idle:4.0%}  of {said.groups} groups in vain "
                f"{each.lost:.1f}, given up {each.given_up:.1f}  staleness {each.staleness:.1f}"
            )
        print(f"  ratio {ratios[-1]:.2f}, ceiling {ceilings[-1]:.2f}")
    print(f"median ratio {median(ratios):.2f} (target {TARGET}), ceiling {median(ceilings):.2f}")
    return 0 if median(ratios) >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
