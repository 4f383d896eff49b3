"""The threads of OpenMP end where the thread that computed with them waits, and start again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from trivium.models.cpu import openmp
from trivium.models.cpu.openmp import release_team

FACTOR = torch.ones(512, 512)


def in_a_thread(*works: object) -> list[int]:
    """The number of threads of this process after each work, done by one new thread with two OpenMP threads."""
    numbers: list[int] = []

    def count() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        for work in works:
            work() if callable(work) else None
            numbers.append(len(list(Path("/proc/self/task").iterdir())))
        torch.set_num_threads(before)

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    return numbers


def product() -> None:
    assert torch.equal(FACTOR @ FACTOR, torch.full_like(FACTOR, 512.0))


@pytest.mark.skipif("openmp._libgomp() is None", reason="torch has another OpenMP")
def test_a_team_ends_and_starts_again() -> None:
    alone, team, released, again = in_a_thread(None, product, release_team, product)
    assert team == again == alone + 1
    assert released == alone


def test_without_a_team_and_without_libgomp_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    release_team()
    release_team()
    monkeypatch.setattr(openmp, "_libgomp", lambda: None)
    release_team()
