"""A headless Chromium, driven by its DevTools protocol over a pair of pipes: nothing but Debian's package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START = (
    "--headless=new",
    "--no-sandbox",  # it runs as root in containers, and opens pages of this project alone
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def chromium() -> str | None:
    """The browser's command; None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """A tab. `problems` are the errors that its console showed and its scripts raised."""

    def __init__(self, commands: int, answers: int, deadline_s: float) -> None:
        self._commands, self._answers, self._deadline_s = commands, answers, deadline_s
        self._number, self._received, self._session = 0, b"", ""
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command. AssertionError where it fails, or takes longer than the deadline."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it resolves to."""
        how = {"returnByValue": True, "awaitPromise": True}
        result = self.send("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in result, f"{expression}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression as soon as it is true; AssertionError, with the page's text, at the deadline. An
        expression about an element that is not in the page yet is not true."""
        end = time.monotonic() + self._deadline_s
        absent = "catch (error) { if (!(error instanceof TypeError)) throw error; }"
        found = f"const value = {expression}; return value instanceof Node ? true : value;"
        expression = f"(() => {{ try {{ {found} }} {absent} }})()"
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} on a page of\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        about = {"key": key, "text": key} if len(key) == 1 else {"key": key}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def move(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        how = {"deviceScaleFactor": scale, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, **how)

    def prefer(self, theme: str) -> None:
        """`dark` or `light`, as the system would."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def _receive(self, method: str) -> dict[str, Any]:
        end = time.monotonic() + self._deadline_s
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the browser does not answer {method} within {self._deadline_s:.0f} s"
            received = os.read(self._answers, 1 << 20)
            assert received, "the browser has ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(about["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(str(about["args"]))
        elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(str(about["entry"]))


@contextmanager
def browser(deadline_s: float = 60.0) -> Generator[Page]:
    """A page of a browser of its own, which ends with the block."""
    command = chromium()
    assert command is not None, "no chromium"
    (commands_out, commands), (answers, answers_in) = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (commands_out, answers_in)]

    def connect() -> None:
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [command, *_START, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=connect,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for each in (commands_out, answers_in, *theirs):
            os.close(each)
        try:
            yield Page(commands, answers, deadline_s)
        finally:
            process.kill()
            process.wait()
            os.close(commands)
            os.close(answers)
