"""Tasks from files: JSON lines and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from trivium.config import ConfigPath, RunConfig
from trivium.foundation.errors import DataError, MissingPackage, Problem
from trivium.tasks.pictures import common_folder
from trivium.tasks.rows import RowTasks, missing_package


class FileTasks(RowTasks):
    """Rows of one file, or of several."""

    class Config(RowTasks.Config):
        """Which file, and how a row becomes a task."""

        path: ConfigPath | tuple[ConfigPath, ...]
        """The file, or a list of files that are read one after another; relative to the config."""

        @property
        def paths(self) -> tuple[str, ...]:
            """The files."""
            return (self.path,) if isinstance(self.path, str) else self.path

        @property
        def image_folder(self) -> Path:
            return super().image_folder or common_folder(self.paths)

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from (_no_file(path, where) for path in self.paths if not Path(path).is_file())

    config: Config

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        for path in config.paths:
            if not Path(path).is_file():
                raise DataError(*_no_file(path, f"tasks.{name}")[1:])
        super().__init__(config, name=name, seed=seed)

    @property
    def origin(self) -> str:
        return ", ".join(self.config.paths)


def _no_file(path: str, where: str) -> Problem:
    return Problem(f"{where}.path", f"the file {path}", "no such file", f"correct {where}.path")


class JsonlTasks(FileTasks):
    """One JSON object per line (UTF-8); empty lines are skipped. Lines are counted from 1."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        return chain.from_iterable(jsonl_rows(path, self.bad_rows) for path in self.config.paths)


def jsonl_rows(path: str, bad: list[DataError] | None = None) -> Iterator[tuple[str, Any]]:
    """(location, row) for each row of a file of JSON lines. `bad` gets the errors of lines that are not JSON, which are
    raised without it."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}:{number}"
                try:
                    row = _parsed(where, line)
                except DataError as error:
                    if bad is None:
                        raise
                    bad.append(error)
                else:
                    yield where, row


def _parsed(where: str, line: bytes) -> object:
    """The JSON value of a line. Raises DataError."""
    if line.lstrip()[:1] == b"[":
        do = "write one object per line, as with `jq -c '.[]'`"
        raise DataError(f"a row at {where}", "a list, on one line or over the whole file", do)
    try:
        # The first line of a file may begin with a byte order mark.
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        found = f"byte {line[error.start : error.start + 1]!r} of {line.strip()[:60]!r} is not UTF-8"
        raise DataError(f"JSON at {where}", found, "convert the file, as with `iconv -f latin1 -t utf-8`") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"JSON at {where}", f"{error} in {line.strip()[:60]!r}", "correct the line") from error


class ParquetTasks(FileTasks):
    """The rows of a Parquet file, counted from 0; needs `pyarrow` (extra `data`)."""

    class Config(FileTasks.Config):
        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            yield from missing_package(where, "pyarrow", _no_pyarrow(where))

    def rows(self) -> Iterator[tuple[str, Any]]:
        return chain.from_iterable(parquet_rows(path, f"tasks.{self.name}") for path in self.config.paths)


def parquet_rows(path: str, where: str) -> Iterator[tuple[str, Any]]:
    """(location, row) for each row of a Parquet file; `where` is the config key for errors. Raises MissingPackage
    without pyarrow."""
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise _no_pyarrow(where) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except (OSError, ValueError, ArithmeticError) as error:  # pyarrow raises any of them
        raise DataError(f"rows of {path}", str(error), "write the file again") from error


def _no_pyarrow(where: str) -> MissingPackage:
    return MissingPackage("pyarrow", "data", f"read {where} from Parquet")
