"""What Ray tasks do with the actor of a CheckpointMonitor, as users of Trinity-RFT write it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import ray

from tests.waiting import eventually
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.trinity import CheckpointMonitor

STEP = 5


def save(directory: str, namespace: str, place: tuple[str, str], number: int, together: list[int]) -> None:
    """Saves a part of a step, once those that may write at the same time do; writes down when."""
    notes = Path(directory) / "notes"
    monitor: Any = CheckpointMonitor.get_actor(namespace)
    ray.get(monitor.notify_started.remote(node_id=place[0], job_id=place[1]))
    began = time.monotonic()
    (notes / f"inside-{number}").touch()
    eventually(lambda: all((notes / f"inside-{n}").exists() for n in together), 120, lambda: f"{number} is alone")
    (notes / f"{number}.json").write_text(json.dumps([began, time.monotonic()]))
    ray.get(monitor.notify_finished.remote(STEP))


def intervals(directory: Path) -> list[tuple[float, float]]:
    """When each saver wrote, by number."""
    return [tuple(json.loads(path.read_text())) for path in sorted((directory / "notes").glob("*.json"))]


class Broken:
    """An actor that cannot be built."""

    def __init__(self) -> None:
        raise ConfigError("an actor", "a broken one", "repair it")

    # A coroutine: for a class without one, Ray starts as many threads as calls are allowed at a time.
    async def get_settings(self) -> dict[str, object]:
        return {}


class Hung:
    """An actor that never answers."""

    async def get_settings(self) -> None:
        await asyncio.Event().wait()
