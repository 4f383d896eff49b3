"""Directories that are complete or absent: staged, hashed, renamed. One counts only once its manifest is there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from trivium.errors import RunDirError

MANIFEST = "manifest.json"
"""Names, sizes and hashes of the files beside it; written last, removed first."""


def folder_name(kind: str, step: int) -> str:
    """The name of the directory of a step."""
    return f"{kind}-{step:06d}"


def staging_directory(directory: Path, name: str) -> Path:
    """An empty directory to write `name` in, without what an earlier attempt left there."""
    staging = _staging(directory, name)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def commit(directory: Path, name: str, step: int) -> bool:
    """Adds the manifest to what was staged for `name` and renames it to that; False where nothing was staged. Blocks
    until it is on disk."""
    staging, final = _staging(directory, name), directory / name
    if not staging.is_dir():
        return False
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
    return sorted(int(path.parent.name.removeprefix(f"{kind}-")) for path in manifests)


def manifest_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """The manifest's files: `bytes` and `sha256` of each by its path in the folder."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]


def verify_files(folder: Path) -> None:
    """Raises RunDirError if a byte of a complete directory has changed."""
    for name, entry in manifest_files(folder).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or _sha256(file) != entry["sha256"]:
            raise RunDirError(
                f"the checkpoint {folder.name}",
                f"{name} is missing or not what was saved",
                f"remove {folder} to continue from an earlier checkpoint",
            )


def discard(folder: Path) -> None:
    """Removes a complete directory, the manifest first: a kill half-way leaves nothing that looks complete."""
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder)


def discard_incomplete(directory: Path, kind: str) -> None:
    """Removes the directories that a killed process left half-written or half-removed."""
    for path in directory.glob(f".{kind}-*.writing"):
        shutil.rmtree(path)
    for path in directory.glob(f"{kind}-*"):
        if not (path / MANIFEST).is_file():
            shutil.rmtree(path)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replaces a file by a rename: readers see the old content or the new, never half of it."""
    staging = _staging(path.parent, path.name)
    staging.write_bytes(content.encode() if isinstance(content, str) else content)
    fsync(staging)
    staging.replace(path)


def _staging(directory: Path, name: str) -> Path:
    return directory / f".{name}.writing"


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
