"""Runs the worlds of many seeds in forked processes, and reduces the faults of one that broke a promise."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

from trivium.config import load_config
from trivium.runtime.launch import run
from trivium.simulation.world import BASE, Outcome, Spec, World, compare

_PATIENCE_S = 600.0
"""Real seconds that a world may take."""


def prepare(directory: Path) -> Path:
    """Runs each kind of command once without simulation, which imports all modules. Returns the directory of the model
    of all worlds."""
    quick = ["engine.mean_s=0.001", "schedule.steps=1"]
    database = f"buffer={{kind: sql, url: 'sqlite:///{directory / 'buffer.db'}'}}"
    with redirect_stderr(StringIO()):
        run(load_config(BASE, [*quick, f"run.dir={directory / 'memory'}"]))
        run(load_config(BASE, [*quick, f"run.dir={directory / 'sql'}", database, "sync.method=checkpoint"]))
    return directory / "memory" / "model"


def run_spec(spec: Spec, model: Path) -> Outcome:
    """Runs a world without its faults, and then with them. Both results are compared if they must be equal.

    Each world has a forked process of its own, since the commands of a world share the globals of their modules.
    """
    calm = _forked(replace(spec, faults=()), model, 0)
    if calm.problems or not spec.faults:
        return replace(calm, spec=spec, problems=[f"without faults: {problem}" for problem in calm.problems])
    outcome = _forked(spec, model, calm.events)
    outcome.events += calm.events
    if outcome.digest and not outcome.problems:
        compare(calm, outcome)
    return outcome


def _forked(spec: Spec, model: Path, calm_events: int) -> Outcome:
    receiver, process = _started(_run, spec, model, calm_events)
    with receiver:
        outcome = _received(receiver) if receiver.poll(_PATIENCE_S) else None
    process.kill()
    process.join()
    return outcome or Outcome(spec, [f"its process ended with {process.exitcode}, or computed for {_PATIENCE_S} s"])


def _run(sender: Connection, spec: Spec, model: Path, calm_events: int) -> None:
    with tempfile.TemporaryDirectory(prefix="trivium-world-") as directory:
        sender.send(World(spec, Path(directory), model, calm_events).run())


def run_seeds(seeds: Iterable[int], processes: int, model: Path) -> Iterator[tuple[Outcome, Spec]]:
    """Yields (outcome, `shrunk` spec if it broke a promise) of worlds in the order in which they end, `processes` at a
    time. Their logs are discarded."""
    running, waiting = dict[Connection, BaseProcess](), iter(seeds)
    while True:
        running |= (_started(_run_seed, seed, model) for seed in islice(waiting, processes - len(running)))
        if not running:
            return
        for receiver in cast(list[Connection], wait([*running])):
            yield receiver.recv()
            running.pop(receiver).join()


def _run_seed(sender: Connection, seed: int, model: Path) -> None:
    sys.stderr = StringIO()
    outcome = run_spec(Spec.of(seed), model)
    sender.send((outcome, shrunk(outcome.spec, model) if outcome.problems else outcome.spec))


def _started(function: Callable[..., None], *arguments: object) -> tuple[Connection, BaseProcess]:
    """A forked process that calls the function with the sending end of a connection, and the receiving end."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(sender, *arguments))
    process.start()
    sender.close()
    return receiver, process


def _received(receiver: Connection) -> Outcome | None:
    try:
        return receiver.recv()
    except EOFError:
        return None


def shrunk(spec: Spec, model: Path) -> Spec:
    """A spec that still breaks a promise, and of whose faults none can be left out."""
    for fault in spec.faults:
        fewer = replace(spec, faults=tuple(other for other in spec.faults if other is not fault))
        if run_spec(fewer, model).problems:
            return shrunk(fewer, model)
    return spec
