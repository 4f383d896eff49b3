"""Roles found by name on a Ray cluster: each lives in an actor of its own, started by whoever asks first."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from trivium.cluster.remote import Proxy, start_host, wait_for
from trivium.errors import UnknownName

_ASKING = itertools.count()


class RayDirectory:
    """The ActorDirectory of processes that are connected to one cluster.

    A role that was started here ends with the process that asked for it first.
    """

    def __init__(self, run_dir: Path, threads: int = 1) -> None:
        """`run_dir` is where roles that are started from here log."""
        self._run_dir, self._threads = run_dir, threads

    def get(self, namespace: str, name: str, make: Callable[[], Any] | None = None) -> Any:
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
        return Proxy(actor, name, caller, wait_for(actor.build.remote(make), name))
