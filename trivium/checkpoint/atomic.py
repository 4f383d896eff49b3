"""Directories that are complete or absent: staged, hashed, renamed. One counts only once its manifest is there."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trivium.errors import ConfigError, RunDirError, StorageError

_log = logging.getLogger("trivium")

MANIFEST = "manifest.json"
"""Names, sizes and hashes of the files beside it; written last, removed first."""


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Raises StorageError, with the path, where the operating system refuses what is written inside the block."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(error):  # so say libraries in Rust: safetensors
            raise
        problem, place = getattr(error, "strerror", None) or str(error), getattr(error, "filename", None) or path
        full = "space" in problem or "quota" in problem.lower()
        do = f"{'free space on' if full else 'check the rights and the place of'} {path.parent}"
        again = "then run the same command again: a run continues from its last checkpoint"
        raise StorageError(f"write {place}", problem, f"{do}, {again}") from error


def made_directory(path: Path, key: str) -> Path:
    """The directory that the config names under `key`, made where it is missing. Raises ConfigError if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the path
        problem = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the directory {str(path)!r} ({key})", problem, "name one that can be written") from error
    return path


def folder_name(kind: str, step: int) -> str:
    """The name of the directory of a step."""
    return f"{kind}-{step:06d}"


def staging_directory(directory: Path, name: str) -> Path:
    """A new directory to write `name` in, under a name of its own: a process that still writes for an earlier attempt,
    whose directories are removed, never writes into it."""
    for earlier in _staged(directory, name):
        shutil.rmtree(earlier, ignore_errors=True)
    staging = directory / f".{name}.{uuid.uuid4().hex[:8]}.writing"
    staging.mkdir(parents=True)
    return staging


def make_unless_staged(directory: Path) -> None:
    """Makes a directory to write in, unless it is one of `staging_directory`: if that is missing, its attempt is over,
    and writing into it fails."""
    if not directory.name.endswith(".writing"):
        directory.mkdir(parents=True, exist_ok=True)


def _staged(directory: Path, name: str) -> list[Path]:
    return [*directory.glob(f".{glob.escape(name)}.{'[0-9a-f]' * 8}.writing")]


def commit(directory: Path, name: str, step: int) -> bool:
    """Adds the manifest to what was staged for `name` and renames it to that; False where nothing was staged. Blocks
    until it is on disk."""
    final, staged = directory / name, _staged(directory, name)
    if not staged:
        return False
    (staging,) = staged
    with writing(final):
        files = sorted(path for path in staging.rglob("*") if path.is_file())
        entries = {
            str(path.relative_to(staging)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
        }
        atomic_write(staging / MANIFEST, json.dumps({"step": step, "files": entries}, indent=1, sort_keys=True))
        for path in (*files, staging):
            fsync(path)
        if final.exists():
            shutil.rmtree(final)  # the same step saved again after a resume from an earlier one
        staging.rename(final)
        fsync(directory)
    return True


def complete_steps(directory: Path, kind: str) -> list[int]:
    """The steps of a kind that are complete, oldest first."""
    manifests = directory.glob(f"{kind}-*/{MANIFEST}")
    numbers = (path.parent.name.removeprefix(f"{kind}-") for path in manifests)
    return sorted(int(number) for number in numbers if number.isdecimal())


def manifest_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """The manifest's files: `bytes` and `sha256` of each by its path in the folder. Raises RunDirError where it is
    damaged."""
    return _manifest(folder)["files"]


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["files"] and all({"bytes", "sha256"} <= entry.keys() for entry in manifest["files"].values()):
            return manifest
        problem = "it lists no files with their hashes"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise _damaged(folder, f"{MANIFEST} is damaged ({problem})")


def verify_files(folder: Path, step: int) -> None:
    """Raises RunDirError where a complete directory is not what was committed for `step`: a byte has changed, or a file
    is gone or came to it. Hidden files do not count."""
    manifest = _manifest(folder)
    if manifest.get("step") != step:
        raise _damaged(folder, f"{MANIFEST} is of step {manifest.get('step')}")
    for name, entry in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or _sha256(file) != entry["sha256"]:
            raise _damaged(folder, f"{name} is missing or not what was saved")
    present = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    for name in present:
        if str(name) not in {*manifest["files"], MANIFEST} and not any(part.startswith(".") for part in name.parts):
            raise _damaged(folder, f"{name} was not saved with it", f"move {folder / name} elsewhere")


def _damaged(folder: Path, found: str, do: str = "") -> RunDirError:
    do = do or f"remove {folder} to continue from an earlier checkpoint; a model of a run's own is built anew"
    return RunDirError(f"{folder} as it was written", found, do)


def discard(folder: Path) -> None:
    """Removes a complete directory, the manifest first: a kill half-way leaves nothing that looks complete."""
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder)


def discard_incomplete(directory: Path, kind: str) -> None:
    """Removes the directories that a killed process left half-written or half-removed."""
    for path in directory.glob(f".{kind}-*.writing"):
        shutil.rmtree(path)
    for path in directory.glob(f"{kind}-*"):
        is_step = path.is_dir() and path.name.removeprefix(f"{kind}-").isdecimal()
        if is_step and not (path / MANIFEST).is_file():
            _log.warning("%s has no %s, so it was not written whole: it is removed", path, MANIFEST)
            shutil.rmtree(path)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replaces a file by a rename: readers see the old content or the new, never half of it."""
    staging = path.with_name(f".{path.name}.writing")
    with writing(path):
        staging.write_bytes(content.encode() if isinstance(content, str) else content)
        fsync(staging)
        staging.replace(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Returns once a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
