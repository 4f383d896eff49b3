"""A service in a process of its own, for scripts that use the Tinker SDK."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tests.waiting import eventually

KEY = "tml-local"


class Service:
    """The command `trivium run` with run.mode tinker."""

    def __init__(self, directory: Path, model: Mapping[str, Any], name: str = "tiny", port: int = 0) -> None:
        self.directory = directory
        sections = {
            "run": {"mode": "tinker", "dir": str(directory)},
            "model": dict(model),
            "tasks": {"train": {"kind": "served"}},
            "serve": {"model": name, "port": port},
            "cluster": {"threads": 1},
            "train": {"lora": {"rank": 4, "alpha": 32}},
        }
        directory.mkdir(parents=True, exist_ok=True)
        (directory.parent / f"{directory.name}.yaml").write_text(yaml.safe_dump(sections))
        self.log = (directory.parent / f"{directory.name}.log").open("ab")
        command = [sys.executable, "-m", "trivium", "run", str(directory.parent / f"{directory.name}.yaml")]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)
        eventually(lambda: self._url() or self.process.poll() is not None, 300, self.text)
        self.url = self._url()
        assert self.url, self.text()

    def _url(self) -> str:
        with suppress(OSError, ValueError):
            at = json.loads((self.directory / "serve.json").read_text())
            return at["url"] if at["pid"] == self.process.pid else ""
        return ""

    def text(self) -> str:
        """What the command printed."""
        return (self.directory.parent / f"{self.directory.name}.log").read_text(errors="replace")[-4000:]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def environment(self) -> dict[str, str]:
        """That of a script of the SDK, without any network."""
        own = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
        return {**os.environ, **own, "HF_HOME": str(self.directory.parent / "hf"), "OMP_NUM_THREADS": "1"}

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        try:
            if self.process.poll() is None:
                self.process.terminate()  # not SIGINT, which commands in the background of a script ignore
                self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.kill()
            self.log.close()


@contextmanager
def running(directory: Path, model: Mapping[str, Any], name: str = "tiny") -> Iterator[Service]:
    service = Service(directory, model, name)
    try:
        yield service
    finally:
        service.end()
