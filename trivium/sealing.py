"""A directory that counts only once its manifest is there: written aside, hashed, renamed."""

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
    """What the directory of a step is called."""
    return f"{kind}-{step:06d}"


def begun(directory: Path, name: str) -> Path:
    """An empty directory to write `name` in; what an earlier attempt left there is gone."""
    aside = _aside(directory, name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def seal(directory: Path, name: str, step: int) -> bool:
    """Seals what was written for `name` and gives it that name; False where nothing was. Blocks until it is on disk."""
    aside, final = _aside(directory, name), directory / name
    if not aside.is_dir():
        return False
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    entries = {str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    write_aside(aside / MANIFEST, json.dumps({"step": step, "files": entries}, indent=1, sort_keys=True))
    for path in (*files, aside):
        to_disk(path)
    if final.exists():
        shutil.rmtree(final)  # the same step saved again after a resume from an earlier one
    aside.rename(final)
    to_disk(directory)
    return True


def sealed_steps(directory: Path, kind: str) -> list[int]:
    """The steps of a kind that count, oldest first."""
    found = directory.glob(f"{kind}-*/{MANIFEST}")
    return sorted(int(path.parent.name.removeprefix(f"{kind}-")) for path in found)


def sealed_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """What the manifest says: `bytes` and `sha256` of each file by its path in the folder."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]


def refuse_damaged(folder: Path) -> None:
    """Raises RunDirError if a byte of a sealed directory has changed."""
    for name, entry in sealed_files(folder).items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or _sha256(file) != entry["sha256"]:
            raise RunDirError(
                f"the checkpoint {folder.name}", f"{name} is missing or not what was saved",
                f"remove {folder} to continue from an earlier checkpoint",
            )  # fmt: skip


def discard(folder: Path) -> None:
    """Removes a sealed directory: unsealed first, so that a kill half-way leaves nothing that looks complete."""
    (folder / MANIFEST).unlink()
    shutil.rmtree(folder)


def discard_unsealed(directory: Path, kind: str) -> None:
    """Removes what a killed process left half-written or half-removed."""
    for path in directory.glob(f".{kind}-*.writing"):
        shutil.rmtree(path)
    for path in directory.glob(f"{kind}-*"):
        if not (path / MANIFEST).is_file():
            shutil.rmtree(path)


def write_aside(path: Path, text: str) -> None:
    """Replaces a file in one move: readers see the old text or the new, never half of it."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    to_disk(aside)
    aside.replace(path)


def _aside(directory: Path, name: str) -> Path:
    return directory / f".{name}.writing"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_disk(path: Path) -> None:
    """Returns once a file, or what a directory lists, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
