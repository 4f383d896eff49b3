"""Reads files that a run in progress changes: complete lines only, and again only if a file has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from pathlib import Path
from threading import Lock
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Row = Mapping[str, float]
"""A row of metrics.jsonl: `step`, and metrics by key."""
_END = 256
"""Number of bytes before the read position that are compared to detect a cut file."""


class MetricRows:
    """The rows of metrics.jsonl. Each refresh reads only the added rows. May be used by several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Row] = []
        self.generation = 0
        """Counts how often a resumed run cut the file, which invalidates the rows read before."""
        self._position, self._end = 0, b""
        self._lock = Lock()

    @property
    def written_s(self) -> float | None:
        """The time of the last write, in seconds of `time.time`; None if there is no such file."""
        _, written_ns = _stamp(self._path)
        return written_ns / 1e9 if written_ns else None

    def refresh(self) -> list[Row]:
        """Returns all rows in order; a step may have several. Leaves an incomplete last line for the next refresh.
        Empty if there is no such file."""
        with self._lock:
            if not self._path.is_file():
                return self.rows
            with self._path.open("rb") as file:
                file.seek(max(0, self._position - len(self._end)))
                if file.read(len(self._end)) != self._end:
                    self.rows, self._position, self._end = [], 0, b""
                    self.generation += 1
                    file.seek(0)
                added = file.read()
            whole = added[: added.rfind(b"\n") + 1]
            # A new list, since another thread may read the old one.
            self.rows = [*self.rows, *(row for line in whole.splitlines() if (row := json_value(line)))]
            self._position += len(whole)
            self._end = (self._end + whole)[-_END:]
            return self.rows


def cached_while_unchanged(
    *names: str, maxsize: int = 16
) -> Callable[[Callable[Concatenate[Path, P], T]], Callable[Concatenate[Path, P], T]]:
    """Decorates a function of a path. Caches its results until the file changes; with `names`, until one of these
    changes in the directory."""

    def decorate(function: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
        @lru_cache(maxsize=maxsize)
        def cached(stamps: object, path: Path, *args: Any, **kwargs: Any) -> T:
            # The stamps only tell results apart: a changed file has another key in the cache.
            del stamps
            return function(path, *args, **kwargs)

        @wraps(function)
        def read(path: Path, *args: P.args, **kwargs: P.kwargs) -> T:
            files = [path / name for name in names] or [path]
            return cached(tuple(map(_stamp, files)), path, *args, **kwargs)

        return read

    return decorate


def _stamp(path: Path) -> tuple[int, int]:
    """Returns size and modification time of a file; (0, 0) if it does not exist."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return 0, 0
    return about.st_size, about.st_mtime_ns


def json_value(text: str | bytes) -> Any:
    """Parses a JSON value; returns None for an incomplete one."""
    try:
        return json.loads(text)
    except ValueError:
        return None
