"""Trinity-RFT's CheckpointMonitor: tracks which saves are complete and which saver may write. All processes of a
namespace share one."""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, SupportsIndex, TypeVar

from trivium.checkpoint import store
from trivium.checkpoint.remote import RemoteDirectory
from trivium.foundation.atomic import atomic_write, complete_steps, folder_name
from trivium.foundation.board import MemoryBoard, Values, locked
from trivium.foundation.concurrency import ProgressDeadline, Waiting, wait_until
from trivium.foundation.errors import DataError, RunDirError, UnknownName, described
from trivium.foundation.registry import suggest
from trivium.frontdoors.trinity.objects.boards.named_actors import named_actor
from trivium.frontdoors.trinity.objects.boards.savers import CHECKPOINT, STATE_DICT, Saver, SaveState
from trivium.types import SaveStrategy

if TYPE_CHECKING:
    from ray.actor import ActorHandle

T = TypeVar("T")

_log = logging.getLogger("trivium")
ROLE = "checkpoint_monitor"
"""The name of a CheckpointMonitor in its namespace."""


class CheckpointMonitor:
    """Tracks which saves are complete: a save is complete when it is announced and every registered saver has finished,
    in any order.

    The newest complete steps are also written to files beside the saves, so they survive the monitor. The monitor does
    not write the saves. A checkpoint of a run (`step-000100`) under `default_local_dir` counts as complete, too.

    A monitor from the constructor belongs to its process, whose threads and event loops may share it. `get_actor`
    returns one for all processes of a namespace. Steps are integers from 0; another value raises DataError.
    """

    LATEST: ClassVar[Mapping[str, str]] = {
        CHECKPOINT: "latest_checkpointed_iteration.txt",
        STATE_DICT: "latest_state_dict_iteration.txt",
    }
    """The files under `default_local_dir` that hold the newest complete steps."""

    def __init__(
        self,
        save_strategy: SaveStrategy,
        default_local_dir: str,
        default_hdfs_dir: str | None = None,
        *,
        deadline_s: float = 3600.0,
    ) -> None:
        """`default_hdfs_dir` is the fsspec URL of a directory that complete checkpoints of a run are copied to
        (`hdfs://`, `s3://`, `file://`, ...). `deadline_s` bounds each wait for other savers, and the copying.
        """
        self.save_strategy = _strategy(save_strategy)
        self.default_local_dir, self.default_hdfs_dir = default_local_dir, default_hdfs_dir
        self.deadline_s = deadline_s
        self._state, self._lock = SaveState(), threading.Lock()
        self._changes = MemoryBoard()
        """Counts the changes of the state, which wakes the waiting savers."""
        self._remote = None if default_hdfs_dir is None else RemoteDirectory(default_hdfs_dir, deadline_s)

    # ------------------------------------------------------------------ one for all processes

    @classmethod
    def get_actor(
        cls,
        namespace: str,
        save_strategy: SaveStrategy | None = None,
        default_local_dir: str | None = None,
        default_hdfs_dir: str | None = None,
    ) -> ActorHandle[Self]:
        """Returns the Ray actor that is the monitor of a namespace: `await monitor.notify_started.remote(...)`,
        `ray.get(monitor.update_latest_checkpoint_step.remote(step))`.

        The first call creates it, and requires `default_local_dir`. Raises ConfigError if the settings differ from
        those of the first call or `default_hdfs_dir` cannot be opened, UnknownName if there is none yet, MissingPackage
        without Ray.
        """
        if default_hdfs_dir is not None:
            RemoteDirectory(default_hdfs_dir, 0.0)  # an error of the actor's constructor would lose its parts
        settings = {
            "save_strategy": None if save_strategy is None else _strategy(save_strategy).value,
            # Absolute, because processes in other folders name the same directory.
            "default_local_dir": None if default_local_dir is None else str(Path(default_local_dir).absolute()),
            "default_hdfs_dir": default_hdfs_dir,
        }
        first = (settings["save_strategy"] or SaveStrategy.UNRESTRICTED.value, *[*settings.values()][1:])
        arguments = None if default_local_dir is None else first
        return named_actor(lambda: cls, ROLE, namespace, arguments, settings)

    def get_settings(self) -> dict[str, str | None]:
        """Returns the arguments of the constructor by name."""
        return {
            "save_strategy": self.save_strategy.value,
            "default_local_dir": self.default_local_dir,
            "default_hdfs_dir": self.default_hdfs_dir,
        }

    # ------------------------------------------------------------------ complete saves

    @property
    def latest_checkpoint_step(self) -> int:
        """The newest step with a complete checkpoint; 0 if there is none."""
        return max(*complete_steps(Path(self.default_local_dir), store.CHECKPOINT), 0, self._noted(CHECKPOINT))

    def update_latest_checkpoint_step(self, step: int) -> None:
        """Records that the checkpoint of this step is complete. Steps may come in any order. Blocks."""
        self._note(CHECKPOINT, _checked(step))

    def update_latest_state_dict_step(self, step: int) -> None:
        """Records that the weights of this step are complete. Steps may come in any order. Blocks."""
        self._note(STATE_DICT, _checked(step))

    def _note(self, kind: str, step: int) -> None:
        """Records the step as the newest one, unless a newer one is recorded."""
        path = Path(self.default_local_dir) / self.LATEST[kind]
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            # Saves may complete in any order: in Trinity, step 7 before step 6 is an AssertionError.
            if not path.exists() or step > self._noted(kind):
                atomic_write(path, f"{step}\n")

    def _noted(self, kind: str) -> int:
        path = Path(self.default_local_dir) / self.LATEST[kind]
        try:
            return _checked(int(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise RunDirError(f"the step in {path}", str(error), "write the newest complete step there") from error

    # ------------------------------------------------------------------ reports of savers

    async def register_thread_count(
        self, step: int, *, state_dict_thread_count: int = 0, checkpoint_thread_count: int = 0
    ) -> None:
        """Adds savers that this step waits for."""
        step = _checked(step)
        counts = {
            STATE_DICT: _checked(state_dict_thread_count, "state_dict_thread_count"),
            CHECKPOINT: _checked(checkpoint_thread_count, "checkpoint_thread_count"),
        }
        self._change(lambda state: state.register(step, counts))
        await self._note_complete(step)

    async def monitor_step(self, step: int, is_state_dict: bool = False) -> None:
        """Announces that all savers of this step are registered. The step is complete once all of them have finished,
        which may be before this call. A checkpoint also waits for the savers of the step's state dict."""
        step = _checked(step)
        self._change(lambda state: state.announce(step, _kind(is_state_dict)))
        await self._note_complete(step)

    async def notify_started(self, node_id: str, job_id: str) -> int:
        """Queues a saver. Returns its ticket once the strategy lets it write. Raises SyncError if nothing changes among
        the savers for `deadline_s`."""
        place = {
            SaveStrategy.SINGLE_THREAD: "",  # `enqueue` gives each saver a separate place
            SaveStrategy.SINGLE_PROCESS: f"{node_id}/{job_id}",
            SaveStrategy.SINGLE_NODE: str(node_id),
            SaveStrategy.UNRESTRICTED: "anywhere",
        }[self.save_strategy]
        name = f"{job_id} on {node_id}"
        ticket = self._change(lambda state: state.enqueue(Saver(place, name)))
        try:
            while not self._change(lambda state: state.admit(ticket)):
                await self._wait(lambda state: state.may_write(ticket), f"the saver {name}", "its turn")
        except BaseException:
            # A saver that is cancelled in the queue must not keep its place: in Trinity, all later saves wait for one
            # that crashed.
            self._change(lambda state: state.savers.pop(ticket, None))
            raise
        return ticket

    async def notify_finished(self, step: int, is_state_dict: bool = False) -> None:
        """Reports that the saver that has written longest has written its part of this step. If it was the last saver,
        returns after the step is recorded as complete."""
        step = _checked(step)
        self._change(lambda state: state.finish(step, _kind(is_state_dict)))
        await self._note_complete(step)

    # ------------------------------------------------------------------ internals

    async def _note_complete(self, step: int) -> None:
        """Records the saves of a step that have become complete, and copies the checkpoints."""
        kinds = self._state.complete(step)
        for kind in kinds:
            update = self.update_latest_state_dict_step if kind == STATE_DICT else self.update_latest_checkpoint_step
            try:
                # In a thread: the lock of the file may be held by another process.
                await asyncio.to_thread(update, step)
            except BaseException:
                self._change(lambda state: state.give_up(step))
                raise
        self._change(lambda state: state.forget(step, kinds))
        if kinds and self._remote is not None:
            local = Path(self.default_local_dir)
            steps = complete_steps(local, store.CHECKPOINT)
            try:
                await self._remote.copy_missing([local / folder_name(store.CHECKPOINT, complete) for complete in steps])
            except RunDirError as error:
                _log.error("%s", error)  # savers continue: the next complete save copies again

    def _change(self, change: Callable[[SaveState], T]) -> T:
        """Applies `change` to the state and wakes the waiting savers. Returns the result of `change`."""
        with self._lock:
            result = change(self._state)
        self._changes.write(lambda values: {"number": values.get("number", 0) + 1})
        return result

    async def _wait(self, condition: Callable[[SaveState], bool], who: str, whom: str) -> None:
        """Waits until `done` holds. Any change among the savers counts as progress."""

        def is_done(_: Values) -> bool:
            with self._lock:
                return condition(self._state)

        def described() -> str:
            with self._lock:
                return self._state.describe()

        async def poll(deadline: ProgressDeadline) -> tuple[bool | None, object]:
            values = await self._changes.poll(lambda v: is_done(v) or described() != deadline.state, deadline.left_s)
            return is_done(values) or None, described()

        await wait_until(poll, lambda: Waiting(who, whom, described()), self.deadline_s)


def _checked(number: SupportsIndex, name: str = "step") -> int:
    """Returns a step, or a number of savers, as an int. Raises DataError for any other value."""
    try:
        if not isinstance(number, bool) and (value := operator.index(number)) >= 0:
            return value
    except TypeError:
        pass
    raise DataError(f"a {name} of 0 or more, as an integer", described(number), "pass what the trainer counts")


def _kind(is_state_dict: bool) -> str:
    return STATE_DICT if is_state_dict else CHECKPOINT


def _strategy(strategy: str) -> SaveStrategy:
    try:
        return SaveStrategy(str(strategy).lower())
    except ValueError as error:
        raise UnknownName(
            f"the save strategy {strategy!r}", "there is none", suggest(strategy, SaveStrategy)
        ) from error
