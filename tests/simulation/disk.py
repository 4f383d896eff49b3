"""The disk of a simulated computer that loses its power: a file keeps what was written before its last `fsync`, and a
directory the entries that were made, renamed and removed before its own.

SQLite syncs its files itself, as its pragma `synchronous` says.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_OF_SQLITE = (".db", ".db-journal", ".db-wal", ".db-shm")
_OFF, _FULL = 0, 2
_JOURNAL_S = 5.0
"""After this time the file system has written changes of directories to its journal."""

AnyPath = str | os.PathLike[str]


class _Change(NamedTuple):
    """An entry of a directory that was made, renamed or removed, which is not on the disk."""

    directory: Path
    at: float
    undo: Callable[[], object]


class Disk:
    """Remembers the content of every file at its last `fsync`, and the changes of directories since theirs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[tuple[int, int], bytes] = {}
        self._changes: list[_Change] = []

    def synced(self, descriptor: int) -> None:
        """A process has synced this file or directory."""
        path = Path(_path_of(descriptor))
        if path.is_dir():
            self._changes = [change for change in self._changes if change.directory != path]
        elif path.is_file():
            self._files[_identity(path)] = path.read_bytes()

    def made(self, path: AnyPath, at: float) -> None:
        """A process has made this file or directory."""
        entry = _absolute(path)

        def undo() -> None:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                self._forget(entry)
                entry.unlink()

        self._changes.append(_Change(entry.parent, at, undo))

    def removed(self, directory: AnyPath, at: float, dir_fd: int | None = None) -> None:
        """A process is about to remove this empty directory."""
        entry = _absolute(directory, dir_fd)
        self._changes.append(_Change(entry.parent, at, entry.mkdir))

    def renaming(self, source: AnyPath, target: AnyPath) -> Callable[[float], None]:
        """A process is about to rename a file or a directory. The result is called with the time when it has."""
        old = _identity(Path(target)) if os.path.lexists(target) else None

        def renamed(at: float) -> None:
            replaced = None if old is None else self._files.pop(old, None)

            def undo() -> None:
                os.rename(target, source)
                self._write(Path(target), replaced)

            self._changes.append(_Change(_absolute(target).parent, at, undo))

        return renamed

    def unlinked(self, path: AnyPath, at: float, dir_fd: int | None = None) -> None:
        """A process is about to remove this file."""
        file = _absolute(path, dir_fd)
        content = self._forget(file)
        self._changes.append(_Change(file.parent, at, lambda: self._write(file, content)))

    def lose_power(self, draw: random.Random, now: float) -> None:
        """Changes the files under the root to a state that the disk may be in after a loss of power."""
        changes = [change for change in self._changes if change.at > now - _JOURNAL_S]
        for change in reversed(changes[draw.randint(0, len(changes)) :]):
            with suppress(OSError):  # later changes, which are not undone, have removed or replaced it
                change.undo()
        self._changes.clear()
        for path in sorted(self._root.rglob("*")):
            if not path.is_file() or path.name.endswith(_OF_SQLITE):
                continue
            content = path.read_bytes()
            kept = self._files.get(_identity(path), b"")
            if content == kept or draw.random() < 0.3:
                continue
            if content.startswith(kept):  # a part of what was appended since may have been written
                path.write_bytes(content[: draw.randint(len(kept), len(content))])
            else:
                path.write_bytes(kept)

    def _forget(self, path: Path) -> bytes | None:
        """Returns the content at the last sync of a file that is about to go: its inode may be used again."""
        with suppress(FileNotFoundError):
            return self._files.pop(_identity(path), None)
        return None

    def _write(self, path: Path, content: bytes | None) -> None:
        if content is not None:
            path.write_bytes(content)
            self._files[_identity(path)] = content


def lose_commits(database: Path, synchronous: int, draw: random.Random, close: Callable[[], object]) -> None:
    """Removes transactions that SQLite had not synced from the log of a database, by its pragma `synchronous`: 0 (OFF)
    syncs nothing, which may damage the database, 1 (NORMAL) before the log is moved into the database, 2 (FULL) each
    transaction. `close` closes the last connection, which would move the whole log into the database."""
    log_file, index_file = database.with_name(f"{database.name}-wal"), database.with_name(f"{database.name}-shm")
    if synchronous >= _FULL or not log_file.is_file():
        return
    content, log, index = database.read_bytes(), log_file.read_bytes(), index_file.read_bytes()
    close()
    # https://www.sqlite.org/walformat.html: a header of 32 bytes, then frames of 24 bytes and one page. The index has
    # the number of frames, and how many of them are in the database, which are synced.
    frame = 24 + int.from_bytes(log[8:12], "big")
    last, synced = (int.from_bytes(index[start : start + 4], "little") for start in (16, 96))
    if synchronous == _OFF:
        content, synced = content[: draw.randint(0, len(content))], 0
    database.write_bytes(content)
    log_file.write_bytes(log[: 32 + frame * draw.randint(synced, last)])
    index_file.unlink(missing_ok=True)


def _path_of(descriptor: int) -> str:
    """The path of an open file or directory."""
    if command := getattr(fcntl, "F_GETPATH", None):  # macOS has no /proc
        return fcntl.fcntl(descriptor, command, bytes(1024)).rstrip(b"\0").decode()
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _absolute(path: AnyPath, dir_fd: int | None = None) -> Path:
    return Path(os.path.abspath(path) if dir_fd is None else f"{_path_of(dir_fd)}/{path}")


def _identity(path: Path) -> tuple[int, int]:
    about = path.stat(follow_symlinks=False)
    return about.st_dev, about.st_ino
