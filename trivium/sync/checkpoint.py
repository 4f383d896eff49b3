"""The channel of processes that see one directory: a version is a folder of safetensors files, sealed by a manifest.

`version-000012/` holds `weights-00000.safetensors`, ... and `manifest.json`, which says where each tensor lies and what
its hash is. A folder is written aside and renamed, so that one with its final name is whole. No locks: the file system
may be shared between machines.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
import uuid
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file

from trivium.errors import SyncError, VersionGone
from trivium.protocols import Weights
from trivium.sealing import begun, to_disk
from trivium.sync.tensors import Named, digests, parts, raw, type_name, type_named, verify
from trivium.synchronizer import TRAINER, Synchronizer

FILE_BYTES = 2**30
"""A file holds so many bytes of tensors, or one larger tensor: what the trainer copies to the CPU at a time."""
APPEARS_S = 60.0
"""Longest time after which another machine's file system shows what was renamed into a shared directory."""
_LOOK_S = 0.2
_PREFIX = "version-"
_MANIFEST = "manifest.json"


class CheckpointChannel:
    """Keeps the newest `keep` published versions as files.

    A collector opens every file of a version at once and then reads at its own pace: what the trainer removes
    meanwhile stays readable to it.
    """

    def __init__(self, *, keep: int, directory: Path, synchronizer: Synchronizer, role: str) -> None:
        self._keep, self._directory, self._synchronizer, self._role = keep, directory, synchronizer, role
        self._own: list[int] | None = None
        """What this trainer has offered or taken back and still keeps; None as long as it has done neither."""

    def offer(self, version: int, weights: Weights) -> bool:
        with self._placing(version) as aside:
            _write(aside, version, weights)
        return True

    def collect(self, version: int) -> Iterator[Named]:
        with ExitStack() as stack:
            tensors, files = self._open(version, stack)
            opened = stack.pop_all()
        reading = _read(version, tensors, files, opened)
        weakref.finalize(reading, opened.close)  # also where nobody ever reads
        return reading

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the trainer, what it offered or took back and still keeps; of an explorer, what lies there."""
        return tuple((self._own or ()) if self._role == TRAINER else self._there())

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        """Copies versions that explorers may still need, whole folders as they are."""
        for version in versions:
            shutil.copytree(self._folder(version), directory / self._folder(version).name)

    def restore(self, directory: Path) -> None:
        """Takes back what `save` wrote, and nothing else: what an earlier life left behind is removed."""
        self._clear()
        for version in _versions_in(directory):
            with self._placing(version) as aside:
                shutil.copytree(directory / self._folder(version).name, aside, dirs_exist_ok=True)

    # ------------------------------------------------------------------ the trainer's side

    @contextmanager
    def _placing(self, version: int) -> Generator[Path]:
        """A folder to be filled; on disk and in its place when the block is done. Then removes what is not kept."""
        own = self._clear() if self._own is None else self._own
        folder = self._folder(version)
        yield (aside := begun(self._directory, folder.name))
        for path in (*aside.iterdir(), aside):
            to_disk(path)
        self._remove(version)
        aside.rename(folder)
        to_disk(self._directory)
        own = sorted({*own, version})
        self._own = own[-self._keep :]
        for old in own[: -self._keep]:
            self._remove(old)

    def _clear(self) -> list[int]:
        """Removes whatever an earlier life of the trainer left, newer versions than this one has among it."""
        for version in self._there():
            self._remove(version)
        for half in self._directory.glob(f".{_PREFIX}*"):
            shutil.rmtree(half, ignore_errors=True)
        self._own = []
        return self._own

    def _remove(self, version: int) -> None:
        """In one move out of sight, then file by file: nobody meets a version that is half there."""
        folder = self._folder(version)
        away = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        if folder.exists():
            folder.rename(away)
            # A file that somebody on another machine reads may resist; the next trainer's first offer tries again.
            shutil.rmtree(away, ignore_errors=True)

    # ------------------------------------------------------------------ the explorer's side

    def _open(self, version: int, stack: ExitStack) -> tuple[list[dict[str, Any]], dict[str, BinaryIO]]:
        """What the manifest says of each tensor, and every file it names, open until the stack is closed."""
        folder = self._folder(version)
        self._wait_for(version)
        try:
            tensors = _manifest(folder, version)
            names = dict.fromkeys(tensor["file"] for tensor in tensors)
            return tensors, {name: stack.enter_context(open(folder / name, "rb")) for name in names}
        except FileNotFoundError as error:
            if (folder / _MANIFEST).is_file():
                raise _damaged(version, f"the files of {folder}", f"{error.filename} is missing") from error
            raise self._gone(version) from error

    def _wait_for(self, version: int) -> None:
        """Returns once the version is there. Raises VersionGone if newer ones are, if it was never published, or if it
        does not appear."""
        end = time.monotonic() + min(APPEARS_S, self._synchronizer.deadline_s)
        while not (self._folder(version) / _MANIFEST).is_file():
            there = self._there()
            self._synchronizer.check_alive()
            published = version in self._synchronizer.published
            if not published or there[-1:] > [version] or time.monotonic() > end:
                raise self._gone(version)
            time.sleep(_LOOK_S)

    def _there(self) -> list[int]:
        return _versions_in(self._directory)

    def _gone(self, version: int) -> VersionGone:
        return VersionGone(
            f"collect version {version}", f"{self._directory} has {self._there()}: it was removed, or never got there",
            "let trainer and explorers see the same directory (sync.dir), and run.name alone use it",
        )  # fmt: skip

    def _folder(self, version: int) -> Path:
        return self._directory / f"{_PREFIX}{version:06d}"


def _write(folder: Path, version: int, weights: Weights) -> None:
    """The files of a version, the manifest last. A tensor is copied and let go of before the next one is read, and what
    a file holds before the next file is begun."""
    entries: list[dict[str, Any]] = []
    copied = ((name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in weights)
    for number, part in enumerate(parts(copied, FILE_BYTES)):
        entries += _write_file(folder / f"weights-{number:05d}.safetensors", part)
        part.clear()
    said = {"version": version, "tensors": entries}
    sealed = {**said, "hash": _hash_of(said)}
    (folder / _MANIFEST).write_text(json.dumps(sealed, indent=1), encoding="utf-8")


def _write_file(file: Path, part: Sequence[Named]) -> list[dict[str, Any]]:
    """What the manifest says of the file's tensors."""
    save_file(dict(part), file)
    starts = _starts(file)
    return [
        {
            "name": name, "dtype": type_name(tensor), "shape": list(tensor.shape), "bytes": tensor.nbytes,
            "file": file.name, "at": starts[name], "hash": digest,
        }
        for (name, tensor), digest in zip(part, digests([tensor for _, tensor in part]), strict=True)
    ]  # fmt: skip


def _starts(file: Path) -> dict[str, int]:
    """Where in a safetensors file each tensor begins: its header, a length and JSON, says so."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _read(
    version: int, tensors: Sequence[Mapping[str, Any]], files: Mapping[str, BinaryIO], opened: ExitStack
) -> Iterator[Named]:
    """Every tensor, verified; one file at a time."""
    with opened:
        for name, group in groupby(tensors, lambda entry: entry["file"]):
            entries = list(group)
            named = [(entry["name"], _tensor(version, entry, files[name])) for entry in entries]
            verify(
                named, [entry["hash"] for entry in entries], version, f"its bytes in {name} are not what was offered",
                "look at the disk, or the file system; the trainer writes every version anew",
            )  # fmt: skip
            yield from named


def _tensor(version: int, entry: Mapping[str, Any], file: BinaryIO) -> torch.Tensor:
    tensor = torch.empty(entry["shape"], dtype=type_named(entry["dtype"]))
    what = f"{entry['name']!r} in {entry['file']}"
    try:
        file.seek(entry["at"])
        count = file.readinto(raw(tensor).numpy().data)  # pyright: ignore[reportAttributeAccessIssue]
    except OSError as error:
        if error.errno == errno.ESTALE:  # removed from another machine, whose file system does not wait for readers
            raise VersionGone(
                f"collect {what} of version {version}", "it was removed", "ask for a newer one"
            ) from error
        raise _damaged(version, what, str(error)) from error
    if count != tensor.nbytes:
        raise _damaged(version, what, f"{count} bytes instead of {tensor.nbytes}")
    return tensor


def _manifest(folder: Path, version: int) -> list[dict[str, Any]]:
    """What it says of each tensor. Raises SyncError where it is not what was written, or of another version."""
    text = (folder / _MANIFEST).read_text(encoding="utf-8", errors="replace")
    try:
        said = json.loads(text)
        whole = said.pop("hash") == _hash_of(said) and said["version"] == version
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(version, f"{folder / _MANIFEST}", f"not a manifest: {error}") from error
    if not whole:
        raise _damaged(version, f"{folder / _MANIFEST}", "it is not what was written for this version")
    return said["tensors"]


def _hash_of(said: Any) -> str:
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


def _damaged(version: int, what: str, found: str) -> SyncError:
    return SyncError(
        f"collect {what} of version {version}", found,
        "look at the disk, or the file system; the trainer writes every version anew",
    )  # fmt: skip


def _versions_in(directory: Path) -> list[int]:
    """The versions that lie in a directory, oldest first."""
    numbers = [path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*")]
    return sorted(int(number) for number in numbers if number.isdecimal())
