"""Throughput of many episodes with environments of long-tailed latency, beside the bound that the latencies set.

    python benchmarks/environments.py [--episodes 256] [--median-s 0.2]

The engine is scripted and takes no time. The bound is the time of the same episodes in the same order, each started
when the environment of an earlier one is free.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import time
from collections.abc import Sequence

import numpy as np

from trivium.config import build, plugin
from trivium.engines.scripted import ScriptedEngine
from trivium.foundation.randomness import SampleKey
from trivium.policy import Policy
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Message, Sampling, Task

STEPS = 4


class Slow:
    """An environment whose steps wait as long as the task says."""

    async def reset(self, task: Task) -> Sequence[Message]:
        self.left = list(task.columns["seconds"])
        return task.prompt

    async def step(self, completion: str) -> tuple[list[Message], float, bool]:
        await asyncio.sleep(self.left.pop(0))
        return [Message("user", "on")], 1.0, not self.left


def bound(durations: Sequence[float], places: int) -> float:
    """The seconds that the episodes take, in this order, with so many places."""
    free = [0.0] * places
    for seconds in durations:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)


async def measured(tasks: Sequence[Task], places: int) -> float:
    section = {"kind": "multi_turn", "environment": f"{__file__}:Slow", "max_environments": places}
    episodes = build("workflows", plugin("workflows")(section))
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer)
    engine = ScriptedEngine(
        ScriptedEngine.Config(replies=((1,),)), eos_token_ids=renderer.eos_token_ids, decode=renderer.decode
    )
    keys = [SampleKey(0, "train", "train", task.task_id) for task in tasks]
    policies = [Policy(engine, renderer, Sampling(2), key, 4096) for key in keys]
    began = time.perf_counter()
    await asyncio.gather(*(episodes.run(task, policy) for task, policy in zip(tasks, policies, strict=True)))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--median-s", type=float, default=0.2)
    arguments = parser.parse_args()
    latencies = arguments.median_s * np.random.default_rng(0).lognormal(0.0, 1.2, (arguments.episodes, STEPS))
    prompt = (Message("user", "go"),)
    tasks = [Task(str(n), prompt, {"seconds": row.tolist()}) for n, row in enumerate(latencies)]
    quantiles = ", ".join(f"{np.quantile(latencies, q):.2f}" for q in (0.5, 0.9, 0.99, 1.0))
    print(
        f"{arguments.episodes} episodes of {STEPS} steps; latency in s at the median, 90 %, 99 %, maximum: {quantiles}"
    )
    print(f"{'max_environments':>16} {'bound s':>9} {'measured s':>11} {'of the bound':>13}")
    for places in (16, 64, arguments.episodes):
        least = bound(latencies.sum(1).tolist(), places)
        seconds = asyncio.run(measured(tasks, places))
        print(f"{places:>16} {least:>9.2f} {seconds:>11.2f} {least / seconds:>13.1%}")


if __name__ == "__main__":
    main()
