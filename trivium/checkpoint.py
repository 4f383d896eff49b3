"""Checkpoints: one directory per step, complete or absent. Written aside, hashed, renamed, sealed by a manifest."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.errors import RunDirError
from trivium.save_monitor import CHECKPOINT, CheckpointMonitor, SaveStrategy, save_step
from trivium.sealing import MANIFEST, discard, discard_unsealed, folder_name, refuse_damaged, sealed_steps, write_aside

__all__ = ["Checkpoint", "CheckpointMonitor", "CheckpointStore", "SaveStrategy", "export", "write_aside"]

_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """What `save` was told: stage, buffer, algorithm, monitors."""


class CheckpointStore:
    """The checkpoints of a run directory, earlier sessions' included.

    Saving goes through a CheckpointMonitor over the same directory, which seals a step when every saver of it is done:
    what one calls the latest is what the other does.
    """

    def __init__(
        self, directory: Path, *, keep: int = 3, keep_best: str | None = None,
        save_strategy: SaveStrategy = SaveStrategy.UNRESTRICTED, remote: str | None = None, deadline_s: float = 3600.0,
    ) -> None:  # fmt: skip
        """`remote` is an fsspec URL that complete checkpoints are copied to; `deadline_s` bounds waits for other savers
        and for the copying."""
        self.directory, self.keep, self.keep_best = directory, keep, keep_best
        self.monitor = CheckpointMonitor(save_strategy, str(directory), remote, deadline_s=deadline_s)

    async def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint, in a thread: `write` fills a directory, the manifest seals it, a rename publishes it.

        `state["score"]` is what `keep_best` compares (None where nothing was measured); `state["pinned"]` are steps
        that retention must not touch. Then removes what retention does not keep.
        """

        def write_all(directory: Path) -> None:
            write(directory)
            (directory / _STATE).write_text(json.dumps(dict(state), indent=1, sort_keys=True), encoding="utf-8")

        await save_step(self.monitor, step, write_all)
        await asyncio.to_thread(self.prune, pinned=state.get("pinned", ()))
        return self._path(step)

    async def copied(self) -> None:
        """Every checkpoint kept here is in the remote directory as well, where one is named; RunDirError otherwise."""
        await self.monitor.copied()

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, oldest first."""
        return sealed_steps(self.directory, CHECKPOINT)

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
        refuse_damaged(path)
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
        """Removes what a killed process left half-written or half-removed."""
        discard_unsealed(self.directory, CHECKPOINT)

    def _path(self, step: int) -> Path:
        return self.directory / folder_name(CHECKPOINT, step)

    def _state(self, step: int) -> Mapping[str, Any]:
        return json.loads((self._path(step) / _STATE).read_text(encoding="utf-8"))


def export(checkpoint: Checkpoint, out: Path) -> Path:
    """Copies the policy of a checkpoint to `out`: a plain Hugging Face directory."""
    if out.exists() and any(out.iterdir()):
        raise RunDirError(f"export to {out}", "it exists and is not empty", "name a new directory")
    shutil.copytree(checkpoint.path / "policy", out, dirs_exist_ok=True)
    return out
