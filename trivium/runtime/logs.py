"""The log of a run: a file in the run directory; warnings also appear on the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from trivium.foundation.atomic import writing
from trivium.foundation.phases import SPANS, spans_to

_log = logging.getLogger("trivium")
ENDED = "ended by an error: "
"""Begins the line of log.txt with the error that ended a session."""
BEGINS = "begins at step"
"""Part of a line that every session logs."""


class _LogFile(logging.FileHandler):
    """A log file that reports once on stderr that it cannot be written; logging would print a traceback each time."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._report(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # flushes the buffered records
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self.failed:
            self.failed = True
            sys.stderr.write(f"cannot write {self.baseFilename}: {error.strerror}\n")


@contextmanager
def logging_to(run_dir: Path, file_name: str, role: str = "", shown: int = logging.WARNING) -> Generator[None]:
    """Sends the logger `trivium` to a file of the run directory while the block runs; records from the level `shown` on
    also go to stderr. Time spans go to a separate file of the process (`phases.SPANS`).

    Several processes may write to one file, with their `role` in each record: every record is appended whole.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    format_ = f"{role}: %(message)s" if role else "%(message)s"
    with writing(run_dir / file_name):
        handler = _LogFile(run_dir / file_name, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {format_}"))
    terminal = logging.StreamHandler()  # stderr shows warnings to users who do not read the file
    terminal.setFormatter(logging.Formatter(format_))
    terminal.setLevel(shown)
    terminal.addFilter(lambda record: not record.exc_info)  # only the file gets tracebacks
    _log.setLevel(logging.INFO)
    for destination in (handler, terminal):
        _log.addHandler(destination)
    process = role or file_name.removesuffix(".txt").removeprefix("log").removeprefix("-") or "main"
    try:
        with spans_to(run_dir / SPANS / f"{process}.jsonl"):
            yield
    finally:
        for destination in (handler, terminal):
            _log.removeHandler(destination)
            destination.close()
