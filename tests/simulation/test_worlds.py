"""The commands of a run in simulated worlds: they keep their promises, and the simulation finds planted faults."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("greenlet")

from tests.simulation.planted import PLANTED, find
from trivium.simulation.seeds import prepare, run_seeds, run_spec
from trivium.simulation.world import Spec

SEEDS = range(30)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("simulation"))


def test_worlds_keep_their_promises(model: Path) -> None:
    faults, broken = Counter[str](), dict[int, list[str]]()
    for outcome, _ in run_seeds(SEEDS, 1, model):
        faults += outcome.faults
        if outcome.problems:
            broken[outcome.spec.seed] = outcome.problems
    assert not broken
    assert {"kill", "power", "pause", "clock", "slow_disk", "twin"} <= set(faults)


@pytest.mark.slow
def test_further_worlds_keep_their_promises(model: Path) -> None:
    assert not [outcome for outcome, _ in run_seeds(range(30, 200), 2, model) if outcome.problems]


@pytest.mark.parametrize("shared", [False, True])
def test_a_seed_repeats_its_history(shared: bool, model: Path) -> None:
    seed = next(seed for seed in range(1000) if (spec := Spec.of(seed)).shared == shared and len(spec.faults) > 1)
    first, second = (run_spec(Spec.of(seed), model) for _ in range(2))
    assert first.events == second.events
    assert (first.digest, first.seconds, first.starts) == (second.digest, second.seconds, second.starts)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, model: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        found = pool.submit(find, name, model).result(600)
    assert found.startswith("seed "), found
    seed = int(found.split()[1].rstrip(":"))
    assert not run_spec(Spec.of(seed), model).problems  # without the fault
