"""Checkpoints: one directory per step, complete or absent. Written aside, hashed, renamed, sealed by a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.errors import RunDirError

_PREFIX, _MANIFEST, _STATE = "step-", "manifest.json", "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """What `save` was told: stage, buffer, algorithm, monitors."""


class CheckpointStore:
    """The checkpoints of a run directory, earlier sessions' included."""

    def __init__(self, directory: Path, *, keep: int = 3, keep_best: str | None = None) -> None:
        self.directory, self.keep, self.keep_best = directory, keep, keep_best

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint: `write` fills a directory, the manifest seals it, a rename publishes it.

        `state["score"]` is what `keep_best` compares (None where nothing was measured); `state["pinned"]` are steps
        that retention must not touch. Then removes what retention does not keep.
        """
        final = self.directory / f"{_PREFIX}{step:06d}"
        aside = self.directory / f".{final.name}.writing"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write(aside)
        (aside / _STATE).write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        entries = {
            str(path.relative_to(aside)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
        }
        write_aside(aside / _MANIFEST, json.dumps({"step": step, "files": entries}, indent=1, sort_keys=True))
        for path in (*files, aside):
            _to_disk(path)
        if final.exists():
            shutil.rmtree(final)  # the same step saved again after a resume from an earlier one
        aside.rename(final)
        _to_disk(self.directory)
        self.prune(pinned=state.get("pinned", ()))
        return final

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, oldest first."""
        found = [
            int(path.name.removeprefix(_PREFIX))
            for path in self.directory.glob(f"{_PREFIX}*")
            if (path / _MANIFEST).is_file()
        ]
        return sorted(found)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified; None where there is none."""
        steps = self.steps()
        return self.open(steps[-1]) if steps else None

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises RunDirError if it is absent, or if a byte of it has changed."""
        path = self.directory / f"{_PREFIX}{step:06d}"
        if not (path / _MANIFEST).is_file():
            raise RunDirError(
                f"the checkpoint of step {step}", f"{self.directory} has steps {self.steps()}", "name one of those"
            )
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest["files"].items():
            file = path / name
            if not file.is_file() or file.stat().st_size != entry["bytes"] or _sha256(file) != entry["sha256"]:
                raise RunDirError(
                    f"the checkpoint {path.name}", f"{name} is missing or not what was saved",
                    f"remove {path} to continue from an earlier checkpoint",
                )  # fmt: skip
        return Checkpoint(step, path, self._state(step))

    def prune(self, pinned: Collection[int] = ()) -> None:
        """Removes all but the newest `keep`, the best, and the pinned ones."""
        steps = self.steps()
        kept = {*steps[-self.keep :], *pinned}
        scores = {step: self._state(step).get("score") for step in steps} if self.keep_best else {}
        measured = {step: score for step, score in scores.items() if score is not None}
        if measured:
            kept.add(max(measured, key=lambda step: (measured[step], step)))
        for step in steps:
            if step not in kept:
                # Unsealed before it is removed, so that a kill half-way leaves nothing that looks complete.
                path = self.directory / f"{_PREFIX}{step:06d}"
                (path / _MANIFEST).unlink()
                shutil.rmtree(path)

    def discard_unfinished(self) -> None:
        """Removes what a killed process left half-written or half-removed."""
        for path in self.directory.glob(f".{_PREFIX}*.writing"):
            shutil.rmtree(path)
        for path in self.directory.glob(f"{_PREFIX}*"):
            if not (path / _MANIFEST).is_file():
                shutil.rmtree(path)

    def _state(self, step: int) -> Mapping[str, Any]:
        path = self.directory / f"{_PREFIX}{step:06d}" / _STATE
        return json.loads(path.read_text(encoding="utf-8"))


def export(checkpoint: Checkpoint, out: Path) -> Path:
    """Copies the policy of a checkpoint to `out`: a plain Hugging Face directory."""
    if out.exists() and any(out.iterdir()):
        raise RunDirError(f"export to {out}", "it exists and is not empty", "name a new directory")
    shutil.copytree(checkpoint.path / "policy", out, dirs_exist_ok=True)
    return out


def write_aside(path: Path, text: str) -> None:
    """Replaces a file in one move: readers see the old text or the new, never half of it."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    _to_disk(aside)
    aside.replace(path)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
