"""CheckpointMonitor: when a checkpoint that several savers write is complete, and which saver may write when."""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex, TypeVar

from trivium.board import Board, MemoryBoard, Values, locked
from trivium.checkpoint.atomic import atomic_write, commit, complete_steps, folder_name, staging_directory
from trivium.checkpoint.remote import RemoteDirectory
from trivium.checkpoint.savers import CHECKPOINT, STATE_DICT, Saver, SaveState
from trivium.concurrency import (
    Heartbeat,
    HeartbeatTracker,
    ProcessLife,
    ProgressDeadline,
    Threads,
    Waiting,
    wait_until,
)
from trivium.errors import DataError, RunDirError, SyncError, described
from trivium.types import SaveStrategy

T = TypeVar("T")

_log = logging.getLogger("trivium")
_POLL_S = 0.5
"""How often a wait for savers checks whether they are alive."""


class CheckpointMonitor:
    """Knows which saves are complete: announced, and every registered saver finished, in whatever order.

    A complete step is committed (`checkpoint.atomic`): what its savers wrote in the directory that `begin` returned
    becomes `step-000100` (a checkpoint) or `weights-000100` (a state dict) under `default_local_dir`, for every process
    to see. Of savers that write elsewhere, a file there holds the newest step.

    Callable from any thread and any event loop, and over one board from several processes: each has an object of its
    own, and calls it for its own savers. Steps are integers from 0: another raises DataError.
    """

    LATEST: ClassVar[Mapping[str, str]] = {CHECKPOINT: "latest-step.txt", STATE_DICT: "latest-weights.txt"}
    """The files under `default_local_dir` that hold the newest complete step of which nothing was written there."""

    def __init__(
        self,
        save_strategy: SaveStrategy,
        default_local_dir: str,
        default_hdfs_dir: str | None = None,
        *,
        deadline_s: float = 3600.0,
        board: Board | None = None,
        heartbeat_s: float | None = None,
    ) -> None:
        """`default_hdfs_dir` is the fsspec URL of a directory that complete saves are copied to (`hdfs://`, `s3://`,
        `file://`, ...). `deadline_s` bounds every wait for other savers, and the copying. `board` is shared by all
        processes whose savers take turns (default: this process); with `heartbeat_s` they may be on several machines,
        and each beats for its savers."""
        self.save_strategy = SaveStrategy(save_strategy)
        self.default_local_dir, self.default_hdfs_dir = default_local_dir, default_hdfs_dir
        self.deadline_s, self.heartbeat_s = deadline_s, heartbeat_s
        self.board: Board = board or MemoryBoard()
        self._remote = None if default_hdfs_dir is None else RemoteDirectory(default_hdfs_dir)
        self._copier = Threads(1, "trivium-copy")
        self._trackers: dict[int, HeartbeatTracker] = {}
        """Of the savers' heartbeats, as this process sees them."""
        self._beating: dict[int, ExitStack] = {}
        """The heartbeats of this process's own savers."""

    # ------------------------------------------------------------------ what is complete

    @property
    def latest_checkpoint_step(self) -> int:
        """The newest step with a complete checkpoint; 0 where there is none."""
        return max(*complete_steps(Path(self.default_local_dir), CHECKPOINT), 0, self._noted(CHECKPOINT))

    @property
    def latest_state_dict_step(self) -> int:
        """The newest step whose weights can be loaded, a complete checkpoint's included; 0 where there is none."""
        weights = complete_steps(Path(self.default_local_dir), STATE_DICT)
        return max(*weights, self.latest_checkpoint_step, self._noted(STATE_DICT))

    def update_latest_checkpoint_step(self, step: int) -> None:
        """Commits the checkpoint of this step, or notes that it is complete elsewhere. Steps may come in any order.
        Blocks."""
        self._update(CHECKPOINT, _checked(step))

    def update_latest_state_dict_step(self, step: int) -> None:
        """The same for the weights alone."""
        self._update(STATE_DICT, _checked(step))

    def _update(self, kind: str, step: int) -> None:
        local = Path(self.default_local_dir)
        name = folder_name(kind, step)
        if not commit(local, name, step) and not (local / name).is_dir():
            self._note(kind, step)

    def _note(self, kind: str, step: int) -> None:
        """Writes the step down as the newest one, unless a newer one is."""
        path = Path(self.default_local_dir) / self.LATEST[kind]
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
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

    async def completed(self, step: int, is_state_dict: bool = False) -> None:
        """Waits until what was announced of this step is complete.

        Raises RunDirError if it never will be (a saver died, or could not write), SyncError at the deadline.
        """
        kind = _kind(is_state_dict)

        def settled(state: SaveState) -> bool:
            entry = state.steps.get(step)
            return (entry is None or kind not in entry.announced) and folder_name(kind, step) not in state.committing

        await self._wait(settled, f"the {kind} save of step {step}", "its savers")
        cause = self._state.broken.get(step)
        if cause is not None:
            raise RunDirError(f"a complete save of step {step}", cause, "fix the cause, and save the step again")

    # ------------------------------------------------------------------ what savers report

    async def begin(self, step: int, is_state_dict: bool = False) -> str:
        """Begins a save of this step, or begins it anew; returns the (empty) directory that its savers write in."""
        kind, step = _kind(is_state_dict), _checked(step)
        self._change(lambda state: state.supersede(step, kind))
        directory = await asyncio.to_thread(staging_directory, Path(self.default_local_dir), folder_name(kind, step))
        return str(directory)

    async def register_thread_count(
        self, step: int, *, state_dict_thread_count: int = 0, checkpoint_thread_count: int = 0
    ) -> None:
        """Adds savers that this step waits for."""
        step, caller = _checked(step), _this_process()
        counts = {
            STATE_DICT: _checked(state_dict_thread_count, "state_dict_thread_count"),
            CHECKPOINT: _checked(checkpoint_thread_count, "checkpoint_thread_count"),
        }
        self._change(lambda state: state.register(step, counts, caller))
        await self._commit_complete(step)

    async def monitor_step(self, step: int, is_state_dict: bool = False) -> None:
        """Announces that all savers of this step are registered: it is complete once all have finished, which may be
        now. A checkpoint also waits for the step's state dict savers."""
        step = _checked(step)
        self._change(lambda state: state.announce(step, _kind(is_state_dict)))
        await self._commit_complete(step)

    async def notify_started(
        self,
        node_id: str,
        job_id: str,
        *,
        step: int | None = None,
        is_state_dict: bool = False,
        alive: ProcessLife | None = None,
        heartbeat_s: float | None = None,
    ) -> int:
        """Queues a saver; returns its ticket once the strategy lets it write.

        It is dead once its process is (`alive`; default: this one), or, with `heartbeat_s`, after so long without
        `notify_alive`. A dead saver loses its turn, and its `step` will not be complete; without one, the steps that
        its process has registered savers for. Raises SyncError after `deadline_s` without any change among the savers.
        """
        place = {
            SaveStrategy.SINGLE_THREAD: "",  # a place of its own
            SaveStrategy.SINGLE_PROCESS: f"{node_id}/{job_id}",
            SaveStrategy.SINGLE_NODE: str(node_id),
            SaveStrategy.UNRESTRICTED: "anywhere",
        }[self.save_strategy]
        name = f"{job_id} on {node_id}"
        step = None if step is None else _checked(step)
        saver = Saver(
            place, name, step, _kind(is_state_dict), alive or _this_process(), heartbeat_s or self.heartbeat_s
        )
        ticket = self._change(lambda state: state.enqueue(saver))
        if heartbeat_s is None and self.heartbeat_s is not None and saver.alive == _this_process():
            self._beat(ticket, self.heartbeat_s)
        try:
            admitted: bool | None = False
            while admitted is False:
                await self._wait(lambda state: state.may_write(ticket), f"the saver {name}", "its turn")
                admitted = self._change(lambda state: state.admit(ticket))
            if admitted is None:
                raise _counts_as_dead(f"the turn of the saver {name}")
        except BaseException:
            self._change(lambda state: state.savers.pop(ticket, None))
            self._stop_beating(ticket)
            raise
        return ticket

    async def notify_alive(self, ticket: int) -> None:
        """A heartbeat of a saver; ignored where it counts as dead already."""

        def beat(state: SaveState) -> None:
            if ticket in state.savers:
                state.savers[ticket].beats += 1

        self._change(beat)

    async def notify_finished(self, step: int, is_state_dict: bool = False, *, ticket: int | None = None) -> None:
        """A saver has written its part of this step. Returns once the step is committed, if that completes it.

        `ticket` tells which saver it was; without it, it is one of this process. Raises SyncError for one that counts
        as dead.
        """
        kind, step, caller = _kind(is_state_dict), _checked(step), _this_process()

        def finish(state: SaveState) -> int | None:
            if ticket is not None and ticket not in state.savers:
                raise _counts_as_dead(f"finish the save of step {step}")
            if step not in state.broken:
                state.step(step).counts[kind] -= 1
            return _removed(state, step, kind, ticket, caller)

        self._stop_beating(self._change(finish))
        await self._commit_complete(step)

    async def notify_failed(
        self, step: int, cause: str, is_state_dict: bool = False, *, ticket: int | None = None
    ) -> None:
        """A saver could not write its part: the step will not be complete."""
        kind, step, caller = _kind(is_state_dict), _checked(step), _this_process()

        def fail(state: SaveState) -> int | None:
            if ticket is not None and ticket not in state.savers:
                return None  # its save began anew, or was given up
            state.give_up(step, cause)
            return _removed(state, step, kind, ticket, caller)

        self._stop_beating(self._change(fail))

    # ------------------------------------------------------------------ the remote directory

    async def copied(self) -> None:
        """Copies complete saves to `default_hdfs_dir` where they are missing. Raises RunDirError if that fails."""
        if self._remote is None:
            return
        try:
            async with asyncio.timeout(self.deadline_s):
                await self._copier.run(partial(self._copy, self._remote))
        except Exception as error:  # every kind of storage has its own errors
            raise RunDirError(
                f"copy checkpoints to {self._remote.url}",
                f"{type(error).__name__}: {str(error) or f'it was not done within {self.deadline_s:.0f} s'}",
                "it is tried again after the next save, and when the same command is run again",
            ) from error

    def _copy(self, remote: RemoteDirectory) -> None:
        local = Path(self.default_local_dir)
        for kind in (CHECKPOINT, STATE_DICT):
            for step in complete_steps(local, kind):
                folder = local / folder_name(kind, step)
                if not remote.holds(folder):
                    remote.copy(folder)

    # ------------------------------------------------------------------ internals

    async def _commit_complete(self, step: int) -> None:
        """Commits the saves of a step that have become complete."""
        caller = _this_process()

        def complete(state: SaveState) -> list[str]:
            kinds = state.complete(step)
            state.committing |= {folder_name(kind, step): caller for kind in kinds}
            return kinds

        kinds = self._change(complete)
        for kind in kinds:
            name = folder_name(kind, step)
            update = self.update_latest_state_dict_step if kind == STATE_DICT else self.update_latest_checkpoint_step
            try:
                await asyncio.to_thread(update, step)
            except BaseException as error:
                cause = f"it could not be committed: {type(error).__name__}: {error}"
                self._change(lambda state, cause=cause: state.give_up(step, cause))
                raise
            finally:
                self._change(lambda state, name=name: state.committing.pop(name, None))
        if kinds:
            try:
                await self.copied()
            except RunDirError as error:
                _log.error("%s", error)  # the run goes on; it is tried again, and must succeed at its end

    @property
    def _state(self) -> SaveState:
        return SaveState.of(self.board.read())

    def _change(self, change: Callable[[SaveState], T]) -> T:
        """What `change` returns, applied to the state; wakes those who wait. It may be called more than once."""
        results: list[T] = []

        def apply(values: Values) -> Values:
            state = SaveState.of(values)
            results[:] = [change(state)]
            return {**values, **state.values()}

        self.board.write(apply)
        return results[0]

    def _remove_dead(self) -> None:
        state = self._state
        causes = {ticket: (saver.beats, self._cause_of_death(ticket, saver)) for ticket, saver in state.savers.items()}
        dead = {ticket: (beats, cause) for ticket, (beats, cause) in causes.items() if cause}
        lost = [name for name, life in state.committing.items() if not life()]
        for ticket in [*self._trackers.keys() - state.savers.keys()]:
            self._trackers.pop(ticket, None)
        if dead or lost:
            for name, cause in self._change(lambda state: state.remove_dead(dead, lost)):
                _log.error("the saver %s died (%s); what it was saving does not count", name, cause)

    def _cause_of_death(self, ticket: int, saver: Saver) -> str:
        """Empty as long as it may be alive."""
        if not saver.alive():
            return "its process is gone"
        if saver.heartbeat_s is None or not (saver.writing or saver.beats):
            return ""
        silence_s = self._trackers.setdefault(ticket, HeartbeatTracker()).silence_s(saver.beats)
        return f"no heartbeat for {saver.heartbeat_s} s" if silence_s > saver.heartbeat_s else ""

    def _beat(self, ticket: int, heartbeat_s: float) -> None:
        """Beats for a saver of this process until it has finished."""
        stack = self._beating[ticket] = ExitStack()
        beat = partial(self._change, partial(_count_beat, ticket))
        stack.enter_context(Heartbeat(beat, heartbeat_s / 4, f"saver-{ticket}"))

    def _stop_beating(self, ticket: int | None) -> None:
        if ticket is not None and (beating := self._beating.pop(ticket, None)) is not None:
            beating.close()

    async def _wait(self, done: Callable[[SaveState], bool], who: str, whom: str) -> None:
        """Waits until `done` holds. Any change among the savers is progress."""

        async def poll(deadline: ProgressDeadline) -> tuple[bool | None, object]:
            self._remove_dead()
            patience_s = min(_POLL_S, deadline.seconds)
            state = SaveState.of(await self.board.poll(lambda values: done(SaveState.of(values)), patience_s))
            return done(state) or None, state.describe()

        await wait_until(poll, lambda: Waiting(who, whom, self._state.describe()), self.deadline_s)


def _removed(state: SaveState, step: int, kind: str, ticket: int | None, caller: ProcessLife) -> int | None:
    """The ticket of the saver that has ended, which is removed."""
    if ticket is None:
        return state.remove(step, kind, caller)
    state.savers.pop(ticket, None)
    return ticket


def _count_beat(ticket: int, state: SaveState) -> None:
    """Raises KeyError for a saver that counts as dead, which ends its heartbeat."""
    state.savers[ticket].beats += 1


def _this_process() -> ProcessLife:
    return ProcessLife.of(os.getpid())


def _checked(number: SupportsIndex, name: str = "step") -> int:
    """A step, or a number of savers. Raises DataError for what is none."""
    try:
        if not isinstance(number, bool) and (value := operator.index(number)) >= 0:
            return value
    except TypeError:
        pass
    raise DataError(f"a {name} of 0 or more, as an integer", described(number), "pass what the trainer counts")


def _kind(is_state_dict: bool) -> str:
    return STATE_DICT if is_state_dict else CHECKPOINT


def _counts_as_dead(request: str) -> SyncError:
    return SyncError(
        request,
        "the saver counts as dead, or the save began anew without it: others may be writing",
        "allow it more time between two heartbeats, and save the step again",
    )


# --------------------------------------------------------------------------- saving


@asynccontextmanager
async def saving(
    monitor: CheckpointMonitor, step: int, *, is_state_dict: bool = False, heartbeat_s: float = 60.0
) -> AsyncGenerator[None]:
    """The turn of this process to write its part of a step: waits for it, beats during it, and ends it; as failed, with
    what the block raises."""
    ticket = await monitor.notify_started(
        socket.gethostname(),
        str(os.getpid()),
        step=step,
        is_state_dict=is_state_dict,
        alive=ProcessLife.of(os.getpid()),
        heartbeat_s=heartbeat_s,
    )
    try:
        with Heartbeat(lambda: asyncio.run(monitor.notify_alive(ticket)), heartbeat_s / 4, "save") as heartbeat:
            yield
        if heartbeat.error is not None:  # `notify_finished` refuses a saver that counts as dead
            _log.warning("the heartbeat of the save of step %d failed: %s", step, heartbeat.error)
    except BaseException as error:
        cause = f"its saver failed: {type(error).__name__}: {error}"
        await monitor.notify_failed(step, cause, is_state_dict, ticket=ticket)
        raise
    await monitor.notify_finished(step, is_state_dict, ticket=ticket)


async def save_step(
    monitor: CheckpointMonitor, step: int, write: Callable[[Path], None], *, is_state_dict: bool = False
) -> None:
    """Saves a step that `write` writes, in a thread; it is complete on return. `write` may register further savers.

    Raises what `write` raises; the step is not complete then.
    """
    directory = Path(await monitor.begin(step, is_state_dict))
    kind = "state_dict_thread_count" if is_state_dict else "checkpoint_thread_count"
    await monitor.register_thread_count(step, **{kind: 1})
    await monitor.monitor_step(step, is_state_dict)
    async with saving(monitor, step, is_state_dict=is_state_dict):
        await asyncio.to_thread(write, directory)
    await monitor.completed(step, is_state_dict)


def run_now(saving: Coroutine[Any, Any, object]) -> None:
    """Runs a save for a caller that cannot await, in any thread: on an event loop of its own."""
    with ThreadPoolExecutor(1, "trivium-save") as pool:
        pool.submit(asyncio.run, saving).result()
