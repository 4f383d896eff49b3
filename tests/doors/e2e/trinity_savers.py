"""Processes that save through a monitor of Trinity-RFT's front door, on Ray or without it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import Forked
from tests.waiting import eventually
from trivium.frontdoors.trinity import CheckpointMonitor

STEP = 5
Start = Callable[..., Callable[[], int]]
"""Starts a function in a process of its own; what it returns waits for its exit code."""


def save(
    directory: str, namespace: str, strategy: str, place: tuple[str, str], number: int, together: list[int]
) -> None:
    """Saves a part of a step, once those that may write at the same time do; writes down when."""
    notes = Path(directory) / "notes"
    monitor = CheckpointMonitor.get_actor(namespace, strategy, directory)  # type: ignore[arg-type]

    async def part() -> None:
        await monitor.notify_started(*place)
        began = time.monotonic()
        (notes / f"inside-{number}").touch()
        eventually(lambda: all((notes / f"inside-{n}").exists() for n in together), 120, lambda: f"{number} is alone")
        (notes / f"{number}.json").write_text(json.dumps([began, time.monotonic()]))
        await monitor.notify_finished(STEP)

    asyncio.run(part())


def save_as_users_of_ray_do(directory: str, namespace: str, number: int) -> None:
    """The same with `.remote`, one at a time."""
    import ray

    monitor: Any = CheckpointMonitor.get_actor(namespace, None, directory)
    ray.get(monitor.register_thread_count.remote(STEP, checkpoint_thread_count=1))
    ray.get(monitor.notify_started.remote(node_id="node", job_id="job"))
    began = time.monotonic()
    (Path(directory) / "notes" / f"{number}.json").write_text(json.dumps([began, time.monotonic()]))
    ray.get(monitor.notify_finished.remote(STEP))


def die_while_saving(directory: str, namespace: str, step: int) -> None:
    """Registers and starts a save, and is killed."""
    monitor = CheckpointMonitor.get_actor(namespace, None, directory)

    async def begin() -> None:
        await monitor.register_thread_count(step, checkpoint_thread_count=1)
        await monitor.monitor_step(step)
        await monitor.notify_started("node", "doomed")

    asyncio.run(begin())
    os.kill(os.getpid(), signal.SIGKILL)


def complete_elsewhere(directory: str, namespace: str, step: int) -> None:
    """Says that a step is complete whose files this monitor has not seen."""
    CheckpointMonitor.get_actor(namespace, None, directory).update_latest_checkpoint_step(step)


def intervals(directory: Path) -> list[tuple[float, float]]:
    """When each saver wrote, by number."""
    return [tuple(json.loads(path.read_text())) for path in sorted((directory / "notes").glob("*.json"))]


@contextmanager
def forked(directory: Path) -> Iterator[Start]:
    started: list[Forked] = []

    def start(work: Callable[..., None], *arguments: Any) -> Callable[[], int]:
        started.append(Forked(work.__name__, directory / f"{len(started)}.out", work, str(directory), *arguments))
        return lambda process=started[-1]: process.wait(120)

    try:
        yield start
    finally:
        for process in started:
            process.kill()


@contextmanager
def on_ray(address: str, directory: Path) -> Iterator[Start]:
    import ray

    def start(work: Callable[..., None], *arguments: Any) -> Callable[[], int]:
        reference = ray.remote(num_cpus=0, max_retries=0)(work).remote(str(directory), *arguments)

        def wait() -> int:
            try:
                ray.get(reference, timeout=120)
            except ray.exceptions.WorkerCrashedError:
                return -9
            return 0

        return wait

    ray.init(address, logging_level="ERROR", log_to_driver=False)
    try:
        yield start
    finally:
        ray.shutdown()
