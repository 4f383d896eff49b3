"""Files and directories that are complete or absent: staged, hashed, renamed. A directory is complete if it has a
manifest."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trivium.foundation.errors import ConfigError, RunDirError, StorageError

_log = logging.getLogger("trivium")

MANIFEST = "manifest.json"
"""The file with the names, sizes and hashes of the other files in its directory. It is written last, removed first."""


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turns an error of the operating system inside the block into a StorageError that names the path."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        # safetensors, written in Rust, raises its own error type with the system's error as text.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        problem, place = getattr(error, "strerror", None) or str(error), getattr(error, "filename", None) or path
        full = "space" in problem or "quota" in problem.lower()
        do = f"{'free space on' if full else 'check the permissions and the location of'} {path.parent}"
        again = "then run the same command again: a run continues from its last checkpoint"
        raise StorageError(f"write {place}", problem, f"{do}, {again}") from error


def made_directory(path: Path, key: str) -> Path:
    """Makes the directory that the config names under `key`, unless it exists. Raises ConfigError if that fails, or if
    the directory cannot be written."""
    try:
        make_directories(path)
        if os.access(path.parent, os.R_OK):
            fsync(path.parent)  # another process may have made it a moment ago
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    except (OSError, ValueError) as error:  # ValueError: the path contains NUL
        problem = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the directory {str(path)!r} ({key})", problem, "name one that can be written") from error
    return path


def make_directories(path: Path) -> None:
    """Makes a directory and the missing ones above it. Blocks until the entries are on disk: what is synced inside a
    directory may still be lost with the directory."""
    if not path.is_dir():
        make_directories(path.parent)
        path.mkdir(exist_ok=True)
        fsync(path.parent)


def folder_name(kind: str, step: int) -> str:
    """The name of the directory of a step."""
    return f"{kind}-{step:06d}"


def staging_directory(final: Path) -> Path:
    """A new empty directory beside `final`, in which its files are written until `commit` renames it.

    Removes the staging directories of earlier attempts. Each attempt has a unique name, so a process that still writes
    for an earlier attempt never writes into this one.
    """
    name = f".{final.name}."
    for earlier in final.parent.glob(f"{glob.escape(name)}{'[0-9a-f]' * 8}.writing"):
        shutil.rmtree(earlier, ignore_errors=True)
    staging = final.parent / f"{name}{uuid.uuid4().hex[:8]}.writing"
    make_directories(staging.parent)
    staging.mkdir()
    return staging


def make_unless_staged(directory: Path) -> None:
    """Makes a directory to write in, unless it is a staging directory. If a staging directory is missing, its attempt
    has ended, and writing into it fails."""
    if not directory.name.endswith(".writing"):
        directory.mkdir(parents=True, exist_ok=True)


def commit(staging: Path, final: Path, step: int) -> None:
    """Adds the manifest to a staging directory and renames it to `final`. Blocks until it is on disk."""
    with writing(final):
        files = sorted(path for path in staging.rglob("*") if path.is_file())
        entries = {
            str(path.relative_to(staging)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
        }
        atomic_write(staging / MANIFEST, json.dumps({"step": step, "files": entries}, indent=1, sort_keys=True))
        directories = sorted(path for path in staging.rglob("*") if path.is_dir())
        for path in (*files, *directories, staging):
            fsync(path)
        if final.exists():
            discard(final)  # a run that resumed from an earlier step saves this step again
        # After everything in it is on disk: a directory with its final name is complete, also after a loss of power.
        staging.rename(final)
        fsync(final.parent)


def complete_steps(directory: Path, kind: str) -> list[int]:
    """The steps whose directory of this kind is complete, oldest first."""
    manifests = directory.glob(f"{kind}-*/{MANIFEST}")
    numbers = (path.parent.name.removeprefix(f"{kind}-") for path in manifests)
    return sorted(int(number) for number in numbers if number.isdecimal())


def manifest_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """`bytes` and `sha256` of each file, by its path in the folder. Raises RunDirError if the manifest is damaged."""
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
    """Raises RunDirError if a complete directory differs from what was committed for `step`: a file is changed, missing
    or new. Hidden files are ignored."""
    manifest = _manifest(folder)
    if manifest.get("step") != step:
        raise _damaged(folder, f"{MANIFEST} is of step {manifest.get('step')}")
    for name, entry in manifest["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or _sha256(file) != entry["sha256"]:
            raise _damaged(folder, f"{name} is missing or was changed after the save")
    present = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    for name in present:
        if str(name) not in {*manifest["files"], MANIFEST} and not any(part.startswith(".") for part in name.parts):
            raise _damaged(folder, f"{name} does not belong to the checkpoint", f"move {folder / name} elsewhere")


def _damaged(folder: Path, found: str, do: str = "") -> RunDirError:
    do = do or f"remove {folder} to continue from an earlier checkpoint; a model that the run built is built again"
    return RunDirError(f"{folder} as it was written", found, do)


def discard(folder: Path) -> None:
    """Removes a directory, the manifest first: if the process is killed half-way, the rest is not complete."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def discard_incomplete(directory: Path, kind: str) -> None:
    """Removes the directories of this kind that a killed process left half-written or half-removed."""
    for path in directory.glob(f".{kind}-*.writing"):
        shutil.rmtree(path)
    for path in directory.glob(f"{kind}-*"):
        is_step = path.is_dir() and path.name.removeprefix(f"{kind}-").isdecimal()
        if is_step and not (path / MANIFEST).is_file():
            _log.warning("%s has no %s, so it is incomplete: it is removed", path, MANIFEST)
            shutil.rmtree(path)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replaces a file by a rename: a reader sees the old content or the new content, never a part."""
    staging = path.with_name(f".{path.name}.writing")
    with writing(path):
        staging.write_bytes(content.encode() if isinstance(content, str) else content)
        fsync(staging)
        staging.replace(path)


def refuse_existing(path: Path, option: str, *, is_own: Callable[[bytes], bool] = lambda content: False) -> None:
    """Raises ConfigError if an option of a command names a file or directory that exists, unless `is_own` of its
    content: the command itself wrote it."""
    if path.exists() and not (path.is_file() and is_own(path.read_bytes())):
        found = "it exists, and this command did not write it"
        raise ConfigError(f"{option} {path}", found, "name a new file, or move that one elsewhere")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Returns once a file, or the list of entries of a directory, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
