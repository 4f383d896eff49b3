"""Runs the worlds of many seeds in forked processes, and reduces the faults of one that broke a promise."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import astuple, replace
from io import StringIO
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import torch

from tests.simulation.spec import FAMILY, Outcome, Spec
from tests.simulation.world import BASE, World
from trivium.config import load_config
from trivium.foundation.atomic import atomic_write
from trivium.foundation.concurrency import ProcessLife
from trivium.runtime.launch import run

_PATIENCE_S = 300
"""Real seconds that a world may take."""
IN_MEMORY = Path("/dev/shm")
"""Where the files of worlds are, if it exists."""
_PREFIX, _OWNER = "trivium-worlds-", "owner.json"


def prepare(directory: Path) -> Path:
    """Runs each kind of command once without simulation, which imports all modules. Returns the directory of the model
    of all worlds."""
    torch.set_num_threads(1)
    quick = ["engine.mean_s=0.001", "schedule.steps=1"]
    database = f"buffer={{kind: sql, url: 'sqlite:///{directory / 'buffer.db'}'}}"
    with redirect_stderr(StringIO()):
        run(load_config(BASE, [*quick, f"run.dir={directory / 'memory'}"]))
        run(load_config(BASE, [*quick, f"run.dir={directory / 'sql'}", database, "sync.method=checkpoint"]))
    return directory / "memory" / "model"


def run_spec(spec: Spec, model: Path, *, quiet: bool = False) -> Outcome:
    """Runs a world, after the same one without its faults. Both results are compared if they must be equal. `quiet`
    discards the logs."""
    return next(_outcomes([[spec]], model, 1, quiet=quiet))


def run_seeds(seeds: Iterable[int], processes: int, model: Path) -> Iterator[Outcome]:
    """Yields the outcomes of worlds, of which `processes` run at a time. Discards their logs."""
    families = itertools.groupby(map(Spec.of, seeds), lambda spec: spec.seed // FAMILY)
    return _outcomes(([*specs] for _, specs in families), model, processes, quiet=True)


def shrunk(spec: Spec, model: Path) -> Spec:
    """A spec that still breaks a promise, and of whose faults none can be left out."""
    for fault in spec.faults:
        fewer = replace(spec, faults=tuple(other for other in spec.faults if other is not fault))
        if run_spec(fewer, model, quiet=True).problems:
            return shrunk(fewer, model)
    return spec


def _outcomes(families: Iterable[list[Spec]], model: Path, processes: int, *, quiet: bool) -> Iterator[Outcome]:
    """Runs each family in a forked process, since the commands of a world share the globals of their modules."""
    context, waiting = multiprocessing.get_context("fork"), iter(families)
    running = dict[Connection, tuple[BaseProcess, list[Spec]]]()
    with _directory_of_worlds(model) as directory:
        try:
            while True:
                for specs in itertools.islice(waiting, processes - len(running)):
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_run_family, args=(sender, specs, model, directory, quiet))
                    process.start()
                    sender.close()
                    running[receiver] = process, [*specs]
                if not running:
                    return
                for receiver in cast(list[Connection], wait([*running])):
                    process, left = running[receiver]
                    try:
                        yield receiver.recv()
                        left.pop(0)
                    except EOFError:
                        process.join()
                        del running[receiver]
                        if left and process.exitcode != 1:  # 1: an error that was reported
                            yield Outcome(left.pop(0), [f"its process ended with {process.exitcode}"])
                        waiting = itertools.chain([left], waiting) if left else waiting
        finally:  # the caller may want no further outcomes
            for process, _ in running.values():
                process.kill()
                process.join()


@contextmanager
def _directory_of_worlds(model: Path) -> Generator[Path]:
    """A new directory for the files of worlds. Removes those that killed processes have left."""
    parent = IN_MEMORY if IN_MEMORY.is_dir() else model
    for owner in parent.glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(FileNotFoundError):  # another process removes it
            if not ProcessLife(*json.loads(owner.read_text(encoding="utf-8")))():
                shutil.rmtree(owner.parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=_PREFIX) as directory:
        atomic_write(Path(directory) / _OWNER, json.dumps(astuple(ProcessLife.of(os.getpid()))))
        yield Path(directory)


def _run_family(sender: Connection, specs: list[Spec], model: Path, directory: Path, quiet: bool) -> None:
    """Runs worlds of one config, and sends the outcome of each."""
    gc.disable()  # a collection would run finalizers of one command while another one runs
    if quiet:
        sys.stderr = StringIO()
    # One path for all worlds of a process: their configs, which name it, are read once.
    place, calm = Path(tempfile.mkdtemp(dir=directory)), None
    for spec in specs:
        signal.alarm(_PATIENCE_S)
        try:
            if calm is None:
                calm = _run(replace(spec, seed=spec.seed // FAMILY * FAMILY, faults=()), place, model, 0)
            outcome = _with_faults(spec, calm, place, model)
        except Exception as error:
            sender.send(Outcome(spec, [f"seed {spec.seed}: {''.join(traceback.format_exception(error))}"]))
            raise  # the worlds that are left run in another process
        sender.send(outcome)


def _with_faults(spec: Spec, calm: Outcome, place: Path, model: Path) -> Outcome:
    if calm.problems or not spec.faults:
        return replace(calm, spec=spec, problems=[f"without faults: {problem}" for problem in calm.problems])
    outcome = _run(spec, place, model, calm.events)
    if outcome.digest and not outcome.problems:
        outcome.compare(calm)
    return outcome


def _run(spec: Spec, place: Path, model: Path, calm_events: int) -> Outcome:
    directory = place / "world"
    directory.mkdir()
    try:
        return World(spec, directory, model, calm_events).run()
    finally:
        shutil.rmtree(directory)
