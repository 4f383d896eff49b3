"""RunRole: the part of a trainer or an explorer in a run, over a Board. It joins and leaves, sends heartbeats, detects
the death of other roles, and waits for them with a deadline.

The board is an object in one process, a Ray actor or a database row. All ways of running share this code.
"""

from __future__ import annotations

import logging
import uuid
from asyncio import CancelledError
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from trivium.foundation.concurrency import Heartbeat, HeartbeatTracker, ProgressDeadline, Waiting, wait_until
from trivium.foundation.errors import ConfigError, RoleFailed, SyncError, TriviumError, first_cause
from trivium.types import DAY, TRAINER, RunningStatus

if TYPE_CHECKING:
    from trivium.foundation.board import Board, Values

_log = logging.getLogger("trivium")

_MAX_ENDED = 64
"""Maximum number of ended stages that the board lists."""
POLL_S = 60.0
"""Seconds between two checks in a wait that lasts as long as the run."""


class RunRole:
    """One role of a run: the trainer, or an explorer. One object per role, all over the same board."""

    def __init__(
        self,
        board: Board,
        *,
        deadline_s: float,
        heartbeat_s: float | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.board, self.deadline_s = board, deadline_s
        self.settings = dict(settings or {})
        """A digest of each section that trainer and explorers must agree on, and the day of the run."""
        self.heartbeat_s = heartbeat_s
        """A role without a heartbeat for this long is dead. None: process handles report deaths, or one process has all
        roles."""
        self._incarnation = ""
        """Identifies the stage and the trainer process of this role."""
        self._heartbeat: Heartbeat | None = None

    # ------------------------------------------------------------------ joining and leaving

    def open(self, stage: int = 0, *, last: bool = True) -> None:
        """Begins a stage as the trainer: clears the state of an earlier trainer and lets explorers join."""
        self._incarnation = uuid.uuid4().hex
        opened: Values = {
            "incarnation": self._incarnation,
            "stage": stage,
            "last": last,
            "settings": self.settings,
            "trainer": RunningStatus.RUNNING.value,
        }

        def begin(values: Values) -> Values:
            # Explorers that still wait for the end of an earlier stage find it in this list.
            ended = [*values.get("ended", ()), values["incarnation"]] if values.get("finished") else []
            return {**self._kept(values), **opened, "ended": ended[-_MAX_ENDED:]}

        self.board.write(begin)

    def _kept(self, values: Values) -> Values:
        """The values of the board that are kept from stage to stage."""
        return {}

    async def wait_for_trainer(self, name: str) -> int | None:
        """Waits, as an explorer of another process, for a live trainer with an unfinished stage. Returns the stage, or
        None if the run has ended.

        Raises SyncError if no trainer appears within the deadline, ConfigError if its settings differ.
        """
        first = self.board.read()
        beats, previous = first.get("beats", {}).get(TRAINER), self._incarnation

        def over(values: Values) -> bool:
            return bool(values.get("finished") and values.get("last")) and not self._differing(values)

        def ready(values: Values) -> bool:
            # The status of a dead trainer stays RUNNING; only a new beat shows that it is alive.
            alive = self.heartbeat_s is None or values.get("beats", {}).get(TRAINER) != beats
            started = values.get("incarnation", previous) != previous
            return alive and started and not values.get("finished") and "failed" not in values

        values = await self.board.poll(lambda v: ready(v) or over(v), self.deadline_s)
        if over(values):
            return None
        if ready(values) and (differing := self._differing(values)):
            raise ConfigError(
                f"explore with this config, as {name!r}",
                f"the trainer runs another config: {', '.join(differing)} differ(s)",
                "give both the same file and the same overrides (only fields marked `free` in docs/config.md may "
                "differ, except `schedule.steps`)",
            )
        if not ready(values):
            raise SyncError(
                f"explorer {name!r} waits for a trainer",
                f"no trainer appeared within {self.deadline_s:.0f} s",
                "start one (`run.mode=train`) over the same buffer and under the same run.name",
            )
        self._incarnation, self.settings[DAY] = values["incarnation"], values["settings"].get(DAY, "")
        return values["stage"]

    def _differing(self, values: Values) -> list[str]:
        """The sections whose digests differ between the trainer's settings and this role's. The day is the trainer's:
        the command of an explorer may start later."""
        return sorted({name for name, _ in values.get("settings", {}).items() ^ self.settings.items()} - {DAY})

    async def join(self, name: str) -> bool:
        """Adds an explorer to the run, once an earlier one of that name is dead and reaped. Returns False if the stage
        has ended meanwhile.

        Raises SyncError if the earlier one is alive.
        """
        life, stopped = uuid.uuid4().hex, RunningStatus.STOPPED.value

        def free(values: Values) -> bool:
            earlier = values.get("explorers", {}).get(name)
            return earlier is None or (earlier["status"] == stopped and bool(earlier.get("reaped", True)))

        def enter(values: Values) -> Values:
            if not free(values):
                return values
            # It loads the newest published version. The trainer publishes the first version without a request.
            entry = {"status": RunningStatus.REQUIRE_SYNC.value, "version": None, "life": life, "idle": True}
            # The beat restarts the silence that other roles measured for the earlier explorer.
            return {**_with_beat(values, name), "explorers": {**values.get("explorers", {}), name: entry}}

        # Time for an explorer of this name to be noticed as dead, after one silent heartbeat, and to be reaped.
        await self.board.poll(lambda v: free(v) or self._broken(v), 3 * (self.heartbeat_s or 10.0))
        self._write(enter)
        values = self.check_alive()
        if values.get("finished") or self._incarnation in values.get("ended", ()):
            return False
        if values.get("explorers", {}).get(name, {}).get("life") != life:
            raise SyncError(
                f"join the run as explorer {name!r}",
                "the run has another explorer of that name",
                "give each its own run.explorer, or leave it out",
            )
        _log.info("explorer %s joins", name)
        return True

    def finish(self) -> None:
        """Marks the stage as finished by the trainer, so that explorers may leave."""
        self._write(lambda values: {**values, "trainer": RunningStatus.STOPPED.value, "finished": True})

    def finish_run(self, stage: int) -> None:
        """Marks the last stage as finished, as the trainer of a complete run, if an earlier trainer died after its last
        checkpoint."""
        values = self.board.read()
        if not (values.get("finished") and values.get("last")):
            self.open(stage)
            self.finish()

    async def wait_finished(self, name: str) -> None:
        """Waits until the trainer has finished the stage, for as long as it lives."""

        def over(values: Values) -> bool:
            return bool(values.get("finished")) or self._incarnation in values.get("ended", ())

        values: Values = {}
        while not over(values):
            values = await self.board.poll(lambda v: over(v) or self._broken(v), POLL_S)
            self._refuse_broken(values)
        if values.get("finished"):
            self.set_explorer_status(name, RunningStatus.STOPPED)

    def set_trainer_status(self, status: RunningStatus) -> None:
        self._write(lambda values: {**values, "trainer": status.value})

    def report_step(self, step: int) -> None:
        """Records a step of the trainer, which is progress for every role that waits for it."""
        self._write(lambda values: {**values, "step": step})

    def set_explorer_status(self, name: str, status: RunningStatus) -> None:
        self._explorer(name, status=status.value)

    @property
    def trainer_status(self) -> RunningStatus:
        """STOPPED until a trainer opens the board."""
        return RunningStatus(self.board.read().get("trainer", RunningStatus.STOPPED))

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """The number of live explorers in each status."""
        statuses = [entry["status"] for entry in live_explorers(self.board.read()).values()]
        return {status: statuses.count(status.value) for status in RunningStatus}

    # ------------------------------------------------------------------ heartbeats and failures

    @contextmanager
    def heartbeat(self, role: str) -> Generator[None]:
        """Sends heartbeats of this role while the block runs; `monitor` raises the error if that fails."""
        if self.heartbeat_s is None:
            yield
            return
        self._heartbeat = Heartbeat(
            lambda: self._write(lambda values: _with_beat(values, role)), self.heartbeat_s / 4, role
        )
        with self._heartbeat:
            yield

    @contextmanager
    def report_failure(self, role: str) -> Generator[None]:
        """Marks the role as dead if the block raises, so that no other role waits for it."""
        try:
            yield
        except BaseException as error:
            # A cancelled explorer leaves the run, which continues even without other explorers.
            stopped = isinstance(error, CancelledError | KeyboardInterrupt)
            self.mark_dead(role, "it was stopped" if stopped else _cause(error), replaced=stopped)
            raise

    def mark_dead(self, role: str, cause: str, *, replaced: bool = False, beats: int | None = None) -> None:
        """Marks a role as dead. The run continues without an explorer if another one lives or a new one may replace it
        (`replaced`); otherwise the run fails. With `beats`, the count of a silent role, does nothing if the count has
        changed."""

        def change(values: Values) -> Values:
            explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
            if beats is not None and values.get("beats", {}).get(role, 0) != beats:
                return values
            if role in explorers:
                if role not in live_explorers(values):
                    return values
                values = with_explorer(values, role, status=RunningStatus.STOPPED.value, dead=cause, reaped=False)
                evaluation = values.get("evaluation")
                if evaluation is not None and evaluation["by"] == role and evaluation["metrics"] is None:
                    values = {**values, "evaluation": {**evaluation, "by": None}}
                if replaced or live_explorers(values):
                    return values
            ended = {"trainer": RunningStatus.STOPPED.value} if role == TRAINER else {}
            return {"failed": {"role": role, "cause": cause, "silent": beats is not None}, **values, **ended}

        self._write(change)

    async def monitor(self, role: str, reap: Callable[[str], Awaitable[object]] | None = None) -> None:
        """Watches the other roles until it is cancelled; `reap` is awaited for each explorer that died.

        Raises RoleFailed if the run has failed, if this role was marked dead, or if its heartbeat thread stopped.
        """

        def unreaped(values: Values) -> list[str]:
            return [name for name in dead_explorers(values) if reap and not values["explorers"][name]["reaped"]]

        patience_s = POLL_S if self.heartbeat_s is None else self.heartbeat_s / 4
        trackers = defaultdict[str, HeartbeatTracker](lambda: HeartbeatTracker((self.heartbeat_s or 0.0) / 2))
        while True:
            values = await self.board.poll(
                lambda v: self._broken(v) or bool(unreaped(v)) or role in dead_explorers(v), patience_s
            )
            self._refuse_broken(values)
            if role in dead_explorers(values):
                raise RoleFailed(role, f"it was declared dead: {dead_explorers(values)[role]}")
            if self._heartbeat is not None and (error := self._heartbeat.error) is not None:
                raise RoleFailed(role, f"its heartbeat stopped: {_cause(error)}") from error
            for name in unreaped(values):
                assert reap is not None
                await reap(name)
                self._write(lambda values, name=name: with_explorer(values, name, reaped=True))
                _log.warning("explorer %s has ended: %s", name, dead_explorers(values)[name])
            if self.heartbeat_s is not None:
                self._mark_silent(role, self.heartbeat_s, values, trackers)

    def _mark_silent(
        self, role: str, heartbeat_s: float, values: Values, trackers: Mapping[str, HeartbeatTracker]
    ) -> None:
        """Marks the other roles whose heartbeat has stopped as dead."""
        peers = {*live_explorers(values), *(() if values.get("finished") else (TRAINER,))} - {role}
        for peer in sorted(peers):
            beats = values.get("beats", {}).get(peer, 0)
            if trackers[peer].silence_s(beats) > heartbeat_s:
                self.mark_dead(peer, f"no heartbeat for {heartbeat_s} s", replaced=True, beats=beats)

    def may_return(self, role: str) -> bool:
        """Whether the failed role may be started again: it failed by a silent heartbeat, or the run has no failure any
        more."""
        failed = self.board.read().get("failed")
        return failed is None or (failed["role"] == role and failed["silent"])

    def check_alive(self) -> Values:
        """Returns the board. Raises RoleFailed if the run has failed or another trainer has taken it over."""
        values = self.board.read()
        self._refuse_broken(values)
        return values

    @property
    def joined(self) -> bool:
        """Whether this role takes part in a stage."""
        return self._incarnation != ""

    def attach(self, other: RunRole) -> Self:
        """Takes part in the stage of `other`. Returns itself."""
        self._incarnation = other._incarnation
        return self

    def _broken(self, values: Values) -> bool:
        return "failed" in values or not self._same_incarnation(values)

    def _same_incarnation(self, values: Values) -> bool:
        return self._incarnation in (values.get("incarnation", ""), *values.get("ended", ()))

    def _refuse_broken(self, values: Values) -> None:
        """Raises RoleFailed if the run has failed or another trainer has taken it over."""
        if not self._same_incarnation(values):
            raise RoleFailed(TRAINER, "another one was started over the same buffer and run.name")
        if "failed" in values:
            raise RoleFailed(values["failed"]["role"], values["failed"]["cause"])

    # ------------------------------------------------------------------ the board

    async def _wait(self, until: Callable[[Values], bool], who: str, whom: str) -> Values:
        """Waits until `until` holds and returns the board. Any change except a heartbeat restarts the deadline.

        Raises SyncError after `deadline_s` without a change, RoleFailed if the run has failed.
        """
        last: Values = {}

        async def poll(deadline: ProgressDeadline) -> tuple[Values | None, object]:
            nonlocal last

            def over(values: Values) -> bool:
                return self._broken(values) or until(values) or _without_beats(values) != deadline.state

            last = values = await self.board.poll(over, deadline.left_s)
            self._refuse_broken(values)
            return values if until(values) else None, _without_beats(values)

        def waiting() -> Waiting:
            explorers = last.get("explorers", {}).items()
            listed = ", ".join(f"{name} {entry.get('status')}" for name, entry in explorers) or "none"
            where = f"the trainer is {last.get('trainer')} at step {last.get('step', 0)}"
            return Waiting(who, whom, f"{where}; explorers: {listed}")

        return await wait_until(poll, waiting, self.deadline_s)

    def _explorer(self, name: str, **entry: object) -> None:
        # A dead explorer stays dead, since its slots have been issued to others.
        self._write(lambda values: values if name in dead_explorers(values) else with_explorer(values, name, **entry))

    def _write(self, change: Callable[[Values], Values]) -> None:
        """Changes the board, unless another trainer has opened it."""

        def allowed(values: Values) -> Values:
            return change(values) if self._incarnation in ("", values.get("incarnation", "")) else values

        self.board.write(allowed)


def live_explorers(values: Values) -> Mapping[str, Mapping[str, Any]]:
    """The explorers on a board that have joined and have neither died nor left."""
    explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
    stopped = RunningStatus.STOPPED.value
    return {name: entry for name, entry in explorers.items() if entry["status"] != stopped}


def dead_explorers(values: Values) -> Mapping[str, str]:
    """The dead explorers on a board, with the cause of each death."""
    return {name: entry["dead"] for name, entry in values.get("explorers", {}).items() if "dead" in entry}


def with_explorer(values: Values, name: str, **entry: object) -> Values:
    """Returns the board with these values in the entry of an explorer."""
    explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
    return {**values, "explorers": {**explorers, name: {**explorers.get(name, {}), **entry}}}


def _with_beat(values: Values, role: str) -> Values:
    beats: Mapping[str, int] = values.get("beats", {})
    return {**values, "beats": {**beats, role: beats.get(role, 0) + 1}}


def _without_beats(values: Values) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "beats"}


def _cause(error: BaseException) -> str:
    """The first cause of an error."""
    cause = first_cause(error)
    return str(cause) if isinstance(cause, TriviumError) else f"{type(cause).__name__}: {cause}"
