"""Synchronizer: who is where, which versions exist, who waits for whom, who died; a state machine over a Board.

Every way of running shares it: the board is a value in one process, a Ray actor, or a database row. The trainer
publishes, explorers adopt; nobody waits without a deadline, and nobody waits for the dead.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from trivium.errors import ConfigError, RoleFailed, SyncError, TriviumError, first_cause

if TYPE_CHECKING:
    from trivium.board import Board, Values
    from trivium.types import Metrics

_log = logging.getLogger("trivium")

_REMEMBERED = 64
TRAINER = "trainer"
"""The role name of the trainer; any other name on a board is an explorer's."""


class RunningStatus(StrEnum):
    """What a role is doing, as the other side sees it."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    """It wants newer weights exchanged: an explorer without a free slot, or a trainer whose interval is over."""
    WAITING_SYNC = "waiting_sync"
    """It stands at a collective exchange and cannot go on without the other side."""
    STOPPED = "stopped"


class SyncMethod(StrEnum):
    """How weights travel."""

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SyncStyle(StrEnum):
    """Who decides when weights travel."""

    FIXED = "fixed"
    DYNAMIC_BY_TRAINER = "dynamic_by_trainer"
    DYNAMIC_BY_EXPLORER = "dynamic_by_explorer"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective exchange of weights that everybody has agreed to enter."""

    number: int
    version: int
    members: tuple[str, ...]
    """The explorers that take part; the trainer is rank 0, member i is rank i + 1."""
    address: str
    """Where the trainer's rendezvous store listens, `host:port`."""


class Synchronizer:
    """Statuses, versions, heartbeats. One object per role, all over the same board."""

    def __init__(
        self, board: Board, *, deadline_s: float, style: SyncStyle = SyncStyle.FIXED, interval: int = 1,
        collective: bool = False, heartbeat_s: float | None = None, settings: str = "",
    ) -> None:  # fmt: skip
        self.board, self.deadline_s = board, deadline_s
        self.style, self.interval = style, interval
        self.collective = collective
        """Whether weights travel by an exchange that both sides enter, instead of lying somewhere to be fetched."""
        self.settings = settings
        """A digest of what trainer and explorers must agree on."""
        self.heartbeat_s = heartbeat_s
        """A role is dead that has not beaten for so long; None where process handles tell, or one process holds all."""
        self._incarnation = ""
        self._heart_failed: Exception | None = None

    # ------------------------------------------------------------------ coming and going

    def open(self, stage: int = 0, *, last: bool = True) -> None:
        """The trainer begins a stage: whatever an earlier life left on the board is gone, explorers may join."""
        self._incarnation = uuid.uuid4().hex
        opened: Values = {
            "incarnation": self._incarnation, "stage": stage, "last": last, "settings": self.settings,
            "trainer": RunningStatus.RUNNING.value,
        }  # fmt: skip

        def begin(values: Values) -> Values:
            # Who still waits for the end of a stage sees here that it came.
            ended = [*values.get("ended", ()), values["incarnation"]] if values.get("finished") else []
            return {**opened, "ended": ended[-_REMEMBERED:]}

        self.board.write(begin)

    async def meet(self, who: str) -> int | None:
        """An explorer of another process looks for a trainer that is alive and has begun a stage it has not finished;
        returns the stage, or None where the run has come to its end.

        Raises SyncError if none comes within the deadline, ConfigError if one with other settings does.
        """
        first = self.board.read()
        beat, left = first.get("beats", {}).get(TRAINER), self._incarnation

        def over(values: Values) -> bool:
            return bool(values.get("finished") and values.get("last")) and values.get("settings") == self.settings

        def ready(values: Values) -> bool:
            # What a dead trainer left on the board says RUNNING for ever; a beat tells the living.
            alive = self.heartbeat_s is None or values.get("beats", {}).get(TRAINER) != beat
            begun = values.get("incarnation", left) != left
            return alive and begun and not values.get("finished") and "failed" not in values

        values = await self.board.poll(lambda v: ready(v) or over(v), self.deadline_s)
        if over(values):
            return None
        if ready(values) and values.get("settings") != self.settings:
            raise ConfigError(
                f"explore with this config, as {who!r}", "the trainer runs another one",
                "give both the same file and the same overrides (what may differ is `free` in docs/config.md, "
                "`schedule.steps` excepted)",
            )  # fmt: skip
        if not ready(values):
            raise SyncError(
                f"explorer {who!r} waits for a trainer", f"none came within {self.deadline_s:.0f} s",
                "start one (`run.mode=train`) over the same buffer and under the same run.name",
            )  # fmt: skip
        self._incarnation = values["incarnation"]
        return values["stage"]

    async def join(self, name: str) -> bool:
        """An explorer takes its place beside the trainer, once an earlier one of that name is dead and buried. False
        where the stage came to its end meanwhile.

        Raises SyncError if that one is alive.
        """
        life, stopped = uuid.uuid4().hex, RunningStatus.STOPPED.value

        def free(values: Values) -> bool:
            earlier = values.get("explorers", {}).get(name)
            return earlier is None or (earlier["status"] == stopped and bool(earlier.get("buried", True)))

        def enter(values: Values) -> Values:
            if not free(values):
                return values
            entry = {"status": RunningStatus.REQUIRE_SYNC.value, "version": None, "life": life}
            # The beat is for whoever has just seen the earlier one fall silent and must not take this one for it.
            return {**_with_beat(values, name), "explorers": {**values.get("explorers", {}), name: entry}}

        await self.board.poll(lambda v: free(v) or self._broken(v), 3 * (self.heartbeat_s or 10.0))
        self._write(enter)
        values = self.check_alive()
        if values.get("finished") or self._incarnation in values.get("ended", ()):
            return False
        if values.get("explorers", {}).get(name, {}).get("life") != life:
            raise SyncError(
                f"join the run as explorer {name!r}", "another one of that name is in it",
                "give each its own run.explorer, or leave it out",
            )  # fmt: skip
        _log.info("explorer %s joins", name)
        return True

    def finish(self) -> None:
        """The trainer is done: explorers may go."""
        self._write(lambda values: {**values, "trainer": RunningStatus.STOPPED.value, "finished": True})

    async def finished(self, name: str) -> None:
        """Waits until the trainer is done, for as long as it lives."""

        def over(values: Values) -> bool:
            return bool(values.get("finished")) or self._incarnation in values.get("ended", ())

        values: Values = {}
        while not over(values):
            values = await self.board.poll(lambda v: over(v) or self._broken(v), 60.0)
            self._refuse_broken(values)
        if values.get("finished"):
            self.set_explorer_status(name, RunningStatus.STOPPED)

    def set_trainer_status(self, status: RunningStatus) -> None:
        self._write(lambda values: {**values, "trainer": status.value})

    def trained(self, step: int) -> None:
        """The trainer says that it has taken a step: whoever waits for it sees that it gets on."""
        self._write(lambda values: {**values, "step": step})

    def set_explorer_status(self, name: str, status: RunningStatus) -> None:
        self._explorer(name, status=status.value)

    @property
    def trainer_status(self) -> RunningStatus:
        """STOPPED until the trainer has said otherwise."""
        return RunningStatus(self.board.read().get("trainer", RunningStatus.STOPPED))

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """How many living explorers are in each status."""
        statuses = [entry["status"] for entry in living(self.board.read()).values()]
        return {status: statuses.count(status.value) for status in RunningStatus}

    # ------------------------------------------------------------------ life and death

    @contextmanager
    def heart(self, role: str) -> Generator[None]:
        """Beats for this role while the block runs. A thread beats, so that a busy event loop is not a death; should
        it fail, `tend` says so."""
        if self.heartbeat_s is None:
            yield
            return
        stopped, period_s = threading.Event(), self.heartbeat_s / 4

        def work() -> None:
            try:
                while not stopped.is_set():
                    self._write(lambda values: _with_beat(values, role))
                    stopped.wait(period_s)
            except Exception as error:  # nobody awaits a thread
                self._heart_failed = error

        thread = threading.Thread(target=work, name=f"heart-{role}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join(self.heartbeat_s)

    @contextmanager
    def obituary(self, role: str) -> Generator[None]:
        """Leaves word on the board when the role of this block ends by an error, so that nobody waits for it."""
        try:
            yield
        except BaseException as error:
            # An explorer that is asked to stop leaves; that is no reason to end the run, whoever else explores.
            asked_to = isinstance(error, CancelledError | KeyboardInterrupt)
            self.report_death(role, "it was stopped" if asked_to else _cause(error), replaced=asked_to)
            raise

    def report_death(self, role: str, cause: str, *, replaced: bool = False, beats: int | None = None) -> None:
        """Says on the board that a role has died. The death of an explorer is borne while another one lives, or while
        a new one takes its place (`replaced`); any other ends the run. With `beats`, only if it has not beaten since.
        """

        def change(values: Values) -> Values:
            explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
            if beats is not None and values.get("beats", {}).get(role, 0) != beats:
                return values
            if role in explorers:
                if role not in living(values):
                    return values
                values = _with_explorer(values, role, status=RunningStatus.STOPPED.value, dead=cause, buried=False)
                evaluation = values.get("evaluation")
                if evaluation is not None and evaluation["by"] == role and evaluation["metrics"] is None:
                    values = {**values, "evaluation": {**evaluation, "by": None}}
                if replaced or living(values):
                    return values
            return {"failed": {"role": role, "cause": cause}, **values}

        self._write(change)

    async def tend(self, role: str, bury: Callable[[str], Awaitable[object]] | None = None) -> None:
        """Watches the other roles until it is cancelled; `bury` is awaited for each explorer that died.

        Raises RoleFailed for a death that the run cannot bear, and where this role itself counts as dead.
        """

        def to_bury(values: Values) -> list[str]:
            return [name for name in dead(values) if bury and not values["explorers"][name]["buried"]]

        pulse = _Pulse(self.heartbeat_s) if self.heartbeat_s is not None else None
        patience_s = 1.0 if self.heartbeat_s is None else self.heartbeat_s / 4
        while True:
            values = await self.board.poll(lambda v: self._broken(v) or bool(to_bury(v)), patience_s)
            self._refuse_broken(values)
            if role in dead(values):
                raise RoleFailed(role, f"it counts as dead: {dead(values)[role]}")
            if self._heart_failed is not None:
                raise RoleFailed(role, f"its heart stopped: {_cause(self._heart_failed)}") from self._heart_failed
            for name in to_bury(values):
                assert bury is not None
                await bury(name)
                self._write(lambda values, name=name: _with_explorer(values, name, buried=True))
                _log.warning("explorer %s is gone: %s", name, dead(values)[name])
            for peer, beats in pulse.silent(values, role) if pulse is not None else ():
                self.report_death(peer, f"no heartbeat for {self.heartbeat_s} s", beats=beats)

    def check_alive(self) -> Values:
        """The board. Raises RoleFailed where the run is over for a reason other than being finished."""
        values = self.board.read()
        self._refuse_broken(values)
        return values

    def beside(self, other: Synchronizer) -> Synchronizer:
        """This one, taking part in the same life of the run as `other`."""
        self._incarnation = other._incarnation
        return self

    def _broken(self, values: Values) -> bool:
        return "failed" in values or not self._same_life(values)

    def _same_life(self, values: Values) -> bool:
        return self._incarnation in (values.get("incarnation", ""), *values.get("ended", ()))

    def _refuse_broken(self, values: Values) -> None:
        """Raises RoleFailed if this run is over for a reason other than being finished."""
        if not self._same_life(values):
            raise RoleFailed(TRAINER, "another one was started over the same buffer and run.name")
        if "failed" in values:
            raise RoleFailed(values["failed"]["role"], values["failed"]["cause"])

    # ------------------------------------------------------------------ versions

    def publish(self, version: int, held: Sequence[int] = ()) -> None:
        """Says that `version` has been delivered, or lies where it can be fetched. Versions only grow.

        Of those published before, what is not among the `held` ones is gone; nothing said, the last few are kept.
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
            return {**values, "versions": [*before[-_REMEMBERED:], version]}

        self._write(change)

    @property
    def published(self) -> tuple[int, ...]:
        """The versions that can be had, oldest first."""
        return tuple(self.board.read().get("versions", ()))

    def ask(self, name: str, wants: bool) -> None:
        """An explorer says whether it wants newer weights."""
        self.set_explorer_status(name, RunningStatus.REQUIRE_SYNC if wants else RunningStatus.RUNNING)

    def require(self, name: str) -> None:
        """An explorer says that it wants newer weights."""
        self.ask(name, True)

    async def next_version(self, name: str, loaded: int | None, *, newest: bool) -> int:
        """Waits for something newer than `loaded` that can be had; the newest of it, or the next one.

        With a collective method that is the version of an exchange about to begin.
        """
        newer: list[int] = []

        def look(values: Values) -> bool:
            newer[:] = [v for v in self._offered(values) if loaded is None or v > loaded]
            return bool(newer)

        def answers(values: Values) -> bool:
            """The trainer's interval is over and it asks for an explorer at a sync point; here is one."""
            mine = values.get("explorers", {}).get(name, {}).get("status")
            return (
                self.style is SyncStyle.DYNAMIC_BY_TRAINER
                and values.get("trainer") == RunningStatus.REQUIRE_SYNC.value
                and mine == RunningStatus.RUNNING.value
            )

        while True:
            await self._wait(
                lambda values: look(values) or answers(values),
                f"explorer {name!r} (version {loaded})", "the trainer's next version",
            )  # fmt: skip
            if newer:
                return newer[-1] if newest else newer[0]
            self.require(name)

    def _offered(self, values: Values) -> list[int]:
        if not self.collective:
            return list(values.get("versions", ()))
        exchange = values.get("exchange")
        return [exchange["version"]] if exchange is not None and exchange["members"] is None else []

    def adopted(self, name: str, version: int, *, wants: bool = False) -> None:
        """An explorer says that it now plays with `version`; `wants`: it still has nothing to play, and wants newer."""
        status = RunningStatus.REQUIRE_SYNC if wants else RunningStatus.RUNNING
        self._explorer(name, status=status.value, version=version)

    def interval_over(self, steps: float) -> bool:
        """Whether an explorer that played so many steps' worth of groups with the same weights asks for newer ones."""
        return self.style is SyncStyle.DYNAMIC_BY_EXPLORER and steps >= self.interval

    # ------------------------------------------------------------------ collective exchange

    async def ready_to_nccl_sync(self, role: str, version: int, address: str = "") -> Exchange | None:
        """Waits until the trainer and every living explorer that lacks `version` stand ready; None if no explorer does.

        The trainer says at which `address` (`host:port`) it is met. Both sides then enter the exchange.
        """
        if role == TRAINER:
            return await self._gather(version, address)

        entered: list[int] = []

        def stand(values: Values) -> Values:
            exchange = values.get("exchange")
            entered.clear()
            if exchange is None or exchange["version"] != version or exchange["members"] is not None:
                return values  # it was agreed upon without this explorer, or given up
            if role in dead(values):
                return values
            entered.append(exchange["number"])
            ready = {**exchange, "ready": sorted({*exchange["ready"], role})}
            return _with_explorer({**values, "exchange": ready}, role, status=RunningStatus.WAITING_SYNC.value)

        self._write(stand)
        self.check_alive()
        if not entered:
            return None
        (number,) = entered
        values = await self._wait(
            lambda v: v["exchange"]["number"] != number or v["exchange"]["members"] is not None,
            f"explorer {role!r}", f"the exchange of version {version}",
        )  # fmt: skip
        agreed = values["exchange"]
        if agreed["number"] != number or role not in agreed["members"]:
            return None
        return Exchange(number, version, tuple(agreed["members"]), agreed["address"])

    async def _gather(self, version: int, address: str) -> Exchange | None:
        def begin(values: Values) -> Values:
            number = values.get("exchange", {"number": 0})["number"] + 1
            opened: Values = {"number": number, "version": version, "ready": [], "members": None, "address": address}
            return {**values, "exchange": opened, "trainer": RunningStatus.WAITING_SYNC.value}

        def agree(values: Values) -> Values:
            exchange = values["exchange"]
            members = [name for name in exchange["ready"] if name in living(values)]
            return {**values, "exchange": {**exchange, "members": members}, "trainer": RunningStatus.RUNNING.value}

        self._write(begin)
        await self._wait(
            lambda v: bool(living(v)) and not set(_behind(v, version)) - set(v["exchange"]["ready"]),
            TRAINER, f"the explorers to enter the exchange of version {version}",
        )  # fmt: skip
        self._write(agree)
        exchange = self.check_alive()["exchange"]
        members = tuple(exchange["members"])
        return Exchange(exchange["number"], version, members, address) if members else None

    def broken(self, exchange: Exchange, waited_for: Sequence[str]) -> str:
        """Why an exchange under way will not be finished: one of those `waited_for` is gone, or the trainer has begun
        another. Empty while it may be. Raises RoleFailed where the run is over."""
        values = self.check_alive()
        for name in waited_for:
            if name not in living(values):
                return f"explorer {name!r} is gone: {dead(values).get(name, 'it stopped')}"
        now = values["exchange"]["number"]
        return f"the trainer has begun exchange {now}" if now != exchange.number else ""

    # ------------------------------------------------------------------ evaluation

    async def evaluation(self, version: int) -> Metrics:
        """The trainer asks for an evaluation of `version` and waits for the answer of whichever explorer plays it."""

        def ask(values: Values) -> Values:
            number = values.get("evaluation", {"number": 0})["number"] + 1
            return {**values, "evaluation": {"number": number, "version": version, "by": None, "metrics": None}}

        self._write(ask)
        values = await self._wait(
            lambda values: values["evaluation"]["metrics"] is not None, TRAINER, f"an evaluation of version {version}"
        )
        return values["evaluation"]["metrics"]

    async def next_evaluation(self, name: str, answered: int) -> tuple[int, int]:
        """Waits for an evaluation that this explorer can play, its version being loaded; (number, version), claimed."""

        def mine(values: Values) -> bool:
            asked = values.get("evaluation")
            loaded = values.get("explorers", {}).get(name, {}).get("version")
            return (
                asked is not None and asked["number"] > answered and asked["by"] in (None, name)
                and asked["metrics"] is None and loaded == asked["version"]
            )  # fmt: skip

        def claim(values: Values) -> Values:
            return {**values, "evaluation": {**values["evaluation"], "by": name}} if mine(values) else values

        while True:
            # For as long as the run lives: there may be nothing to evaluate for hours.
            values = await self.board.poll(lambda v: mine(v) or self._broken(v), 60.0)
            self._refuse_broken(values)
            if mine(values):
                self._write(claim)
                asked = self.check_alive()["evaluation"]
                if asked["by"] == name:
                    return asked["number"], asked["version"]

    def answer_evaluation(self, number: int, metrics: Metrics) -> None:
        """An explorer gives the numbers of the evaluation that it claimed."""

        def answer(values: Values) -> Values:
            asked = values["evaluation"]
            return {**values, "evaluation": {**asked, "metrics": metrics}} if asked["number"] == number else values

        self._write(answer)

    # ------------------------------------------------------------------ the board

    async def _wait(self, until: Callable[[Values], bool], who: str, whom: str) -> Values:
        """The board once `until` holds. Any change but a heartbeat counts as getting on; without one for `deadline_s`
        SyncError says who waited for whom."""
        since = last = time.monotonic()
        seen = _progress(self.board.read())

        def over(values: Values) -> bool:
            return self._broken(values) or until(values) or _progress(values) != seen

        while True:
            values = await self.board.poll(over, max(0.0, last + self.deadline_s - time.monotonic()))
            self._refuse_broken(values)
            if until(values):
                return values
            if _progress(values) != seen:
                seen, last = _progress(values), time.monotonic()
            elif time.monotonic() >= last + self.deadline_s:
                now = time.monotonic()
                raise SyncError(
                    f"{who} waits for {whom}",
                    f"waiting for {now - since:.0f} s, nothing happened for {now - last:.0f} s; the board says {seen}",
                    "look at the log of the one waited for; raise sync.deadline_s if it is only slow",
                )

    def _explorer(self, name: str, **entry: Any) -> None:
        # The dead stay dead, whatever they say: their slots are played by others by now.
        self._write(lambda values: values if name in dead(values) else _with_explorer(values, name, **entry))

    def _write(self, change: Callable[[Values], Values]) -> None:
        """Changes the board, unless another trainer has begun on it: then it is no longer this role's to change."""

        def allowed(values: Values) -> Values:
            return change(values) if self._incarnation in ("", values.get("incarnation", "")) else values

        self.board.write(allowed)


class _Pulse:
    """Notices hearts that have stopped. It compares beats, not clocks: machines disagree on the time."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._seen: dict[str, tuple[int, float]] = {}
        """What each role's count of beats was, and since when."""
        self._looked = time.monotonic()

    def silent(self, values: Values, role: str) -> list[tuple[str, int]]:
        """The roles, `role` aside, that have not beaten for too long, and how often they have."""
        now = time.monotonic()
        if now - self._looked > self._heartbeat_s / 2:
            self._seen.clear()  # whoever did not look, or could not, has nothing to say about others
        self._looked = now
        silent: list[tuple[str, int]] = []
        peers = [*living(values), *([] if values.get("finished") else [TRAINER])]
        for peer in (peer for peer in peers if peer != role):
            beats = values.get("beats", {}).get(peer, 0)
            count, since = self._seen.get(peer, (None, now))
            if count != beats:
                self._seen[peer] = (beats, now)
            elif now - since > self._heartbeat_s:
                silent.append((peer, beats))
        return silent


def living(values: Values) -> Mapping[str, Mapping[str, Any]]:
    """The explorers on a board that joined and have neither died nor gone."""
    explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
    stopped = RunningStatus.STOPPED.value
    return {name: entry for name, entry in explorers.items() if entry["status"] != stopped}


def dead(values: Values) -> Mapping[str, str]:
    """Explorers that died, and of what."""
    return {name: entry["dead"] for name, entry in values.get("explorers", {}).items() if "dead" in entry}


def wanted(values: Values) -> bool:
    """Whether a living explorer asks for newer weights."""
    asking = (RunningStatus.REQUIRE_SYNC.value, RunningStatus.WAITING_SYNC.value)
    return any(entry["status"] in asking for entry in living(values).values())


def _with_explorer(values: Values, name: str, **entry: Any) -> Values:
    explorers: Mapping[str, Mapping[str, Any]] = values.get("explorers", {})
    return {**values, "explorers": {**explorers, name: {**explorers.get(name, {}), **entry}}}


def _with_beat(values: Values, role: str) -> Values:
    beats: Mapping[str, int] = values.get("beats", {})
    return {**values, "beats": {**beats, role: beats.get(role, 0) + 1}}


def _behind(values: Values, version: int) -> list[str]:
    return [name for name, entry in living(values).items() if entry.get("version") != version]


def _progress(values: Values) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "beats"}


def _cause(error: BaseException) -> str:
    """What went wrong first, in one line per part."""
    cause = first_cause(error)
    return str(cause) if isinstance(cause, TriviumError) else f"{type(cause).__name__}: {cause}"
