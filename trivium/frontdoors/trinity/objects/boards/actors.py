"""Boards that the processes of a namespace share by name. A board is on Ray if this process is connected to a cluster,
else in a file of this machine. Its content lasts as long as one of the processes lives."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trivium.foundation.atomic import writing
from trivium.foundation.board import FileTable, SharedBoard
from trivium.foundation.errors import RunDirError
from trivium.frontdoors.trinity.objects.boards.remote_calls import Shared, ray_session

T = TypeVar("T")

_lock = threading.RLock()
_made: dict[tuple[str, str, str], Any] = {}


def made_once(namespace: str, name: str, make: Callable[[Shared], T]) -> T:
    """Returns this process's object for the board with this name. `make` creates it on the first call."""
    with _lock:
        keys = [(session, namespace, name) for session in dict.fromkeys(("", ray_session()))]
        for key in keys:  # an object made before this process joined a Ray cluster stays valid
            if key in _made:
                return _made[key]
        shared = _shared(namespace, name)
        try:
            return _made.setdefault(keys[-1], make(shared))
        except BaseException:
            shared.close()
            raise


def forget(namespace: str, name: str | None = None) -> None:
    """Releases the boards of a namespace, or the one with this name, as if this process had ended."""
    with _lock:
        for key in [key for key in _made if key[1] == namespace and name in (None, key[2])]:
            _made.pop(key).shared.close()


def _shared(namespace: str, name: str) -> Shared:
    if ray_session():
        from trivium.frontdoors.trinity.objects.boards.ray_actors import join

        return join(namespace, name)
    table = FileTable(_directory() / hashlib.sha256(namespace.encode()).hexdigest()[:32] / name)
    return Shared(namespace, name, SharedBoard(table), close=table.close)


def _directory() -> Path:
    """Returns the directory that all processes of this user share on this machine."""
    directory = Path(tempfile.gettempdir()) / f"trivium-{os.getuid()}"
    with writing(directory):
        directory.mkdir(mode=0o700, exist_ok=True)
    if directory.lstat().st_uid != os.getuid():
        raise RunDirError(f"{directory}, for what processes share", "it belongs to another user", "set TMPDIR")
    return directory
