"""CheckpointMonitor: when a checkpoint that several savers write is complete, and which saver may write when."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trivium.board import MemoryBoard
from trivium.checkpoint.atomic import commit, complete_steps, folder_name, staging_directory
from trivium.checkpoint.remote import RemoteDirectory
from trivium.concurrency import (
    Heartbeat,
    HeartbeatTracker,
    ProcessLife,
    ProgressDeadline,
    Threads,
    Waiting,
    wait_until,
)
from trivium.errors import RunDirError, SyncError
from trivium.types import SaveStrategy

_log = logging.getLogger("trivium")

CHECKPOINT, STATE_DICT = "step", "weights"
"""The two kinds of saves, as in the names of their directories: everything training needs, and the policy alone."""
_POLL_S = 0.5
"""How often a wait for savers checks whether they are alive."""


# --------------------------------------------------------------------------- state


@dataclass
class _Saver:
    """A process or thread that writes, or is queued."""

    place: str
    """Savers of the same place may write at the same time."""
    name: str
    step: int | None
    kind: str
    alive: Callable[[], bool] | None
    heartbeat_s: float | None
    beats: int = 0
    tracker: HeartbeatTracker | None = None
    """Of its heartbeat, from the moment it may write: a queued saver has no ticket to beat with."""

    @property
    def writing(self) -> bool:
        return self.tracker is not None

    def beat(self) -> None:
        self.beats += 1
        if self.tracker is not None:
            self.tracker.silence_s(self.beats)

    def cause_of_death(self) -> str:
        """Empty as long as it may be alive."""
        if self.alive is not None and not self.alive():
            return "its process is gone"
        if self.tracker and self.heartbeat_s is not None and self.tracker.silence_s(self.beats) > self.heartbeat_s:
            return f"no heartbeat for {self.heartbeat_s} s"
        return ""


@dataclass
class _Step:
    """The state of the saves of a step that is not complete."""

    counts: dict[str, int] = field(default_factory=lambda: {CHECKPOINT: 0, STATE_DICT: 0})
    """Savers that have not finished, by kind; below 0 where one finished before it was registered."""
    registered: set[str] = field(default_factory=set[str])
    announced: set[str] = field(default_factory=set[str])

    def complete(self) -> list[str]:
        """The kinds that are announced and of which every saver has finished. A checkpoint holds the state dict."""
        kinds: list[str] = []
        if self.counts[STATE_DICT] == 0:
            if STATE_DICT in self.announced or (CHECKPOINT in self.announced and STATE_DICT in self.registered):
                kinds.append(STATE_DICT)
            if CHECKPOINT in self.announced and self.counts[CHECKPOINT] == 0:
                kinds.append(CHECKPOINT)
        return kinds


@dataclass
class _State:
    """The savers, and what is missing of which step. Plain values; the monitor holds the lock."""

    savers: dict[int, _Saver] = field(default_factory=dict[int, _Saver])
    """By ticket, in order of arrival."""
    steps: dict[int, _Step] = field(default_factory=dict[int, _Step])
    committing: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    broken: dict[int, str] = field(default_factory=dict[int, str])
    """Why a step will never be complete, unless its save begins anew."""
    tickets: int = 0

    def enqueue(self, saver: _Saver) -> int:
        self.tickets += 1
        saver.place = saver.place or f"ticket {self.tickets}"
        self.savers[self.tickets] = saver
        return self.tickets

    def admit(self, ticket: int) -> bool:
        """Lets a saver write if those that write are of its own place, first come, first served. True also for one that
        was removed."""
        mine = self.savers.get(ticket)
        if mine is None:
            return True
        writing = {saver.place for saver in self.savers.values() if saver.writing}
        if not mine.writing and mine.place in (writing or {next(iter(self.savers.values())).place}):
            mine.tracker = HeartbeatTracker()
        return mine.writing

    def remove(self, step: int, kind: str, ticket: int | None) -> None:
        """Removes this saver; without a ticket, the one that has written longest at this save, or at an unnamed one."""
        if ticket is None:
            writing = {t: saver for t, saver in self.savers.items() if saver.writing}
            same = [t for t, saver in writing.items() if (saver.step, saver.kind) == (step, kind)]
            ticket = next(iter([*same, *(t for t, saver in writing.items() if saver.step is None)]), None)
        if ticket is not None:
            del self.savers[ticket]

    def remove_dead(self) -> list[tuple[_Saver, str]]:
        """Removes the savers that died, with the causes; their steps will not be complete."""
        causes = {ticket: saver.cause_of_death() for ticket, saver in self.savers.items()}
        removed = [(self.savers.pop(ticket), cause) for ticket, cause in causes.items() if cause]
        for saver, cause in removed:
            self.give_up(saver.step, f"the saver {saver.name} died: {cause}")
        return removed

    def supersede(self, step: int, kind: str) -> None:
        """Forgets an earlier save of this step, its savers included."""
        self.broken.pop(step, None)
        self.savers = {t: saver for t, saver in self.savers.items() if (saver.step, saver.kind) != (step, kind)}
        if step in self.steps:
            self.steps[step].counts[kind] = 0
            self.steps[step].registered.discard(kind)
            self.steps[step].announced.discard(kind)

    def step(self, step: int) -> _Step:
        return self.steps.setdefault(step, _Step())

    def give_up(self, step: int | None, cause: str) -> None:
        """The step will not be complete."""
        if step is not None:
            self.broken[step] = cause
            self.steps.pop(step, None)

    def complete(self, step: int) -> list[str]:
        """The kinds of this step that have become complete, each once; forgets a step of which nothing is missing."""
        entry = self.steps.get(step)
        if entry is None:
            return []
        kinds = entry.complete()
        for kind in kinds:
            entry.announced.discard(kind)
            entry.registered.discard(kind)
            self.committing.add((kind, step))
        if not any(entry.counts.values()) and not entry.announced:
            del self.steps[step]
        return kinds

    def describe(self) -> str:
        writing = [saver.name for saver in self.savers.values() if saver.writing]
        missing = {step: entry.counts for step, entry in self.steps.items()}
        return f"writing: {', '.join(writing) or 'no saver'}; still to finish: {missing or 'nothing'}"


# --------------------------------------------------------------------------- the monitor


class CheckpointMonitor:
    """Knows which saves are complete: announced, and every registered saver finished, in whatever order.

    A complete step is committed (`checkpoint.atomic`): what its savers wrote in the directory that `begin` returned
    becomes `step-000100` (a checkpoint) or `weights-000100` (a state dict) under `default_local_dir`, for every process
    to see. Savers may also write elsewhere; then only this object knows.

    Callable from any thread and any event loop.
    """

    def __init__(
        self,
        save_strategy: SaveStrategy,
        default_local_dir: str,
        default_hdfs_dir: str | None = None,
        *,
        deadline_s: float = 3600.0,
    ) -> None:
        """`default_hdfs_dir` is the fsspec URL of a directory that complete saves are copied to (`hdfs://`, `s3://`,
        `file://`, ...). `deadline_s` bounds every wait for other savers, and the copying."""
        self.save_strategy = SaveStrategy(save_strategy)
        self.default_local_dir, self.default_hdfs_dir = default_local_dir, default_hdfs_dir
        self.deadline_s = deadline_s
        self._remote = None if default_hdfs_dir is None else RemoteDirectory(default_hdfs_dir)
        self._state, self._lock = _State(), threading.Lock()
        self._copier = Threads(1, "trivium-copy")
        self._changes = MemoryBoard()
        """Counts the changes of the state, for waiters that may be on several event loops."""
        self._elsewhere = {CHECKPOINT: 0, STATE_DICT: 0}
        """The newest complete step of which nothing was written here."""

    # ------------------------------------------------------------------ what is complete

    @property
    def latest_checkpoint_step(self) -> int:
        """The newest step with a complete checkpoint; 0 where there is none."""
        return max(*complete_steps(Path(self.default_local_dir), CHECKPOINT), 0, self._elsewhere[CHECKPOINT])

    @property
    def latest_state_dict_step(self) -> int:
        """The newest step whose weights can be loaded, a complete checkpoint's included; 0 where there is none."""
        weights = complete_steps(Path(self.default_local_dir), STATE_DICT)
        return max(*weights, self.latest_checkpoint_step, self._elsewhere[STATE_DICT])

    def update_latest_checkpoint_step(self, step: int) -> None:
        """Commits the checkpoint of this step. Steps may come in any order. Blocks."""
        self._update(CHECKPOINT, step)

    def update_latest_state_dict_step(self, step: int) -> None:
        """The same for the weights alone."""
        self._update(STATE_DICT, step)

    def _update(self, kind: str, step: int) -> None:
        local = Path(self.default_local_dir)
        name = folder_name(kind, step)
        if not commit(local, name, step) and not (local / name).is_dir():
            self._elsewhere[kind] = max(step, self._elsewhere[kind])

    async def completed(self, step: int, is_state_dict: bool = False) -> None:
        """Waits until what was announced of this step is complete.

        Raises RunDirError if it never will be (a saver died, or could not write), SyncError at the deadline.
        """
        kind = _kind(is_state_dict)

        def settled(state: _State) -> bool:
            entry = state.steps.get(step)
            return (entry is None or kind not in entry.announced) and (kind, step) not in state.committing

        await self._wait(settled, f"the {kind} save of step {step}", "its savers")
        with self._lock:
            cause = self._state.broken.get(step)
        if cause is not None:
            raise RunDirError(f"a complete save of step {step}", cause, "fix the cause, and save the step again")

    # ------------------------------------------------------------------ what savers report

    async def begin(self, step: int, is_state_dict: bool = False) -> str:
        """Begins a save of this step, or begins it anew; returns the (empty) directory that its savers write in."""
        kind = _kind(is_state_dict)
        with self._changed() as state:
            state.supersede(step, kind)
        directory = await asyncio.to_thread(staging_directory, Path(self.default_local_dir), folder_name(kind, step))
        return str(directory)

    async def register_thread_count(
        self, step: int, *, state_dict_thread_count: int = 0, checkpoint_thread_count: int = 0
    ) -> None:
        """Adds savers that this step waits for."""
        with self._changed() as state:
            if step not in state.broken:
                counts = {STATE_DICT: state_dict_thread_count, CHECKPOINT: checkpoint_thread_count}
                for kind, count in counts.items():
                    state.step(step).counts[kind] += count
                    state.step(step).registered |= {kind} if count else set()
        await self._commit_complete(step)

    async def monitor_step(self, step: int, is_state_dict: bool = False) -> None:
        """Announces that all savers of this step are registered: it is complete once all have finished, which may be
        now. A checkpoint also waits for the step's state dict savers."""
        with self._changed() as state:
            if step not in state.broken:
                state.step(step).announced.add(_kind(is_state_dict))
        await self._commit_complete(step)

    async def notify_started(
        self,
        node_id: str,
        job_id: str,
        *,
        step: int | None = None,
        is_state_dict: bool = False,
        alive: Callable[[], bool] | None = None,
        heartbeat_s: float | None = None,
    ) -> int:
        """Queues a saver; returns its ticket once the strategy lets it write.

        `alive` (such as `ProcessLife`) tells whether it lives; with `heartbeat_s` it is dead after so long without
        `notify_alive`. A dead saver loses its turn, and its `step` will not be complete. Raises SyncError after
        `deadline_s` without any change among the savers.
        """
        place = {
            SaveStrategy.SINGLE_THREAD: "",  # a place of its own
            SaveStrategy.SINGLE_PROCESS: f"{node_id}/{job_id}",
            SaveStrategy.SINGLE_NODE: node_id,
            SaveStrategy.UNRESTRICTED: "anywhere",
        }[self.save_strategy]
        name = f"{job_id} on {node_id}"
        saver = _Saver(place, name, step, _kind(is_state_dict), alive, heartbeat_s)
        with self._changed() as state:
            ticket = state.enqueue(saver)
        try:
            await self._wait(lambda state: state.admit(ticket), f"the saver {name}", "its turn")
        finally:
            if not saver.writing:  # cancelled, or removed
                with self._changed() as state:
                    state.savers.pop(ticket, None)
        if not saver.writing:
            raise _counts_as_dead(f"the turn of the saver {name}")
        return ticket

    async def notify_alive(self, ticket: int) -> None:
        """A heartbeat of a saver; ignored where it counts as dead already."""
        with self._lock:
            if ticket in self._state.savers:
                self._state.savers[ticket].beat()

    async def notify_finished(self, step: int, is_state_dict: bool = False, *, ticket: int | None = None) -> None:
        """A saver has written its part of this step. Returns once the step is committed, if that completes it.

        `ticket` tells which saver it was; needed where savers can die. Raises SyncError for one that counts as dead.
        """
        kind = _kind(is_state_dict)
        with self._changed() as state:
            if ticket is not None and ticket not in state.savers:
                raise _counts_as_dead(f"finish the save of step {step}")
            state.remove(step, kind, ticket)
            if step not in state.broken:
                state.step(step).counts[kind] -= 1
        await self._commit_complete(step)

    async def notify_failed(
        self, step: int, cause: str, is_state_dict: bool = False, *, ticket: int | None = None
    ) -> None:
        """A saver could not write its part: the step will not be complete."""
        with self._changed() as state:
            if ticket is None or ticket in state.savers:  # else its save began anew, or was given up
                state.remove(step, _kind(is_state_dict), ticket)
                state.give_up(step, cause)

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
        with self._changed() as state:
            kinds = state.complete(step)
        for kind in kinds:
            update = self.update_latest_state_dict_step if kind == STATE_DICT else self.update_latest_checkpoint_step
            try:
                await asyncio.to_thread(update, step)
            except BaseException as error:
                with self._changed() as state:
                    state.give_up(step, f"it could not be committed: {type(error).__name__}: {error}")
                raise
            finally:
                with self._changed() as state:
                    state.committing.discard((kind, step))
        if kinds:
            try:
                await self.copied()
            except RunDirError as error:
                _log.error("%s", error)  # the run goes on; it is tried again, and must succeed at its end

    def _remove_dead(self) -> None:
        with self._lock:
            removed = self._state.remove_dead()
        for saver, cause in removed:
            _log.error("the saver %s died (%s); what it was saving does not count", saver.name, cause)
        if removed:
            self._notify()

    async def _wait(self, done: Callable[[_State], bool], who: str, whom: str) -> None:
        """Waits until `done` holds. Any change among the savers is progress."""

        def check() -> bool:
            with self._lock:
                return done(self._state)

        def describe() -> str:
            with self._lock:
                return self._state.describe()

        async def poll(deadline: ProgressDeadline) -> tuple[bool | None, object]:
            self._remove_dead()
            await self._changes.poll(lambda _: check(), min(_POLL_S, deadline.seconds))
            return check() or None, describe()

        await wait_until(poll, lambda: Waiting(who, whom, describe()), self.deadline_s)
        self._notify()  # its admission may allow others

    @contextmanager
    def _changed(self) -> Generator[_State]:
        """The state, to be changed; wakes the waiters."""
        with self._lock:
            yield self._state
        self._notify()

    def _notify(self) -> None:
        self._changes.write(lambda values: {"changes": values.get("changes", 0) + 1})


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


def save_step_now(
    monitor: CheckpointMonitor, step: int, write: Callable[[Path], None], *, is_state_dict: bool = False
) -> None:
    """`save_step` for a caller that cannot await, in any thread: it has an event loop of its own."""
    with ThreadPoolExecutor(1, "trivium-save") as pool:
        pool.submit(asyncio.run, save_step(monitor, step, write, is_state_dict=is_state_dict)).result()
