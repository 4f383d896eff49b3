"""The checkpoints of a run: one directory per step, complete or absent (`checkpoint.atomic`)."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.checkpoint.atomic import (
    MANIFEST,
    complete_steps,
    discard,
    discard_incomplete,
    folder_name,
    verify_files,
    writing,
)
from trivium.checkpoint.save_monitor import CheckpointMonitor, save_step
from trivium.checkpoint.savers import CHECKPOINT
from trivium.errors import RunDirError
from trivium.types import SaveStrategy

_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """The `state` that `save` was given: stage, buffer, algorithm, monitors."""


class CheckpointStore:
    """The checkpoints of a run directory, earlier sessions' included.

    Saving goes through a CheckpointMonitor over the same directory, which commits a step when all its savers are done:
    both agree on the latest step.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 3,
        keep_best: str | None = None,
        save_strategy: SaveStrategy = SaveStrategy.UNRESTRICTED,
        remote: str | None = None,
        deadline_s: float = 3600.0,
    ) -> None:
        """`remote` is an fsspec URL that complete checkpoints are copied to; `deadline_s` bounds waits for other savers
        and for the copying."""
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self.monitor = CheckpointMonitor(save_strategy, str(directory), remote, deadline_s=deadline_s)

    async def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, in a thread: `write` fills a directory, which is then committed.

        `state["score"]` is what `keep_best` compares (None where nothing was measured); `state["pinned"]` are steps
        that are kept. Then removes the checkpoints that are not kept.
        """

        def write_all(directory: Path) -> None:
            with writing(directory):
                write(directory)
                (directory / _STATE).write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")

        await save_step(self.monitor, step, write_all)
        await asyncio.to_thread(self.prune, pinned=state.get("pinned", ()))
        return self._path(step)

    async def copied(self) -> None:
        """Copies the checkpoints to the remote directory, where there is one. Raises RunDirError if that fails."""
        await self.monitor.copied()

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, oldest first."""
        return complete_steps(self.directory, CHECKPOINT)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, verified; None where there is none."""
        steps = self.steps()
        return self.open(steps[-1]) if steps else None

    def open(self, step: int) -> Checkpoint:
        """The checkpoint of a step. Raises RunDirError if it is absent, or if a byte of it has changed."""
        path = self._path(step)
        if not (path / MANIFEST).is_file():
            raise RunDirError(
                f"the checkpoint of step {step}", f"{self.directory} has steps {self.steps()}", "name one of those"
            )
        verify_files(path, step)
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
                discard(self._path(step))

    def discard_unfinished(self) -> None:
        """Removes the directories that a killed process left half-written or half-removed."""
        discard_incomplete(self.directory, CHECKPOINT)

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
    """Copies the policy of a checkpoint to `out`: a plain Hugging Face directory, without the files of these patterns.

    Raises RunDirError where `out` is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise RunDirError(f"export to {out}", "it exists and is not empty", "name a new directory")
    shutil.copytree(checkpoint.path / "policy", out, ignore=shutil.ignore_patterns(*leave_out), dirs_exist_ok=True)
    return out
