"""Runs `trivium run` again and again in one run directory, killing it with SIGKILL at the moments it is told.

A process of its own: it imports everything once and forks a child per launch, so that a launch costs a second, not ten.
stdin: {"arguments": [...], "kills": [{"moment": "save", "nth": 1} | {"moment": "time", "seconds": 0.4}, ...]}.
stdout: one line per launch: the moment it was killed at, or `finished`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import trivium.launch
import trivium.sealing
from trivium.buffers.journal import Journal
from trivium.checkpoint import CheckpointStore
from trivium.cli import main
from trivium.engines.decoder import Decoder
from trivium.monitors.jsonl import _RowFile
from trivium.training.optim import Optimizer
from trivium.training.saving import Held
from trivium.training.torch import TorchTrainEngine


def die(moment: str) -> None:
    """Says which moment was reached, on the file descriptor the parent reads, and is gone."""
    os.write(REPORT, moment.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def arm(owner: Any, name: str, moment: str, nth: int, deadly: Callable[..., Any]) -> None:
    """Replaces the nth call of `owner.name` by `deadly(original, *args)`."""
    original, calls = getattr(owner, name), iter(range(1, 1_000_000))

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            deadly(original, *args, **kwargs)
            die(moment)
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def half_of_a_file(original: Callable[..., Any], path: Path, text: str) -> None:
    path.with_name(f".{path.name}.writing").write_text(text[: len(text) // 2])


def half_a_record(original: Callable[..., Any], journal: Journal, step: int, group: Any) -> None:
    original(journal, step, group)
    path = journal._path(step)
    os.truncate(path, path.stat().st_size - 10)


def half_the_tensors(original: Callable[..., Any], decoder: Decoder, weights: Any) -> None:
    original(decoder, [(name, tensor * 0 if i % 2 else tensor) for i, (name, tensor) in enumerate(weights)])


def half_a_row(original: Callable[..., Any], file: Any, row: dict[str, Any]) -> None:
    file._file.write(json.dumps(row).encode()[:40])
    file._file.flush()


def whole(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)


def nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None: ...


def half_the_files(original: Callable[..., Any], held: Held, directory: Path) -> None:
    """Training has gone on since."""
    original(replace(held, files=dict(list(held.files.items())[:2])), directory)
    wait_for_a_step(directory.parents[1], int(re.findall(r"\d{6}", directory.name)[0]))


def not_pruned(original: Callable[..., Any], store: CheckpointStore, pinned: Any) -> None:
    wait_for_a_step(store.directory.parent, store.steps()[-1])


def wait_for_a_step(run_dir: Path, saved: int) -> None:
    """Until a step after the one that is being saved was logged."""
    deadline = time.monotonic() + 60
    while not any(json.loads(row)["step"] > saved for row in (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]):
        assert time.monotonic() < deadline, "training waits for the save"
        time.sleep(0.002)


MOMENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "model: built, not renamed": (Path, "rename", nothing),
    "config: half written": (trivium.launch, "write_aside", half_of_a_file),
    "save: models written, not sealed": (TorchTrainEngine, "save", whole),
    "save: manifest half written": (trivium.sealing, "write_aside", half_of_a_file),
    "save: sealed, not renamed": (Path, "rename", nothing),
    "save: renamed, not pruned": (CheckpointStore, "prune", nothing),
    "prune: unsealed, not removed": (shutil, "rmtree", nothing),
    "put: half a record": (Journal, "append", half_a_record),
    "put: journaled, not counted": (Journal, "append", whole),
    "adopt: half the tensors": (Decoder, "load", half_the_tensors),
    "update: gradient there, no step": (Optimizer, "step", nothing),
    "update: step taken, no version": (Optimizer, "step", whole),
    "log: half a row": (_RowFile, "append", half_a_row),
}
BESIDE: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "beside: half the files, training goes on": (Held, "_write_own", half_the_files),
    "beside: complete, not pruned, training goes on": (CheckpointStore, "prune", not_pruned),
}
"""Moments of a save that training does not wait for."""


def child(arguments: list[str], kill: dict[str, Any] | None) -> None:
    if kill is not None and kill["moment"] == "time":
        threading.Timer(kill["seconds"], die, ["time"]).start()
    elif kill is not None:
        owner, name, deadly = (MOMENTS | BESIDE)[kill["moment"]]
        arm(owner, name, kill["moment"], kill["nth"], deadly)
    sys.argv = ["trivium", *arguments]
    try:
        main()
    except SystemExit as done:
        os._exit(done.code if isinstance(done.code, int) else 1)


def launch(arguments: list[str], kill: dict[str, Any] | None) -> str:
    global REPORT
    reading, REPORT = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        child(arguments, kill)
    os.close(REPORT)
    with os.fdopen(reading) as report:
        moment = report.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return moment if os.WTERMSIG(status) == signal.SIGKILL and moment else f"died of {status}"
    return "finished" if os.WEXITSTATUS(status) == 0 else f"exit code {os.WEXITSTATUS(status)}"


REPORT = -1

if __name__ == "__main__":
    orders = json.load(sys.stdin)
    for kill in [*orders["kills"], None]:
        print(launch(orders["arguments"], kill), flush=True)
