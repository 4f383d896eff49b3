"""The commands of a run in simulated worlds: they keep their promises, and the simulation finds planted faults."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path

import pytest

pytest.importorskip("greenlet")

from tests.failing import refused
from tests.simulation import seeds
from tests.simulation.planted import PLANTED, find
from tests.simulation.seeds import prepare, run_seeds, run_spec
from tests.simulation.spec import FAMILY, Fault, Spec
from trivium.foundation.concurrency import ProcessLife
from trivium.foundation.errors import ConfigError

SEEDS = range(40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("simulation"))


def test_worlds_keep_their_promises(model: Path) -> None:
    faults, broken = Counter[str](), dict[int, list[str]]()
    for outcome in run_seeds(SEEDS, 1, model):
        faults += outcome.faults
        if outcome.problems:
            broken[outcome.spec.seed] = outcome.problems
    assert not broken
    assert {"kill", "power", "pause", "clock", "slow_disk", "twin"} <= set(faults)


@pytest.mark.timeout(900)
def test_further_worlds_keep_their_promises(model: Path) -> None:
    """In two processes. `make simulate` runs more of them: 100 cost 60 CPU seconds."""
    assert not [outcome for outcome in run_seeds(range(40, 100), 2, model) if outcome.problems]


@pytest.mark.parametrize("shared", [False, True])
def test_a_seed_alone_decides_about_its_world(shared: bool, model: Path) -> None:
    """The worlds that ran before in the same process have no influence."""
    last = next(seed for seed in range(FAMILY - 1, 1000, FAMILY) if Spec.of(seed).shared == shared)
    *_, after_others = run_seeds(range(last - FAMILY + 1, last + 1), 1, model)
    alone = run_spec(Spec.of(last), model)
    assert alone.events > 100
    assert replace(alone, spec=after_others.spec) == after_others


@pytest.mark.parametrize("seed", [143, 517, 1532, 1731, 4864, 9266])
def test_worlds_that_found_a_defect_keep_their_promises(seed: int, model: Path) -> None:
    assert not run_spec(Spec.of(seed), model).problems


def test_worlds_remove_their_files_and_those_of_killed_processes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds, "IN_MEMORY", tmp_path)
    alive = ProcessLife.of(os.getpid())
    for name, owner in {"alive": alive, "killed": replace(alive, started="0")}.items():  # a later one has its pid
        (tmp_path / f"trivium-worlds-{name}").mkdir()
        (tmp_path / f"trivium-worlds-{name}" / "owner.json").write_text(json.dumps(astuple(owner)))
    outcomes = run_seeds(range(3), 1, model)
    next(outcomes)
    assert len([*tmp_path.glob("trivium-worlds-*")]) == 2  # the one that is alive, and its own
    del outcomes  # while its process runs
    assert [path.name for path in tmp_path.iterdir()] == ["trivium-worlds-alive"]


def test_a_fault_is_read_as_it_is_printed() -> None:
    faults = Spec.of(4).faults
    assert faults
    assert [Fault.parsed(str(fault)) for fault in faults] == [*faults]
    with refused(ConfigError, "kill@soon"):
        Fault.parsed("kill@soon:trainer:1")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, model: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        found = pool.submit(find, name, model, 100).result(600)
    # A fault that a full disk alone shows needs 1,000 worlds, two CPU minutes: it has a recorded seed.
    assert found.startswith("seed "), f"record another seed: python -m tests.simulation.planted '{name}'"
    seed = int(found.split()[1].rstrip(":"))
    assert not run_spec(Spec.of(seed), model).problems  # without the fault
