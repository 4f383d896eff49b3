"""Starts a run from the checkpoint of another run."""

from __future__ import annotations

import shutil
from pathlib import Path

from trivium.buffers.step_log import STEPS
from trivium.checkpoint.store import CheckpointStore
from trivium.foundation.atomic import MANIFEST, atomic_write
from trivium.foundation.errors import RunDirError
from trivium.runtime.run_dir import ADOPTED

_HISTORY = ("metrics.jsonl", STEPS, "tables", "rollouts", "order")
"""The files and folders of a run directory that a checkpoint refers to."""


def adopt_checkpoint(source: Path, store: CheckpointStore) -> None:
    """Copies a checkpoint of another run into a run directory as its latest one, with the history of the other run.
    When the run resumes, it cuts off the history after the checkpoint."""
    run_dir = store.directory.parent
    if not (source / MANIFEST).is_file():
        raise RunDirError(f"resume from {source}", "no complete checkpoint there", "name a step-... directory")
    newest, mark = store.steps()[-1:], run_dir / ADOPTED
    if newest and mark.is_file() and mark.read_text(encoding="utf-8") == str(source):
        return  # an earlier session adopted it: the run resumes from the latest checkpoint
    if newest and source == (store.directory / f"step-{newest[0]:06d}").resolve():
        return
    if newest:
        raise RunDirError(
            f"resume from {source}",
            f"{store.directory} has checkpoints up to step {newest[0]}",
            "choose another default_local_dir, or resume_mode: auto to continue from the latest",
        )
    store.directory.mkdir(parents=True, exist_ok=True)
    staging = store.directory / f".{source.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(source, staging)
    for name in _HISTORY:
        history = source.parent.parent / name
        if history.is_dir():
            shutil.copytree(history, run_dir / name, dirs_exist_ok=True)
        elif history.is_file():
            shutil.copyfile(history, run_dir / name)
    # The checkpoint appears last: a command that dies before finds none, and copies again.
    atomic_write(mark, str(source))
    staging.rename(store.directory / source.name)
