"""Checkpoints are complete or absent, verified when read, and pruned by rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from trivium.checkpoint import CheckpointStore, export
from trivium.errors import RunDirError


def write(directory: Path) -> None:
    (directory / "policy").mkdir()
    (directory / "policy" / "weights").write_bytes(b"x" * 100)


def saved(store: CheckpointStore, *steps: int, **state: object) -> None:
    for step in steps:
        store.save(step, write, {"step": step, **state})


def test_round_trip(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    saved(store, 1, 2)
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.state["step"]) == (2, 2)
    assert (export(latest, tmp_path / "out") / "weights").read_bytes() == b"x" * 100
    with pytest.raises(RunDirError, match="not empty"):
        export(latest, tmp_path / "out")


def test_a_save_that_dies_leaves_the_previous_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saved(store, 1)

    def dies(directory: Path) -> None:
        write(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(2, dies, {})
    assert store.steps() == [1]
    (tmp_path / "step-000007").mkdir()  # a removal that died after unsealing
    store.discard_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    saved(store, 1)
    file = tmp_path / "step-000001" / "policy" / "weights"
    if damage == "flip":
        file.write_bytes(b"x" * 99 + b"y")
    elif damage == "cut":
        file.write_bytes(b"x" * 99)
    else:
        file.unlink()
    with pytest.raises(RunDirError, match="weights is missing or not what was saved"):
        store.latest()


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saved(store, 3)
    with pytest.raises(RunDirError, match=r"has steps \[3\]"):
        store.open(4)


def test_retention_keeps_newest_best_and_pinned_of_earlier_sessions_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, keep_best="eval/test/accuracy")
    for step, score in ((1, None), (2, 0.9), (3, 0.1)):
        store.save(step, write, {"score": score, "pinned": [1]})
    later = CheckpointStore(tmp_path, keep=2, keep_best="eval/test/accuracy")
    for step, score in ((4, 0.2), (5, 0.3), (6, None)):
        later.save(step, write, {"score": score, "pinned": [1]})
    assert later.steps() == [1, 2, 5, 6]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    saved(store, 1, mark="old")
    saved(store, 1, mark="new")
    assert store.open(1).state["mark"] == "new"
