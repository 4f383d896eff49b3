"""Runs the worlds of many seeds in forked processes, and reduces the faults of one that broke a promise."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import torch

from trivium.config import load_config
from trivium.runtime.launch import run
from trivium.simulation.spec import FAMILY, Outcome, Spec
from trivium.simulation.world import BASE, World

_PATIENCE_S = 300
"""Real seconds that a world may take."""
_IN_MEMORY = Path("/dev/shm")


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
    while True:
        for specs in itertools.islice(waiting, processes - len(running)):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run_family, args=(sender, specs, model, quiet))
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


def _run_family(sender: Connection, specs: list[Spec], model: Path, quiet: bool) -> None:
    """Runs worlds of one config, and sends the outcome of each."""
    gc.disable()  # a collection would run finalizers of one command while another one runs
    if quiet:
        sys.stderr = StringIO()
    calm = None
    for spec in specs:
        signal.alarm(_PATIENCE_S)
        try:
            if calm is None:
                calm = _run(replace(spec, seed=spec.seed // FAMILY * FAMILY, faults=()), model, 0)
            outcome = _with_faults(spec, calm, model)
        except Exception as error:
            sender.send(Outcome(spec, [f"seed {spec.seed}: {''.join(traceback.format_exception(error))}"]))
            raise  # the worlds that are left run in another process
        sender.send(outcome)


def _with_faults(spec: Spec, calm: Outcome, model: Path) -> Outcome:
    if calm.problems or not spec.faults:
        return replace(calm, spec=spec, problems=[f"without faults: {problem}" for problem in calm.problems])
    outcome = _run(spec, model, calm.events)
    if outcome.digest and not outcome.problems:
        outcome.compare(calm)
    return outcome


def _run(spec: Spec, model: Path, calm_events: int) -> Outcome:
    # One path for all worlds of a process: their configs, which name it, are read once.
    directory = (_IN_MEMORY if _IN_MEMORY.is_dir() else model) / f"trivium-world-{os.getpid()}"
    directory.mkdir()
    try:
        return World(spec, directory, model, calm_events).run()
    finally:
        shutil.rmtree(directory)
