"""BackgroundSaver: writes the checkpoints of a trainer one at a time, during training if the engine supports it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trivium.checkpoint.store import CheckpointStore
from trivium.foundation.errors import RunDirError, TriviumError
from trivium.protocols import TrainEngine


class BackgroundSaver:
    """Saves checkpoints of a run as a task of one event loop, one at a time."""

    def __init__(self, store: CheckpointStore, engine: TrainEngine, *, asynchronous: bool, every: int = 0) -> None:
        """`asynchronous`: training continues while the files are written, if the engine supports it. `every`: the
        interval of checkpoints, in train steps; 0: only at the end of a stage."""
        self.store, self.engine, self.asynchronous, self.every = store, engine, asynchronous, every
        self.step: int | None = None
        """The step of the last save that began, or the step that the run continues from."""
        self.writing: asyncio.Task[Path] | None = None
        """The save in progress."""
        self.failed = False
        """Whether the last save that ended failed."""

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due at this train step and has not been begun."""
        return self.every > 0 and step % self.every == 0 and self.step != step

    async def save(self, step: int, state: Mapping[str, Any], write_more: Callable[[Path], None]) -> None:
        """Saves the engine, `state` and the files that `write_more` writes. Returns when the save is complete or, if an
        engine continues it in the background, as soon as training may change the engine's state.

        Waits for the previous save first. Raises the errors of both.
        """
        await self.wait()
        # `held` is set once the engine holds a copy of its state, or at the end of the save.
        loop, held = asyncio.get_running_loop(), asyncio.Event()

        def write(directory: Path) -> None:
            write_more(directory)
            hold = partial(loop.call_soon_threadsafe, held.set)
            self.engine.save(directory, hold if self.asynchronous else None)

        self.writing = asyncio.create_task(self.store.save(step, write, state), name=f"save-{step}")
        self.writing.add_done_callback(lambda _: held.set())
        self.step = step
        await held.wait()
        self.look()

    async def wait(self) -> None:
        """Waits until the save in progress is complete. Raises its error."""
        if self.writing is not None:
            await asyncio.wait({self.writing})  # a cancelled trainer does not cancel its save
            self.look()

    def look(self) -> None:
        """Raises the error of the save in progress, once it has ended."""
        if self.writing is None or not self.writing.done():
            return
        writing, self.writing = self.writing, None
        self.failed = writing.cancelled() or writing.exception() is not None
        try:
            writing.result()
        except TriviumError:
            raise  # the error already names the problem
        except Exception as error:
            raise save_failed(self.step, error) from error


def save_failed(step: int | None, error: Exception) -> RunDirError:
    return RunDirError(
        f"save the checkpoint of step {step}",
        f"{type(error).__name__}: {error}",
        "fix the cause and run the same command again: it continues from the previous checkpoint",
    )
