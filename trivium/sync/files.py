"""The channel through a shared directory: a version is a folder of safetensors files with a manifest.

`version-000012/` holds `weights-00000.safetensors`, ... and `manifest.json` with the file and the hash of each tensor.
A folder is staged and renamed, so a folder with its final name is complete. There are no locks, because machines may
share the file system.

With `full_every` above 1, a version may hold differences from the version before (`sync.differences`). An explorer that
has that version reads only these; any other one reads all versions since the last whole one. Older versions that newer
ones need are kept as `base-000009/`.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.foundation.atomic import fsync, staging_directory, writing
from trivium.foundation.concurrency import ProgressDeadline
from trivium.foundation.errors import DataError, SyncError, VersionGone
from trivium.models.late import torch
from trivium.models.weights.stream import Described, Named, drained, groups, spec, type_named
from trivium.protocols import TensorSpec, Weights
from trivium.sync.differences import TensorDifference, difference, patched
from trivium.sync.hashes import copied, hash_of_json, joined, verify
from trivium.synchronizer import Synchronizer
from trivium.types import TRAINER, Capabilities

if TYPE_CHECKING:
    from trivium.models.weights.saved_tensors import SafetensorsFiles

# What reads and writes tensors is imported inside the functions: a check of a config imports this module, not torch.

FILE_BYTES = 2**30
"""The size of a file, unless it holds one larger tensor. The trainer copies this much to the CPU at a time."""
APPEARS_S = 60.0
"""The longest time until a folder is visible on another machine."""
_POLL_S = 0.2
_PREFIX, _BASE = "version-", "base-"
_MANIFEST = "manifest.json"
_DO = "check the disk or the file system; the trainer writes each version anew"


@dataclass
class _LastVersion:
    """The tensors of one version, on the CPU."""

    version: int
    hash: str = ""
    """The hash of all tensors: a trainer that was started again may give a version other weights."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Folder:
    """An open folder: the entries of the tensors by name, and the files that they name."""

    base: tuple[int, str] | None
    """The version that its differences are from, and the hash of that; None if it is whole."""
    entries: dict[str, dict[str, Any]]
    files: SafetensorsFiles

    @property
    def hash(self) -> str:
        """The hash of all tensors."""
        return joined({name: entry["hash"] for name, entry in self.entries.items()})


class FileChannel:
    """Keeps the newest `keep` published versions as files.

    `collect` opens every file of a version at once, so that files which the trainer removes meanwhile stay readable.
    """

    capabilities = Capabilities(sends_differences=True)

    def __init__(
        self, *, keep: int, directory: Path, synchronizer: Synchronizer, role: str, full_every: int = 1
    ) -> None:
        """`full_every`: one of so many versions is whole; the others hold what differs from the version before. Above
        1, trainer and explorers keep the tensors of their last version in memory."""
        self._keep, self._directory, self._synchronizer, self._role = keep, directory, synchronizer, role
        self._full_every = full_every
        self._own: list[int] | None = None
        """The versions that this trainer offered or restored, and keeps; None before the first."""
        self._whole: list[int] = []
        """The whole versions among those that are on disk, bases included."""
        self._since_whole = 0
        """Versions that were offered since the last whole one, that one included."""
        self._last: _LastVersion | None = None
        """The version that was offered or read last, if `full_every` is above 1 and it was complete."""
        self.offered = ""

    def offer(self, version: int, weights: Weights) -> bool:
        before, self._last = self._last, None
        if before is not None and (self._since_whole >= self._full_every or before.version >= version):
            before = None
        last = _LastVersion(version) if self._full_every > 1 else None
        with self._staged(version, is_whole=before is None) as staging:
            self.offered = _write(staging, version, weights, before, last)
        self._since_whole = 1 if before is None else self._since_whole + 1
        if last is not None:
            last.hash, self._last = self.offered, last
        return True

    def collect(self, version: int) -> Described:
        before, self._last = self._last, None
        folders = self._open(version, before)
        specs = (
            TensorSpec(entry["name"], entry["dtype"], tuple(entry["shape"])) for entry in folders[-1].entries.values()
        )
        return Described(tuple(specs), self._arriving(version, folders, before))

    @property
    def versions(self) -> tuple[int, ...]:
        """The trainer's own versions; for an explorer, the versions in the directory."""
        return tuple((self._own or ()) if self._role == TRAINER else self._there())

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        """Copies versions, which explorers may still need. A copy is whole."""
        for version in versions:
            folder = directory / self._folder(version).name
            if version in self._whole:
                shutil.copytree(self._folder(version), folder)
            else:
                folder.mkdir(parents=True)
                _write(folder, version, _read(version, self._open(version, None), None), None, None)

    def restore(self, directory: Path) -> None:
        """Restores the versions that `save` wrote, and removes all others."""
        self._clear()
        for version in _versions_in(directory):
            with self._staged(version, is_whole=True) as staging:
                shutil.copytree(directory / self._folder(version).name, staging, dirs_exist_ok=True)

    # ------------------------------------------------------------------ the trainer's side

    @contextmanager
    def _staged(self, version: int, *, is_whole: bool) -> Generator[Path]:
        """A folder to fill. After the block it is on disk under its final name, and old versions are removed."""
        versions = (
            self._clear() if self._own is None else self._own
        )  # the first offer removes those of earlier processes
        folder = self._folder(version)
        with writing(folder):
            staging = staging_directory(folder)
            try:
                yield staging
                # Before the rename: after a loss of power, too, a folder with its final name is complete.
                for path in (*staging.iterdir(), staging):
                    fsync(path)
                self._remove(version)
                staging.rename(folder)
                fsync(self._directory)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)  # the run may be complete: no later offer removes it
                raise
        versions = sorted({*versions, version})
        self._own = versions[-self._keep :]
        if is_whole:
            self._whole = sorted({*self._whole, version})
        self._retire(versions[: -self._keep])

    def _retire(self, versions: Sequence[int]) -> None:
        """Removes these old versions, or turns them into bases if a kept version needs them. Removes the bases that no
        kept version needs any more."""
        assert self._own is not None
        needed = max((whole for whole in self._whole if whole <= self._own[0]), default=self._own[0])
        for version in versions:
            if version >= needed:
                self._folder(version).rename(self._folder(version, _BASE))
        for version in {*versions, *_versions_in(self._directory, _BASE)}:
            if version < needed:
                self._remove(version)
        self._whole = [whole for whole in self._whole if whole >= needed]

    def _clear(self) -> list[int]:
        """Removes the folders of earlier trainer processes, newer versions included."""
        for version in {*self._there(), *_versions_in(self._directory, _BASE)}:
            self._remove(version)
        for prefix in (_PREFIX, _BASE):
            for staging in self._directory.glob(f".{prefix}*"):
                shutil.rmtree(staging, ignore_errors=True)
        self._own, self._whole, self._last = [], [], None
        return self._own

    def _remove(self, version: int) -> None:
        """Renames a version before it removes the files, so that no explorer reads a part of it."""
        for folder in (self._folder(version), self._folder(version, _BASE)):
            away = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
            if folder.exists():
                folder.rename(away)
                # A file that another machine reads may stay; the first offer of the next trainer process tries again.
                shutil.rmtree(away, ignore_errors=True)

    # ------------------------------------------------------------------ the explorer's side

    def _open(self, version: int, before: _LastVersion | None) -> list[_Folder]:
        """The folder of a version and those that its differences need, oldest first: back to the one after `before`, or
        to a whole one."""
        self._wait_for(version)
        folders = [self._opened(version, version)]
        have = None if before is None else (before.version, before.hash)
        while (base := folders[0].base) is not None and base != have:
            folders.insert(0, self._opened(base[0], version))
            if folders[0].hash != base[1]:  # a trainer that was started again has replaced it meanwhile
                raise self._gone(version)
        return folders

    def _opened(self, version: int, wanted: int) -> _Folder:
        """Opens the folder of `version`, which is read for the version `wanted`."""
        from trivium.models.weights.saved_tensors import SafetensorsFiles

        # The trainer may turn the version into a base at any time, but not back.
        folder = next((place for place in self._places(version) if place.exists()), self._folder(version))
        try:
            base, entries = _manifest(folder, version)
            paths = [folder / name for name in dict.fromkeys(entry["file"] for entry in entries)]
            return _Folder(base, {entry["name"]: entry for entry in entries}, SafetensorsFiles(paths))
        except FileNotFoundError as error:
            if (folder / _MANIFEST).is_file():
                raise _damaged(version, f"the files of {folder}", f"{error.filename} is missing") from error
            if not folder.exists() and any(place.exists() for place in self._places(version)):
                return self._opened(version, wanted)
            raise self._gone(wanted) from error
        except DataError as error:
            raise _damaged(version, f"the files of {folder}", f"{error.asked}: {error.found}") from error

    def _arriving(self, version: int, folders: Sequence[_Folder], before: _LastVersion | None) -> Iterator[Named]:
        """Yields every tensor, verified. Holds them if the next version may be read as differences."""
        last = _LastVersion(version)
        for name, tensor in _read(version, folders, before):
            if self._full_every > 1:
                last.tensors[name] = tensor
            yield name, tensor
        if self._full_every > 1:
            last.hash = folders[-1].hash
            self._last = last

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

    def _folder(self, version: int, prefix: str = _PREFIX) -> Path:
        return self._directory / f"{prefix}{version:06d}"

    def _places(self, version: int) -> tuple[Path, Path]:
        return self._folder(version), self._folder(version, _BASE)


def _write(folder: Path, version: int, weights: Weights, before: _LastVersion | None, last: _LastVersion | None) -> str:
    """Writes the files of a version, the manifest last: differences from `before` where they are smaller. Returns the
    hash of all tensors. At most the tensors of one file are in memory, beside those in `before` and `last`."""
    from safetensors.torch import save_file

    entries: list[dict[str, Any]] = []
    hashes = dict[str, str]()
    for number, group in enumerate(groups(copied(weights, hashes), FILE_BYTES)):
        file, written = folder / f"weights-{number:05d}.safetensors", dict[str, torch.Tensor]()
        for name, tensor in drained(group):
            old = None if before is None else before.tensors.pop(name, None)
            change = None if old is None else difference(old, tensor)
            written |= {name: tensor} if change is None else dict(zip(_named(name), change, strict=True))
            entry = {**spec(name, tensor)._asdict(), "bytes": tensor.nbytes, "file": file.name, "hash": hashes[name]}
            entries.append(entry if change is None else {**entry, "changed": [len(part) for part in change]})
            if last is not None:
                last.tensors[name] = tensor
        save_file(written, file)
    base = {} if before is None else {"base": [before.version, before.hash]}
    content = {"version": version, **base, "tensors": entries}
    manifest = {**content, "hash": hash_of_json(content)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return joined(hashes)


def _named(name: str) -> tuple[str, str]:
    """The names of the tensors of a difference, in the order of its fields."""
    return f"{name}#gaps", f"{name}#values"


def _read(version: int, folders: Sequence[_Folder], before: _LastVersion | None) -> Iterator[Named]:
    """Yields every tensor of the last folder, verified. Takes those of `before` out of it."""
    for name, entry in folders[-1].entries.items():
        tensor = None if before is None else before.tensors.pop(name, None)
        whole = [
            i for i, opened in enumerate(folders) if name in opened.entries and "changed" not in opened.entries[name]
        ]
        if whole:
            folder = folders[whole[-1]]
            tensor = _copied(version, name, folder.entries[name], folder)
        assert tensor is not None, "the first folder is whole, or its differences are from `before`"
        for folder in folders[whole[-1] + 1 if whole else 0 :]:
            tensor = _patched(version, name, tensor, folder)
        found = f"its bytes in {entry['file']} differ from those that were offered"
        verify([(name, tensor)], {name: entry["hash"]}, version, found, _DO)
        yield name, tensor


def _patched(version: int, name: str, tensor: torch.Tensor, folder: _Folder) -> torch.Tensor:
    counts, entry = folder.entries[name]["changed"], folder.entries[name]
    parts = [
        _copied(version, key, {**entry, "shape": [count], "dtype": dtype}, folder)
        for key, count, dtype in zip(_named(name), counts, ("uint8", entry["dtype"]), strict=True)
    ]
    try:
        return patched(tensor, TensorDifference(*parts))
    except ValueError as error:
        raise _damaged(version, f"{name!r} in {entry['file']}", str(error)) from error


def _copied(version: int, key: str, entry: Mapping[str, Any], folder: _Folder) -> torch.Tensor:
    """The tensor `key` of a file, of the shape and the type of the entry."""
    tensor, what = torch.empty(entry["shape"], dtype=type_named(entry["dtype"])), f"{key!r} in {entry['file']}"
    try:
        folder.files.copy_bytes(key, tensor)
    except OSError as error:
        if error.errno == errno.ESTALE:  # another machine removed it, and its file system keeps no open files
            raise VersionGone(
                f"collect {what} of version {version}", "it was removed", "ask for a newer version"
            ) from error
        raise _damaged(version, what, str(error)) from error
    except (DataError, KeyError) as error:
        raise _damaged(version, what, getattr(error, "found", "the file does not name it")) from error
    return tensor


def _manifest(folder: Path, version: int) -> tuple[tuple[int, str] | None, list[dict[str, Any]]]:
    """The version that the manifest's differences are from, with its hash, and the entries. Raises SyncError if it is
    damaged, or of another version."""
    text = (folder / _MANIFEST).read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
        intact = content.pop("hash") == hash_of_json(content) and content["version"] == version
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(version, f"{folder / _MANIFEST}", f"not a manifest: {error}") from error
    if not intact:
        raise _damaged(
            version, f"{folder / _MANIFEST}", "it differs from the manifest that was written for this version"
        )
    base = content.get("base")
    return None if base is None else (base[0], base[1]), content["tensors"]


def _damaged(version: int, what: str, found: str) -> SyncError:
    return SyncError(
        f"collect {what} of version {version}",
        found,
        _DO,
    )


def _versions_in(directory: Path, prefix: str = _PREFIX) -> list[int]:
    """The versions in a directory, oldest first."""
    numbers = [path.name.removeprefix(prefix) for path in directory.glob(f"{prefix}*")]
    return sorted(int(number) for number in numbers if number.isdecimal())
