"""The threads of OpenMP end where the thread that computed with them waits, and start again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.waiting import until
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.randomness import SampleKey
from trivium.models.cpu.openmp import _libgomp, release_team
from trivium.runtime.main_loop import run_in_loop
from trivium.text.tiny import TinyModel
from trivium.types import Request, Sampling

pytestmark = pytest.mark.skipif(_libgomp() is None, reason="torch has another OpenMP")
FACTOR = torch.ones(512, 512)


def tasks() -> set[str]:
    """The threads of this process, OpenMP's included."""
    return {path.name for path in Path("/proc/self/task").iterdir()}


def product() -> None:
    assert torch.equal(FACTOR @ FACTOR, torch.full_like(FACTOR, 512.0))


def team_of(work: Callable[[], None]) -> set[str]:
    """The threads that this thread starts for the work, with two OpenMP threads."""
    number = torch.get_num_threads()
    torch.set_num_threads(2)  # the first change in a process starts a thread that torch keeps
    before = tasks()
    try:
        work()
        return tasks() - before
    finally:
        torch.set_num_threads(number)


def in_a_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_a_team_ends_and_starts_again() -> None:
    def check() -> None:
        assert team_of(release_team) == set(), "there is no team yet"
        team = team_of(product)
        assert len(team) == 1
        assert team <= tasks()
        release_team()
        assert not team & tasks()
        assert len(team_of(product)) == 1

    in_a_thread(check)


def test_the_pool_of_a_run_ends_the_teams_of_its_threads() -> None:
    async def check() -> None:
        team = await asyncio.to_thread(team_of, product)
        assert len(team) == 1
        assert not team & tasks()

    run_in_loop(check(), 60.0)


async def test_an_idle_engine_ends_its_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[set[str]] = []

    def watched() -> None:
        before = tasks()
        release_team()
        ended.append(before - tasks())

    sizes = {"layers": 1, "hidden": 256, "heads": 4, "mlp": 1024, "max_position": 1024}
    model = TinyModel(TinyModel.Config.model_validate(sizes), seed=0).materialize(tmp_path / "model")
    how: dict[str, Any] = {"eos_token_ids": frozenset({0}), "decode": str, "threads": 2}
    engine = TorchEngine(TorchEngine.Config(device="cpu", max_rows=2), model_dir=model, **how)
    monkeypatch.setattr("trivium.engines.torch.engine.release_team", watched)
    try:
        # Both threads read a long prompt.
        await engine.generate(Request(np.ones(900, np.int32), Sampling(2), SampleKey(0, "a", "b", "c")))
        await until(lambda: ended)
    finally:
        await engine.close()
    assert any(ended)
