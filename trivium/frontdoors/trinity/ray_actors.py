"""Roles by name on a Ray cluster: each is an actor of its own, started by the first process that needs it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import ray

from trivium.cluster.actors import Proxy, result_of, start_host
from trivium.errors import UnknownName

_ASKING = itertools.count()


class RayDirectory:
    """The ActorDirectory of processes that are connected to one cluster.

    A role ends with the process that started it.
    """

    def __init__(self, run_dir: Path, threads: int = 1) -> None:
        """`run_dir` is where roles that are started from here log."""
        self._run_dir, self._threads = run_dir, threads

    def get(self, namespace: str, name: str, make: Callable[[], object] | None = None) -> Proxy:
        """The role of that name: an object with its methods, whose coroutines are awaited and whose functions block.

        Where there is none, `make` builds it in a process of its own. Raises UnknownName without `make`, and whatever
        building it raises.
        """
        caller = f"{os.getpid()}-{next(_ASKING)}"
        if make is None:
            try:
                return Proxy(ray.get_actor(name, namespace), name, caller)
            except ValueError as error:
                raise UnknownName(
                    f"the role {name!r} of {namespace!r}", "no actor of that name", "start it, or say how it is built"
                ) from error
        actor = start_host(name, self._run_dir, self._threads, namespace=namespace, existing=True)
        return Proxy(actor, name, caller, result_of(actor.build.remote(make), name))
