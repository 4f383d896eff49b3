"""Trinity-RFT's CheckpointMonitor: one per namespace, looked up by name."""

from __future__ import annotations

from functools import partial

from trivium.checkpoint import save_monitor
from trivium.errors import ConfigError
from trivium.frontdoors.trinity.actors import HERE, ActorDirectory
from trivium.types import SaveStrategy

ROLE = "checkpoint_monitor"
"""The name of a CheckpointMonitor in an ActorDirectory."""


class CheckpointMonitor(save_monitor.CheckpointMonitor):
    """The monitor of a namespace (`get_actor`); on Ray it may be an actor."""

    @classmethod
    def get_actor(
        cls,
        namespace: str,
        save_strategy: SaveStrategy | None = None,
        default_local_dir: str | None = None,
        default_hdfs_dir: str | None = None,
        *,
        directory: ActorDirectory | None = None,
    ) -> CheckpointMonitor:
        """The monitor of a namespace; built on the first call, which needs `default_local_dir`.

        `directory` decides where it lives: in this process by default. Raises ConfigError for settings other
        than those it was built with.
        """
        make = None
        if default_local_dir is not None:
            strategy = save_strategy or SaveStrategy.UNRESTRICTED
            make = partial(cls, strategy, default_local_dir, default_hdfs_dir)
        monitor = (directory or HERE).get(namespace, ROLE, make)
        settings = {
            "save_strategy": save_strategy,
            "default_local_dir": default_local_dir,
            "default_hdfs_dir": default_hdfs_dir,
        }
        for name, value in settings.items() if isinstance(monitor, cls) else ():  # one on Ray has no attributes here
            if value is not None and value != getattr(monitor, name):
                raise ConfigError(
                    f"the checkpoint monitor of {namespace!r} with {name} {value!r}",
                    f"it has {getattr(monitor, name)!r}",
                    "pass the same everywhere, or use another namespace",
                )
        return monitor
