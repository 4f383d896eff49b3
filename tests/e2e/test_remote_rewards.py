"""A run whose rewards come from `trivium serve-reward`, which is killed in the middle and comes back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import httpx
import pytest

from tests.processes import Forked, commands
from tests.reward_services import port_below_ephemeral
from tests.waiting import eventually

TINY = Path(__file__).with_name("tiny.yaml")
TOKEN = "sesame-of-the-tests"
MORTAL = """
import os, signal
from pathlib import Path

scored, grave = 0, Path(__file__).with_name("killed")

def mortal(prompt, completion, answer):
    global scored
    scored += 1
    if scored == 40 and not grave.exists():
        grave.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(completion.strip() == str(answer))
"""

Start = Callable[..., Forked]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Start]:
    monkeypatch.setenv("SCORING_TOKEN", TOKEN)
    (tmp_path / "mortal.py").write_text(MORTAL)
    (tmp_path / "rewards.yaml").write_text("rewards: [mortal.py:mortal]\n")
    with commands(tmp_path) as starting:
        yield starting


def serve(start: Start, tmp_path: Path, port: int = 0) -> tuple[Forked, str]:
    """The server and its URL, once it listens."""
    token = ("--token-variable", "SCORING_TOKEN")
    server = start("serve-reward", "serve-reward", str(tmp_path / "rewards.yaml"), "--port", str(port), *token)
    eventually(lambda: "serving the reward" in server.text, 120, lambda: server.text, server)
    return server, server.text.partition(" at ")[2].partition("/get_reward")[0]


def config(tmp_path: Path, url: str, **section: str) -> str:
    remote = {"kind": "remote", "name": "mortal", "urls": f"{url}/get_reward", "protocol": "openrlhf", **section}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"extends": str(TINY), "rewards": [remote], "run": {"dir": str(tmp_path / "run")}}))
    return str(path)


def test_a_run_waits_for_a_service_that_was_killed(start: Start, tmp_path: Path) -> None:
    port = port_below_ephemeral()
    server, url = serve(start, tmp_path, port)
    run = start("run", "run", config(tmp_path, url, token_variable="SCORING_TOKEN"))
    assert server.wait(240) == -signal.SIGKILL
    eventually(lambda: "is tried again" in run.text, 120, lambda: run.text, run)
    again, _ = serve(start, tmp_path, port)
    assert run.wait(240) == 0, run.text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "failures" not in summary, summary
    assert httpx.get(f"{url}/health").json()["failed"] == 0
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]

    os.kill(again.pid, signal.SIGTERM)
    assert again.wait(120) == 0
    assert "stopping" in again.text


def test_a_wrong_token_ends_the_run_and_names_it(start: Start, tmp_path: Path) -> None:
    _, url = serve(start, tmp_path)
    (tmp_path / "token").write_text("another-token")
    run = start("run", "run", config(tmp_path, url, token_file=str(tmp_path / "token"))).ended(1, seconds=240)
    assert "status 401: it refuses the token" in run.text
    assert "another-token" not in run.text + (tmp_path / "run" / "log.txt").read_text()
    assert f"TokenRefused in {url}/get_reward" in run.text


def test_a_command_that_cannot_serve_says_why(start: Start, tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("rewards: [{kind: exakt}]\n")
    open_to_all = start("open", "serve-reward", str(tmp_path / "rewards.yaml"), "--host", "0.0.0.0")
    misspelt = start("misspelt", "serve-reward", str(tmp_path / "none.yaml"))
    assert (open_to_all.wait(120), misspelt.wait(120)) == (2, 2)
    assert "without a token" in open_to_all.text
    assert "did you mean 'exact'" in misspelt.text
