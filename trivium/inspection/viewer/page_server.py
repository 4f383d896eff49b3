"""The routes of `trivium view`: read-only, for browsers on this machine whose address has the token."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from trivium.foundation.errors import TriviumError
from trivium.inspection.viewer.group_list import Query
from trivium.inspection.viewer.timeline import chrome_trace, lanes
from trivium.inspection.viewer.watched_run import WatchedRun

_PAGES = files("trivium.inspection.viewer") / "pages"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Image types by the first bytes of a file. Media are stored without their types.
_IMAGES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)


class Guarded:
    """Passes on requests that only read, use a loopback host name and have the token as the first part of the path.

    Refuses other host names against DNS rebinding: a web site may resolve its own name to this machine, so that its
    scripts in the user's browser could read the page.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no lifespan events, no web sockets
            return
        refused = self._refused(scope)
        if refused is not None:
            await refused(scope, receive, send)
            return
        path: str = scope["path"]
        inner = path.removeprefix("/").partition("/")[2]
        await self._app({**scope, "path": f"/{inner}", "raw_path": f"/{inner}".encode()}, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        """The response to a request that is not passed on; None for any other."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
            return _plain(403, "open the page by the address that `trivium view` printed")
        if scope["method"] not in ("GET", "HEAD"):
            return _plain(405, "the page only reads")
        token = scope["path"].removeprefix("/").partition("/")[0]
        # Takes as long for a wrong first character as for a wrong last one, so that its time does not tell the token.
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return _plain(
                404, "the token in the address is missing or wrong: open the whole address that `trivium view` printed"
            )
        return None


def _plain(status: int, text: str) -> Response:
    return Response(text + "\n", status, media_type="text/plain", headers=_HEADERS)


def page_app(runs: Sequence[WatchedRun]) -> FastAPI:
    """Builds the page over these runs, without its guard. Errors of runs are JSON with the fields `asked`, `found` and
    `do`."""
    app = FastAPI(title="Trivium", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(TriviumError)
    def _(request: Request, error: TriviumError) -> Response:
        del request
        return JSONResponse({"asked": error.asked, "found": error.found, "do": error.do}, 400)

    @app.middleware("http")
    async def _(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers.update(_HEADERS)
        return response

    _add_files(app, runs)
    _add_values(app, runs)
    return app


def _add_files(app: FastAPI, runs: Sequence[WatchedRun]) -> None:
    """Adds the routes of the page itself and of the files that it shows."""
    names = {item.name for item in _PAGES.iterdir() if item.is_file()}

    @app.get("/")
    def _() -> Response:
        return Response((_PAGES / "index.html").read_bytes(), media_type="text/html; charset=utf-8")

    @app.get("/pages/{name}")
    def _(name: str) -> Response:
        kind = _TYPES.get("." + name.rpartition(".")[2])
        # Only names of files that are there: a name with `..` leads nowhere.
        if name not in names or kind is None:
            return _plain(404, "no such file")
        return Response((_PAGES / name).read_bytes(), media_type=f"{kind}; charset=utf-8")

    @app.get("/media/{run}/{sha256}")
    def _(run: int, sha256: str) -> Response:
        if re.fullmatch("[0-9a-f]{64}", sha256) is None or run not in range(len(runs)):
            return _plain(404, "media are named by their SHA-256")
        data = runs[run].media.load(sha256)
        kind = next((kind for start, kind in _IMAGES.items() if data.startswith(start)), "application/octet-stream")
        return Response(data, media_type=kind)

    @app.get("/trace/{run}.json")
    def _(run: int) -> Response:
        if run not in range(len(runs)):
            return _plain(404, "no such run")
        name = re.sub(r"[^\w.-]", "_", runs[run].name)
        headers = {"Content-Disposition": f'attachment; filename="{name}-trace.json"'}
        return JSONResponse(chrome_trace(runs[run].path), headers=headers)


def _add_values(app: FastAPI, runs: Sequence[WatchedRun]) -> None:
    """Adds the routes of the values that the page requests."""

    def of(run: int) -> WatchedRun:
        if run not in range(len(runs)):
            raise TriviumError(f"run {run} of the page", f"it has {len(runs)}", "choose one of them")
        return runs[run]

    @app.get("/api/runs")
    def _() -> Any:
        return [run.about() for run in runs]

    @app.get("/api/curves")
    def _(run: int, keys: str, after: int = 0) -> Any:
        return of(run).curves(keys.split(","), after)

    @app.get("/api/verdict")
    def _(run: int) -> Any:
        return of(run).verdict()

    @app.get("/api/steps")
    def _(run: int) -> Any:
        return of(run).run.groups.steps()

    @app.get("/api/tasks")
    def _(run: int, step: int) -> Any:
        return of(run).groups.tasks(step)

    @app.get("/api/groups")
    def _(run: int, step: int, query: Annotated[Query, Depends()]) -> Any:
        return of(run).groups.page(step, query)

    @app.get("/api/rollouts")
    def _(run: int, step: int, stage: int, slot: int, attempt: int, first: int = 0, count: int = 1) -> Any:
        place = {"stage": stage, "slot": slot, "attempt": attempt}
        return of(run).rollouts(step, place, max(0, first), max(1, count))

    @app.get("/api/progress")
    def _(run: int, sort: str = "", descending: bool = True, text: str = "", first: int = 0, count: int = 100) -> Any:
        return of(run).tasks.page(sort, descending, text, max(0, first), min(max(1, count), 500))

    @app.get("/api/timeline")
    def _(run: int, start: float | None = None, stop: float | None = None) -> Any:
        return lanes(of(run).path, start, stop)
