"""The log of a run: a file in the run directory, warnings on the terminal too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from trivium.phases import SPANS, spans_to

_log = logging.getLogger("trivium")
ENDED = "ended by an error: "
"""The line of log.txt that says why a session did not finish."""
BEGINS = "begins at step"
"""The line that every session has."""


class _LogFile(logging.FileHandler):
    """A log file that says on stderr, once, that it cannot be written; logging would print a traceback each time."""

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
        except OSError as error:  # flushes what is buffered
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self.failed:
            self.failed = True
            sys.stderr.write(f"cannot write {self.baseFilename}: {error.strerror}\n")


@contextmanager
def logging_to(run_dir: Path, file_name: str, role: str = "", shown: int = logging.WARNING) -> Generator[None]:
    """The logger `trivium` goes to a file of the run directory while the block runs; from the level `shown` on, to
    stderr as well. When the process did what goes to a file of its own (`phases.SPANS`).

    Several processes may write to one file, each saying which `role` it is: a record is appended whole.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    format_ = f"{role}: %(message)s" if role else "%(message)s"
    handler = _LogFile(run_dir / file_name, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {format_}"))
    terminal = logging.StreamHandler()  # stderr shows warnings without a look into the file
    terminal.setFormatter(logging.Formatter(format_))
    terminal.setLevel(shown)
    terminal.addFilter(lambda record: not record.exc_info)  # tracebacks are for the file
    _log.setLevel(logging.INFO)
    for each in (handler, terminal):
        _log.addHandler(each)
    process = role or file_name.removesuffix(".txt").removeprefix("log").removeprefix("-") or "main"
    try:
        with spans_to(run_dir / SPANS / f"{process}.jsonl"):
            yield
    finally:
        for each in (handler, terminal):
            _log.removeHandler(each)
            each.close()
