"""One Ray actor for all processes of a namespace, found by its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trivium.cluster.session import connect
from trivium.foundation.errors import ConfigError, SyncError, UnknownName

_STARTS_S = 300.0
"""Seconds that an actor may take to start and answer: its process imports torch."""
_ENDS_S = 30.0
"""Seconds that an actor that ends may keep its name."""


def named_actor(
    kind: Callable[[], type[Any]],
    name: str,
    namespace: str,
    arguments: tuple[object, ...] | None,
    settings: Mapping[str, object],
    address: str | None = None,
) -> Any:
    """Returns the actor of a name. The first call in its namespace creates it, from the class that `kind` returns; Ray
    ends it with the script or the job that has created it.

    Raises MissingPackage without Ray, UnknownName if there is no actor and `arguments` is None, ConfigError if a
    setting differs from that of the first call, ActorDied if the constructor fails, and SyncError if the actor does not
    answer within `_STARTS_S`.
    """
    connect({} if address is None else {"address": address}, purpose=f"the actor {name!r} of {namespace!r}")
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    from trivium.cluster.actors import MAX_CONCURRENCY, ActorDied, death_cause

    if arguments is None:
        try:
            actor: Any = ray.get_actor(name, namespace=namespace)
        except ValueError as error:
            raise UnknownName(
                f"the {name} of {namespace!r}", "no process has made one", "make it first with everything that it needs"
            ) from error
    else:
        # No CPU, since it mostly waits. Each wait of a caller is one call in flight.
        # Of two first calls at the same time, one creates the actor, and the other finds it.
        options: dict[str, Any] = {"name": name, "namespace": namespace, "get_if_exists": True, "num_cpus": 0}
        actor = ray.remote(kind()).options(**options, max_concurrency=MAX_CONCURRENCY).remote(*arguments)
    try:
        first: Any = ray.get(actor.get_settings.remote(), timeout=_STARTS_S)
    except GetTimeoutError as error:
        raise SyncError(
            f"the {name} of {namespace!r}",
            f"its actor has not answered for {_STARTS_S:g} s",
            "see with `ray list actors` whether it waits for a node or hangs; end it there with `ray.kill`",
        ) from error
    except RayError as error:
        raise ActorDied(name, death_cause(error)) from error
    for key, value in settings.items():
        if value is not None and value != first[key]:
            raise ConfigError(
                f"the {name} of {namespace!r} with {key} {value!r}",
                f"it has {first[key]!r}",
                "pass the same everywhere, or use another namespace",
            )
    return actor


def end_actor(actor: Any, name: str, namespace: str) -> None:
    """Ends an actor, and returns once its name is free."""
    import ray

    ray.kill(actor)
    end = time.monotonic() + _ENDS_S
    while time.monotonic() < end:
        try:
            ray.get_actor(name, namespace=namespace)
        except ValueError:
            return
        # Ray announces no name that becomes free.
        time.sleep(_ENDS_S / 1000)
