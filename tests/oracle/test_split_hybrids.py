"""Models with recurrent states on several ranks: sharded, replicated, and split by tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hybrid_parts import HYBRID_OF, write_hybrid
from rank_parts_of_splitting import (
    CONTINUED,
    CONTINUED_CASES,
    HYBRID_CASES,
    HYBRID_LAYOUTS,
    Step,
    engine_of,
    hybrids_on_ranks,
    planned_part,
    step,
)
from rank_processes import run_ranks

pytestmark = pytest.mark.timeout(900)  # the ranks of all tests run in the first one
CASES = [(size, kind, layout) for size, cases in HYBRID_CASES.items() for kind, layout in cases]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrids")
    for kind in {kind for _, kind, _ in CASES}:
        write_hybrid(directory / kind, HYBRID_OF[kind], vocab_size=40)
    return directory


@pytest.fixture(scope="module")
def continued(directory: Path) -> Step:
    """The second step of a model, from the checkpoint that `CONTINUED alone` has."""
    engine = engine_of(directory, model=CONTINUED, average=True)
    step(engine)
    engine.save(directory / f"{CONTINUED} alone")
    return step(engine)


@pytest.fixture(scope="module")
def alone(directory: Path) -> Callable[[str], Step]:
    """The step of one process with a model."""
    return cache(lambda kind: step(engine_of(directory, model=kind, average=kind == CONTINUED)))


@pytest.fixture(scope="module")
def found(directory: Path, continued: Step, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    folder = tmp_path_factory.mktemp("ranks") / "hybrids"
    return run_ranks(list(HYBRID_CASES), hybrids_on_ranks, folder, directory, deadline_s=720.0)


@pytest.mark.parametrize(("size", "kind", "layout"), CASES)
def test_equals_one_process(
    size: int, kind: str, layout: str, found: dict[int, list[Any]], alone: Callable[[str], Step], directory: Path
) -> None:
    """Gradient norms and weights. The layers of Zamba 2 share weights."""
    ranks = found[size][0][f"{kind} {layout}"]
    assert ranks.distance(alone(kind)) < 1e-9
    assert size > 2 or layout == "expert" or ranks.norms.keys() == alone(kind).norms.keys()  # the critic
    planned = planned_part(directory / kind, size, **HYBRID_LAYOUTS[layout])
    assert found[size][0][f"{kind} {layout} part"] == pytest.approx(planned, abs=0.03)


@pytest.mark.parametrize(("size", "layout"), CONTINUED_CASES)
def test_a_checkpoint_continues_in_another_layout(
    size: int, layout: str, found: dict[int, list[Any]], continued: Step, directory: Path
) -> None:
    resumed = found[size][0][f"{CONTINUED} {layout} resumed"]
    assert resumed.is_whole()
    assert resumed.distance(continued) < 1e-9
    engine = engine_of(directory, model=CONTINUED, average=True)
    engine.load(directory / f"{size} {CONTINUED} {layout}")
    assert step(engine).distance(continued) < 1e-9
