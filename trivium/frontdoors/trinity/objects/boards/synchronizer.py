"""Trinity-RFT's Synchronizer: the object of one process, or the Ray actor that several processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trivium.config import RunConfig, config_from_mapping
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.trinity.objects.boards.named_actors import named_actor
from trivium.frontdoors.trinity.objects.boards.run_synchronizer import AGREED, RunSynchronizer, options_of
from trivium.frontdoors.trinity.translation import translate

ROLE = "synchronizer"
"""The name of a Synchronizer in its namespace."""


class Synchronizer(RunSynchronizer):
    """The synchronizer of a run, in the process of its Trainer. `get_actor` returns one for several processes."""

    @classmethod
    def get_actor(cls, config: object = None, namespace: str | None = None) -> Any:
        """Returns the Ray actor that is the synchronizer of a run: `ray.get(actor.set_trainer_status.remote(status))`,
        `await actor.wait_new_model_state_dict.remote(version)`.

        The first call creates it, and requires the config (of Trinity's shape, or a RunConfig). Later calls may pass
        the namespace alone: the config's `ray_namespace` or `run.name`; if both are unset, the run directory. With
        `cluster.kind: ray` the actor is that of the run's Trainer, otherwise the Trainer has its own object.

        Raises ConfigError if the `sync` section differs from that of the first call, UnknownName if there is no actor
        yet, MissingPackage without Ray.
        """
        run_config = _run_config(config)
        if run_config is None:
            if namespace is None:
                raise ConfigError("a synchronizer", "neither a config nor a namespace", "pass one of them")
            return named_actor(_actor_class, ROLE, namespace, None, {})
        return named_actor(
            _actor_class,
            ROLE,
            namespace or namespace_of(run_config),
            (run_config.model_dump(mode="json", exclude_unset=True),),
            {name: value for name, value in options_of(run_config).items() if name in AGREED},
            run_config.cluster.address,
        )


def _actor_class() -> type[RunSynchronizer]:
    # It needs Ray, which a process with a Synchronizer of its own may lack.
    from trivium.frontdoors.trinity.objects.boards.synchronizer_actor import SynchronizerActor

    return SynchronizerActor


def namespace_of(config: RunConfig) -> str:
    """Returns the namespace of a run's actors."""
    # Absolute, because processes in other folders name the same directory.
    return config.run.name or str(Path(config.run.dir).absolute())


def _run_config(config: object) -> RunConfig | None:
    if config is None or isinstance(config, RunConfig):
        return config
    return config_from_mapping(translate(config).config)
