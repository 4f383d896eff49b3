"""Publisher: when the trainer's weights are offered to explorers; which rollouts of earlier sessions count."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trivium.foundation.run_role import live_explorers
from trivium.synchronizer import weights_requested
from trivium.types import RunningStatus, SyncStyle, capabilities_of

if TYPE_CHECKING:
    from trivium.checkpoint.background import BackgroundSaver
    from trivium.foundation.board import Values
    from trivium.protocols import Buffer, TrainEngine, WeightChannel
    from trivium.schedule import Schedule
    from trivium.synchronizer import Synchronizer

T = TypeVar("T")

_log = logging.getLogger("trivium")
_GRACE_S = 0.2
"""How long a trainer waits for groups before an explorer may be given weights ahead of `sync.interval`."""


@dataclass
class Publisher:
    """Offers versions of the policy to the channel and publishes those that it delivers."""

    engine: TrainEngine
    buffer: Buffer
    channel: WeightChannel
    synchronizer: Synchronizer
    schedule: Schedule
    keeps_versions: bool = False
    """Whether the channel keeps versions for any process: they are published even if no explorer fills the buffer."""
    note: Callable[[int, str], None] | None = None
    """Called with (version, hash of its weights) for every published version."""
    recorded: InitVar[Mapping[int, str] | None] = None
    """The hash of each version that earlier sessions published in this stage (`EarlierRollouts`)."""
    earlier_rollouts: EarlierRollouts = field(init=False)
    last_sync_step: int | None = None
    """The version that was offered last."""
    last_trainer_sync_step: int = 0
    """The version that `sync.interval` is counted from: the one offered last or, before the first offer, the one that
    the session began with."""
    offered_hash: str = ""
    """The hash of the weights of `last_sync_step`."""
    _is_starved: bool = False
    """Whether the trainer waits for explorers, and `_GRACE_S` or the first event of the wait has passed."""

    def __post_init__(self, recorded: Mapping[int, str] | None) -> None:
        self.earlier_rollouts = EarlierRollouts(self.buffer, recorded)

    def publish_held(self) -> None:
        """Publishes the versions that the channel of a resumed run holds."""
        held = self.channel.versions
        for version in held:
            self.synchronizer.publish(version, held)

    def starts_from(self, version: int) -> bool:
        """Whether a session that begins to train at `version` offers it at once. With a fixed style it does so only if
        explorers resume from this version, or if the version is published by `sync.interval`."""
        is_used = self.schedule.resume_version(version) == version or self.schedule.published(version)
        return is_used or self.synchronizer.style is not SyncStyle.FIXED

    @property
    def is_followed(self) -> bool:
        """Whether any process reads the versions that are published."""
        return capabilities_of(self.buffer).explored or self.keeps_versions

    def offer(self, version: int) -> bool:
        """Offers the current weights to the channel and, if they were delivered, publishes their version; returns
        whether they were. Offers them again if an exchange was aborted. Blocks."""
        while not (offer := self.engine.offer_weights()).delivered:
            if not self.synchronizer.was_exchanged(version):
                return False
        self.offered_hash = offer.hash
        if self.note is not None:  # before any rollout of this version can be journaled
            self.note(version, self.offered_hash)
        self.synchronizer.publish(version, self.channel.versions)
        self.last_sync_step = self.last_trainer_sync_step = version
        return True

    def is_due(self, version: int, values: Values, *, is_needed: bool) -> bool:
        """Whether `version`, the current one, is to be offered now. `values` are those of the board; `is_needed`: an
        evaluation needs the version, as the check of recorded rollouts may."""
        is_offered = self.last_sync_step == version
        if not is_offered and (is_needed or version in self.earlier_rollouts.unverified):
            return True
        explorers = live_explorers(values).values()
        if self.synchronizer.collective and any(entry.get("version") is None for entry in explorers):
            return True  # an explorer that joined late has no weights, and a collective channel keeps none to fetch
        if is_offered or not self.is_followed:
            return False
        if self.synchronizer.style is SyncStyle.FIXED:
            return self.schedule.published(version)
        # While the trainer has groups to train on, a sync for explorers that are idle ahead of it would only delay it.
        return weights_requested(values, idle=self._interval_over(version) or self._is_starved)

    async def verify_earlier(self, version: int) -> None:
        """Discards the groups of this and of later versions that earlier sessions sampled with other weights."""
        await self.earlier_rollouts.verify(version, (self.last_sync_step, self.offered_hash))

    def ask_for_sync(self, version: int) -> None:
        """With `dynamic_by_trainer`, requests a sync from the explorers once the interval is over."""
        if self.synchronizer.style is SyncStyle.DYNAMIC_BY_TRAINER and self._interval_over(version):
            self.synchronizer.set_trainer_status(RunningStatus.REQUIRE_SYNC)

    def _interval_over(self, version: int) -> bool:
        return version - self.last_trainer_sync_step >= self.synchronizer.interval

    async def wait_for_explorers(
        self,
        result: Awaitable[T],
        is_due: Callable[[Values], bool],
        sync_if_due: Callable[[], Awaitable[None]],
        saver: BackgroundSaver,
    ) -> T:
        """Awaits the result of explorers' work. Meanwhile offers weights to explorers that cannot continue without
        them. Raises the error of a save in progress as soon as it fails."""
        waited_for = asyncio.ensure_future(result)
        try:
            while not waited_for.done():
                # A change of the board wakes it at once; a `need_sync` of the user is polled every second.
                patience_s = 1.0 if self._is_starved else _GRACE_S
                polling = asyncio.ensure_future(self.synchronizer.board.poll(is_due, patience_s))
                writing = set[asyncio.Future[Any]]() if saver.writing is None else {saver.writing}
                try:
                    await asyncio.wait({waited_for, polling, *writing}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ended = not polling.cancel()
                saver.look()
                if ended:
                    polling.result()  # raises the board's error
                if not waited_for.done():
                    await sync_if_due()
                self._is_starved = True
            return waited_for.result()
        finally:
            self._is_starved = False
            waited_for.cancel()


@dataclass
class EarlierRollouts:
    """Groups that earlier sessions of the run left in the buffer. They count only if this session publishes the same
    weights under their version."""

    buffer: Buffer
    recorded: Mapping[int, str] | None
    """The hash of each version that earlier sessions published in this stage. None: groups count without a check."""
    num_discarded: int = 0
    """Groups that were discarded since the last row of metrics."""
    unverified: dict[int, str] = field(init=False)
    """Of `recorded`, the versions that this session has not reached."""

    def __post_init__(self) -> None:
        self.unverified = dict(self.recorded or {})

    async def start(self, version: int, *, ordered: bool) -> None:
        """Discards groups of versions without a recorded hash. `ordered`: the buffer also restores groups that versions
        later than `version` sampled, so these versions are verified as well."""
        if self.recorded is not None:
            await self._discard(max((version, *self.unverified)) + 1, "no hash of their weights is recorded")
        if not ordered:
            self.unverified = {v: digest for v, digest in self.unverified.items() if v == version}

    async def verify(self, version: int, offered: tuple[int | None, str]) -> None:
        """Discards the groups of this and of later versions unless `offered`, the (version, hash) of the weights that
        were offered last, equals the recorded pair."""
        recorded = self.unverified.pop(version, None)
        if recorded is not None and offered != (version, recorded):
            self.unverified.clear()  # later versions follow from this one, so their groups are discarded too
            await self._discard(version, f"the weights of version {version} differ in this session")

    async def _discard(self, version: int, cause: str) -> None:
        if count := await self.buffer.discard(version):
            _log.warning("%d groups of an earlier session are discarded and rolled out again: %s", count, cause)
            self.num_discarded += count
