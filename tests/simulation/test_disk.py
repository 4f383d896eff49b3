"""What a simulated disk keeps when it loses its power."""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("greenlet")

from tests.simulation.disk import Disk, lose_commits


def sync(disk: Disk, path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    disk.synced(descriptor)
    os.close(descriptor)


def replace_and_lose_power(directory: Path, seed: int, *, syncs: bool, age_s: float) -> str:
    """Replaces a file of content `old` by `new`. Returns its content after a loss of power `age_s` later."""
    directory.mkdir()
    disk, file, staging = Disk(directory), directory / "file", directory / "staging"
    for path, content in ((file, "old"), (staging, "new")):
        path.write_text(content)
        sync(disk, path)
    disk.renaming(staging, directory / "nothing")  # a rename that fails changes nothing
    renamed = disk.renaming(staging, file)
    staging.replace(file)
    renamed(0.0)
    if syncs:
        sync(disk, directory)
    disk.lose_power(random.Random(seed), now=age_s)
    return file.read_text()


def test_a_rename_is_undone_unless_its_directory_was_synced(tmp_path: Path) -> None:
    def outcomes(name: str, *, syncs: bool, age_s: float) -> set[str]:
        return {replace_and_lose_power(tmp_path / f"{name}{n}", n, syncs=syncs, age_s=age_s) for n in range(20)}

    assert outcomes("unsynced", syncs=False, age_s=1.0) == {"old", "new"}
    assert outcomes("synced", syncs=True, age_s=1.0) == {"new"}
    assert outcomes("written", syncs=False, age_s=60.0) == {"new"}


def test_a_removal_is_undone_unless_its_directory_was_synced(tmp_path: Path) -> None:
    there = set[bool]()
    for seed in range(20):
        disk, file = Disk(tmp_path), tmp_path / f"file{seed}"
        file.write_text("content")
        sync(disk, file)
        disk.unlinked(file, at=0.0)
        file.unlink()
        disk.lose_power(random.Random(seed), now=1.0)
        there.add(file.is_file() and file.read_text() == "content")
    assert there == {False, True}


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_new_entry_is_lost_unless_its_directory_was_synced(kind: str, tmp_path: Path) -> None:
    def outcomes(name: str, *, syncs: bool) -> set[bool]:
        there = set[bool]()
        for seed in range(20):
            folder = tmp_path / f"{name}{seed}"
            folder.mkdir()
            disk, entry = Disk(folder), folder / "entry"
            file = entry if kind == "file" else entry / "file"
            if kind == "directory":
                entry.mkdir()
                disk.made(entry, at=0.0)
            file.write_text("content")
            disk.made(file, at=0.0)
            for path in (file, *([entry] if kind == "directory" else []), *([folder] if syncs else [])):
                sync(disk, path)
            disk.lose_power(random.Random(seed), now=1.0)
            there.add(file.is_file() and file.read_text() == "content")
        return there

    assert outcomes("unsynced", syncs=False) == {False, True}
    assert outcomes("synced", syncs=True) == {True}


def test_a_removed_directory_returns_with_its_files_unless_its_parent_was_synced(tmp_path: Path) -> None:
    there = set[bool]()
    for seed in range(20):
        folder, disk = tmp_path / f"{seed}", Disk(tmp_path)
        folder.mkdir()
        (folder / "file").write_text("content")
        sync(disk, folder / "file")
        disk.unlinked(folder / "file", at=0.0)
        (folder / "file").unlink()
        disk.removed(folder, at=0.0)
        folder.rmdir()
        disk.lose_power(random.Random(seed), now=1.0)
        there.add((folder / "file").is_file())
    assert there == {False, True}


@pytest.mark.parametrize("synchronous", ["FULL", "NORMAL"])
def test_a_database_loses_the_transactions_that_it_has_not_synced(synchronous: str, tmp_path: Path) -> None:
    left = set[int]()
    for seed in range(20):
        path = tmp_path / f"{seed}.db"
        writer = sqlite3.connect(path, isolation_level=None)
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute(f"PRAGMA synchronous={synchronous}")
        writer.execute("CREATE TABLE numbers (number)")
        writer.execute("PRAGMA wal_checkpoint")  # the table is synced
        for number in range(10):
            writer.execute("INSERT INTO numbers VALUES (?)", (number,))
        (level,) = writer.execute("PRAGMA synchronous").fetchone()
        lose_commits(path, level, random.Random(seed), writer.close)
        reader = sqlite3.connect(path)
        numbers = [number for (number,) in reader.execute("SELECT number FROM numbers")]
        reader.close()
        assert numbers == [*range(len(numbers))]
        left.add(len(numbers))
    assert left == {10} if synchronous == "FULL" else min(left) < 5 < max(left)
