"""Roles by name, in this process; the default ActorDirectory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from trivium.errors import UnknownName
from trivium.registry import suggest


class ActorDirectory(Protocol):
    """Finds a role by name: in this process (`LocalDirectory`), or through Ray on a cluster (`RayDirectory`)."""

    def get(self, namespace: str, name: str, make: Callable[[], Any] | None = None) -> Any:
        """The role of that name; where there is none yet, what `make` builds, once. What is returned has the role's
        methods: its coroutines are awaited as usual, wherever it runs.

        Raises UnknownName where there is none and nothing to build.
        """
        ...


class LocalDirectory:
    """The roles of this process, by namespace and name. Callable from any thread."""

    def __init__(self) -> None:
        self._roles: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def get(self, namespace: str, name: str, make: Callable[[], Any] | None = None) -> Any:
        with self._lock:
            roles = self._roles.setdefault(namespace, {})
            if name not in roles:
                if make is None:
                    raise UnknownName(
                        f"the role {name!r} of {namespace!r}", "it does not run here", suggest(name, roles)
                    )
                roles[name] = make()
            return roles[name]

    def forget(self, namespace: str) -> None:
        """Frees the names of a namespace."""
        with self._lock:
            self._roles.pop(namespace, None)


HERE = LocalDirectory()
"""The default directory."""
