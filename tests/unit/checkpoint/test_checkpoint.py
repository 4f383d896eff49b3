"""Checkpoints are complete or absent, verified when read, pruned by rule, and copied elsewhere by the same law."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from failing import refused

from trivium.checkpoint.store import CheckpointStore, export
from trivium.foundation.atomic import MANIFEST
from trivium.foundation.errors import ConfigError, RunDirError, StorageError


def write(directory: Path) -> None:
    (directory / "policy").mkdir()
    (directory / "policy" / "weights").write_bytes(b"x" * 100)


async def saved(store: CheckpointStore, *steps: int, **state: object) -> None:
    for step in steps:
        await store.save(step, write, {"step": step, **state})


async def test_round_trip(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    await saved(store, 1, 2)
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.state["step"]) == (2, 2)
    assert (export(latest, tmp_path / "out") / "weights").read_bytes() == b"x" * 100
    with refused(RunDirError, tmp_path / "out", "empty"):
        export(latest, tmp_path / "out")


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (b"\x00\xff junk", MANIFEST),
        (b"[]", MANIFEST),
        (b'{"files": {}, "step": 2}', "no files"),
        (b'{"files": {"policy/weights": {}}, "step": 2}', "no files"),
        (b'{"files": 5, "step": 2}', MANIFEST),
        (b"[" * 100_000, MANIFEST),
    ],
)
async def test_a_damaged_manifest_verifies_nothing_and_is_refused(
    tmp_path: Path, manifest: bytes, problem: str
) -> None:
    store = CheckpointStore(tmp_path)
    await saved(store, 1, 2)
    (tmp_path / "step-000002" / MANIFEST).write_bytes(manifest)
    with refused(RunDirError, problem, tmp_path / "step-000002"):
        store.latest()
    shutil.rmtree(tmp_path / "step-000002")  # as the message says
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1


async def test_a_checkpoint_under_another_name_or_with_another_file_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    await saved(store, 1)
    (tmp_path / "step-000001" / ".DS_Store").write_text("hidden")
    assert store.open(1).step == 1
    (tmp_path / "step-000001" / "policy" / "other").write_text("loaded with it")
    with refused(RunDirError, tmp_path / "step-000001", "policy/other"):
        store.open(1)
    (tmp_path / "step-000001" / "policy" / "other").unlink()
    (tmp_path / "step-000001").rename(tmp_path / "step-000005")
    with refused(RunDirError, tmp_path / "step-000005", "step 1"):
        store.latest()


async def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    await saved(store, 1)
    (tmp_path / "step-abc").mkdir()
    (tmp_path / "step-abc" / MANIFEST).write_text("{}")
    (tmp_path / "step-000009").write_text("a file")
    (tmp_path / "step-000008").mkdir()
    store.recover()
    assert store.steps() == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000009", "step-abc"]
    assert "step-000008 has no manifest.json" in caplog.text


async def test_a_save_that_dies_leaves_the_previous_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    await saved(store, 1)

    def dies(directory: Path) -> None:
        write(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        await store.save(2, dies, {})
    assert store.steps() == [1]
    (tmp_path / "step-000007").mkdir()  # a removal that died after unsealing
    store.recover()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    await saved(store, 2)  # the same step, saved anew
    assert store.steps() == [1, 2]


async def test_a_save_that_dies_before_it_removes_old_checkpoints_is_completed(tmp_path: Path) -> None:
    wide, narrow = CheckpointStore(tmp_path, keep=9), CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        await saved(wide, step, pinned=[1])
    latest = narrow.recover()
    assert latest is not None
    assert latest.step == 4
    assert narrow.steps() == [1, 3, 4]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
async def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    await saved(store, 1)
    file = tmp_path / "step-000001" / "policy" / "weights"
    if damage == "flip":
        file.write_bytes(b"x" * 99 + b"y")
    elif damage == "cut":
        file.write_bytes(b"x" * 99)
    else:
        file.unlink()
    with refused(RunDirError, "policy/weights"):
        store.latest()


async def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    await saved(store, 3)
    with refused(RunDirError, "step 4", "[3]"):
        store.open(4)


async def test_retention_keeps_newest_best_and_pinned_of_earlier_sessions_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, keep_best="eval/test/accuracy")
    for step, score in ((1, None), (2, 0.9), (3, 0.1)):
        await store.save(step, write, {"score": score, "pinned": [1]})
    later = CheckpointStore(tmp_path, keep=2, keep_best="eval/test/accuracy")
    for step, score in ((4, 0.2), (5, 0.3), (6, None)):
        await later.save(step, write, {"score": score, "pinned": [1]})
    assert later.steps() == [1, 2, 5, 6]


async def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    await saved(store, 1, mark="old")
    await saved(store, 1, mark="new")
    assert store.open(1).state["mark"] == "new"


async def test_a_step_whose_replacement_dies_half_way_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    await saved(store, 1, 2)

    def dies(folder: Path) -> None:
        (folder / "policy" / "weights").unlink()
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", dies)
        with refused(StorageError, "killed"):
            await saved(store, 2)
    assert store.steps() == [1]
    await saved(store, 2)
    assert store.open(2).step == 2


async def test_directories_of_a_checkpoint_are_on_disk_before_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    await saved(CheckpointStore(tmp_path), 1)
    assert synced.index("weights") < synced.index("policy") < synced.index(tmp_path.name)


# --------------------------------------------------------------------------- copies elsewhere


@pytest.fixture(params=["file", "memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty directory."""
    return (tmp_path / "elsewhere").as_uri() if request.param == "file" else f"memory://{tmp_path.name}"


def found(url: str) -> dict[str, bytes]:
    """Every file of a remote directory."""
    files, root = fsspec.url_to_fs(url)
    paths = files.find(root) if files.exists(root) else []
    return {str(path).removeprefix(root).lstrip("/"): files.cat_file(path) for path in paths}


def local(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_complete_checkpoints_are_copied_byte_for_byte(tmp_path: Path, remote: str) -> None:
    store = CheckpointStore(tmp_path / "here", remote=remote)
    await saved(store, 1, 2)
    assert found(remote) == local(tmp_path / "here")
    assert len(found(remote)) == 6


async def test_retention_here_removes_nothing_there(tmp_path: Path, remote: str) -> None:
    store = CheckpointStore(tmp_path / "here", keep=1, remote=remote)
    await saved(store, 1, 2)
    assert store.steps() == [2]
    assert {path.partition("/")[0] for path in found(remote)} == {"step-000001", "step-000002"}


async def test_a_step_saved_anew_is_copied_anew(tmp_path: Path, remote: str) -> None:
    store = CheckpointStore(tmp_path / "here", remote=remote)
    await saved(store, 1, mark="old")
    await saved(store, 1, mark="new")
    assert found(remote) == local(tmp_path / "here")


class _Broken:
    """Breaks the remote storage after so many files, and mends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str, after: int) -> None:
        kind = type(fsspec.url_to_fs(url)[0])
        self.original, self.left, self.broken = kind.put_file, after, True

        def put_file(files: object, here: str, there: str, **more: object) -> None:
            self.left -= 1
            if self.broken and self.left < 0:
                raise ConnectionError("no route to the bucket")
            self.original(files, here, there, **more)

        monkeypatch.setattr(kind, "put_file", put_file)


@pytest.mark.parametrize("after", [0, 1, 2])
async def test_a_copy_that_fails_is_said_does_not_count_and_is_made_up_for(
    tmp_path: Path, remote: str, after: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path / "here", remote=remote)
    storage = _Broken(monkeypatch, remote, after)
    await saved(store, 1)
    assert store.steps() == [1]  # here it counts
    assert "no route to the bucket" in caplog.text
    assert remote in caplog.text
    assert f"step-000001/{MANIFEST}" not in found(remote)  # there it does not
    with refused(RunDirError, remote, "no route"):
        await store.copied()
    storage.broken = False
    await saved(store, 2)
    assert found(remote) == local(tmp_path / "here")
    await store.copied()


async def test_half_of_a_newer_copy_does_not_pass_for_the_older_one(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "here", remote=remote)
    await saved(store, 1, mark="old")
    _Broken(monkeypatch, remote, 1)
    await saved(store, 1, mark="new")
    assert f"step-000001/{MANIFEST}" not in found(remote)


async def test_what_a_dead_process_could_not_copy_is_copied_by_the_next(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = _Broken(monkeypatch, remote, 1)
    await saved(CheckpointStore(tmp_path / "here", remote=remote), 1)
    storage.broken = False
    await CheckpointStore(tmp_path / "here", remote=remote).copied()
    assert found(remote) == local(tmp_path / "here")


async def test_a_storage_that_hangs_does_not_hang_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mended = threading.Event()
    url = (tmp_path / "elsewhere").as_uri()
    kind = type(fsspec.url_to_fs(url)[0])
    original: Callable[..., None] = kind.put_file

    def put_file(files: object, here: str, there: str) -> None:
        mended.wait(120)
        original(files, here, there)

    monkeypatch.setattr(kind, "put_file", put_file)
    store = CheckpointStore(tmp_path / "here", remote=url, deadline_s=0.2)
    async with asyncio.timeout(60):
        await saved(store, 1)
        with refused(RunDirError, url, "TimeoutError"):
            await store.copied()
    mended.set()


async def test_an_attempt_that_was_cancelled_leaves_the_next_one_alone(tmp_path: Path) -> None:
    """The thread of a cancelled save cannot be stopped: what it still writes is not in the next save of the step."""
    store = CheckpointStore(tmp_path)
    writing, saved_again, ended = threading.Event(), threading.Event(), threading.Event()

    def late(directory: Path) -> None:
        writing.set()
        assert saved_again.wait(120)
        try:
            (directory / "late").write_text("late")
        finally:
            ended.set()

    first = asyncio.ensure_future(store.save(1, late, {}))
    assert await asyncio.to_thread(writing.wait, 60)
    first.cancel()
    await asyncio.wait({first})
    await saved(store, 1)
    saved_again.set()
    assert await asyncio.to_thread(ended.wait, 60)
    latest = store.latest()
    assert latest is not None
    assert not (latest.path / "late").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("url", ["nowhere://bucket/run", "s3n://"])
def test_a_url_that_cannot_be_opened_is_refused_before_anything_is_trained(tmp_path: Path, url: str) -> None:
    with refused(ConfigError, url):
        CheckpointStore(tmp_path, remote=url)
