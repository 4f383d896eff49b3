"""The disk of a simulated computer that loses its power: a file keeps what was written before its last `fsync`."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

_OWN = (".db", ".db-journal", ".db-wal", ".db-shm")
"""Files of SQLite, which syncs them itself."""


class Disk:
    """Remembers the content of every file at its last `fsync`, and the entries of every directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[tuple[int, int], bytes] = {}
        self._entries: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}

    def synced(self, descriptor: int) -> None:
        """A process has synced this file or directory."""
        about, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        identity = about.st_dev, about.st_ino
        if path.is_dir():
            self._entries[identity] = {entry.name: _identity(entry) for entry in os.scandir(path)}
        elif path.is_file():
            with path.open("rb", buffering=0) as file:
                self._files[identity] = file.readall()

    def unlinked(self, path: str | os.PathLike[str], dir_fd: int | None = None) -> None:
        """A process is about to remove this file, whose inode may be used again."""
        about = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        self._files.pop((about.st_dev, about.st_ino), None)

    def lose_power(self, draw: random.Random) -> None:
        """Changes the files under the root to a state that the disk may be in after a loss of power."""
        for path in sorted(self._root.rglob("*")):
            if not path.is_file() or path.name.endswith(_OWN):
                continue
            content = path.read_bytes()
            kept = self._files.get(_identity(path), b"")
            if content == kept or draw.random() < 0.3:
                continue
            if content.startswith(kept):  # a part of what was appended since may have been written
                path.write_bytes(content[: draw.randint(len(kept), len(content))])
            else:
                path.write_bytes(kept)
        for path in sorted(self._root.rglob("*")):
            # A rename that was not synced may be undone: the directory is not there under its new name.
            known = self._entries.get(_identity(path.parent)) if path.is_dir() else None
            if known is not None and known.get(path.name) != _identity(path) and draw.random() < 0.5:
                shutil.rmtree(path)


def _identity(path: Path | os.DirEntry[str]) -> tuple[int, int]:
    about = path.stat(follow_symlinks=False)
    return about.st_dev, about.st_ino
