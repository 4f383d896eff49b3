"""Runs the worlds of many seeds in forked processes, and reduces the faults of one that broke a promise."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

from trivium.config import load_config
from trivium.runtime.launch import run
from trivium.simulation.world import BASE, Outcome, Spec, outcome_of

_WORLDS = 20
"""Worlds that one process runs. The threads of killed commands stay in its memory."""


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
    """Runs a world in a temporary directory. The log goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="trivium-world-") as directory:
        return outcome_of(spec, Path(directory), model)


def run_seeds(seeds: Sequence[int], processes: int, model: Path) -> Iterator[Outcome]:
    """Yields the outcomes of worlds in the order in which they end."""
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=_WORLDS) as pool:
        yield from pool.imap_unordered(_run_quietly, ((seed, model) for seed in seeds))


def _run_quietly(task: tuple[int, Path]) -> Outcome:
    seed, model = task
    with redirect_stderr(StringIO()):
        return run_spec(Spec.of(seed), model)


def shrunk(spec: Spec, model: Path) -> Spec:
    """A spec that still breaks a promise, and of whose faults none can be left out."""
    for fault in spec.faults:
        fewer = replace(spec, faults=tuple(other for other in spec.faults if other is not fault))
        with redirect_stderr(StringIO()):
            if run_spec(fewer, model).problems:
                return shrunk(fewer, model)
    return spec
