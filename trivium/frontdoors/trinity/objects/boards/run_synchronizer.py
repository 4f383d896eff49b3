"""The methods of Trinity-RFT's Synchronizer, on top of the core's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from trivium import synchronizer as core
from trivium.config import RunConfig
from trivium.config.resume import fingerprint
from trivium.foundation.board import MemoryBoard, Values
from trivium.foundation.concurrency import ProgressDeadline, Waiting, wait_until
from trivium.foundation.errors import ConfigError, SyncError
from trivium.foundation.run_role import live_explorers, with_explorer
from trivium.protocols import WeightChannel
from trivium.runtime.build import build_synchronizer, shares_buffer
from trivium.types import TRAINER, RunningStatus

if TYPE_CHECKING:
    from torch import Tensor

_STOPPED, _WAITING = RunningStatus.STOPPED.value, RunningStatus.WAITING_SYNC.value


class RunSynchronizer(core.Synchronizer):
    """The methods of Trinity-RFT's synchronizer, over the board of a run.

    Explorers that report by `set_explorer_status(status, old_status)` need no name.
    """

    channel: WeightChannel | None = None
    """What `set_model_state_dict` offers weights to the explorers by."""

    def get_settings(self) -> dict[str, Any]:
        """Returns the settings that every caller of `get_actor` must have."""
        return {name: getattr(self, name) for name in AGREED}

    def _kept(self, values: Values) -> Values:
        return {"explorers": {name: entry for name, entry in live_explorers(values).items() if _ANONYMOUS in entry}}

    def _same_incarnation(self, values: Values) -> bool:
        return not self._incarnation or super()._same_incarnation(values)  # without an incarnation: every trainer

    # ------------------------------------------------------------------ statuses

    def open(self, stage: int = 0, *, last: bool = True) -> None:
        super().open(stage, last=last)
        self.set_trainer_status(RunningStatus.RUNNING)

    def get_trainer_status(self) -> RunningStatus:
        """Returns `trainer_status`."""
        return self.trainer_status

    def set_explorer_status(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, status: RunningStatus | str, old_status: RunningStatus | None = None
    ) -> None:
        """Adds an explorer with this status or, with `old_status`, updates one that has the old status.

        The core's form `set_explorer_status(name, status)` works too. Raises SyncError if no explorer that was reported
        this way has the old status.
        """
        if not isinstance(status, RunningStatus):
            assert old_status is not None
            super().set_explorer_status(status, old_status)
            return

        def change(values: Values) -> Values:
            explorers = _explorers(values)
            if old_status is None:
                # No process of the run ends such an explorer, so nothing of it is left to reap.
                entry = {"status": status.value, "version": None, _ANONYMOUS: True, "reaped": True}
                return with_explorer(values, f"anonymous-{len(explorers)}", **entry)
            old = RunningStatus(old_status).value
            same = [name for name, entry in explorers.items() if _ANONYMOUS in entry and entry["status"] == old]
            if not same:
                counts = {status.value: number for status, number in _counts(values).items()}
                raise SyncError(
                    f"an explorer from {old_status} to {status}",
                    f"none is {old_status}: {counts}",
                    "report each explorer first by its status alone, then by that and the one before",
                )
            return with_explorer(values, same[0], status=status.value)

        self._write(change)

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """Returns the number of explorers in each status."""
        return _counts(self.board.read())

    def explorer_requires_sync(self) -> bool:
        """Whether an explorer requires weights."""
        return self.get_explorer_status_counts()[RunningStatus.REQUIRE_SYNC] > 0

    def trainer_requires_weight_sync(self) -> bool | None:
        """Whether the trainer requires an exchange; None if it is stopped."""
        status = self.trainer_status
        return None if status is RunningStatus.STOPPED else status is RunningStatus.REQUIRE_SYNC

    # ------------------------------------------------------------------ versions

    def get_latest_model_version(self) -> int:
        """Returns the newest version that was delivered or can be fetched; 0 if there is none."""
        return _latest(self.board.read())

    async def wait_new_model_state_dict(self, current_version: int, no_wait: bool = False) -> int:
        """Waits for a version newer than `current_version`, and returns the newest. Returns the current version if the
        trainer stops or calls `notify_no_new_model_state_dict`, or with `no_wait`.

        An explorer has the status REQUIRE_SYNC during the wait and RUNNING afterwards. Raises SyncError at the
        deadline, after restoring the status, and for a version that does not exist yet.
        """
        values = self.board.read()
        if _latest(values) < current_version:
            raise SyncError(
                f"a version newer than {current_version}",
                f"the newest is {_latest(values)}",
                "pass the version that the explorer has loaded",
            )
        refusals = values.get(_REFUSALS, 0)

        def over(values: Values) -> bool:
            refused = values.get(_REFUSALS, 0) != refusals
            return _latest(values) > current_version or _trainer(values) == _STOPPED or refused

        with self._requiring():
            if not no_wait and not over(values):
                values = await self._until(over, f"a version newer than {current_version}", "the trainer")
        return _latest(values)

    def notify_no_new_model_state_dict(self) -> None:
        """Ends the waits for a new version: the trainer has no newer weights."""
        self._write(lambda values: {**values, _REFUSALS: values.get(_REFUSALS, 0) + 1})

    @contextmanager
    def _requiring(self) -> Generator[None]:
        """Sets an explorer to REQUIRE_SYNC inside the block and to RUNNING afterwards. After an error, restores its
        status."""
        name, before = self._idle_explorer()
        if name is None:
            yield
            return
        self._explorer(name, status=RunningStatus.REQUIRE_SYNC.value)
        try:
            yield
        except BaseException:
            # Trinity leaves REQUIRE_SYNC after a timeout, and the next call fails on it.
            self._explorer(name, status=before)
            raise
        self._explorer(name, status=RunningStatus.RUNNING.value)

    def _idle_explorer(self) -> tuple[str | None, str]:
        """Returns (name, status) of an explorer without a name: of one that waits for nothing, if there is one."""
        live = live_explorers(self.board.read())
        statuses = [(name, entry["status"]) for name, entry in live.items() if _ANONYMOUS in entry]
        statuses.sort(key=lambda item: _IDLE_FIRST.index(item[1]))
        return statuses[0] if statuses else (None, "")

    # ------------------------------------------------------------------ weights

    def set_model_state_dict(self, state_dict: Mapping[str, Tensor] | str | Path | None, trainer_step: int) -> None:
        """Offers the weights of a step to the explorers, and publishes the step if they were delivered or can be
        fetched. None publishes a step whose weights are stored elsewhere.

        `state_dict` holds tensors by Hugging Face name, or is a directory of safetensors files. Raises ConfigError for
        a directory without such files, SyncError for weights of an object without a Trainer.
        """
        weights = _read(Path(state_dict)) if isinstance(state_dict, str | Path) else state_dict
        if weights is None:
            self.publish(trainer_step)
        elif self.channel is None:
            do = "pass them to the synchronizer that the Trainer has, or to the actor of get_actor"
            raise SyncError(f"weights of step {trainer_step}", "this synchronizer has no channel", do)
        elif self.channel.offer(trainer_step, list(weights.items())):
            self.publish(trainer_step, self.channel.versions)

    def set_model_state_dict_with_step_num(self, step_num: int | None = None, world_size: int | None = None) -> int:
        """Publishes a step whose weights are stored elsewhere; with `world_size`, after that many calls. Returns the
        step; the newest version if `step_num` is None."""
        step = self.get_latest_model_version() if step_num is None else step_num
        counted = [1]

        def count(values: Values) -> Values:
            shards = dict(values.get(_SHARDS, {}))
            # In place: the board may call `count` again, if another process has written meanwhile.
            counted[:] = [shards.pop(str(step), 0) + 1]
            return {**values, _SHARDS: {**shards, str(step): counted[0]} if counted[0] < (world_size or 1) else shards}

        self._write(count)
        if step_num is not None and counted[0] >= (world_size or 1):
            self.publish(step)
        return step

    def get_model_state_dict(self) -> tuple[dict[str, Tensor] | None, int]:
        """Returns (tensors by name, version) of the newest version; None for tensors that are stored elsewhere."""
        version = self.get_latest_model_version()
        is_held = self.channel is not None and version in self.channel.versions
        return dict(self.channel.collect(version)) if self.channel is not None and is_held else None, version

    def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """Returns (name, type, shape) of each tensor of the newest version."""
        weights, _ = self.get_model_state_dict()
        if weights is None:
            return None
        return [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in weights.items()]

    # ------------------------------------------------------------------ exchanges

    async def ready_to_nccl_sync(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, module: str, trainer_step: int, address: str = ""
    ) -> Any:
        """Waits until the trainer (`"trainer"`, with its step) and all live explorers (`"explorer"`) are ready. Returns
        the trainer's step to both. Returns None, with the statuses as before, if the other side stops or is not ready
        by the deadline.

        The core's form, for one of its roles, returns its Exchange.
        """
        if address or module not in (TRAINER, "explorer") or module in _explorers(self.board.read()):
            return await super().ready_to_nccl_sync(module, trainer_step, address)
        return await (self._trainer_ready(trainer_step) if module == TRAINER else self._explorer_ready())

    async def _trainer_ready(self, step: int) -> int | None:
        if step < self.get_latest_model_version():
            raise SyncError(
                f"an exchange of step {step}", f"{self.get_latest_model_version()} is published", "pass the newest step"
            )
        before = self.trainer_status
        self.set_trainer_status(RunningStatus.WAITING_SYNC)
        agreed: list[bool] = []

        def agree(values: Values) -> Values:
            # In place: the board may call `agree` again, if another process has written meanwhile.
            agreed[:] = [_all_wait(values)]
            if not agreed[0]:
                return values
            members = list(live_explorers(values))
            for name in members:
                values = with_explorer(values, name, status=RunningStatus.RUNNING.value, version=step)
            number = values.get(_PAIRED, {"number": 0})["number"] + 1
            return {**values, _PAIRED: {"number": number, "step": step, "members": members}}

        try:
            while not agreed or not agreed[0]:
                await self._until(lambda values: _all_wait(values) or _all_stopped(values), TRAINER, "the explorers")
                self._write(agree)
                if not agreed[0] and _all_stopped(self.board.read()):
                    return None
        except SyncError:
            return None
        finally:
            self.set_trainer_status(RunningStatus.RUNNING if agreed and agreed[0] else before)
        # After the exchange: Trinity counts the version before it, also if the explorers stop meanwhile.
        self.publish(step)
        return step

    async def _explorer_ready(self) -> int | None:
        name, before = self._idle_explorer()
        if name is None:
            raise SyncError(
                "an explorer's exchange of weights",
                "no explorer was reported",
                "call set_explorer_status(RunningStatus.RUNNING) first",
            )
        number = self.board.read().get(_PAIRED, {"number": 0})["number"]
        self._explorer(name, status=_WAITING)

        def met(values: Values) -> bool:
            paired = values.get(_PAIRED, {"number": 0})
            return paired["number"] > number and name in paired["members"]

        values: Values = {}
        try:
            values = await self._until(lambda v: met(v) or _trainer(v) == _STOPPED, f"explorer {name}", TRAINER)
        except SyncError:
            pass  # the trainer was not ready by the deadline
        finally:
            if not met(values):
                self._explorer(name, status=before)
        return values[_PAIRED]["step"] if met(values) else None

    # ------------------------------------------------------------------ the board

    async def _until(self, over: Callable[[Values], bool], who: str, whom: str) -> Values:
        """Waits until `over` holds for the board, and returns its values. Raises SyncError after `deadline_s` without a
        change."""

        async def poll(deadline: ProgressDeadline) -> tuple[Values | None, object]:
            values = await self.board.poll(lambda v: over(v) or _progress(v) != deadline.state, deadline.left_s)
            return values if over(values) else None, _progress(values)

        return await wait_until(poll, lambda: Waiting(who, whom), self.deadline_s)


_REFUSALS, _SHARDS, _PAIRED = "refusals", "shards", "paired"
"""Keys that this Synchronizer adds to the board."""
_ANONYMOUS = "anonymous"
"""The key in the entry of an explorer that was reported without a name."""
_IDLE_FIRST = (RunningStatus.RUNNING.value, RunningStatus.REQUIRE_SYNC.value, _WAITING)
AGREED = ("style", "interval", "collective")
"""The settings that every caller of `get_actor` must have."""


def _read(directory: Path) -> dict[str, Tensor]:
    """Reads the tensors of a directory's safetensors files, by name."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"weights in {directory}", "no *.safetensors", "save them there, as `save_pretrained` of transformers does"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def options_of(config: RunConfig) -> dict[str, Any]:
    """Returns the arguments of a run's Synchronizer, beside the board."""
    on_ray = config.cluster.kind == "ray"
    # On Ray, the starting process passes the config to the roles, so they need not agree on settings.
    like = build_synchronizer(config.sync, MemoryBoard(), None if on_ray else fingerprint(config))
    return {
        "deadline_s": like.deadline_s,
        "style": like.style,
        "interval": like.interval,
        "collective": like.collective,
        # If the roles share only a database, only heartbeats show whether a role is alive.
        "heartbeat_s": config.sync.heartbeat_s if shares_buffer(config.buffers) and not on_ray else None,
        "settings": like.settings,
    }


def _explorers(values: Values) -> Mapping[str, Mapping[str, Any]]:
    return values.get("explorers", {})


def _counts(values: Values) -> dict[RunningStatus, int]:
    statuses = [entry["status"] for entry in _explorers(values).values()]
    return {status: statuses.count(status.value) for status in RunningStatus}


def _latest(values: Values) -> int:
    return max(values.get("versions", ()), default=0)


def _trainer(values: Values) -> str:
    return values.get("trainer", _STOPPED)


def _progress(values: Values) -> Values:
    """The values whose change is progress."""
    return {key: value for key, value in values.items() if key != "beats"}


def _all_wait(values: Values) -> bool:
    live = live_explorers(values).values()
    return bool(live) and all(entry["status"] == _WAITING for entry in live)


def _all_stopped(values: Values) -> bool:
    return bool(_explorers(values)) and not live_explorers(values)
