"""The channel through a shared directory: a version is a folder of safetensors files with a manifest.

`version-000012/` holds `weights-00000.safetensors`, ... and `manifest.json` with the place and the hash of each tensor.
A folder is staged and renamed, so that one with its final name is complete. There are no locks: the file system may be
shared between machines.
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
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file

from trivium.checkpoint.atomic import fsync, staging_directory
from trivium.concurrency import ProgressDeadline
from trivium.errors import SyncError, VersionGone
from trivium.models.weights.described import Described, type_name
from trivium.protocols import TensorSpec, Weights
from trivium.sync.hashes import copied, joined, verify
from trivium.sync.tensors import BUCKET_BYTES, Named, drained, parts, raw, type_named
from trivium.synchronizer import Synchronizer
from trivium.types import TRAINER

FILE_BYTES = 2**30
"""The size of a file, unless it holds one larger tensor: what the trainer copies to the CPU at a time."""
APPEARS_S = 60.0
"""How long another machine's file system may take to show a folder of a shared directory."""
_POLL_S = 0.2
_PREFIX = "version-"
_MANIFEST = "manifest.json"


class FileChannel:
    """Keeps the newest `keep` published versions as files.

    `collect` opens every file of a version at once: what the trainer removes while they are read stays readable.
    """

    def __init__(self, *, keep: int, directory: Path, synchronizer: Synchronizer, role: str) -> None:
        self._keep, self._directory, self._synchronizer, self._role = keep, directory, synchronizer, role
        self._own: list[int] | None = None
        """The versions that this trainer has offered or restored and keeps; None before the first."""
        self.offered = ""

    def offer(self, version: int, weights: Weights) -> bool:
        with self._staged(version) as staging:
            self.offered = _write(staging, version, weights)
        return True

    def collect(self, version: int) -> Described:
        with ExitStack() as stack:
            tensors, files = self._open(version, stack)
            opened = stack.pop_all()
        reading = _read(version, tensors, files, opened)
        weakref.finalize(reading, opened.close)  # also where it is never read
        return Described(
            tuple(TensorSpec(each["name"], each["dtype"], tuple(each["shape"])) for each in tensors), reading
        )

    @property
    def versions(self) -> tuple[int, ...]:
        """For the trainer, what it has offered or restored and keeps; for an explorer, what the directory has."""
        return tuple((self._own or ()) if self._role == TRAINER else self._there())

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        """Copies the folders of versions that explorers may still need."""
        for version in versions:
            shutil.copytree(self._folder(version), directory / self._folder(version).name)

    def restore(self, directory: Path) -> None:
        """Restores what `save` wrote, and removes everything else."""
        self._clear()
        for version in _versions_in(directory):
            with self._staged(version) as staging:
                shutil.copytree(directory / self._folder(version).name, staging, dirs_exist_ok=True)

    # ------------------------------------------------------------------ the trainer's side

    @contextmanager
    def _staged(self, version: int) -> Generator[Path]:
        """A folder to fill; on disk under its final name after the block. Then removes what is not kept."""
        own = self._clear() if self._own is None else self._own
        folder = self._folder(version)
        yield (staging := staging_directory(folder))
        for path in (*staging.iterdir(), staging):
            fsync(path)
        self._remove(version)
        staging.rename(folder)
        fsync(self._directory)
        own = sorted({*own, version})
        self._own = own[-self._keep :]
        for old in own[: -self._keep]:
            self._remove(old)

    def _clear(self) -> list[int]:
        """Removes what an earlier trainer process left, which may include newer versions."""
        for version in self._there():
            self._remove(version)
        for staging in self._directory.glob(f".{_PREFIX}*"):
            shutil.rmtree(staging, ignore_errors=True)
        self._own = []
        return self._own

    def _remove(self, version: int) -> None:
        """Renames a version before its files are removed: no explorer sees half of it."""
        folder = self._folder(version)
        away = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        if folder.exists():
            folder.rename(away)
            # Where another machine reads a file, it may stay; the next trainer's first offer tries again.
            shutil.rmtree(away, ignore_errors=True)

    # ------------------------------------------------------------------ the explorer's side

    def _open(self, version: int, stack: ExitStack) -> tuple[list[dict[str, Any]], dict[str, BinaryIO]]:
        """The manifest's entries of the tensors, and every file that they name, open until the stack is closed."""
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
        """Returns once the version is there. Raises VersionGone if there are newer ones, if it is not published, or if
        it does not appear in time."""
        deadline = ProgressDeadline(min(APPEARS_S, self._synchronizer.deadline_s))
        while not (self._folder(version) / _MANIFEST).is_file():
            there = self._there()
            self._synchronizer.check_alive()
            published = version in self._synchronizer.published
            if not published or there[-1:] > [version] or not deadline.left_s:
                raise self._gone(version)
            time.sleep(_POLL_S)

    def _there(self) -> list[int]:
        return _versions_in(self._directory)

    def _gone(self, version: int) -> VersionGone:
        return VersionGone(
            f"collect version {version}",
            f"{self._directory} has {self._there()}: it was removed, or never written there",
            "let trainer and explorers see the same directory (sync.dir), and run.name alone use it",
        )

    def _folder(self, version: int) -> Path:
        return self._directory / f"{_PREFIX}{version:06d}"


def _write(folder: Path, version: int, weights: Weights) -> str:
    """Writes the files of a version, the manifest last; returns the hash of all tensors. At most those of one file are
    in memory."""
    entries: list[dict[str, Any]] = []
    hashes = dict[str, str]()
    for number, part in enumerate(parts(copied(weights, hashes), FILE_BYTES)):
        entries += _write_file(folder / f"weights-{number:05d}.safetensors", part, hashes)
        part.clear()
    content = {"version": version, "tensors": entries}
    manifest = {**content, "hash": _hash_of(content)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return joined(hashes)


def _write_file(file: Path, part: Sequence[Named], hashes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Writes a file; returns the manifest's entries of its tensors."""
    save_file(dict(part), file)
    starts = _starts(file)
    return [
        {
            "name": name,
            "dtype": type_name(tensor.dtype),
            "shape": list(tensor.shape),
            "bytes": tensor.nbytes,
            "file": file.name,
            "at": starts[name],
            "hash": hashes[name],
        }
        for name, tensor in part
    ]


def _starts(file: Path) -> dict[str, int]:
    """Where each tensor begins in a safetensors file, from its header: a length and JSON."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _read(
    version: int, tensors: Sequence[Mapping[str, Any]], files: Mapping[str, BinaryIO], opened: ExitStack
) -> Iterator[Named]:
    """Every tensor, verified; those of a bucket are in memory together."""
    with opened:
        for entries in _buckets(tensors):
            named = [(entry["name"], _tensor(version, entry, files[entry["file"]])) for entry in entries]
            verify(
                named,
                {entry["name"]: entry["hash"] for entry in entries},
                version,
                f"its bytes in {entries[0]['file']} are not what was offered",
                "check the disk or the file system; the trainer writes each version anew",
            )
            yield from drained(named)


def _buckets(tensors: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The entries of one file that are read together, at most `BUCKET_BYTES` unless one has more."""
    bucket, size = list[Mapping[str, Any]](), 0
    for entry in tensors:
        if bucket and (size + entry["bytes"] > BUCKET_BYTES or entry["file"] != bucket[0]["file"]):
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry["bytes"]
    if bucket:
        yield bucket


def _tensor(version: int, entry: Mapping[str, Any], file: BinaryIO) -> torch.Tensor:
    tensor = torch.empty(entry["shape"], dtype=type_named(entry["dtype"]))
    what = f"{entry['name']!r} in {entry['file']}"
    try:
        file.seek(entry["at"])
        count = file.readinto(raw(tensor).numpy().data)  # pyright: ignore[reportAttributeAccessIssue]
    except OSError as error:
        if error.errno == errno.ESTALE:  # removed by another machine: its file system does not keep open files
            raise VersionGone(
                f"collect {what} of version {version}", "it was removed", "ask for a newer one"
            ) from error
        raise _damaged(version, what, str(error)) from error
    if count != tensor.nbytes:
        raise _damaged(version, what, f"{count} bytes instead of {tensor.nbytes}")
    return tensor


def _manifest(folder: Path, version: int) -> list[dict[str, Any]]:
    """The manifest's entries. Raises SyncError where it was changed, or is of another version."""
    text = (folder / _MANIFEST).read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
        intact = content.pop("hash") == _hash_of(content) and content["version"] == version
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(version, f"{folder / _MANIFEST}", f"not a manifest: {error}") from error
    if not intact:
        raise _damaged(version, f"{folder / _MANIFEST}", "it is not what was written for this version")
    return content["tensors"]


def _hash_of(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _damaged(version: int, what: str, found: str) -> SyncError:
    return SyncError(
        f"collect {what} of version {version}",
        found,
        "check the disk or the file system; the trainer writes each version anew",
    )


def _versions_in(directory: Path) -> list[int]:
    """The versions in a directory, oldest first."""
    numbers = [path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*")]
    return sorted(int(number) for number in numbers if number.isdecimal())
