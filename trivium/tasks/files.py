"""Tasks from files: JSON lines and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trivium.config import ConfigPath
from trivium.errors import DataError, MissingPackage
from trivium.tasks.rows import RowTasks


class FileTasks(RowTasks):
    """Rows of one file."""

    class Config(RowTasks.Config):
        """Which file, and how a row becomes a task."""

        path: ConfigPath
        """The file, relative to the config."""

    config: Config

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        if not Path(config.path).is_file():
            raise DataError(f"the file {config.path}", "no such file", f"correct tasks.{name}.path")
        super().__init__(config, name=name, seed=seed)

    @property
    def origin(self) -> str:
        return self.config.path


class JsonlTasks(FileTasks):
    """One JSON object per line (UTF-8); empty lines are passed over. Lines are counted from 1."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        with Path(self.config.path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{self.config.path}:{number}"
                    yield where, _parsed(where, line)


def _parsed(where: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"JSON at {where}", f"{error} in {line.strip()[:60]!r}", "correct the line") from error


class ParquetTasks(FileTasks):
    """The rows of a Parquet file, counted from 0; needs `pyarrow` (extra `data`)."""

    def __init__(self, config: FileTasks.Config, *, name: str, seed: int) -> None:
        try:
            import pyarrow.parquet as parquet
        except ModuleNotFoundError as error:
            raise MissingPackage("pyarrow", "data", f"read tasks.{name} from Parquet") from error
        self._parquet = parquet
        super().__init__(config, name=name, seed=seed)

    def rows(self) -> Iterator[tuple[str, Any]]:
        number = 0
        try:
            with self._parquet.ParquetFile(self.config.path) as file:
                for batch in file.iter_batches():
                    for row in batch.to_pylist():
                        yield f"{self.config.path}, row {number}", row
                        number += 1
        except (OSError, ValueError) as error:  # pyarrow's errors are one or the other
            raise DataError(f"rows of {self.config.path}", str(error), "write the file again") from error
