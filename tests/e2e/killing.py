"""Runs `trivium run` again and again in one run directory, killing it with SIGKILL at chosen moments.

The launches are forked from the preloaded process; a moment is a call of the product's code in which the process dies.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import trivium.foundation.atomic as atomic
import trivium.runtime.run_dir as run_dir_module
from tests.processes import Forked, fork_server, trivium
from tests.waiting import eventually
from trivium.buffers.journal import Journal
from trivium.buffers.media import MediaFiles
from trivium.checkpoint.store import CheckpointStore
from trivium.engines.torch.decoder import Decoder
from trivium.monitors.jsonl import _RowFile
from trivium.training.distributed.train_process import TrainProcess
from trivium.training.engine import TorchTrainEngine
from trivium.training.optim import Optimizer
from trivium.training.snapshot import Snapshot

Kill = tuple[str, int] | float
"""(moment, the how manieth call of its kind), or seconds after the start."""


def die(moment: str) -> None:
    """Reports the moment that was reached to the test, and is gone."""
    REPORT.send(moment)
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


def half_a_picture(original: Callable[..., Any], files: MediaFiles, media: Any) -> None:
    files.folder.mkdir(parents=True, exist_ok=True)
    (files.folder / f".{media.sha256}.writing").write_bytes(media.data[: len(media.data) // 2])


def half_the_tensors(original: Callable[..., Any], decoder: Decoder, weights: Any) -> None:
    original(decoder, [(name, tensor * 0 if i % 2 else tensor) for i, (name, tensor) in enumerate(weights)])


def half_a_row(original: Callable[..., Any], file: Any, row: dict[str, Any]) -> None:
    file._file.write(json.dumps(row).encode()[:40])
    file._file.flush()


def whole(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)


def nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None: ...


def half_the_files(original: Callable[..., Any], snapshot: Snapshot, directory: Path) -> None:
    """Training has gone on since."""
    original(replace(snapshot, files=dict(list(snapshot.files.items())[:2])), directory)
    wait_for_a_step(directory.parents[1], int(re.findall(r"\d{6}", directory.name)[0]))


def not_pruned(original: Callable[..., Any], store: CheckpointStore, pinned: Any) -> None:
    wait_for_a_step(store.directory.parent, store.steps()[-1])


def wait_for_a_step(run_dir: Path, saved: int) -> None:
    """Until a step after the one that is being saved was logged."""

    def stepped() -> bool:
        rows = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
        return any(json.loads(row)["step"] > saved for row in rows)

    eventually(stepped, why=lambda: "training waits for the save")


MOMENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "model: built, not renamed": (Path, "rename", nothing),
    "config: half written": (run_dir_module, "atomic_write", half_of_a_file),
    "save: models written, no manifest": (TorchTrainEngine, "save", whole),
    "save: manifest half written": (atomic, "atomic_write", half_of_a_file),
    "save: manifest written, not renamed": (Path, "rename", nothing),
    "save: renamed, not pruned": (CheckpointStore, "prune", nothing),
    "prune: manifest gone, files not removed": (shutil, "rmtree", nothing),
    "put: half a record": (Journal, "append", half_a_record),
    "put: journaled, not counted": (Journal, "append", whole),
    "adopt: half the tensors": (Decoder, "load", half_the_tensors),
    "update: gradient there, no step": (Optimizer, "step", nothing),
    "update: step taken, no version": (Optimizer, "step", whole),
    "log: half a row": (_RowFile, "append", half_a_row),
}
BESIDE: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "beside: half the files, training goes on": (Snapshot, "_write_own", half_the_files),
    "beside: complete, not pruned, training goes on": (CheckpointStore, "prune", not_pruned),
}
"""Moments of a save that training does not wait for."""

PICTURES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "keep: half a picture": (MediaFiles, "keep", half_a_picture),
    "keep: a picture, no record": (MediaFiles, "keep", whole),
}
"""Moments of runs whose rollouts hold pictures."""

CALLS: dict[str, tuple[Any, str, Callable[..., Any]]] = {"call: not answered": (TrainProcess, "_wait_for", nothing)}
"""Moments at which the train process (`train.own_process`) computes or writes."""


def launches(config: Path, run_dir: Path, kills: Sequence[Kill] = (), overrides: Sequence[str] = ()) -> list[str]:
    """`trivium run` once for each kill, and once more: the moment each launch was killed at, or `finished`.

    Fails when the last one does not finish.
    """
    outcomes = [launch(config, run_dir, kill, overrides) for kill in (*kills, None)]
    assert outcomes[-1] == "finished", (outcomes, run_dir.with_name(f"{run_dir.name}.out").read_text())
    return outcomes


def launch(config: Path, run_dir: Path, kill: Kill | None, overrides: Sequence[str] = ()) -> str:
    """One `trivium run`: the moment it was killed at, `finished`, or its exit code."""
    arguments, output = ("run", str(config), f"run.dir={run_dir}", *overrides), run_dir.with_name(f"{run_dir.name}.out")
    reading, writing = fork_server().Pipe(duplex=False)
    with reading, writing:
        process = Forked("trivium", output, _command, arguments, kill, writing)
        try:
            code = process.wait(600)
        finally:
            process.kill()
        if code == -signal.SIGKILL and reading.poll():
            return reading.recv()
    return "finished" if code == 0 else f"exit code {code}"


def _command(arguments: Sequence[str], kill: Kill | None, report: Connection) -> None:
    global REPORT
    REPORT = report
    match kill:
        case None:
            pass
        case float():
            threading.Timer(kill, die, ["time"]).start()
        case moment, nth:
            owner, name, deadly = (MOMENTS | BESIDE | PICTURES | CALLS)[moment]
            arm(owner, name, moment, nth, deadly)
    trivium(*arguments)


REPORT: Connection
