"""The checkpoints of a run: one directory per step, complete or absent (`checkpoint.atomic`)."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.checkpoint.remote import RemoteDirectory
from trivium.foundation.atomic import (
    MANIFEST,
    commit,
    complete_steps,
    discard,
    discard_incomplete,
    folder_name,
    staging_directory,
    verify_files,
    writing,
)
from trivium.foundation.errors import RunDirError

_log = logging.getLogger("trivium")
CHECKPOINT = "step"
"""The first part of the name of a checkpoint's directory: `step-000100`."""
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """The `state` that `save` was given: stage, buffer, algorithm, monitors."""


class CheckpointStore:
    """The checkpoints of a run directory, those of earlier sessions included."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 3,
        keep_best: str | None = None,
        remote: str | None = None,
        deadline_s: float = 3600.0,
    ) -> None:
        """`keep` is the number of newest checkpoints to keep. `keep_best` names the metric of `state["score"]` (see
        `save`); with it, the checkpoint of the highest score is kept too. `remote` is an fsspec URL that complete
        checkpoints are copied to; `deadline_s` bounds the copying."""
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self._remote = None if remote is None else RemoteDirectory(remote, deadline_s)

    async def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint in threads: `write` fills a directory, which is then committed and copied to the remote.
        Then removes the checkpoints that are not to be kept.

        `keep_best` compares `state["score"]` (None if nothing was measured); `state["pinned"]` lists steps to keep.

        Propagates the errors of `write`; the step then has no checkpoint.
        """
        path = self._path(step)

        def write_all(directory: Path) -> None:
            with writing(directory):
                write(directory)
                (directory / _STATE).write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")

        staging = await asyncio.to_thread(staging_directory, path)
        await asyncio.to_thread(write_all, staging)
        await asyncio.to_thread(commit, staging, path, step)
        try:
            await self.copied()
        except RunDirError as error:
            _log.error("%s", error)  # the run continues: the next save and the end of the run copy again
        await asyncio.to_thread(self.prune, pinned=state.get("pinned", ()))
        return path

    async def copied(self) -> None:
        """Copies the checkpoints that the remote directory lacks. Does nothing without a remote directory. Raises
        RunDirError if a copy fails."""
        if self._remote is not None:
            await self._remote.copy_missing([self._path(step) for step in self.steps()])

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, oldest first."""
        return complete_steps(self.directory, CHECKPOINT)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified. Returns None if there is no checkpoint."""
        steps = self.steps()
        return self.open(steps[-1]) if steps else None

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises RunDirError if it is absent or differs from what was saved."""
        path = self._path(step)
        if not (path / MANIFEST).is_file():
            raise RunDirError(
                f"the checkpoint of step {step}", f"{self.directory} has steps {self.steps()}", "name one of those"
            )
        verify_files(path, step)
        return Checkpoint(step, path, self._state(step))

    def prune(self, pinned: Collection[int] = ()) -> None:
        """Removes the checkpoints except for the newest `keep`, the best one and the pinned ones."""
        steps = self.steps()
        retained = {*steps[-self.keep :], *pinned}
        scores = {step: self._state(step).get("score") for step in steps} if self.keep_best else {}
        measured = {step: score for step, score in scores.items() if score is not None}
        if measured:
            retained.add(max(measured, key=lambda step: (measured[step], step)))
        for step in steps:
            if step not in retained:
                discard(self._path(step))

    def recover(self) -> Checkpoint | None:
        """Returns the newest checkpoint, verified, or None. Removes what a killed process left: half-written and
        half-removed directories, and the checkpoints that its last save had not removed yet."""
        discard_incomplete(self.directory, CHECKPOINT)
        latest = self.latest()
        if latest is not None:
            self.prune(latest.state.get("pinned", ()))
        return latest

    def _path(self, step: int) -> Path:
        return self.directory / folder_name(CHECKPOINT, step)

    def _state(self, step: int) -> Mapping[str, Any]:
        path = self._path(step) / _STATE
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunDirError(
                f"read {path}", f"{type(error).__name__}: {error}", f"remove {path.parent} to continue without it"
            ) from error


def export(checkpoint: Checkpoint, out: Path, leave_out: Sequence[str] = ()) -> Path:
    """Copies the policy of a checkpoint to `out`, except for the files that match `leave_out`: a plain Hugging Face
    directory.

    Raises RunDirError if `out` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirError(f"export to {out}", "it exists and is not an empty directory", "name a new directory")
    shutil.copytree(checkpoint.path / "policy", out, ignore=shutil.ignore_patterns(*leave_out), dirs_exist_ok=True)
    return out
