"""The journal: every finished group is on disk before it counts, so that a killed run loses no rollout.

One append-only file per train step under `rollouts/`. A record is length, CRC-32 and msgpack. The journal detects and
truncates a torn tail (the process died while writing); its slot is leased again. Media are separate files; records
contain their hashes.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from trivium.buffers.media import MediaFiles, MediaStore
from trivium.foundation.atomic import atomic_write, writing
from trivium.foundation.errors import DataError
from trivium.types import Failure, Group, Lease, Media, Message, StopReason, Task, Trajectory, Turn

_log = logging.getLogger("trivium")
_HEADER = struct.Struct("<II")
_FAILED = "failed-from"
_PackMedia = Callable[[Iterable[Media]], list[dict[str, Any]]]
_UnpackMedia = Callable[[Iterable[dict[str, Any]]], tuple[Media, ...]]
_STORED = "run the same command again: groups that were not trained on yet are rolled out again"


class Journal:
    """The rollouts of a run, by train step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._media = MediaFiles.beside(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for unfinished in directory.glob(".*.writing"):  # of a process that was killed
            unfinished.unlink()

    def append(self, step: int, group: Group) -> None:
        """Writes the group to the operating system, so that it survives the death of this process."""
        record = _record(group, self._media)
        path = self._path(step)
        with writing(path), open(path, "ab") as file:  # buffered: writes everything or raises
            file.write(record)

    def read(self, after_step: int) -> Iterator[Group]:
        """The groups of later steps, in the order they were written. Truncates torn tails."""
        for path in self._paths(after_step):
            yield from self._read_file(path)

    def read_step(self, step: int) -> Iterator[Group]:
        """The groups of one step, in the order they were written."""
        if self._path(step).is_file():
            yield from self._read_file(self._path(step))

    def drop(self, step: int) -> None:
        """Removes the groups of one step."""
        self._path(step).unlink(missing_ok=True)

    def strike(self, after_step: int, lost: Callable[[Group], bool]) -> None:
        """Removes the groups of later steps for which `lost` returns True."""
        for path in self._paths(after_step):
            groups = list(self._read_file(path))
            remaining = [group for group in groups if not lost(group)]
            if len(remaining) < len(groups):
                write_groups(path, remaining)

    def mark_failed(self, from_slot: int) -> None:
        """Records the first slot of the failures that end the run, for the next session."""
        atomic_write(self.directory / _FAILED, f"{from_slot}\n")

    @property
    def failed_from(self) -> int | None:
        """The slot recorded by `mark_failed`. None after `set_aside`."""
        path = self.directory / _FAILED
        text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else None
        if text is not None and not text.isdecimal():
            raise DataError(
                f"a slot in {path}", repr(text[:60]), "write the first slot of the failed step, or remove it"
            )
        return None if text is None else int(text)

    def set_aside(self, after_step: int, groups: Sequence[Group]) -> None:
        """Moves groups of later steps to a separate file, where they are not counted, and removes the failure mark."""
        if groups:
            slots = {group.slot for group in groups}
            write_groups(self._aside, [*self.read_aside(), *groups])
            self.strike(after_step, lambda group: group.slot in slots)
        (self.directory / _FAILED).unlink()

    def read_aside(self) -> list[Group]:
        """The groups that were set aside, in the order of `set_aside`."""
        return list(self._read_file(self._aside)) if self._aside.is_file() else []

    @property
    def _aside(self) -> Path:
        return self.directory / "failed.msgpack"

    def _paths(self, after_step: int) -> list[Path]:
        paths = sorted(self.directory.glob("step-*.msgpack"))
        numbers = {path: path.stem.removeprefix("step-") for path in paths}
        return [path for path in paths if numbers[path].isdecimal() and int(numbers[path]) > after_step]

    def _read_file(self, path: Path) -> Iterator[Group]:
        data, end = path.read_bytes(), 0
        for offset, payload in whole_records(data):
            yield _decoded(path, offset, payload, f"remove {path}: its groups are rolled out again", self._media)
            end = offset + _HEADER.size + len(payload)
        if end < len(data):
            _log.warning(
                "%s is damaged, or was cut short, after byte %d: the rest, %d bytes, is removed, and its groups are "
                "rolled out again",
                *(path, end, len(data) - end),
            )
            os.truncate(path, end)

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}.msgpack"


def write_groups(path: Path, groups: Iterable[Group]) -> None:
    """Writes a file of groups, in place of an earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging, media = path.with_name(f".{path.name}.writing"), MediaFiles.beside(path.parent)
    with writing(path):
        with open(staging, "wb") as file:
            file.writelines(_record(group, media) for group in groups)
        staging.replace(path)


def read_recorded(path: Path) -> Iterator[tuple[int, Group]]:
    """(offset, group) of each record in a file of a run. Does not change the file; skips a torn tail. Media have
    hashes but no bytes.

    Raises DataError if the file is not a journal or is damaged.
    """
    data, end = path.read_bytes(), 0
    for offset, payload in whole_records(data):
        yield offset, _decoded(path, offset, payload)
        end = offset + _HEADER.size + len(payload)
    if end < len(data) and _header(data, end)[0] <= len(data) - end - _HEADER.size:
        raise _damaged(path, end, "its bytes differ from those that were written")
    if end < len(data):
        _log.warning("%s ends with an incomplete record: %d bytes skipped", path, len(data) - end)


def read_record(path: Path, offset: int, *, media: bool = True) -> Group:
    """The group at an offset from `read_recorded`. Without `media`, its media have hashes but no bytes. Raises
    DataError if the group is no longer there."""
    with open(path, "rb") as file:
        file.seek(offset)
        header = file.read(_HEADER.size)
        record = header + file.read(_header(header, 0)[0])
    for _, payload in whole_records(record):
        return _decoded(path, offset, payload, store=MediaFiles.beside(path.parent) if media else None)
    raise _damaged(path, offset, "the file has changed since it was opened")


def whole_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, payload) of every record before the first torn or damaged one."""
    offset = 0
    while offset < len(data):
        size, crc = _header(data, offset)
        start = offset + _HEADER.size
        payload = data[start : start + size]
        if len(payload) < size or zlib.crc32(payload) != crc:
            return
        yield offset, payload
        offset = start + size


def _header(data: bytes, offset: int) -> tuple[int, int]:
    """(size, CRC) of the record at an offset. The size is beyond the end if the header itself is torn."""
    header = data[offset : offset + _HEADER.size]
    return _HEADER.unpack(header) if len(header) == _HEADER.size else (len(data) + 1, 0)


_RECORDED = "name a file (step-000001.msgpack) that a run wrote under rollouts/"


def _decoded(path: Path, offset: int, payload: bytes, do: str = _RECORDED, store: MediaStore | None = None) -> Group:
    try:
        return decode_group(payload, store)
    except DataError as error:
        raise DataError(error.asked, error.found, f"{error.do}; or {do}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # msgpack's own errors are ValueErrors
        raise _damaged(path, offset, f"it holds no group ({type(error).__name__}: {error})", do) from error


def _damaged(path: Path, offset: int, problem: str, do: str = _RECORDED) -> DataError:
    return DataError(f"the recorded group at byte {offset} of {path}", problem, do)


def _record(group: Group, store: MediaStore) -> bytes:
    payload = encode_group(group, store)
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def stored_record(group: Group, buffer: str, store: MediaStore) -> bytes:
    """A group as a row of a database: the record of a file with a checksum that also covers the buffer's name."""
    payload = encode_group(group, store)
    return _HEADER.pack(len(payload), zlib.crc32(payload, zlib.crc32(buffer.encode()))) + payload


def read_stored(record: bytes, buffer: str, lease: Lease, store: MediaStore | None = None) -> Group:
    """The group of a row. Raises DataError if it is not the group that was stored there.

    Without a store, media have hashes but no bytes.
    """
    place = f"the stored group of slot {lease.slot}, attempt {lease.attempt}, of the buffer {buffer}"
    size, crc = _header(record, 0)
    payload = record[_HEADER.size :]
    if not record:
        raise DataError(place, "it holds no group", _STORED)
    if size != len(payload) or zlib.crc32(payload, zlib.crc32(buffer.encode())) != crc:
        raise DataError(place, "its bytes differ from those that were written", _STORED)
    try:
        group = decode_group(payload, store)
    except DataError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(place, f"it holds no group ({type(error).__name__}: {error})", _STORED) from error
    if Lease(group.slot, group.attempt) != lease:
        raise DataError(place, f"it is the group of slot {group.slot}, attempt {group.attempt}", _STORED)
    return group


def encode_group(group: Group, store: MediaStore | None = None) -> bytes:
    """A group as msgpack: arrays as little-endian bytes, nothing pickled. The store keeps the media; without a store,
    the msgpack contains their bytes."""

    def pack_media(items: Iterable[Media]) -> list[dict[str, Any]]:
        return [_pack_media(item, store) for item in items]

    task = group.task
    prompt = [{**message.entry(), "media": pack_media(message.media)} for message in task.prompt]
    try:
        packed = msgpack.packb(
            {
                "slot": group.slot,
                "epoch": group.epoch,
                "attempt": group.attempt,
                "version": group.version,
                "dropped": group.dropped,
                "task": {
                    "task_id": task.task_id,
                    "prompt": prompt,
                    "columns": dict(task.columns),
                    "taskset": task.taskset,
                },
                "trajectories": [_pack_trajectory(trajectory, pack_media) for trajectory in group.trajectories],
                "greedy": None if group.greedy is None else _pack_trajectory(group.greedy, pack_media),
            }
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"journal the rollouts of task {group.task.task_id!r}",
            f"a column or metric that is not a JSON value ({error}); columns: {sorted(group.task.columns)}",
            "let the task source convert its columns to text, numbers, lists and mappings",
        ) from error
    assert packed is not None
    return packed


def decode_group(payload: bytes, store: MediaStore | None = None) -> Group:
    """The inverse of `encode_group`. Without a store, media kept in a store have no bytes."""

    def unpack_media(items: Iterable[dict[str, Any]]) -> tuple[Media, ...]:
        return tuple(_unpack_media(item, store) for item in items)

    data: dict[str, Any] = msgpack.unpackb(payload, strict_map_key=False)
    task = data["task"]
    prompt = tuple(Message.of(message, unpack_media(message["media"])) for message in task["prompt"])
    return Group(
        slot=data["slot"],
        task=Task(task["task_id"], prompt, task["columns"], task["taskset"]),
        trajectories=tuple(_unpack_trajectory(item, unpack_media) for item in data["trajectories"]),
        epoch=data["epoch"],
        attempt=data["attempt"],
        version=data["version"],
        greedy=None if data["greedy"] is None else _unpack_trajectory(data["greedy"], unpack_media),
        dropped=data["dropped"],
    )


def _pack_trajectory(trajectory: Trajectory, pack_media: _PackMedia) -> dict[str, Any]:
    failure = trajectory.failure
    return {
        "index": trajectory.index,
        "turns": [_pack_turn(turn, pack_media) for turn in trajectory.turns],
        "rewards": dict(trajectory.rewards),
        "failure": None if failure is None else [failure.side, failure.kind, failure.message, failure.cause],
        "metrics": dict(trajectory.metrics),
        "feedback": trajectory.feedback,
    }


def _unpack_trajectory(data: dict[str, Any], unpack_media: _UnpackMedia) -> Trajectory:
    failure = None if data["failure"] is None else Failure(*data["failure"])
    turns = tuple(_unpack_turn(turn, unpack_media) for turn in data["turns"])
    return Trajectory(data["index"], turns, data["rewards"], failure, data["metrics"], data["feedback"])


def _pack_turn(turn: Turn, pack_media: _PackMedia) -> list[Any]:
    arrays = (turn.prompt_tokens, turn.tokens, turn.log_prob, turn.policy_version)
    media = pack_media(turn.media)
    fields = [*(a.tobytes() for a in arrays), turn.stop_reason.value, turn.text, media, turn.reward, turn.state]
    extra = {name: [array.dtype.str, array.shape, array.tobytes()] for name, array in turn.extra.items()}
    return [*fields, extra, turn.participant]


def _unpack_turn(data: list[Any], unpack_media: _UnpackMedia) -> Turn:
    prompt_tokens, tokens, log_prob, policy_version, stop_reason, text, media, reward, state, arrays, participant = data
    extra: dict[str, tuple[str, list[int], bytes]] = arrays
    return Turn(
        np.frombuffer(prompt_tokens, np.int32),
        np.frombuffer(tokens, np.int32),
        np.frombuffer(log_prob, np.float32),
        np.frombuffer(policy_version, np.int32),
        StopReason(stop_reason),
        text,
        unpack_media(media),
        reward,
        state,
        participant,
        {name: np.frombuffer(array, dtype).reshape(shape) for name, (dtype, shape, array) in extra.items()},
    )


def _pack_media(item: Media, store: MediaStore | None) -> dict[str, Any]:
    about = {"mime": item.mime, "sha256": item.sha256, "span": item.span}
    if store is None:
        return {**about, "data": item.data}
    store.keep(item)
    return about


def _unpack_media(item: dict[str, Any], store: MediaStore | None) -> Media:
    span = None if item["span"] is None else (item["span"][0], item["span"][1])
    sha256 = item["sha256"]
    data = item["data"] if "data" in item else b"" if store is None else store.load(sha256)
    return Media(item["mime"], data, span, sha256)
