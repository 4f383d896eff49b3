"""Trinity-RFT's Synchronizer, on top of the core's: one for all processes of a namespace."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors.torch import load_file

from trivium import synchronizer as core
from trivium.cluster.session import connect
from trivium.config import RunConfig, config_from_mapping
from trivium.config.resume import fingerprint
from trivium.foundation.board import MemoryBoard, Values
from trivium.foundation.concurrency import ProcessLife, ProgressDeadline, Waiting, wait_until
from trivium.foundation.errors import ConfigError, SyncError
from trivium.foundation.run_role import live_explorers
from trivium.frontdoors.trinity.objects.boards.actors import forget, made_once
from trivium.frontdoors.trinity.objects.boards.remote_calls import Shared, actor_like
from trivium.frontdoors.trinity.translation import translate
from trivium.planning.memory_estimate import kept_versions
from trivium.protocols import WeightChannel
from trivium.runtime.build import build_synchronizer, open_board, shares_buffer
from trivium.types import TRAINER, RunningStatus, SyncStyle

if TYPE_CHECKING:
    from torch import Tensor

ROLE = "synchronizer"
"""The name of a Synchronizer in its namespace."""
_POLL_S = 0.5
"""How often a wait checks whether explorers are alive."""
_STOPPED, _WAITING = RunningStatus.STOPPED.value, RunningStatus.WAITING_SYNC.value
_SERVED_OTHERWISE = {
    "add_module": "nothing is to be registered: a process that ends is noticed",
    "setup_weight_sync_group": "sync.method nccl makes the group of its processes by itself",
    "coordinate_weight_sync_setup": "sync.method nccl makes the group of its processes by itself",
    "coordinate_weight_sync_teardown": "sync.method nccl ends the group of its processes by itself",
    "get_latest_model_path": "call get_model_state_dict(), or read the directory of sync.method checkpoint",
    "get_model_state_dict_iterator": "call get_model_state_dict()",
}
"""Other members of Trinity-RFT's synchronizer -> what to do instead."""


@actor_like
class Synchronizer(core.Synchronizer):
    """The synchronizer of a namespace. `get_actor` returns an instance in each process; all instances use one board.

    Explorers that report by `set_explorer_status(status, old_status)` need no name: each belongs to the process that
    first reported it, and counts as stopped when that process ends. Methods can be called directly or, on Ray, by
    `.remote(...)` like those of an actor.
    """

    shared: Shared | None = None
    channel: WeightChannel | None = None
    """The channel of this process's Trainer, by which `set_model_state_dict` offers weights to the explorers."""
    _options: Mapping[str, Any]

    @classmethod
    def get_actor(cls, config: object = None, namespace: str | None = None) -> Synchronizer:
        """Returns the synchronizer of a run. The first call in any of its processes creates it, and requires the config
        (of Trinity's shape, or a RunConfig). Later calls may pass the namespace alone: the config's `ray_namespace` or
        `run.name`; if both are unset, the run directory.

        If processes share the buffer, the board is in the buffer's database, which the commands of the run share too.
        Otherwise its processes are those of the Ray cluster that this process is connected to, or those of this machine
        and user. Raises ConfigError if the `sync` section or, on one machine, the run directory differs from that of
        the first call.
        """
        run_config = _run_config(config)
        if namespace is None and run_config is None:
            raise ConfigError("a synchronizer", "neither a config nor a namespace", "pass one of them")
        if run_config is not None and run_config.cluster.kind == "ray":
            address = run_config.cluster.address
            connect({} if address is None else {"address": address})
        namespace = namespace or _namespace(cast(RunConfig, run_config))
        synchronizer = made_once(namespace, ROLE, lambda shared: cls._made(shared, run_config))
        agreed = ["style", "interval", "collective", *(["directory"] if synchronizer.host is None else [])]
        for name, value in _options(run_config).items() if run_config is not None else ():
            if name in agreed and value != synchronizer._options[name]:
                raise ConfigError(
                    f"the synchronizer of {namespace!r} with {name} {value!r}",
                    f"it has {synchronizer._options[name]!r}",
                    "pass the same everywhere, or use another namespace",
                )
        return synchronizer

    @classmethod
    def _made(cls, shared: Shared, config: RunConfig | None) -> Synchronizer:
        options = shared.agree(_RUN, None if config is None else _options(config))
        board = shared.board
        if options["in_database"]:
            if config is None:
                raise ConfigError(
                    f"the synchronizer of {shared.namespace!r} by its namespace",
                    "it lies in the database of the run's buffer",
                    "pass the config",
                )
            board = open_board(config)
        made = cls(
            board,
            deadline_s=options["deadline_s"],
            style=SyncStyle(options["style"]),
            interval=options["interval"],
            collective=options["collective"],
            heartbeat_s=options["heartbeat_s"],
            settings=options["settings"],
        )
        made.shared, made._options = shared, options
        return made

    def __reduce__(self) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
        if self.shared is None:
            return super().__reduce__()
        return Synchronizer.get_actor, (None, self.shared.namespace)

    def leave(self) -> None:
        """Detaches this process; the next `get_actor` creates another instance."""
        if self.shared is not None:
            forget(self.shared.namespace, ROLE)

    @property
    def host(self) -> Any:
        """On Ray, the actor that hosts the board."""
        return None if self.shared is None else self.shared.host

    def __getattr__(self, name: str) -> Any:
        if name in _SERVED_OTHERWISE:
            raise AttributeError(f"a Synchronizer has no {name}: {_SERVED_OTHERWISE[name]}")
        raise AttributeError(f"a Synchronizer has no {name!r}")

    def _kept(self, values: Values) -> Values:
        anonymous = {name: entry for name, entry in live_explorers(values).items() if "alive" in entry}
        return {**{key: values[key] for key in (_RUN,) if key in values}, "explorers": anonymous}

    def _same_incarnation(self, values: Values) -> bool:
        return not self._incarnation or super()._same_incarnation(values)  # without an incarnation: every trainer

    # ------------------------------------------------------------------ statuses

    def open(self, stage: int = 0, *, last: bool = True) -> None:
        super().open(stage, last=last)
        self.set_trainer_status(RunningStatus.RUNNING)

    def set_trainer_status(self, status: RunningStatus) -> None:
        """Sets the trainer's status until the next call, or the end of the calling process."""
        me = asdict(ProcessLife.of(os.getpid()))
        self._write(lambda values: {**values, "trainer": status.value, _TRAINS: me})

    @property
    def trainer_status(self) -> RunningStatus:
        """The trainer's status: STOPPED before a trainer starts, and after its process has ended."""
        self._stop_dead()
        return super().trainer_status

    def get_trainer_status(self) -> RunningStatus:
        """Returns `trainer_status`."""
        return self.trainer_status

    def set_explorer_status(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, status: RunningStatus | str, old_status: RunningStatus | None = None
    ) -> None:
        """Adds an explorer of this process with this status or, with `old_status`, updates one that has the old status.

        The core's form `set_explorer_status(name, status)` works too. Raises SyncError if no explorer that was reported
        this way has the old status.
        """
        if not isinstance(status, RunningStatus):
            assert old_status is not None
            super().set_explorer_status(status, old_status)
            return
        me = asdict(ProcessLife.of(os.getpid()))

        def change(values: Values) -> Values:
            explorers = _explorers(values)
            if old_status is None:
                name = f"{me['host']}-{me['pid']}/{len(explorers)}"
                entry = {"status": status.value, "version": None, "alive": me, "reaped": True}
                return {**values, "explorers": {**explorers, name: entry}}
            same = [n for n, e in explorers.items() if "alive" in e and e["status"] == RunningStatus(old_status).value]
            own = [name for name in same if explorers[name]["alive"] == me]
            if not same:
                raise SyncError(
                    f"an explorer from {old_status} to {status}",
                    f"none is {old_status}: { ({status.value: n for status, n in _counts(values).items()}) }",
                    "report each explorer first by its status alone, then by that and the one before",
                )
            return _with(values, [*own, *same][0], status=status.value)

        self._write(change)

    def get_explorer_status_counts(self) -> dict[RunningStatus, int]:
        """Returns the number of explorers in each status; dead explorers count as stopped."""
        self._stop_dead()
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

        An explorer of this process has the status REQUIRE_SYNC during the wait and RUNNING afterwards. Raises SyncError
        at the deadline, after restoring the status, and for a version that does not exist yet.
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
        """Sets an explorer of this process to REQUIRE_SYNC inside the block and to RUNNING afterwards. After an error,
        restores its status."""
        name, before = self._own_explorer()
        if name is None:
            yield
            return
        self._explorer(name, status=RunningStatus.REQUIRE_SYNC.value)
        try:
            yield
        except BaseException:
            self._explorer(name, status=before)
            raise
        self._explorer(name, status=RunningStatus.RUNNING.value)

    def _own_explorer(self) -> tuple[str | None, str]:
        """Returns (name, status) of an explorer that this process has reported, preferably one that is not waiting."""
        me = asdict(ProcessLife.of(os.getpid()))
        live = live_explorers(self.board.read())
        own = [(name, entry["status"]) for name, entry in live.items() if entry.get("alive") == me]
        own.sort(key=lambda item: item[1] == _WAITING)
        return own[0] if own else (None, "")

    # ------------------------------------------------------------------ weights

    def set_model_state_dict(self, state_dict: Mapping[str, Tensor] | str | Path | None, trainer_step: int) -> None:
        """Offers the weights of a step, and publishes the step if they were delivered or can be fetched. The weights go
        to the explorers of this process's Trainer by `sync.method`; without a Trainer, to `get_model_state_dict`. None
        publishes a step whose weights are stored elsewhere.

        `state_dict` holds tensors by Hugging Face name, or is a directory of safetensors files. Raises ConfigError for
        a directory without such files.
        """
        weights = _read(Path(state_dict)) if isinstance(state_dict, str | Path) else state_dict
        if weights is None:
            self.publish(trainer_step)
        elif (channel := self.channel or self._weights).offer(trainer_step, list(weights.items())):
            self.publish(trainer_step, channel.versions)

    def set_model_state_dict_with_step_num(self, step_num: int | None = None, world_size: int | None = None) -> int:
        """Publishes a step whose weights are stored elsewhere; with `world_size`, after that many calls. Returns the
        step; the newest version if `step_num` is None."""
        step = self.get_latest_model_version() if step_num is None else step_num
        counted = [1]

        def count(values: Values) -> Values:
            shards = dict(values.get(_SHARDS, {}))
            counted[:] = [shards.pop(str(step), 0) + 1]
            return {**values, _SHARDS: {**shards, str(step): counted[0]} if counted[0] < (world_size or 1) else shards}

        self._write(count)
        if step_num is not None and counted[0] >= (world_size or 1):
            self.publish(step)
        return step

    def get_model_state_dict(self) -> tuple[dict[str, Tensor] | None, int]:
        """Returns (tensors by name, version) of the newest version; None for tensors that are stored elsewhere."""
        version = self.get_latest_model_version()
        for channel in (self.channel, self._weights):
            if channel is not None and version in channel.versions:
                return dict(channel.collect(version)), version
        return None, version

    def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """Returns (name, type, shape) of each tensor of the newest version."""
        weights, _ = self.get_model_state_dict()
        if weights is None:
            return None
        return [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in weights.items()]

    @cached_property
    def _weights(self) -> WeightChannel:
        """The channel that keeps weights without a Trainer: in Ray's object store, or in files."""
        if self.shared is None:
            raise SyncError("weights of a synchronizer", "it was not made by get_actor", "use the run's channel")
        keep = self._options["keep"]
        if self.shared.calls is not None:
            from trivium.frontdoors.trinity.objects.boards.ray_actors import StateDicts

            weights: Any = StateDicts(self.shared, keep=keep)
            return weights
        from trivium.sync.files import FileChannel

        return FileChannel(keep=keep, directory=Path(self._options["directory"]), synchronizer=self, role=ROLE)

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
            agreed[:] = [_all_wait(values)]
            if not agreed[0]:
                return values
            members = list(live_explorers(values))
            for name in members:
                values = _with(values, name, status=RunningStatus.RUNNING.value, version=step)
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
        self.publish(step)
        return step

    async def _explorer_ready(self) -> int | None:
        name, before = self._own_explorer()
        if name is None:
            raise SyncError(
                "an explorer's exchange of weights",
                "this process has reported no explorer",
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
            self._stop_dead()
            values = await self.board.poll(over, min(_POLL_S, deadline.seconds))
            return values if over(values) else None, {key: value for key, value in values.items() if key != "beats"}

        return await wait_until(poll, lambda: Waiting(who, whom), self.deadline_s)

    def _stop_dead(self) -> None:
        """Sets the trainer and explorers whose processes have ended to stopped."""
        values = self.board.read()
        is_alive = ProcessLife.__call__ if self.shared is None else self.shared.is_alive
        for name, entry in live_explorers(values).items():
            if "alive" in entry and not is_alive(ProcessLife(**entry["alive"])):
                self._explorer(name, status=_STOPPED, dead="its process is gone")
        trains = values.get(_TRAINS)
        if trains is not None and _trainer(values) != _STOPPED and not is_alive(ProcessLife(**trains)):
            self._write(lambda values: {**values, "trainer": _STOPPED} if values.get(_TRAINS) == trains else values)


_RUN, _REFUSALS, _SHARDS, _PAIRED, _TRAINS = "run", "refusals", "shards", "paired", "trains"
"""Keys that this Synchronizer adds to the board."""


def _read(directory: Path) -> dict[str, Tensor]:
    """Reads the tensors of a directory's safetensors files, by name."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"weights in {directory}", "no *.safetensors", "save them there, as `save_pretrained` of transformers does"
        )
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _options(config: RunConfig) -> dict[str, Any]:
    """Returns the settings that every process needs to create the run's synchronizer, as JSON values."""
    in_database = shares_buffer(config) and config.cluster.kind != "ray"
    # On Ray, the starting process passes the config to the roles, so they need not agree on settings.
    like = build_synchronizer(config, MemoryBoard(), None if config.cluster.kind == "ray" else fingerprint(config))
    return {
        "deadline_s": like.deadline_s,
        "style": like.style.value,
        "interval": like.interval,
        "collective": like.collective,
        # If the roles share only a database, only heartbeats show whether a role is alive.
        "heartbeat_s": config.sync.heartbeat_s if in_database else None,
        "settings": like.settings,
        "keep": kept_versions(config),
        "directory": str(Path(config.run.dir).absolute() / "state_dicts"),
        "in_database": in_database,
    }


def _namespace(config: RunConfig) -> str:
    return config.run.name or str(Path(config.run.dir).absolute())


def _run_config(config: object) -> RunConfig | None:
    if config is None or isinstance(config, RunConfig):
        return config
    return config_from_mapping(translate(config).config)


def _explorers(values: Values) -> Mapping[str, Mapping[str, Any]]:
    return values.get("explorers", {})


def _counts(values: Values) -> dict[RunningStatus, int]:
    statuses = [entry["status"] for entry in _explorers(values).values()]
    return {status: statuses.count(status.value) for status in RunningStatus}


def _with(values: Values, name: str, **entry: object) -> Values:
    explorers = _explorers(values)
    return {**values, "explorers": {**explorers, name: {**explorers[name], **entry}}}


def _latest(values: Values) -> int:
    return max(values.get("versions", ()), default=0)


def _trainer(values: Values) -> str:
    return values.get("trainer", _STOPPED)


def _all_wait(values: Values) -> bool:
    live = live_explorers(values).values()
    return bool(live) and all(entry["status"] == _WAITING for entry in live)


def _all_stopped(values: Values) -> bool:
    return bool(_explorers(values)) and not live_explorers(values)
