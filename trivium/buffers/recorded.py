"""A buffer over what another run journaled: its groups once more, as they were, for whoever trains on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from trivium.buffers.journal import read_record, read_recorded
from trivium.buffers.reading import ReadOnlyBuffer
from trivium.config import BufferConfig, ConfigPath
from trivium.errors import DataError, RunDirError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import Group

_log = logging.getLogger("trivium")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a group lies."""

    path: Path
    offset: int
    epochs: int
    """What is added to its epoch: how many lie before its recording."""


class RecordedBuffer(ReadOnlyBuffer):
    """Gives the trainer recorded groups in slot order, so many per step, exactly as they were: tokens,
    log-probabilities, versions, rewards, failures. They count as played for this run.

    What was dropped is left out, and of a slot that was played again the last attempt counts. Several recordings follow
    one another: slots are counted on, and epochs where a task comes again, so that no two groups pass for one. The data
    ends where no whole step is left.
    """

    sampled = True
    """A policy sampled these groups, though no explorer of this run."""

    class Config(BufferConfig):
        kind: str = "recorded"
        path: Annotated[tuple[ConfigPath, ...], BeforeValidator(lambda said: [said] if isinstance(said, str) else said)]
        """What to train on, one after the other: journal files, directories of them (`rollouts/stage-0` of a run), or
        the `rollouts` directory of a run, whose stages follow one another."""

    def __init__(
        self, config: Config, *, schedule: Schedule, rollouts: Path, renderer: Renderer, deadline_s: float,
        name: str = "",
    ) -> None:  # fmt: skip
        """Raises DataError where `config.path` leads to no journal."""
        del rollouts, renderer, deadline_s, name  # nothing is played, nothing encoded, nobody waited for
        self.schedule = schedule
        self._recordings = [files for path in config.path for files in _recordings(Path(path))]
        self._places: list[_Place] | None = None
        """By slot; None until somebody asks."""
        self._cursor = 0

    async def take(self, count: int, version: int) -> list[Group]:
        places = await self._index()
        if self._cursor + count > len(places):
            _log.info("%d recorded group(s) left: no step of %d", len(places) - self._cursor, count)
            raise StopAsyncIteration
        first, self._cursor = self._cursor, self._cursor + count
        return await asyncio.to_thread(self._read, places, range(first, first + count))

    async def refuse(self, count: int) -> None:
        """Nothing: refused groups are replaced by the next recorded ones."""

    async def past(self, slots: Sequence[int]) -> list[Group]:
        return await asyncio.to_thread(self._read, await self._index(), slots)

    async def state(self) -> dict[str, Any]:
        """The cursor, and what it counts."""
        return {"cursor": self._cursor, "recorded": len(await self._index())}

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        places = await self._index()
        if state is None:
            return
        if len(places) < state["recorded"]:
            raise RunDirError(
                f"continue at recorded group {state['cursor']}",
                f"{len(places)} groups are recorded, there were {state['recorded']}", "put the files back",
            )  # fmt: skip
        self._cursor = state["cursor"]

    async def _index(self) -> list[_Place]:
        if self._places is None:
            self._places = await asyncio.to_thread(_places, self._recordings)
        return self._places

    def _read(self, places: Sequence[_Place], slots: Sequence[int]) -> list[Group]:
        groups: list[Group] = []
        for slot in slots:
            group = read_record(places[slot].path, places[slot].offset)
            if len(group.trajectories) != self.schedule.group_size:
                raise DataError(
                    f"train on groups of {self.schedule.group_size} (schedule.group_size)",
                    f"recorded group {slot} (task {group.task.task_id!r}) has {len(group.trajectories)} members",
                    "say the group size of the run that recorded it",
                )
            groups.append(replace(group, slot=slot, epoch=group.epoch + places[slot].epochs))
        return groups


def _recordings(path: Path) -> Iterator[list[Path]]:
    """The files of each recording under a path: within one, no slot means two things."""
    if path.is_file():
        yield [path]
        return
    found = [sorted(folder.glob("*.msgpack")) for folder in (path, *sorted(path.glob("stage-*"), key=_stage))]
    if not any(found):
        raise DataError(
            f"recorded rollouts in {path}", "no such file" if not path.exists() else "no .msgpack files there",
            "name the rollouts directory of a run that explored, or a file in it, in buffer.path",
        )  # fmt: skip
    yield from filter(None, found)


def _stage(folder: Path) -> tuple[int, str]:
    number = folder.name.removeprefix("stage-")
    return (int(number) if number.isdecimal() else 0), number


def _places(recordings: Sequence[Sequence[Path]]) -> list[_Place]:
    """Where the groups of all recordings lie, in slot order within each."""
    places: list[_Place] = []
    seen: set[tuple[str, str, int]] = set()
    for files in recordings:
        found: dict[int, tuple[Path, int]] = {}
        ids: set[tuple[str, str, int]] = set()
        for path in files:
            for offset, group in read_recorded(path):
                found.pop(group.slot, None)
                ids.add((group.task.taskset, group.task.task_id, group.epoch))
                if not group.dropped:
                    found[group.slot] = path, offset
        epochs = 0 if ids.isdisjoint(seen) else 1 + max(epoch for _, _, epoch in seen)
        seen |= {(taskset, task_id, epoch + epochs) for taskset, task_id, epoch in ids}
        places += [_Place(*found[slot], epochs) for slot in sorted(found)]
    return places
