"""The channel through a shared directory: a version is a folder of safetensors files with a manifest.

`version-000012/` holds `weights-00000.safetensors`, ... and `manifest.json` with the file and the hash of each tensor.
A folder is staged and renamed, so a folder with its final name is complete. There are no locks, because machines may
share the file system.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.checkpoint.atomic import fsync, staging_directory, writing
from trivium.concurrency import ProgressDeadline
from trivium.errors import DataError, SyncError, VersionGone
from trivium.models.late import torch
from trivium.models.weights.stream import Described, Named, drained, groups, spec, type_named
from trivium.protocols import TensorSpec, Weights
from trivium.sync.hashes import copied, joined, verify
from trivium.synchronizer import Synchronizer
from trivium.types import TRAINER

if TYPE_CHECKING:
    from trivium.models.weights.saved_tensors import SafetensorsFiles

# What reads and writes tensors is imported inside the functions: a check of a config imports this module, not torch.

FILE_BYTES = 2**30
"""The size of a file, unless it holds one larger tensor. The trainer copies this much to the CPU at a time."""
APPEARS_S = 60.0
"""The longest time until a folder is visible on another machine."""
_POLL_S = 0.2
_PREFIX = "version-"
_MANIFEST = "manifest.json"
_DO = "check the disk or the file system; the trainer writes each version anew"


class FileChannel:
    """Keeps the newest `keep` published versions as files.

    `collect` opens every file of a version at once, so that files which the trainer removes meanwhile stay readable.
    """

    def __init__(self, *, keep: int, directory: Path, synchronizer: Synchronizer, role: str) -> None:
        self._keep, self._directory, self._synchronizer, self._role = keep, directory, synchronizer, role
        self._own: list[int] | None = None
        """The versions that this trainer offered or restored, and keeps; None before the first."""
        self.offered = ""

    def offer(self, version: int, weights: Weights) -> bool:
        with self._staged(version) as staging:
            self.offered = _write(staging, version, weights)
        return True

    def collect(self, version: int) -> Described:
        entries, files = self._open(version)
        specs = (TensorSpec(each["name"], each["dtype"], tuple(each["shape"])) for each in entries)
        return Described(tuple(specs), _read(version, entries, files))

    @property
    def versions(self) -> tuple[int, ...]:
        """The trainer's own versions; for an explorer, the versions in the directory."""
        return tuple((self._own or ()) if self._role == TRAINER else self._there())

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        """Copies the folders of versions, which explorers may still need."""
        for version in versions:
            shutil.copytree(self._folder(version), directory / self._folder(version).name)

    def restore(self, directory: Path) -> None:
        """Restores the versions that `save` wrote, and removes all others."""
        self._clear()
        for version in _versions_in(directory):
            with self._staged(version) as staging:
                shutil.copytree(directory / self._folder(version).name, staging, dirs_exist_ok=True)

    # ------------------------------------------------------------------ the trainer's side

    @contextmanager
    def _staged(self, version: int) -> Generator[Path]:
        """A folder to fill. After the block it is on disk under its final name, and old versions are removed."""
        own = self._clear() if self._own is None else self._own  # the first offer removes those of earlier processes
        folder = self._folder(version)
        with writing(folder):
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
        """Removes the folders of earlier trainer processes, newer versions included."""
        for version in self._there():
            self._remove(version)
        for staging in self._directory.glob(f".{_PREFIX}*"):
            shutil.rmtree(staging, ignore_errors=True)
        self._own = []
        return self._own

    def _remove(self, version: int) -> None:
        """Renames a version before it removes the files, so that no explorer reads a part of it."""
        folder = self._folder(version)
        away = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        if folder.exists():
            folder.rename(away)
            # A file that another machine reads may stay; the first offer of the next trainer process tries again.
            shutil.rmtree(away, ignore_errors=True)

    # ------------------------------------------------------------------ the explorer's side

    def _open(self, version: int) -> tuple[list[dict[str, Any]], SafetensorsFiles]:
        """The manifest's entries of the tensors, and the files that they name."""
        from trivium.models.weights.saved_tensors import SafetensorsFiles

        folder = self._folder(version)
        self._wait_for(version)
        try:
            entries = _manifest(folder, version)
            return entries, SafetensorsFiles(
                [folder / name for name in dict.fromkeys(each["file"] for each in entries)]
            )
        except FileNotFoundError as error:
            if (folder / _MANIFEST).is_file():
                raise _damaged(version, f"the files of {folder}", f"{error.filename} is missing") from error
            raise self._gone(version) from error
        except DataError as error:
            raise _damaged(version, f"the files of {folder}", f"{error.asked}: {error.found}") from error

    def _wait_for(self, version: int) -> None:
        """Waits until the version is visible. Raises VersionGone if there are newer ones, if it is not published, or if
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
        """The versions in the directory, oldest first."""
        return _versions_in(self._directory)

    def _gone(self, version: int) -> VersionGone:
        return VersionGone(
            f"collect version {version}",
            f"{self._directory} has {self._there()}: the version was removed, or never written there",
            "give trainer and explorers the same directory (sync.dir), and use it for this run only",
        )

    def _folder(self, version: int) -> Path:
        return self._directory / f"{_PREFIX}{version:06d}"


def _write(folder: Path, version: int, weights: Weights) -> str:
    """Writes the files of a version, the manifest last. Returns the hash of all tensors. At most the tensors of one
    file are in memory."""
    from safetensors.torch import save_file

    entries: list[dict[str, Any]] = []
    hashes = dict[str, str]()
    for number, group in enumerate(groups(copied(weights, hashes), FILE_BYTES)):
        file = folder / f"weights-{number:05d}.safetensors"
        save_file(dict(group), file)
        for name, tensor in drained(group):
            described = spec(name, tensor)._asdict()
            entries.append({**described, "bytes": tensor.nbytes, "file": file.name, "hash": hashes[name]})
    content = {"version": version, "tensors": entries}
    manifest = {**content, "hash": _hash_of(content)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return joined(hashes)


def _read(version: int, entries: Sequence[Mapping[str, Any]], files: SafetensorsFiles) -> Iterator[Named]:
    """Yields every tensor, verified."""
    for entry in entries:
        name, tensor = entry["name"], torch.empty(entry["shape"], dtype=type_named(entry["dtype"]))
        what = f"{name!r} in {entry['file']}"
        try:
            files.copy_bytes(name, tensor)
        except OSError as error:
            if error.errno == errno.ESTALE:  # another machine removed it, and its file system keeps no open files
                raise VersionGone(
                    f"collect {what} of version {version}", "it was removed", "ask for a newer version"
                ) from error
            raise _damaged(version, what, str(error)) from error
        except (DataError, KeyError) as error:
            raise _damaged(version, what, getattr(error, "found", "the file does not name it")) from error
        found = f"its bytes in {entry['file']} differ from those that were offered"
        verify([(name, tensor)], {name: entry["hash"]}, version, found, _DO)
        yield name, tensor


def _manifest(folder: Path, version: int) -> list[dict[str, Any]]:
    """The manifest's entries. Raises SyncError if it is damaged, or of another version."""
    text = (folder / _MANIFEST).read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
        intact = content.pop("hash") == _hash_of(content) and content["version"] == version
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(version, f"{folder / _MANIFEST}", f"not a manifest: {error}") from error
    if not intact:
        raise _damaged(
            version, f"{folder / _MANIFEST}", "it differs from the manifest that was written for this version"
        )
    return content["tensors"]


def _hash_of(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _damaged(version: int, what: str, found: str) -> SyncError:
    return SyncError(
        f"collect {what} of version {version}",
        found,
        _DO,
    )


def _versions_in(directory: Path) -> list[int]:
    """The versions in a directory, oldest first."""
    numbers = [path.name.removeprefix(_PREFIX) for path in directory.glob(f"{_PREFIX}*")]
    return sorted(int(number) for number in numbers if number.isdecimal())
