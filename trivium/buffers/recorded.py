"""A buffer over the journal of another run, which trains on its unchanged groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from trivium.buffers.journal import read_record, read_recorded
from trivium.buffers.read_only import ReadOnlyBuffer
from trivium.config import BufferConfig, ConfigPath
from trivium.errors import DataError, RunDirError
from trivium.protocols import Renderer
from trivium.schedule import Schedule
from trivium.types import Capabilities, Group

_log = logging.getLogger("trivium")


@dataclass(frozen=True, slots=True)
class _Place:
    """The place where a group is stored."""

    path: Path
    offset: int
    epochs: int
    """The epochs of earlier recordings, which are added to the group's epoch."""


class RecordedBuffer(ReadOnlyBuffer):
    """Yields recorded groups in slot order, exactly as recorded: tokens, log-probabilities, versions, rewards,
    failures. They count as rollouts of this run.

    Dropped groups are skipped, and the last attempt at a slot counts. Several recordings follow one another: slots are
    numbered on, and so are epochs where a task occurs again, so that groups stay distinct. The data ends where fewer
    groups are left than a step takes.
    """

    capabilities = Capabilities(explored=False, recorded=True)

    class Config(BufferConfig):
        kind: str = "recorded"
        path: Annotated[tuple[ConfigPath, ...], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
        """The recordings to train on, in this order: journal files, directories of them (`rollouts/stage-0` of a run),
        or the `rollouts` directory of a run, whose stages follow one another."""

    def __init__(
        self,
        config: Config,
        *,
        schedule: Schedule,
        rollouts: Path,
        renderer: Renderer,
        deadline_s: float,
        name: str = "",
    ) -> None:
        """Raises DataError if there is no journal at `config.path`."""
        del rollouts, renderer, deadline_s, name  # nothing is generated, encoded or waited for
        self.schedule = schedule
        self._recordings = [files for path in config.path for files in _recordings(Path(path))]
        self._places: list[_Place] | None = None
        """By slot; None until the first use."""
        self._cursor = 0

    async def take(self, count: int, version: int) -> list[Group]:
        places = await self._index()
        if self._cursor + count > len(places):
            _log.info("%d recorded group(s) left: no step of %d", len(places) - self._cursor, count)
            raise StopAsyncIteration
        first, self._cursor = self._cursor, self._cursor + count
        return await asyncio.to_thread(self._read, places, range(first, first + count))

    async def refuse(self, count: int) -> None:
        """Does nothing: the next recorded groups replace refused groups."""

    async def taken_groups(self, slots: Sequence[int]) -> list[Group]:
        return await asyncio.to_thread(self._read, await self._index(), slots)

    async def state(self) -> dict[str, Any]:
        """The cursor, and the number of recorded groups."""
        return {"cursor": self._cursor, "recorded": len(await self._index())}

    async def restore(self, state: Mapping[str, Any] | None, version: int) -> None:
        places = await self._index()
        if state is None:
            return
        if len(places) < state["recorded"]:
            raise RunDirError(
                f"continue at recorded group {state['cursor']}",
                f"{len(places)} groups are recorded, there were {state['recorded']}",
                "restore the files",
            )
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
                    "set it to the group size of the run that recorded them",
                )
            groups.append(replace(group, slot=slot, epoch=group.epoch + places[slot].epochs))
        return groups


def _recordings(path: Path) -> Iterator[list[Path]]:
    """The files of each recording under a path; slots are unique within a recording."""
    if path.is_file():
        yield [path]
        return
    recordings = [sorted(folder.glob("*.msgpack")) for folder in (path, *sorted(path.glob("stage-*"), key=_stage))]
    if not any(recordings):
        raise DataError(
            f"recorded rollouts in {path}",
            "no such file" if not path.exists() else "no .msgpack files there",
            "name the rollouts directory of a run that explored, or a file in it, in buffer.path",
        )
    yield from filter(None, recordings)


def _stage(folder: Path) -> tuple[int, str]:
    number = folder.name.removeprefix("stage-")
    return (int(number) if number.isdecimal() else 0), number


def _places(recordings: Sequence[Sequence[Path]]) -> list[_Place]:
    """The places of the groups of all recordings, in slot order within each."""
    places: list[_Place] = []
    seen: set[tuple[str, str, int]] = set()
    for files in recordings:
        by_slot: dict[int, tuple[Path, int]] = {}
        ids: set[tuple[str, str, int]] = set()
        for path in files:
            for offset, group in read_recorded(path):
                by_slot.pop(group.slot, None)
                ids.add((group.task.taskset, group.task.task_id, group.epoch))
                if not group.dropped:
                    by_slot[group.slot] = path, offset
        epochs = 0 if ids.isdisjoint(seen) else 1 + max(epoch for _, _, epoch in seen)
        seen |= {(taskset, task_id, epoch + epochs) for taskset, task_id, epoch in ids}
        places += [_Place(*by_slot[slot], epochs) for slot in sorted(by_slot)]
    return places
