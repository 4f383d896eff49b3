"""Reads files that a run in progress changes: complete lines only, and each part once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

Row = Mapping[str, float]
"""A row of metrics.jsonl: `step`, and metrics by key."""
Stamp = tuple[int, int]
"""Size and modification time of a file, (0, 0) if it does not exist: another stamp means that the content changed."""
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
        _, written_ns = stamp(self._path)
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
            self.rows = [*self.rows, *(row for line in whole.splitlines() if (row := json_value(line)))]
            self._position += len(whole)
            self._end = (self._end + whole)[-_END:]
            return self.rows


def stamp(path: Path) -> Stamp:
    """Returns the stamp of a file. The functions that parse files cache their results by it."""
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
