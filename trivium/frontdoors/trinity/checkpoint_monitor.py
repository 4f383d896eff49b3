"""Trinity-RFT's CheckpointMonitor: one for all processes of a namespace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from trivium.checkpoint import save_monitor
from trivium.checkpoint.savers import CHECKPOINT, STATE_DICT
from trivium.errors import ConfigError, UnknownName
from trivium.frontdoors.trinity.actors import made_once
from trivium.frontdoors.trinity.remote_calls import Shared, actor_like
from trivium.registry import suggest
from trivium.types import SaveStrategy

ROLE = "checkpoint_monitor"
"""The name of a CheckpointMonitor in its namespace."""
HEARTBEAT_S = 60.0
"""A saver on another machine of a Ray cluster that is silent for so long is dead."""


@actor_like
class CheckpointMonitor(save_monitor.CheckpointMonitor):
    """One made by `get_actor` stands for the monitor of a namespace: in every process that asks for it, over one state.
    A directly made one is of this process alone.

    Methods are called as they are, or, on Ray, by `.remote(...)` as those of an actor.
    """

    LATEST: ClassVar[Mapping[str, str]] = {
        CHECKPOINT: "latest_checkpointed_iteration.txt",
        STATE_DICT: "latest_state_dict_iteration.txt",
    }
    """The files that hold the newest complete steps."""

    shared: Shared | None = None

    def _update(self, kind: str, step: int) -> None:
        super()._update(kind, step)
        self._note(kind, step)

    def __reduce__(self) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
        if self.shared is None:
            return super().__reduce__()
        return CheckpointMonitor.get_actor, (self.shared.namespace,)

    @classmethod
    def get_actor(
        cls,
        namespace: str,
        save_strategy: SaveStrategy | None = None,
        default_local_dir: str | None = None,
        default_hdfs_dir: str | None = None,
    ) -> CheckpointMonitor:
        """The monitor of a namespace. The first call of all its processes makes it, and needs `default_local_dir`; it
        lasts as long as one of them lives.

        They are the processes of a Ray cluster where this one is connected to it, else those of this machine and user.
        Raises ConfigError for settings other than those it was made with.
        """
        settings = {
            "save_strategy": None if save_strategy is None else _strategy(save_strategy).value,
            "default_local_dir": None if default_local_dir is None else str(Path(default_local_dir).absolute()),
            "default_hdfs_dir": default_hdfs_dir,
        }

        def make(shared: Shared) -> CheckpointMonitor:
            first = {**settings, "save_strategy": settings["save_strategy"] or SaveStrategy.UNRESTRICTED.value}
            has = shared.agree("settings", None if default_local_dir is None else first)
            heartbeat_s = None if shared.calls is None else HEARTBEAT_S
            names = ("save_strategy", "default_local_dir", "default_hdfs_dir")
            monitor = cls(*(has[name] for name in names), board=shared.board, heartbeat_s=heartbeat_s)
            monitor.shared = shared
            return monitor

        monitor = made_once(namespace, ROLE, make)
        for name, value in settings.items():
            if value is not None and value != getattr(monitor, name):
                raise ConfigError(
                    f"the checkpoint monitor of {namespace!r} with {name} {value!r}",
                    f"it has {getattr(monitor, name)!r}",
                    "pass the same everywhere, or use another namespace",
                )
        return monitor


def _strategy(strategy: str) -> SaveStrategy:
    try:
        return SaveStrategy(str(strategy).lower())
    except ValueError as error:
        raise UnknownName(
            f"the save strategy {strategy!r}", "there is none", suggest(strategy, SaveStrategy)
        ) from error
