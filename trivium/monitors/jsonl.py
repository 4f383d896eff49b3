"""metrics.jsonl: one JSON object per logged row, each with `step`. The file other tools read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium.config import Plugin
from trivium.foundation.atomic import writing
from trivium.foundation.errors import RunDirError


class JsonlMonitor:
    """Appends to `metrics.jsonl` and, for tables, to `tables/<name>.jsonl` in the run directory.

    A run that starts at step 0 starts both afresh; one that resumes restores the lengths its checkpoint recorded.
    """

    class Config(Plugin):
        kind: str = "jsonl"

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int) -> None:
        self.run_dir = run_dir
        self._files: dict[str, _RowFile] = {}
        existing = ["metrics.jsonl", *(f"tables/{p.name}" for p in sorted((run_dir / "tables").glob("*.jsonl")))]
        for name in existing:
            file = self._file(name)
            if resume_step == 0:
                file.truncate(0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file("metrics.jsonl").append({"step": step, **metrics})

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        file = self._file(f"tables/{name.replace('/', '-')}.jsonl")
        for row in rows:
            file.append({"step": step, **row})

    def state(self) -> dict[str, Any]:
        """Returns the length of each file in bytes, after syncing the files to disk."""
        return {"bytes": {name: file.position() for name, file in sorted(self._files.items())}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Cuts each file to its recorded length; empties a table that began later."""
        lengths: dict[str, int] = state["bytes"]
        later = {f"tables/{p.name}" for p in (self.run_dir / "tables").glob("*.jsonl")}
        for name in sorted(later | set(lengths)):
            self._file(name).truncate(lengths.get(name, 0))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> _RowFile:
        if name not in self._files:
            self._files[name] = _RowFile(self.run_dir / name)
        return self._files[name]


class _RowFile:
    """A file of JSON lines. Each line is written whole and flushed: in a killed run, only the last line can be
    incomplete."""

    def __init__(self, path: Path) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row. Numbers keep every bit; NaN and infinities are written as JSON's common extension."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with writing(self.path):
            self._file.write(line)
            self._file.flush()

    def position(self) -> int:
        """Returns the length in bytes, after syncing the file to disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def truncate(self, position: int) -> None:
        """Discards everything after `position`. Raises RunDirError if the file is shorter."""
        length = self._file.seek(0, os.SEEK_END)
        if length < position:
            raise RunDirError(
                f"continue {self.path}",
                f"{length} bytes, but the checkpoint recorded {position}",
                "put the file back, or resume from an older checkpoint",
            )
        self._file.truncate(position)
        self._file.seek(position)

    def close(self) -> None:
        self._file.close()
