"""Rows from a Python caller, in a file of the run directory that is named by its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trivium.config import ConfigPath, free
from trivium.foundation.errors import DataError, text_of
from trivium.tasks.files import jsonl_rows
from trivium.tasks.pictures import portable
from trivium.tasks.rows import RowTasks, json_value


class GivenRows(RowTasks):
    """The rows passed to `trivium.run(config, tasks=...)`, stored in the run directory."""

    class Config(RowTasks.Config):
        """Where the rows are, and how a row becomes a task."""

        path: ConfigPath = free()
        """The file of JSON lines that `trivium.run` wrote."""
        digest: str
        """The hash of the rows. A resumed run must get the same rows."""

    config: Config

    @property
    def origin(self) -> str:
        return self.config.path

    def rows(self) -> Iterator[tuple[str, Any]]:
        path = Path(self.config.path)
        if not path.is_file() or digest_of(path.read_text(encoding="utf-8")) != self.config.digest:
            raise DataError(
                f"the rows of tasks.{self.name} in {path}",
                "they differ from the rows that the run began with" if path.is_file() else "no such file",
                "call trivium.run with the same rows again",
            )
        return jsonl_rows(self.config.path)


def digest_of(text: str) -> str:
    """The hash of rows written by `as_lines`."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def as_lines(rows: Iterable[object], where: str, *, skips: bool = False) -> str:
    """The rows as JSON lines, images in them as data URIs. Raises DataError for a row that is not a mapping of JSON
    values; with `skips` (`on_bad_row`), its line is the text of the error, which no task can be made of."""
    lines: list[str] = []
    for number, row in enumerate(rows):
        try:
            value = _given(row, f"{where}, row {number}")
        except DataError as error:
            if not skips:
                raise
            value = text_of(error)
        lines.append(json.dumps(value, ensure_ascii=False) + "\n")
    return "".join(lines)


def _given(row: object, where: str) -> dict[str, Any]:
    """A row as JSON values. Raises DataError."""
    try:
        value = json_value(portable(row), where)
    except RecursionError as error:
        do = "write it as JSON text, or remove the column"
        raise DataError(f"a row at {where}", "a value that is nested too deep, or that contains itself", do) from error
    if not isinstance(value, dict):
        raise DataError(f"a row at {where}", type(row).__name__, "give a mapping from column to value")
    return value
