"""Synchronizer: a state machine over a Board. Statuses of the roles, published versions, exchanges of weights,
requests for evaluation, heartbeats, failures.

Every way of running shares it: the board is a value in one process, a Ray actor, or a database row. The trainer
publishes, explorers adopt. Every wait has a deadline, and ends when a role that it needs dies.
"""

from __future__ import annotations

import logging
import uuid
from asyncio import CancelledError
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trivium.concurrency import Heartbeat, HeartbeatTracker, ProgressDeadline, Waiting, wait_until
from trivium.errors import ConfigError, RoleFailed, SyncError, TriviumError, first_cause
from trivium.types import TRAINER, RunningStatus, SyncStyle

if TYPE_CHECKING:
    from trivium.board import Board, Values
    from trivium.types import Metrics

_log = logging.getLogger("trivium")

_MAX_REMEMBERED = 64
"""How many ended stages, and how many published versions, the board lists."""
_POLL_S = 60.0
"""Seconds between two checks in a wait that lasts as long as the run."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective exchange of weights whose members have agreed to enter it."""

    number: int
    version: int
    members: tuple[str, ...]
    """The explorers that take part; the trainer is rank 0, member i is rank i + 1."""
    address: str
    """Where the trainer's rendezvous store listens, `host:port`."""


class Synchronizer:
    """Statuses, versions, heartbeats. One object per role, all over the same board."""

    def __init__(
        self,
        board: Board,
        *,
        deadline_s: float,
        style: SyncStyle = SyncStyle.FIXED,
        interval: int = 1,
        collective: bool = False,
        heartbeat_s: float | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.board, self.deadline_s = board, deadline_s
        self.style, self.interval = style, interval
        self.collective = collective
        """Whether weights travel by an exchange that both sides enter, instead of lying somewhere to be fetched."""
        self.settings = dict(settings or {})
        """A digest of each section that trainer and explorers must agree on."""
        self.heartbeat_s = heartbeat_s
        """A role without a heartbeat for so long is dead; None: process handles tell, or one process has all roles."""
        self._incarnation = ""
        """Which stage of which trainer process this role takes part in."""
        self._heartbeat: Heartbeat | None = None

    # ------------------------------------------------------------------ joining and leaving

    def open(self, stage: int = 0, *, last: bool = True) -> None:
        """The trainer begins a stage: clears the state of an earlier trainer and lets explorers join."""
        self._incarnation = uuid.uuid4().hex
        opened: Values = {
            "incarnation": self._incarnation,
            "stage": stage,
            "last": last,
            "settings": self.settings,
            "trainer": RunningStatus.RUNNING.value,
        }

        def begin(values: Values) -> Values:
            # Explorers that still wait for the end of a stage see here that it has ended.
            ended = [*values.get("ended", ()), values["incarnation"]] if values.get("finished") else []
            return {**self._kept(values), **opened, "ended": ended[-_MAX_REMEMBERED:]}

        self.board.write(begin)

    def _kept(self, values: Values) -> Values:
        """The values of the board that are kept from stage to stage."""
        return {}

    async def wait_for_trainer(self, name: str) -> int | None:
        """Waits, as an explorer of another process, for a live trainer with an unfinished stage; returns the stage, or
        None where the run is over.

        Raises SyncError if none appears within the deadline, ConfigError if it runs with other settings.
        """
        first = self.board.read()
        beats, previous = first.get("beats", {}).get(TRAINER), self._incarnation

        def over(values: Values) -> bool:
            return bool(values.get("finished") and values.get("last")) and values.get("settings") == self.settings

        def ready(values: Values) -> bool:
            # The status of a dead trainer stays RUNNING; only a new beat shows that it is alive.
            alive = self.heartbeat_s is None or values.get("beats", {}).get(TRAINER) != beats
            started = values.get("incarnation", previous) != previous
            return alive and started and not values.get("finished") and "failed" not in values

        values = await self.board.poll(lambda v: ready(v) or over(v), self.deadline_s)
        if over(values):
            return None
        if ready(values) and values.get("settings") != self.settings:
            raise ConfigError(
                f"explore with this config, as {name!r}",
                f"the trainer runs another one: {', '.join(self._differing(values['settings']))} differ(s)",
                "give both the same file and the same overrides (what may differ is `free` in docs/config.md, "
                "`schedule.steps` excepted)",
            )
        if not ready(values):
            raise SyncError(
                f"explorer {name!r} waits for a trainer",
                f"none appeared within {self.deadline_s:.0f} s",
                "start one (`run.mode=train`) over the same buffer and under the same run.name",
            )
        self._incarnation = values["incarnation"]
        return values["stage"]

    def _differing(self, settings: Mapping[str, str]) -> list[str]:
        """The sections whose digests differ between the trainer's `settings` and this role's."""
        return sorted({name for name, _ in settings.items() ^ self.settings.items()})

    async def join(self, name: str) -> bool:
        """Enters an explorer into the run, once an earlier one of that name is dead and reaped. False where the stage
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
            # It loads the newest published version; if there is none yet, the trainer publishes the first one unasked.
            entry = {"status": RunningStatus.REQUIRE_SYNC.value, "version": None, "life": life, "idle": True}
            # The beat tells roles that watched the silence of the earlier explorer that this is another one.
            return {**_with_beat(values, name), "explorers": {**values.get("explorers", {}), name: entry}}

        await self.board.poll(lambda v: free(v) or self._broken(v), 3 * (self.heartbeat_s or 10.0))
        self._write(enter)
        values = self.check_alive()
        if values.get("finished") or self._incarnation in values.get("ended", ()):
            return False
        if values.get("explorers", {}).get(name, {}).get("life") != life:
            raise SyncError(
                f"join the run as explorer {name!r}",
                "another explorer of that name is in it",
                "give each its own run.explorer, or leave it out",
            )
        _log.info("explorer %s joins", name)
        return True

    def finish(self) -> None:
        """The trainer has finished the stage: explorers may leave."""
        self._write(lambda values: {**values, "trainer": RunningStatus.STOPPED.value, "finished": True})

    async def wait_finished(self, name: str) -> None:
        """Waits until the trainer has finished the stage, for as long as it lives."""

        def over(values: Values) -> bool:
            return bool(values.get("finished")) or self._incarnation in values.get("ended", ())

        values: Values = {}
        while not over(values):
            values = await self.board.poll(lambda v: over(v) or self._broken(v), _POLL_S)
            self._refuse_broken(values)
        if values.get("finished"):
            self.set_explorer_status(name, RunningStatus.STOPPED)

    def set_trainer_status(self, status: RunningStatus) -> None:
        self._write(lambda values: {**values, "trainer": status.value})

    def report_step(self, step: int) -> None:
        """The trainer has taken a step: progress for every role that waits for it."""
        self._write(lambda values: {**values, "step": step})

    def set_explorer_status(self, name: str, status: RunningStatus) -> None:
        self._explorer(name, status=status.value)

    @property
    def trainer_status(self) -> RunningStatus:
        """STOPPED until a trainer opens the board."""
        return RunningStatus(self.board.read().get("trainer", RunningStatus.STOPPED))

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """How many live explorers are in each status."""
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
        """Marks the role of this block as dead when it ends by an error, so that no other role waits for it."""
        try:
            yield
        except BaseException as error:
            # An explorer that is cancelled from outside leaves, and the run continues even without others.
            stopped = isinstance(error, CancelledError | KeyboardInterrupt)
            self.mark_dead(role, "it was stopped" if stopped else _cause(error), replaced=stopped)
            raise

    def mark_dead(self, role: str, cause: str, *, replaced: bool = False, beats: int | None = None) -> None:
        """Marks a role as dead. The run goes on without an explorer while another one lives, or where a new one takes
        its place (`replaced`); otherwise the run fails. With `beats`, only if the role's count of beats is unchanged.
        """

        def change(values: Values) -> Values:
            explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
            if beats is not None and values.get("beats", {}).get(role, 0) != beats:
                return values
            if role in explorers:
                if role not in live_explorers(values):
                    return values
                values = _with_explorer(values, role, status=RunningStatus.STOPPED.value, dead=cause, reaped=False)
                evaluation = values.get("evaluation")
                if evaluation is not None and evaluation["by"] == role and evaluation["metrics"] is None:
                    values = {**values, "evaluation": {**evaluation, "by": None}}
                if replaced or live_explorers(values):
                    return values
            ended = {"trainer": RunningStatus.STOPPED.value} if role == TRAINER else {}
            return {"failed": {"role": role, "cause": cause}, **values, **ended}

        self._write(change)

    async def monitor(self, role: str, reap: Callable[[str], Awaitable[object]] | None = None) -> None:
        """Watches the other roles until it is cancelled; `reap` is awaited for each explorer that died.

        Raises RoleFailed if the run has failed, if this role was marked dead, or if its heartbeat thread stopped.
        """

        def unreaped(values: Values) -> list[str]:
            return [name for name in dead_explorers(values) if reap and not values["explorers"][name]["reaped"]]

        patience_s = 1.0 if self.heartbeat_s is None else self.heartbeat_s / 4
        trackers = defaultdict[str, HeartbeatTracker](lambda: HeartbeatTracker((self.heartbeat_s or 0.0) / 2))
        while True:
            values = await self.board.poll(lambda v: self._broken(v) or bool(unreaped(v)), patience_s)
            self._refuse_broken(values)
            if role in dead_explorers(values):
                raise RoleFailed(role, f"it counts as dead: {dead_explorers(values)[role]}")
            if self._heartbeat is not None and (error := self._heartbeat.error) is not None:
                raise RoleFailed(role, f"its heartbeat stopped: {_cause(error)}") from error
            for name in unreaped(values):
                assert reap is not None
                await reap(name)
                self._write(lambda values, name=name: _with_explorer(values, name, reaped=True))
                _log.warning("explorer %s is gone: %s", name, dead_explorers(values)[name])
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
                self.mark_dead(peer, f"no heartbeat for {heartbeat_s} s", beats=beats)

    def check_alive(self) -> Values:
        """The board. Raises RoleFailed where the run is over for a reason other than being finished."""
        values = self.board.read()
        self._refuse_broken(values)
        return values

    @property
    def joined(self) -> bool:
        """Whether this role takes part in a stage."""
        return self._incarnation != ""

    def attach(self, other: Synchronizer) -> Synchronizer:
        """Joins the stage of `other`; returns itself."""
        self._incarnation = other._incarnation
        return self

    def _broken(self, values: Values) -> bool:
        return "failed" in values or not self._same_incarnation(values)

    def _same_incarnation(self, values: Values) -> bool:
        return self._incarnation in (values.get("incarnation", ""), *values.get("ended", ()))

    def _refuse_broken(self, values: Values) -> None:
        """Raises RoleFailed if this run is over for a reason other than being finished."""
        if not self._same_incarnation(values):
            raise RoleFailed(TRAINER, "another one was started over the same buffer and run.name")
        if "failed" in values:
            raise RoleFailed(values["failed"]["role"], values["failed"]["cause"])

    # ------------------------------------------------------------------ versions

    def publish(self, version: int, held: Sequence[int] = ()) -> None:
        """Publishes `version`: it was delivered, or can be fetched. Versions only grow.

        Of the earlier ones, only those in `held` can still be fetched; where `held` is empty, the last few.
        """

        def change(values: Values) -> Values:
            versions: tuple[int, ...] = tuple(values.get("versions", ()))
            if versions and version < versions[-1]:
                raise SyncError(
                    f"publish version {version}",
                    f"version {versions[-1]} is published already",
                    "publish versions in order",
                )
            before = [v for v in versions if v != version and (v in held or not held)]
            # One write for both: an explorer that adopts the version must not see the trainer still in REQUIRE_SYNC.
            newest = [*before[-_MAX_REMEMBERED:], version]
            return {**values, "versions": newest, "trainer": RunningStatus.RUNNING.value}

        self._write(change)

    @property
    def published(self) -> tuple[int, ...]:
        """The versions that can be fetched, oldest first."""
        return tuple(self.board.read().get("versions", ()))

    def request_weights(self, name: str, requested: bool = True, *, idle: bool = False) -> None:
        """Sets or (`requested=False`) clears an explorer's request for newer weights; `idle`: it requests them only
        because it has no free slot."""
        status = RunningStatus.REQUIRE_SYNC if requested else RunningStatus.RUNNING
        self._explorer(name, status=status.value, idle=idle)

    async def next_version(self, name: str, loaded: int | None, *, newest: bool) -> int:
        """Waits for a version newer than `loaded`: the newest one, or the next.

        With a collective method that is the version of an exchange about to begin.
        """

        def newer(values: Values) -> list[int]:
            return [version for version in self._offered(values) if loaded is None or version > loaded]

        def requested(values: Values) -> bool:
            """Whether the trainer requests a sync, and this explorer does not yet."""
            mine = values.get("explorers", {}).get(name, {}).get("status")
            return (
                self.style is SyncStyle.DYNAMIC_BY_TRAINER
                and values.get("trainer") == RunningStatus.REQUIRE_SYNC.value
                and mine == RunningStatus.RUNNING.value
            )

        while True:
            values = await self._wait(
                lambda values: bool(newer(values)) or requested(values),
                f"explorer {name!r} (version {loaded})",
                "the trainer's next version",
            )
            if versions := newer(values):
                return versions[-1] if newest else versions[0]
            self.request_weights(name)

    def _offered(self, values: Values) -> list[int]:
        if not self.collective:
            return list(values.get("versions", ()))
        exchange = values.get("exchange")
        return [exchange["version"]] if exchange is not None and exchange["members"] is None else []

    def adopted(self, name: str, version: int, *, wants: bool = False) -> None:
        """An explorer has loaded `version`; `wants`: the version admits no slot, so it requests a newer one."""
        status = RunningStatus.REQUIRE_SYNC if wants else RunningStatus.RUNNING
        self._explorer(name, status=status.value, version=version, idle=wants)

    def interval_over(self, steps: float) -> bool:
        """Whether an explorer requests newer weights after `steps` steps' worth of groups with one version."""
        return self.style is SyncStyle.DYNAMIC_BY_EXPLORER and steps >= self.interval

    # ------------------------------------------------------------------ collective exchange

    async def ready_to_nccl_sync(self, role: str, version: int, address: str = "") -> Exchange | None:
        """Waits until the trainer and every live explorer without `version` are ready; None if no explorer is left.

        The trainer gives the `address` (`host:port`) of its rendezvous store. Both sides then enter the exchange.
        """
        if role == TRAINER:
            return await self._open_exchange(version, address)

        entered: list[int] = []

        def enter(values: Values) -> Values:
            exchange = values.get("exchange")
            entered.clear()
            if exchange is None or exchange["version"] != version or exchange["members"] is not None:
                return values  # it begins without this explorer, or was aborted
            if role in dead_explorers(values):
                return values
            entered.append(exchange["number"])
            ready = {**exchange, "ready": sorted({*exchange["ready"], role})}
            return _with_explorer({**values, "exchange": ready}, role, status=RunningStatus.WAITING_SYNC.value)

        self._write(enter)
        self.check_alive()
        if not entered:
            return None
        (number,) = entered
        values = await self._wait(
            lambda v: v["exchange"]["number"] != number or v["exchange"]["members"] is not None,
            f"explorer {role!r}",
            f"the exchange of version {version}",
        )
        agreed = values["exchange"]
        if agreed["number"] != number or role not in agreed["members"]:
            return None
        return Exchange(number, version, tuple(agreed["members"]), agreed["address"])

    async def _open_exchange(self, version: int, address: str) -> Exchange | None:
        def begin(values: Values) -> Values:
            number = values.get("exchange", {"number": 0})["number"] + 1
            opened: Values = {"number": number, "version": version, "ready": [], "members": None, "address": address}
            return {**values, "exchange": opened, "trainer": RunningStatus.WAITING_SYNC.value}

        def agree(values: Values) -> Values:
            exchange = values["exchange"]
            members = [name for name in exchange["ready"] if name in live_explorers(values)]
            return {**values, "exchange": {**exchange, "members": members}, "trainer": RunningStatus.RUNNING.value}

        self._write(begin)
        await self._wait(
            lambda v: bool(live_explorers(v)) and not set(_behind(v, version)) - set(v["exchange"]["ready"]),
            TRAINER,
            f"the explorers to enter the exchange of version {version}",
        )
        self._write(agree)
        exchange = self.check_alive()["exchange"]
        members = tuple(exchange["members"])
        return Exchange(exchange["number"], version, members, address) if members else None

    def abort_reason(self, exchange: Exchange, waited_for: Sequence[str]) -> str:
        """Why an exchange cannot complete: an explorer of `waited_for` is gone, or the trainer has started another
        exchange. Empty while it can. Raises RoleFailed if the run has failed."""
        values = self.check_alive()
        for name in waited_for:
            if name not in live_explorers(values):
                return f"explorer {name!r} is gone: {dead_explorers(values).get(name, 'it stopped')}"
        now = values["exchange"]["number"]
        return f"the trainer has started exchange {now}" if now != exchange.number else ""

    # ------------------------------------------------------------------ evaluation

    async def request_evaluation(self, version: int) -> Metrics:
        """The trainer requests an evaluation of `version` and waits for the metrics of the explorer that runs it."""

        def request(values: Values) -> Values:
            number = values.get("evaluation", {"number": 0})["number"] + 1
            return {**values, "evaluation": {"number": number, "version": version, "by": None, "metrics": None}}

        self._write(request)
        values = await self._wait(
            lambda values: values["evaluation"]["metrics"] is not None, TRAINER, f"an evaluation of version {version}"
        )
        return values["evaluation"]["metrics"]

    async def next_evaluation(self, name: str, answered: int) -> tuple[int, int]:
        """Waits for a request for the version that this explorer has loaded, and claims it; (number, version)."""

        def mine(values: Values) -> bool:
            request = values.get("evaluation")
            loaded = values.get("explorers", {}).get(name, {}).get("version")
            return (
                request is not None
                and request["number"] > answered
                and request["by"] in (None, name)
                and request["metrics"] is None
                and loaded == request["version"]
            )

        def claim(values: Values) -> Values:
            return {**values, "evaluation": {**values["evaluation"], "by": name}} if mine(values) else values

        while True:
            # No deadline: the next evaluation may be hours away.
            values = await self.board.poll(lambda v: mine(v) or self._broken(v), _POLL_S)
            self._refuse_broken(values)
            if mine(values):
                self._write(claim)
                request = self.check_alive()["evaluation"]
                if request["by"] == name:
                    return request["number"], request["version"]

    def answer_evaluation(self, number: int, metrics: Metrics) -> None:
        """An explorer reports the metrics of the evaluation that it claimed."""

        def answer(values: Values) -> Values:
            request = values["evaluation"]
            return {**values, "evaluation": {**request, "metrics": metrics}} if request["number"] == number else values

        self._write(answer)

    # ------------------------------------------------------------------ the board

    async def _wait(self, until: Callable[[Values], bool], who: str, whom: str) -> Values:
        """The board once `until` holds. Any change except a heartbeat restarts the deadline.

        Raises SyncError after `deadline_s` without one, RoleFailed where the run has failed.
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
            return Waiting(who, whom, f"the board says {_without_beats(last)}")

        return await wait_until(poll, waiting, self.deadline_s)

    def _explorer(self, name: str, **entry: object) -> None:
        # A dead explorer stays dead: its slots have been issued to others.
        self._write(lambda values: values if name in dead_explorers(values) else _with_explorer(values, name, **entry))

    def _write(self, change: Callable[[Values], Values]) -> None:
        """Changes the board, unless another trainer has opened it since."""

        def allowed(values: Values) -> Values:
            return change(values) if self._incarnation in ("", values.get("incarnation", "")) else values

        self.board.write(allowed)


def live_explorers(values: Values) -> Mapping[str, Mapping[str, Any]]:
    """The explorers on a board that have joined and have neither died nor left."""
    explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
    stopped = RunningStatus.STOPPED.value
    return {name: entry for name, entry in explorers.items() if entry["status"] != stopped}


def dead_explorers(values: Values) -> Mapping[str, str]:
    """The explorers on a board that died, and the cause of each."""
    return {name: entry["dead"] for name, entry in values.get("explorers", {}).items() if "dead" in entry}


def weights_requested(values: Values, *, idle: bool = True) -> bool:
    """Whether a live explorer requests newer weights; `idle` includes explorers that only lack a free slot."""
    asking = (RunningStatus.REQUIRE_SYNC.value, RunningStatus.WAITING_SYNC.value)
    entries = live_explorers(values).values()
    return any(entry["status"] in asking and (idle or not entry.get("idle")) for entry in entries)


def _with_explorer(values: Values, name: str, **entry: object) -> Values:
    explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
    return {**values, "explorers": {**explorers, name: {**explorers.get(name, {}), **entry}}}


def _with_beat(values: Values, role: str) -> Values:
    beats: Mapping[str, int] = values.get("beats", {})
    return {**values, "beats": {**beats, role: beats.get(role, 0) + 1}}


def _behind(values: Values, version: int) -> list[str]:
    return [name for name, entry in live_explorers(values).items() if entry.get("version") != version]


def _without_beats(values: Values) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "beats"}


def _cause(error: BaseException) -> str:
    """The first cause of an error."""
    cause = first_cause(error)
    return str(cause) if isinstance(cause, TriviumError) else f"{type(cause).__name__}: {cause}"
