"""`trivium view`: serves the page over run directories until a signal stops it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from trivium.foundation.atomic import atomic_write, refuse_existing
from trivium.foundation.errors import ConfigError, MissingPackage, RunDirError
from trivium.inspection.run import RecordedRun
from trivium.inspection.viewer.timeline import chrome_trace

LOOPBACK = "127.0.0.1"


def view(paths: Sequence[Path], port: int, announce: Callable[[str], object]) -> None:
    """Serves until SIGTERM or SIGINT. `announce` gets the address, which includes the token.

    Raises RunDirError for a directory that holds no run, ListenError if the port is taken, MissingPackage without the
    extra `serve`.
    """
    for path in paths:
        RecordedRun.open(path)
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackage(error.name or "fastapi", "serve", "view a run in a browser") from error
    asyncio.run(_serve(paths, port, secrets.token_urlsafe(24), announce))


async def _serve(paths: Sequence[Path], port: int, token: str, announce: Callable[[str], object]) -> None:
    from trivium.inspection.viewer.page_server import Guarded, page_app
    from trivium.inspection.viewer.watched_run import WatchedRun
    from trivium.serving.connections import serve_app

    runs = [WatchedRun(path, name) for path, name in zip(paths, names_of(paths), strict=True)]
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve_app(Guarded(page_app(runs), token), LOOPBACK, port) as url:
        announce(f"{url}/{token}/")
        await stop.wait()


def write_trace(paths: Sequence[Path], out: Path) -> None:
    """Writes the timeline of a run in Chrome's trace format. Raises ConfigError for several runs, RunDirError for a run
    without recorded spans."""
    if len(paths) != 1:
        raise ConfigError("the trace of one run", f"{len(paths)} runs", "write one file for each")
    refuse_existing(out, "--trace")
    RecordedRun.open(paths[0])
    trace = chrome_trace(paths[0])
    if not trace["traceEvents"]:
        raise RunDirError(
            f"the timeline of {paths[0]}", "no spans in spans/", "only runs of this version record them: run it again"
        )
    atomic_write(out, json.dumps(trace))


def names_of(paths: Sequence[Path]) -> list[str]:
    """Returns a name for each run: the last parts of its path, as many as distinguish the runs. Raises ConfigError for
    a repeated path."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    if len(set(parts)) < len(parts):
        raise ConfigError("runs to view side by side", "one of them is named twice", "name each run once")
    number = 1
    while len({path_parts[-number:] for path_parts in parts}) < len(parts):
        number += 1
    return ["/".join(path_parts[-number:]) for path_parts in parts]
