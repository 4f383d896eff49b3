"""Synchronizer: a state machine over a Board. Published versions, exchanges of weights, requests for evaluation.

The trainer publishes, explorers adopt. Every wait has a deadline, and ends when a role that it needs dies
(`trivium.foundation.run_role`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trivium.foundation.errors import SyncError
from trivium.foundation.run_role import POLL_S, RunRole, dead_explorers, live_explorers, with_explorer
from trivium.types import TRAINER, RunningStatus, SyncStyle

if TYPE_CHECKING:
    from trivium.foundation.board import Board, Values
    from trivium.types import Draws, Metrics

_MAX_VERSIONS = 64
"""Maximum number of earlier versions that the board lists."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective exchange of weights whose members have agreed to enter it."""

    number: int
    version: int
    members: tuple[str, ...]
    """The explorers that take part; the trainer is rank 0, member i is rank i + 1."""
    address: str
    """The address of the trainer's rendezvous store, `host:port`."""


class Synchronizer(RunRole):
    """Publishes the versions of a run and coordinates the roles that wait for them. One object per role, all over the
    same board."""

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
        super().__init__(board, deadline_s=deadline_s, heartbeat_s=heartbeat_s, settings=settings)
        self.style, self.interval = style, interval
        self.collective = collective
        """Whether both sides enter an exchange to transfer weights, instead of fetching stored weights."""

    # ------------------------------------------------------------------ versions

    def publish(self, version: int, held: Sequence[int] = ()) -> None:
        """Publishes `version` after it was delivered or can be fetched. Versions must increase.

        Of the earlier versions, only those in `held` can still be fetched; if `held` is empty, the last few.
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
            newest = [*before[-_MAX_VERSIONS:], version]
            return {**values, "versions": newest, "trainer": RunningStatus.RUNNING.value}

        self._write(change)

    @property
    def published(self) -> tuple[int, ...]:
        """The versions that can be fetched, oldest first."""
        return tuple(self.board.read().get("versions", ()))

    @property
    def draws(self) -> Draws:
        """The draws of an adaptive curriculum, as the trainer published them last."""
        return self.board.read().get("draws", ())

    def publish_draws(self, draws: Draws) -> None:
        """Publishes the draws of an adaptive curriculum: before the version that admits their slots."""
        self._write(lambda values: {**values, "draws": draws})

    def request_weights(self, name: str, requested: bool = True, *, idle: bool = False) -> None:
        """Sets or (`requested=False`) clears an explorer's request for newer weights. `idle` marks a request that is
        only due to the lack of a free slot."""
        status = RunningStatus.REQUIRE_SYNC if requested else RunningStatus.RUNNING
        self._explorer(name, status=status.value, idle=idle)

    async def next_version(self, name: str, loaded: int | None, *, newest: bool) -> int:
        """Waits for a version newer than `loaded`: the newest one, or the next.

        With a collective method, this is the version of an exchange that is about to begin.
        """

        def newer(values: Values) -> list[int]:
            return [version for version in self._offered(values) if loaded is None or version > loaded]

        def requested(values: Values) -> bool:
            """Whether the trainer requests a sync that this explorer has not requested yet."""
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
        """Records that an explorer has loaded `version`. With `wants`, it requests a newer one, since this one admits
        no slot."""
        status = RunningStatus.REQUIRE_SYNC if wants else RunningStatus.RUNNING
        self._explorer(name, status=status.value, version=version, idle=wants)

    def interval_over(self, steps: float) -> bool:
        """Whether an explorer requests newer weights after the groups of `steps` train steps with one version."""
        return self.style is SyncStyle.DYNAMIC_BY_EXPLORER and steps >= self.interval

    # ------------------------------------------------------------------ collective exchange

    async def ready_to_nccl_sync(self, role: str, version: int, address: str = "") -> Exchange | None:
        """Waits until the trainer and every live explorer without `version` are ready. Returns None if no explorer is
        left.

        The trainer gives the `address` (`host:port`) of its rendezvous store. Both sides then enter the exchange.
        """
        if role == TRAINER:
            return await self._open_exchange(version, address)

        entered: list[int] = []

        def enter(values: Values) -> Values:
            exchange = values.get("exchange")
            # The board calls this again if another process has written in between.
            entered.clear()
            if exchange is None or exchange["version"] != version or exchange["members"] is not None:
                return values  # the exchange began without this explorer or was aborted
            if role in dead_explorers(values):
                return values
            entered.append(exchange["number"])
            ready = {**exchange, "ready": sorted({*exchange["ready"], role})}
            return with_explorer({**values, "exchange": ready}, role, status=RunningStatus.WAITING_SYNC.value)

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

    def was_exchanged(self, version: int) -> bool:
        """Whether explorers entered the last exchange of weights, and it was one of `version`."""
        exchange = self.check_alive().get("exchange")
        return exchange is not None and exchange["version"] == version and bool(exchange["members"])

    def abort_reason(self, exchange: Exchange, waited_for: Sequence[str]) -> str:
        """Returns why an exchange cannot complete: an explorer of `waited_for` has ended, or the trainer has started
        another exchange. Empty while it can complete. Raises RoleFailed if the run has failed."""
        values = self.check_alive()
        for name in waited_for:
            if name not in live_explorers(values):
                return f"explorer {name!r} has ended: {dead_explorers(values).get(name, 'it stopped')}"
        now = values["exchange"]["number"]
        return f"the trainer has started exchange {now}" if now != exchange.number else ""

    # ------------------------------------------------------------------ evaluation

    async def request_evaluation(self, version: int) -> Metrics:
        """Requests an evaluation of `version` as the trainer, and waits for the metrics of the explorer that runs
        it."""

        def request(values: Values) -> Values:
            number = values.get("evaluation", {"number": 0})["number"] + 1
            return {**values, "evaluation": {"number": number, "version": version, "by": None, "metrics": None}}

        self._write(request)
        values = await self._wait(
            lambda values: values["evaluation"]["metrics"] is not None, TRAINER, f"an evaluation of version {version}"
        )
        return values["evaluation"]["metrics"]

    async def next_evaluation(self, name: str, answered: int) -> tuple[int, int]:
        """Waits for a request for the version that this explorer has loaded, and claims it. Returns (number,
        version)."""

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
            values = await self.board.poll(lambda v: mine(v) or self._broken(v), POLL_S)
            self._refuse_broken(values)
            if mine(values):
                self._write(claim)
                request = self.check_alive()["evaluation"]
                if request["by"] == name:
                    return request["number"], request["version"]

    def answer_evaluation(self, number: int, metrics: Metrics) -> None:
        """Reports the metrics of the evaluation that an explorer claimed."""

        def answer(values: Values) -> Values:
            request = values["evaluation"]
            return {**values, "evaluation": {**request, "metrics": metrics}} if request["number"] == number else values

        self._write(answer)


def weights_requested(values: Values, *, idle: bool = True) -> bool:
    """Whether a live explorer requests newer weights; `idle` includes explorers that only lack a free slot."""
    asking = (RunningStatus.REQUIRE_SYNC.value, RunningStatus.WAITING_SYNC.value)
    entries = live_explorers(values).values()
    return any(entry["status"] in asking and (idle or not entry.get("idle")) for entry in entries)


def _behind(values: Values, version: int) -> list[str]:
    return [name for name, entry in live_explorers(values).items() if entry.get("version") != version]
