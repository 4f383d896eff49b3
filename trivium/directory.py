"""Roles found by name, in this process; the default ActorDirectory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from trivium.errors import UnknownName
from trivium.registry import suggest


class LocalDirectory:
    """The roles of this process, by namespace and name. Callable from any thread."""

    def __init__(self) -> None:
        self._roles: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def get(self, namespace: str, name: str, make: Callable[[], Any] | None = None) -> Any:
        """The role of that name; where there is none yet, what `make` builds, once.

        Raises UnknownName where there is none and nothing to build.
        """
        with self._lock:
            here = self._roles.setdefault(namespace, {})
            if name not in here and make is None:
                raise UnknownName(f"the role {name!r} of {namespace!r}", "it does not run here", suggest(name, here))
            if name not in here and make is not None:
                here[name] = make()
            return here[name]

    def forget(self, namespace: str) -> None:
        """The run of this namespace is over: its names are free again."""
        with self._lock:
            self._roles.pop(namespace, None)


HERE = LocalDirectory()
"""What is asked where nobody names another directory."""
