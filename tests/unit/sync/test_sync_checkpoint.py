"""Versions in a directory: whole or not there, verified to the bit, and never taken from under a reader."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import refused
from sync_parts import Reading

from trivium.buffers.files import FileBuffer
from trivium.engines.scripted import ScriptedEngine
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import SyncError, VersionGone
from trivium.loops import follow_weights
from trivium.schedule import Schedule
from trivium.sync import files as checkpoint
from trivium.sync.files import FileChannel
from trivium.sync.hashes import digest
from trivium.synchronizer import Synchronizer
from trivium.types import TRAINER, Sampling

WEIGHTS = {"embed": torch.arange(12.0).reshape(3, 4), "norm": torch.full((4,), -0.0), "head": torch.ones(3, 4)}


class Ends:
    """A trainer and an explorer over one directory, as two machines that share it."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        board = MemoryBoard()
        self.directory = directory / "sync"
        self.synchronizer = Synchronizer(board, deadline_s=0.3)
        self.synchronizer.open()

        def end(role: str) -> FileChannel:
            return FileChannel(keep=keep, directory=self.directory, synchronizer=self.synchronizer, role=role)

        self.trainer, self.explorer = end(TRAINER), end("explorer-0")

    def publish(self, *versions: int) -> None:
        """Each tensor of a version is the tensor of WEIGHTS plus the version."""
        for version in versions:
            assert self.trainer.offer(version, ((name, tensor + version) for name, tensor in WEIGHTS.items()))
            self.synchronizer.publish(version)

    def holds(self, version: int) -> bool:
        found = dict(self.explorer.collect(version))
        return all(torch.equal(found[name], tensor + version) for name, tensor in WEIGHTS.items())


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def ends(tmp_path: Path) -> Ends:
    return Ends(tmp_path)


def test_the_newest_are_kept_and_nothing_else_lies_about(ends: Ends) -> None:
    ends.publish(0, 2, 3, 5)
    assert ends.trainer.versions == ends.explorer.versions == (3, 5)
    assert folders(ends.directory) == ["version-000003", "version-000005"]
    assert ends.holds(3)
    assert ends.holds(5)


def test_a_version_lies_in_several_files_where_it_is_large(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 64)
    ends.publish(1)
    folder = ends.directory / "version-000001"
    assert folders(folder) == ["manifest.json", "weights-00000.safetensors", "weights-00001.safetensors"]
    assert ends.holds(1)


def test_weights_are_read_a_tensor_at_a_time(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 600)
    reading = Reading(9)
    ends.trainer.offer(1, reading)
    assert reading.most <= 2, "the one that is copied, and the one that is being made"
    assert {name: float(tensor[0]) for name, tensor in ends.explorer.collect(1)} == {f"layer.{i}": i for i in range(9)}


def test_tensors_that_share_memory_are_written_each(ends: Ends) -> None:
    fused = torch.randn(6, 4)
    ends.trainer.offer(1, [("q", fused[:3]), ("k", fused[3:]), ("all", fused), ("turned", fused.T)])
    found = dict(ends.explorer.collect(1))
    assert torch.equal(torch.cat([found["q"], found["k"]]), found["all"])
    assert torch.equal(found["turned"], fused.T)


def test_a_reader_outlives_the_removal_of_what_it_reads(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1)  # a file for each tensor
    ends.publish(1)
    reading = iter(ends.explorer.collect(1))
    assert next(reading)[0] == "embed"
    ends.publish(2, 3, 4)
    assert folders(ends.directory) == ["version-000003", "version-000004"]
    assert torch.equal(dict(reading)["head"], WEIGHTS["head"] + 1)


def test_a_reader_that_never_reads_holds_nothing_open(ends: Ends) -> None:
    def held() -> list[Path]:
        """Files of the channel that this process holds open; others come and go beside this test."""
        files = list[Path]()
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # of the listing itself
                files.append(descriptor.readlink())
        return [file for file in files if file.is_relative_to(ends.directory)]

    ends.publish(1)
    assert held() == []
    reading = iter(ends.explorer.collect(1))
    assert held() != []
    del reading
    assert held() == []


def test_a_version_that_was_removed_is_gone_and_the_error_says_what_is_there(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.publish(1, 2, 3)
    monkeypatch.setattr(ends.synchronizer, "deadline_s", 60.0)
    monkeypatch.setattr(checkpoint, "_POLL_S", 60.0)
    started = time.monotonic()
    with refused(VersionGone, "version 1", "[2, 3]"):
        ends.explorer.collect(1)
    assert time.monotonic() - started < 50, "there are newer ones, so it will not appear"


def test_a_version_that_another_machine_does_not_see_yet_is_waited_for(ends: Ends, tmp_path: Path) -> None:
    ends.publish(1)
    hidden = tmp_path / "elsewhere"
    (ends.directory / "version-000001").rename(hidden)
    started = time.monotonic()
    with refused(VersionGone, "version 1"):
        ends.explorer.collect(1)
    assert time.monotonic() - started >= 0.3  # the deadline of this synchronizer
    hidden.rename(ends.directory / "version-000001")
    assert ends.holds(1)


def test_half_a_version_is_no_version(ends: Ends) -> None:
    ends.publish(1)

    def breaks_off():
        yield "embed", WEIGHTS["embed"]
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        ends.trainer.offer(2, breaks_off())
    assert folders(ends.directory) == ["version-000001"]
    ends.publish(2)
    assert ends.holds(2)
    assert folders(ends.directory) == ["version-000001", "version-000002"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def renumber(path: Path) -> None:
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("weights-00000.safetensors", lambda path: flip(path, -1), "'norm'"),
        ("weights-00000.safetensors", cut, "beyond"),
        ("weights-00000.safetensors", Path.unlink, "missing"),
        ("manifest.json", cut, "a manifest"),
        ("manifest.json", lambda path: flip(path, path.read_text().index("embed")), "differs from"),
        ("manifest.json", renumber, "differs from"),
        ("manifest.json", lambda path: path.write_text("[1, 2]"), "a manifest"),
    ],
    ids=["a bit", "a torn file", "a file less", "a torn manifest", "a bit of the manifest", "another's", "no manifest"],
)
def test_damage_is_named(file: str, damage: Callable[[Path], object], said: str, ends: Ends) -> None:
    ends.publish(1)
    assert ends.holds(1)
    damage(ends.directory / "version-000001" / file)
    with refused(SyncError, "version 1", file, said):
        list(ends.explorer.collect(1))


def test_what_an_earlier_life_left_is_never_delivered(ends: Ends, tmp_path: Path) -> None:
    ends.publish(5, 6, 7)
    (ends.directory / ".version-000008.writing").mkdir()
    (ends.directory / "mine.txt").write_text("not the channel's")
    resumed = Ends(tmp_path)
    assert resumed.trainer.versions == ()
    resumed.publish(5)
    assert folders(resumed.directory) == ["mine.txt", "version-000005"]
    assert resumed.holds(5)
    with refused(VersionGone, "version 7"):
        resumed.explorer.collect(7)


def test_nothing_is_restored_from_nowhere(ends: Ends, tmp_path: Path) -> None:
    ends.trainer.restore(tmp_path / "nowhere")
    assert ends.trainer.versions == ends.explorer.versions == ()


class Slow(FileChannel):
    """An explorer's end that gets to a version only after the trainer has gone on to these."""

    meanwhile: tuple[int, ...] = ()
    ends: Ends

    def collect(self, version: int):
        newer, self.meanwhile = self.meanwhile, ()
        self.ends.publish(*newer)
        return super().collect(version)


async def follow(ends: Ends, meanwhile: tuple[int, ...], end: type[SyncError] = SyncError) -> list[int]:
    """The versions that an explorer adopts that is late for version 1, until this error ends it."""
    nobody: Any = None
    no_tasks: Any = ()
    engine = ScriptedEngine(ScriptedEngine.Config(replies=((3,),)), eos_token_ids=frozenset({1}), decode=str)
    explorer = Explorer(engine, nobody, nobody, nobody, Sampling(4), RolloutLimits(1.0, 1))
    schedule = Schedule(tasks=no_tasks, seed=0, max_staleness=1)
    buffer = FileBuffer(
        FileBuffer.Config(), schedule=schedule, rollouts=ends.directory, renderer=nobody, deadline_s=1.0
    )
    channel = Slow(keep=2, directory=ends.directory, synchronizer=ends.synchronizer, role="explorer-0")
    channel.meanwhile, channel.ends = meanwhile, ends
    await ends.synchronizer.join("explorer-0")
    with refused(end, "next version" if end is SyncError else "version 1"):
        await follow_weights(explorer, buffer, schedule, ends.synchronizer, channel)
    return engine.loaded


async def test_an_explorer_that_was_too_slow_for_a_version_asks_again(ends: Ends) -> None:
    ends.publish(1)
    assert await follow(ends, (2, 3)) == [3]


async def test_an_explorer_that_is_in_time_takes_what_it_was_told(ends: Ends) -> None:
    ends.publish(1)
    assert await follow(ends, (2,)) == [1, 2]


async def test_there_is_nothing_to_ask_for_where_the_newest_itself_is_gone(ends: Ends) -> None:
    (ends.directory / "version-000001").mkdir(parents=True)
    ends.synchronizer.publish(1)
    assert await follow(ends, (), VersionGone) == []


def test_the_manifest_says_what_each_tensor_is(ends: Ends) -> None:
    ends.publish(1)
    said = json.loads((ends.directory / "version-000001" / "manifest.json").read_text())
    norm = next(entry for entry in said["tensors"] if entry["name"] == "norm")
    assert (norm["dtype"], norm["shape"], norm["bytes"]) == ("float32", [4], 16)
    assert norm["hash"] == digest(WEIGHTS["norm"] + 1)
