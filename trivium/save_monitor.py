"""CheckpointMonitor: when a checkpoint that several savers write is complete, and who may write when."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trivium.board import MemoryBoard
from trivium.directory import HERE
from trivium.errors import ConfigError, RunDirError, SyncError
from trivium.remote import RemoteDirectory
from trivium.sealing import begun, folder_name, seal, sealed_steps
from trivium.threads import Threads

if TYPE_CHECKING:
    from trivium.protocols import ActorDirectory

_log = logging.getLogger("trivium")

CHECKPOINT, STATE_DICT = "step", "weights"
"""What the directories of the two kinds of saves are called: everything training needs, and the policy alone."""
ROLE = "checkpoint_monitor"
"""The name of a CheckpointMonitor in an ActorDirectory."""
_LOOK_S = 0.5
"""How often somebody who waits for savers looks whether they are alive."""


class SaveStrategy(StrEnum):
    """Who may write at the same time."""

    SINGLE_THREAD = "single_thread"
    """One saver in the whole cluster."""
    SINGLE_PROCESS = "single_process"
    """The savers of one job on one node."""
    SINGLE_NODE = "single_node"
    """The savers of one node."""
    UNRESTRICTED = "unrestricted"
    """Everybody."""


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """Tells whether a process runs, where it can: on another machine it says yes, and a heartbeat has to tell."""

    host: str
    pid: int
    born: str
    """When the process began, as its machine counts: a later one may get its number. Empty where nobody can say."""

    @classmethod
    def of(cls, pid: int) -> ProcessLife:
        """The life of a process of this machine that runs now."""
        return cls(socket.gethostname(), pid, (_proc_stat(pid) or ("", ""))[1])

    def __call__(self) -> bool:
        if self.host != socket.gethostname():
            return True
        if self.born:
            state, born = _proc_stat(self.pid) or ("gone", "")
            return born == self.born and state not in ("Z", "X")  # killed, and its parent has not looked yet
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _proc_stat(pid: int) -> tuple[str, str] | None:
    """(state, start time) of a process where the system has /proc; the name before them may hold anything."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], fields[19]


# --------------------------------------------------------------------------- the books


@dataclass
class _Saver:
    """Somebody who writes, or waits for the turn to."""

    place: str | None
    """Savers of the same place may write at the same time; None is a place of its own."""
    name: str
    step: int | None
    kind: str
    alive: Callable[[], bool] | None
    heartbeat_s: float | None
    beat: float = 0.0
    writing: bool = False

    def death(self) -> str:
        """What it died of; empty while nothing says that it did."""
        if self.alive is not None and not self.alive():
            return "its process is gone"
        # Who waits has no ticket yet to beat with.
        if self.writing and self.heartbeat_s is not None and time.monotonic() - self.beat > self.heartbeat_s:
            return f"no heartbeat for {self.heartbeat_s} s"
        return ""


@dataclass
class _Step:
    """What is known of the saves of a step that is not complete."""

    counts: dict[str, int] = field(default_factory=lambda: {CHECKPOINT: 0, STATE_DICT: 0})
    """Savers that are still to finish, by kind; below 0 where one finished before it was registered."""
    registered: set[str] = field(default_factory=set[str])
    announced: set[str] = field(default_factory=set[str])

    def complete(self) -> list[str]:
        """The kinds that are announced and of which every saver has finished. A checkpoint holds the state dict."""
        found: list[str] = []
        if self.counts[STATE_DICT] == 0:
            if STATE_DICT in self.announced or (CHECKPOINT in self.announced and STATE_DICT in self.registered):
                found.append(STATE_DICT)
            if CHECKPOINT in self.announced and self.counts[CHECKPOINT] == 0:
                found.append(CHECKPOINT)
        return found


@dataclass
class _Books:
    """Who writes, who waits, what is missing of which step. Plain values; the monitor holds the lock."""

    savers: dict[int, _Saver] = field(default_factory=dict[int, _Saver])
    """By ticket, in order of arrival."""
    steps: dict[int, _Step] = field(default_factory=dict[int, _Step])
    sealing: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    broken: dict[int, str] = field(default_factory=dict[int, str])
    """Why a step will never be complete, unless its save begins anew."""
    tickets: int = 0

    def arrive(self, saver: _Saver) -> int:
        self.tickets += 1
        if saver.place is None:
            saver.place = f"ticket {self.tickets}"
        self.savers[self.tickets] = saver
        return self.tickets

    def enter(self, ticket: int) -> bool:
        """Whether a saver need not wait: it writes beside those of its own place, else first come, first served; or it
        was taken out."""
        mine = self.savers.get(ticket)
        if mine is None:
            return True
        writing = {saver.place for saver in self.savers.values() if saver.writing}
        if not mine.writing and mine.place in (writing or {next(iter(self.savers.values())).place}):
            mine.writing, mine.beat = True, time.monotonic()
        return mine.writing

    def leave(self, step: int, kind: str, ticket: int | None) -> None:
        """Takes out this saver; without a ticket, who has written longest at this, or at nobody knows what."""
        if ticket is None:
            writing = {t: saver for t, saver in self.savers.items() if saver.writing}
            at_it = [t for t, saver in writing.items() if (saver.step, saver.kind) == (step, kind)]
            ticket = next(iter([*at_it, *(t for t, saver in writing.items() if saver.step is None)]), None)
        if ticket is not None:
            del self.savers[ticket]

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
        """The step will not be complete: what is missing of it is nobody's business any more."""
        if step is not None:
            self.broken[step] = cause
            self.steps.pop(step, None)

    def complete(self, step: int) -> list[str]:
        """The kinds of this step that are complete, each told once; a step of which nothing is left is forgotten."""
        entry = self.steps.get(step)
        if entry is None:
            return []
        kinds = entry.complete()
        for kind in kinds:
            entry.announced.discard(kind)
            entry.registered.discard(kind)
            self.sealing.add((kind, step))
        if not any(entry.counts.values()) and not entry.announced:
            del self.steps[step]
        return kinds


# --------------------------------------------------------------------------- the monitor


class CheckpointMonitor:
    """Knows which saves are complete: announced, and every registered saver finished, in whatever order.

    A step that is complete is sealed (`trivium.sealing`): what its savers wrote in the directory that `begin` gave them
    becomes `step-000100` (a checkpoint) or `weights-000100` (a state dict) under `default_local_dir`, so "complete" is
    a fact on disk that every process sees. Savers may also write elsewhere; then only this object knows.

    Callable from any thread and any event loop. In a run over Ray it may be an actor (`get_actor`).
    """

    def __init__(
        self, save_strategy: SaveStrategy, default_local_dir: str, default_hdfs_dir: str | None = None, *,
        deadline_s: float = 3600.0,
    ) -> None:  # fmt: skip
        """`default_hdfs_dir` is the fsspec URL of a directory that whatever is sealed is copied to (`hdfs://`, `s3://`,
        `file://`, ...). `deadline_s` bounds every wait for other savers, and the copying."""
        self.save_strategy = SaveStrategy(save_strategy)
        self.default_local_dir, self.default_hdfs_dir = default_local_dir, default_hdfs_dir
        self.deadline_s = deadline_s
        self._remote = None if default_hdfs_dir is None else RemoteDirectory(default_hdfs_dir)
        self._books, self._lock = _Books(), threading.Lock()
        self._copier = Threads(1, "trivium-copy")
        self._bell = MemoryBoard()
        """Rung at every change of the books, for waiters that may be on several event loops."""
        self._elsewhere = {CHECKPOINT: 0, STATE_DICT: 0}
        """The newest complete step of which nothing was written here."""

    @classmethod
    def get_actor(
        cls, namespace: str, save_strategy: SaveStrategy | None = None, default_local_dir: str | None = None,
        default_hdfs_dir: str | None = None, *, directory: ActorDirectory | None = None,
    ) -> CheckpointMonitor:  # fmt: skip
        """The monitor of a namespace; built on the first call, which has to say `default_local_dir`.

        `directory` decides where it lives: in this process unless told otherwise. Raises ConfigError for settings other
        than those it was built with.
        """
        make = None
        if default_local_dir is not None:
            strategy = save_strategy or SaveStrategy.UNRESTRICTED
            make = partial(cls, strategy, default_local_dir, default_hdfs_dir)
        found = (directory or HERE).get(namespace, ROLE, make)
        asked = {
            "save_strategy": save_strategy, "default_local_dir": default_local_dir, "default_hdfs_dir": default_hdfs_dir
        }  # fmt: skip
        for name, value in asked.items() if isinstance(found, cls) else ():  # another process's is asked over the wire
            if value is not None and value != getattr(found, name):
                raise ConfigError(
                    f"the checkpoint monitor of {namespace!r} with {name} {value!r}",
                    f"it has {getattr(found, name)!r}", "say the same everywhere, or use another namespace",
                )  # fmt: skip
        return found

    # ------------------------------------------------------------------ what is complete

    @property
    def latest_checkpoint_step(self) -> int:
        """The newest step with a complete checkpoint; 0 where there is none."""
        return max(*sealed_steps(Path(self.default_local_dir), CHECKPOINT), 0, self._elsewhere[CHECKPOINT])

    @property
    def latest_state_dict_step(self) -> int:
        """The newest step whose weights can be loaded, a complete checkpoint's included; 0 where there is none."""
        weights = sealed_steps(Path(self.default_local_dir), STATE_DICT)
        return max(*weights, self.latest_checkpoint_step, self._elsewhere[STATE_DICT])

    def update_latest_checkpoint_step(self, step: int) -> None:
        """The checkpoint of this step is complete: from now on it counts. Steps may come in any order. Blocks."""
        self._update(CHECKPOINT, step)

    def update_latest_state_dict_step(self, step: int) -> None:
        """The same for the weights alone."""
        self._update(STATE_DICT, step)

    def _update(self, kind: str, step: int) -> None:
        local = Path(self.default_local_dir)
        name = folder_name(kind, step)
        if not seal(local, name, step) and not (local / name).is_dir():
            self._elsewhere[kind] = max(step, self._elsewhere[kind])

    async def completed(self, step: int, is_state_dict: bool = False) -> None:
        """Waits until what was announced of this step is complete.

        Raises RunDirError if it never will be (a saver died, or could not write), SyncError at the deadline.
        """
        kind = _kind(is_state_dict)

        def settled(books: _Books) -> bool:
            entry = books.steps.get(step)
            return (entry is None or kind not in entry.announced) and (kind, step) not in books.sealing

        await self._until(settled, f"the {kind} save of step {step} waits for its savers")
        with self._lock:
            cause = self._books.broken.get(step)
        if cause is not None:
            raise RunDirError(f"a complete save of step {step}", cause, "mend the cause, and save the step anew")

    # ------------------------------------------------------------------ what savers say

    async def begin(self, step: int, is_state_dict: bool = False) -> str:
        """A save of this step begins, anew where there was one: the (empty) directory that its savers write in."""
        kind = _kind(is_state_dict)
        with self._changed() as books:
            books.supersede(step, kind)
        directory = await asyncio.to_thread(begun, Path(self.default_local_dir), folder_name(kind, step))
        return str(directory)

    async def register_thread_count(
        self, step: int, *, state_dict_thread_count: int = 0, checkpoint_thread_count: int = 0
    ) -> None:
        """So many more savers will finish for this step."""
        with self._changed() as books:
            if step not in books.broken:
                counts = {STATE_DICT: state_dict_thread_count, CHECKPOINT: checkpoint_thread_count}
                for kind, count in counts.items():
                    books.step(step).counts[kind] += count
                    books.step(step).registered |= {kind} if count else set()
        await self._settle(step)

    async def monitor_step(self, step: int, is_state_dict: bool = False) -> None:
        """Every saver of this step has been, or will have been, registered: it is complete once all have finished, at
        once where none is missing. A checkpoint also waits for the step's state dict savers."""
        with self._changed() as books:
            if step not in books.broken:
                books.step(step).announced.add(_kind(is_state_dict))
        await self._settle(step)

    async def notify_started(
        self, node_id: str, job_id: str, *, step: int | None = None, is_state_dict: bool = False,
        alive: Callable[[], bool] | None = None, heartbeat_s: float | None = None,
    ) -> int:  # fmt: skip
        """A saver wants to write; returns its ticket once the strategy allows it to.

        `alive` (`ProcessLife`, say) tells whether it still lives; with `heartbeat_s` it is dead after so long without
        `notify_alive`. Others get the turn of the dead, and the `step` it was at will not be complete. Raises SyncError
        after `deadline_s` without any change among the savers.
        """
        place = {
            SaveStrategy.SINGLE_THREAD: None, SaveStrategy.SINGLE_PROCESS: f"{node_id}/{job_id}",
            SaveStrategy.SINGLE_NODE: node_id, SaveStrategy.UNRESTRICTED: "anywhere",
        }[self.save_strategy]  # fmt: skip
        name = f"{job_id} on {node_id}"
        saver = _Saver(place, name, step, _kind(is_state_dict), alive, heartbeat_s)
        with self._changed() as books:
            ticket = books.arrive(saver)
        try:
            await self._until(lambda books: books.enter(ticket), f"the saver {name} waits for its turn")
        finally:
            if not saver.writing:  # it gave up, or was given up
                with self._changed() as books:
                    books.savers.pop(ticket, None)
        if not saver.writing:
            raise _outlived(f"the turn of the saver {name}")
        return ticket

    async def notify_alive(self, ticket: int) -> None:
        """A sign of life of a saver that has one to give; nothing where it counts as dead already."""
        with self._lock:
            if ticket in self._books.savers:
                self._books.savers[ticket].beat = time.monotonic()

    async def notify_finished(self, step: int, is_state_dict: bool = False, *, ticket: int | None = None) -> None:
        """A saver has written its part of this step. The one that completes the step returns when it counts.

        `ticket` tells which saver it was, where that makes a difference: where any of them can be found dead. Raises
        SyncError for one that was.
        """
        kind = _kind(is_state_dict)
        with self._changed() as books:
            if ticket is not None and ticket not in books.savers:
                raise _outlived(f"finish the save of step {step}")
            books.leave(step, kind, ticket)
            if step not in books.broken:
                books.step(step).counts[kind] -= 1
        await self._settle(step)

    async def notify_failed(
        self, step: int, cause: str, is_state_dict: bool = False, *, ticket: int | None = None
    ) -> None:
        """A saver could not write its part of this step, which will not be complete."""
        with self._changed() as books:
            if ticket is None or ticket in books.savers:  # else its step began anew, or is given up already
                books.leave(step, _kind(is_state_dict), ticket)
                books.give_up(step, cause)

    # ------------------------------------------------------------------ the remote directory

    async def copied(self) -> None:
        """Copies to `default_hdfs_dir` what is complete here and lacks there. Raises RunDirError if it cannot."""
        if self._remote is None:
            return
        try:
            async with asyncio.timeout(self.deadline_s):
                await self._copier.run(partial(self._copy, self._remote))
        except Exception as error:  # every kind of storage has errors of its own
            raise RunDirError(
                f"copy checkpoints to {self._remote.url}",
                f"{type(error).__name__}: {str(error) or f'it was not done within {self.deadline_s:.0f} s'}",
                "it is tried again after the next save, and when the same command is run again",
            ) from error  # fmt: skip

    def _copy(self, remote: RemoteDirectory) -> None:
        local = Path(self.default_local_dir)
        for kind in (CHECKPOINT, STATE_DICT):
            for step in sealed_steps(local, kind):
                folder = local / folder_name(kind, step)
                if not remote.holds(folder):
                    remote.copy(folder)

    # ------------------------------------------------------------------ inside

    async def _settle(self, step: int) -> None:
        """Seals what has become complete."""
        with self._changed() as books:
            kinds = books.complete(step)
        for kind in kinds:
            update = (
                self.update_latest_state_dict_step if kind == STATE_DICT else self.update_latest_checkpoint_step
            )  # fmt: skip
            try:
                await asyncio.to_thread(update, step)
            except BaseException as error:
                with self._changed() as books:
                    books.give_up(step, f"it could not be sealed: {type(error).__name__}: {error}")
                raise
            finally:
                with self._changed() as books:
                    books.sealing.discard((kind, step))
        if kinds:
            try:
                await self.copied()
            except RunDirError as error:
                _log.error("%s", error)  # the run goes on; it is tried again, and at its end it has to work

    def _bury(self) -> None:
        """Takes out savers that died; their steps will not be complete."""
        with self._lock:
            dead = {ticket: saver.death() for ticket, saver in self._books.savers.items()}
            buried = [(self._books.savers.pop(ticket), cause) for ticket, cause in dead.items() if cause]
            for saver, cause in buried:
                self._books.give_up(saver.step, f"the saver {saver.name} died: {cause}")
        for saver, cause in buried:
            _log.error("the saver %s died (%s); what it was saving does not count", saver.name, cause)
        if buried:
            self._ring()

    async def _until(self, done: Callable[[_Books], bool], who: str) -> None:
        """Waits until `done` holds. Any change among the savers counts as getting on."""

        def look() -> bool:
            with self._lock:
                return done(self._books)

        seen, last = "", time.monotonic()
        while True:
            self._bury()
            await self._bell.poll(lambda _: look(), min(_LOOK_S, self.deadline_s))
            if look():
                self._ring()  # what let this one in may let in others
                return
            with self._lock:
                now = self._says()
            if now != seen:
                seen, last = now, time.monotonic()
            elif time.monotonic() - last > self.deadline_s:
                raise SyncError(
                    who, f"nothing happened for {self.deadline_s:.0f} s; {seen}",
                    "look at the log of whoever writes; give savers a sign of life, so that their death is noticed",
                )  # fmt: skip

    def _says(self) -> str:
        writing = [saver.name for saver in self._books.savers.values() if saver.writing]
        missing = {step: entry.counts for step, entry in self._books.steps.items()}
        return f"writing: {', '.join(writing) or 'nobody'}; still to finish: {missing or 'nothing'}"

    @contextmanager
    def _changed(self) -> Generator[_Books]:
        """The books, to be written to; whoever waits looks again."""
        with self._lock:
            yield self._books
        self._ring()

    def _ring(self) -> None:
        self._bell.write(lambda values: {"rung": values.get("rung", 0) + 1})


def _kind(is_state_dict: bool) -> str:
    return STATE_DICT if is_state_dict else CHECKPOINT


def _outlived(asked: str) -> SyncError:
    return SyncError(
        asked, "the saver counts as dead, or the save began anew without it: others may be writing",
        "give it more time between two signs of life, and save the step anew",
    )  # fmt: skip


# --------------------------------------------------------------------------- what savers do


@asynccontextmanager
async def saving(
    monitor: CheckpointMonitor, step: int, *, is_state_dict: bool = False, heartbeat_s: float = 60.0
) -> AsyncGenerator[None]:
    """The turn of this process to write its part of a step: waited for, kept alive, and finished, or given up with
    whatever the block raises."""
    ticket = await monitor.notify_started(
        socket.gethostname(), str(os.getpid()), step=step, is_state_dict=is_state_dict,
        alive=ProcessLife.of(os.getpid()), heartbeat_s=heartbeat_s,
    )  # fmt: skip

    async def beat() -> None:
        while True:
            await asyncio.sleep(heartbeat_s / 4)
            await monitor.notify_alive(ticket)

    beating = asyncio.ensure_future(beat())
    try:
        yield
    except BaseException as error:
        cause = f"its saver failed: {type(error).__name__}: {error}"
        await monitor.notify_failed(step, cause, is_state_dict, ticket=ticket)
        raise
    finally:
        beating.cancel()
    await monitor.notify_finished(step, is_state_dict, ticket=ticket)


async def save_step(
    monitor: CheckpointMonitor, step: int, write: Callable[[Path], None], *, is_state_dict: bool = False
) -> None:
    """Saves a step that `write` (in a thread) writes whole, or registers further savers for; it counts on return.

    Raises what `write` raises; the step does not count then.
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
    """`save_step` for a caller that cannot await, in whatever thread: it has an event loop of its own."""
    with ThreadPoolExecutor(1, "trivium-save") as pool:
        pool.submit(asyncio.run, save_step(monitor, step, write, is_state_dict=is_state_dict)).result()
