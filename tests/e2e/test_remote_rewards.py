"""A run whose rewards come from a service that is killed in the middle and comes back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.ports import port_below_ephemeral
from tests.processes import Forked, commands
from tests.waiting import eventually

TINY = Path(__file__).with_name("tiny.yaml")
TOKEN = "sesame-of-the-tests"

Start = Callable[..., Forked]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Start]:
    monkeypatch.setenv("SCORING_TOKEN", TOKEN)
    with commands(tmp_path) as starting:
        yield starting


def serve_rewards(port: int, grave: str, listening: str) -> None:
    """Serves the exact match in the form of OpenRLHF, and writes its port into the file `listening`. Dies at the 40th
    sample if `grave` does not exist."""
    scored = 0

    class Rewards(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal scored
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.answer(401, {})
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            scored += len(body["query"])
            if scored >= 40 and not Path(grave).exists():
                Path(grave).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            triples = zip(body["query"], body["prompts"], body["labels"], strict=True)
            self.answer(200, {"rewards": [float(q.removeprefix(p).strip() == str(label)) for q, p, label in triples]})

        def answer(self, status: int, value: dict[str, Any]) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", port), Rewards)
    Path(listening).write_text(str(server.server_port))
    server.serve_forever()


@contextmanager
def serving(tmp_path: Path, name: str, port: int = 0) -> Generator[tuple[Forked, str]]:
    """The service and its URL, once it listens."""
    listening = tmp_path / f"{name}.port"
    server = Forked(name, tmp_path / f"{name}.out", serve_rewards, port, str(tmp_path / "grave"), str(listening))
    try:
        eventually(lambda: listening.exists() and listening.read_text(), 120, lambda: server.text, server)
        yield server, f"http://127.0.0.1:{listening.read_text()}"
    finally:
        server.kill()


def config(tmp_path: Path, url: str, **section: str) -> str:
    remote = {"kind": "remote", "name": "exact", "urls": f"{url}/get_reward", "protocol": "openrlhf", **section}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"extends": str(TINY), "rewards": [remote], "run": {"dir": str(tmp_path / "run")}}))
    return str(path)


def test_a_run_waits_for_a_service_that_was_killed(start: Start, tmp_path: Path) -> None:
    port = port_below_ephemeral()
    with serving(tmp_path, "mortal", port) as (server, url):
        run = start("run", "run", config(tmp_path, url, token_variable="SCORING_TOKEN"))
        assert server.wait(240) == -signal.SIGKILL
    eventually(lambda: "is tried again" in run.text, 120, lambda: run.text, run)
    with serving(tmp_path, "again", port):
        assert run.wait(240) == 0, run.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "failures" not in summary, summary
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]


def test_a_wrong_token_ends_the_run_and_names_it(start: Start, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("another-token")
    with serving(tmp_path, "guarded") as (_, url):
        run = start("run", "run", config(tmp_path, url, token_file=str(tmp_path / "token"))).ended(1, seconds=240)
    assert "status 401: it refuses the token" in run.text
    assert "another-token" not in run.text + (tmp_path / "run" / "log.txt").read_text()
    assert f"TokenRefused in {url}/get_reward" in run.text
