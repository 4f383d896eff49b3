"""CPU time of the explorer per trajectory, and whether it grows with the trajectories that are in flight.

    python benchmarks/explorer.py [--concurrent 100 1000 4000] [--waves 5] [--group-size 8] [--profile]

A single-turn task with an exact reward: leases, prompts, requests, rewards, groups and the journal of the memory buffer
are those of a run; the completions come from the scripted engine, `--delay` seconds after they were asked for. So many
trajectories are in flight at once, `--waves` times as many are rolled out. Beside each number that includes the engine
stands the engine's own part, measured by asking it alone for as many completions in the same way.

It is the process's CPU time that is measured, so other work on the machine matters little. Exits 1 where the explorer's
part of a trajectory costs more than 0.2 ms, or more than 1.5 times as much at the largest number as at the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from statistics import median
from typing import Any

from trivium.buffers.memory import MemoryBuffer
from trivium.engines.scripted import ScriptedEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.randomness import SampleKey
from trivium.rewards.functions import Exact
from trivium.rewards.judge import make_judge
from trivium.runtime.main_loop import run_in_loop
from trivium.schedule import Schedule
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Message, Request, Sampling, Task
from trivium.workflows.single_turn import SingleTurn

LIMIT_S, FLAT = 2e-4, 1.5
TOKENS = tuple([1, 2, 3, 4] * 8)
SAMPLING = Sampling(len(TOKENS) + 1)
RENDERER = ChatRenderer(tiny_tokenizer("0123456789+="))
TASKS: Any = [Task(f"t{place}", (Message("user", f"{place}+{place}="),), {"answer": "1"}) for place in range(2000)]


def scripted(delay_s: float) -> ScriptedEngine:
    config = ScriptedEngine.Config(replies=(TOKENS,), delay_s=delay_s)
    return ScriptedEngine(config, eos_token_ids=RENDERER.eos_token_ids, decode=RENDERER.decode)


async def explore(concurrent: int, waves: int, group_size: int, delay_s: float) -> None:
    """Rolls out and puts `waves` times `concurrent` trajectories as `explore_loop` does, all that are admitted."""
    groups = waves * concurrent // group_size
    schedule = Schedule(TASKS, 0, groups_per_step=groups, group_size=group_size, steps=1, max_staleness=1)
    judge = make_judge([Exact.Config()])
    engine = scripted(delay_s)
    explorer = Explorer(
        engine, RENDERER, SingleTurn(SingleTurn.Config()), judge, SAMPLING, RolloutLimits(60.0, concurrent)
    )
    with tempfile.TemporaryDirectory() as directory:
        buffer = MemoryBuffer(
            MemoryBuffer.Config(), schedule=schedule, rollouts=Path(directory), renderer=RENDERER, deadline_s=60.0
        )
        await buffer.restore(None, 0)
        await buffer.advance(explorer.name, 0)

        async def rollout() -> None:
            lease = await buffer.lease(explorer.name)
            assert lease is not None
            await buffer.put(explorer.name, await explorer.rollout_slot(schedule, lease))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(groups):
                tasks.create_task(rollout())
        await buffer.close()
    assert len(engine.requests) == groups * group_size


async def generate(concurrent: int, waves: int, delay_s: float) -> None:
    """As many completions from the engine alone."""
    engine = scripted(delay_s)
    prompt = RENDERER.render(TASKS[0].prompt).tokens

    async def one(index: int) -> None:
        await engine.generate(Request(prompt, SAMPLING, SampleKey(0, "train", "train", "t", 0, index)))

    for _ in range(waves):
        async with asyncio.TaskGroup() as tasks:
            for index in range(concurrent):
                tasks.create_task(one(index))


def cpu_s(work: Coroutine[Any, Any, None]) -> float:
    """CPU seconds of the process that an event loop, such as a run's, takes for it."""
    gc.collect()
    started = time.process_time()
    run_in_loop(work, 60.0)
    return time.process_time() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--waves", type=int, default=5)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--delay", type=float, default=0.2, metavar="SECONDS", help="of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, at the largest number")
    options = parser.parse_args()
    cpu_s(explore(64, 1, options.group_size, 0.0))  # warm: imports, caches
    costs: list[float] = []
    print(f"{'concurrent':>10} {'with engine':>14} {'engine alone':>14} {'explorer':>12}   CPU µs per trajectory")
    for concurrent in sorted(options.concurrent):
        number = options.waves * concurrent // options.group_size * options.group_size
        both = median(
            cpu_s(explore(concurrent, options.waves, options.group_size, options.delay)) / number
            for _ in range(options.repeats)
        )
        alone = median(
            cpu_s(generate(concurrent, options.waves, options.delay)) / (options.waves * concurrent)
            for _ in range(options.repeats)
        )
        costs.append(both - alone)
        print(f"{concurrent:>10,} {1e6 * both:>14.0f} {1e6 * alone:>14.0f} {1e6 * costs[-1]:>12.0f}", flush=True)
    if options.profile:
        profiler = cProfile.Profile()
        profiler.runcall(
            run_in_loop, explore(max(options.concurrent), options.waves, options.group_size, options.delay), 60.0
        )
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return 0 if max(costs) <= LIMIT_S and costs[-1] <= FLAT * costs[0] else 1


if __name__ == "__main__":
    sys.exit(main())
