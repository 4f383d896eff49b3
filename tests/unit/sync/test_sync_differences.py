"""Differences between versions: equal to the bit, small, whole where nothing else fits, and never half there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from failing import refused

from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import SyncError, VersionGone
from trivium.models.weights.saved_tensors import SafetensorsFiles
from trivium.sync import files
from trivium.sync.differences import TensorDifference, difference, patched
from trivium.sync.files import FileChannel
from trivium.synchronizer import Synchronizer
from trivium.testing.promises import same_bits
from trivium.types import TRAINER

Named = dict[str, torch.Tensor]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("part", [0.0, 0.001, 0.05, 0.3])
def test_the_patched_tensor_is_the_new_one(dtype: torch.dtype, part: float) -> None:
    """The oracle of the encoding is a loop over the elements."""
    rng = np.random.default_rng(int(1e4 * part))
    for size in (1, 2, 254, 255, 256, 257, 511, 512, 3000):
        old = torch.from_numpy(rng.integers(0, 2**8, size)).to(dtype)
        changed = torch.from_numpy(rng.random(size) < part)
        changed[-1] = part > 0
        new = torch.where(changed, torch.logical_not(old) if dtype == torch.bool else old + 1, old)
        change = difference(old.view(1, -1), new.view(1, -1))
        if change is None:
            assert 2 * int(changed.sum()) * (1 + new.itemsize) >= new.nbytes
            continue
        assert same_bits(patched(old.view(1, -1), change), new.view(1, -1))
        gaps, gap = [], 0
        for differs in changed.tolist():
            if differs:
                gaps += [255] * (gap // 255) + [gap % 255]
            gap = 0 if differs else gap + 1
        assert change.gaps.tolist() == gaps
        assert same_bits(change.values, new[changed])


def test_signs_of_zero_and_bits_of_nan_are_differences() -> None:
    old = torch.zeros(100)
    new = old.clone()
    new[3], new[7] = -0.0, torch.nan
    change = difference(old, new)
    assert change is not None
    assert len(change.values) == 2
    assert same_bits(patched(old, change), new)
    again = difference(new, new)
    assert again is not None
    assert again.nbytes == 0


def test_a_tensor_that_changed_everywhere_takes_no_more_memory_than_it_has() -> None:
    new = torch.ones(100_000, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assert difference(torch.zeros_like(new), new) is None
    assert 0 < max(event.cpu_memory_usage for event in profile.key_averages()) <= new.nbytes


def test_a_difference_of_another_tensor_is_refused() -> None:
    change = TensorDifference(torch.tensor([9], dtype=torch.uint8), torch.ones(1))
    for tensor in (torch.zeros(9), torch.zeros(0)):
        with pytest.raises(ValueError, match="places"):
            patched(tensor, change)


class Ends:
    """A trainer and explorers over one directory."""

    def __init__(self, directory: Path, *, full_every: int = 4, keep: int = 2) -> None:
        self.directory, self._full_every, self._keep = directory / "sync", full_every, keep
        self.synchronizer = Synchronizer(MemoryBoard(), deadline_s=0.3)
        self.synchronizer.open()
        self.trainer, self.explorer = self.end(TRAINER), self.end("explorer-0")

    def end(self, role: str) -> FileChannel:
        return FileChannel(
            keep=self._keep,
            directory=self.directory,
            synchronizer=self.synchronizer,
            role=role,
            full_every=self._full_every,
        )

    def publish(self, *versions: int) -> None:
        for version in versions:
            assert self.trainer.offer(version, weights(version).items())
            self.synchronizer.publish(version)

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


def weights(version: int) -> Named:
    """`few` differs in a few elements between versions, `most` in all, `same` in none; `late` is a new tensor."""
    few = torch.zeros(1000, dtype=torch.bfloat16)
    few[:version] = torch.arange(1, version + 1)
    most, same = torch.full((50,), float(version)), torch.ones(2, 3)
    named = {"few": few.view(10, 100), "most": most, "same": same}
    return named if version < 3 else {**named, "late": torch.full((40,), 0.5)}


def assert_delivers(channel: FileChannel, *versions: int) -> None:
    for version in versions:
        found, expected = dict(channel.collect(version)), weights(version)
        assert [*found] == [*expected]
        assert all(same_bits(found[name], tensor) for name, tensor in expected.items())


def test_a_version_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, synced = Ends(tmp_path), list[tuple[str, bool]]()
    final = ends.directory / "version-000001"
    monkeypatch.setattr(files, "fsync", lambda path: synced.append((path.name, final.exists())))
    ends.publish(1)
    *before, (folder, named), after = synced
    assert sorted(before) == [("manifest.json", False), ("weights-00000.safetensors", False)]
    assert folder.startswith(".version-000001.")
    assert not named
    assert after == (ends.directory.name, True)


def test_an_explorer_that_follows_reads_differences_and_a_late_one_the_chain(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    for version in range(1, 11):
        ends.publish(version)
        assert_delivers(ends.explorer, version)
        assert_delivers(ends.end("late"), *ends.trainer.versions)
    assert ends.kept() == ["version-000009", "version-000010"]  # 1, 5 and 9 are whole
    ends.publish(11, 12)
    assert ends.kept() == ["base-000009", "base-000010", "version-000011", "version-000012"]
    assert_delivers(ends.explorer, 12)  # it missed a version
    ends.publish(13)
    assert ends.kept() == ["base-000009", "base-000010", "base-000011", "version-000012", "version-000013"]
    ends.publish(14)
    assert ends.kept() == ["version-000013", "version-000014"]


def test_a_version_that_follows_reads_only_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(tmp_path)
    ends.publish(1, 2)
    assert_delivers(ends.explorer, 2)
    ends.publish(3)
    opened, open_files = list[str](), SafetensorsFiles.__init__

    def noted(self: SafetensorsFiles, paths: list[Path]) -> None:
        opened.extend(path.parent.name for path in paths)
        open_files(self, paths)

    monkeypatch.setattr(SafetensorsFiles, "__init__", noted)
    assert_delivers(ends.explorer, 3)
    assert opened == ["version-000003"]
    whole = sum(path.stat().st_size for path in (ends.directory / "base-000001").glob("*.safetensors"))
    mine = sum(path.stat().st_size for path in (ends.directory / "version-000003").glob("*.safetensors"))
    assert mine < whole / 2


def test_a_reader_outlives_bases_that_are_removed(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.publish(1, 2, 3)
    reading = iter(ends.end("late").collect(3))
    name, first = next(reading)
    ends.publish(4, 5, 6)
    assert ends.kept() == ["version-000005", "version-000006"]
    found = {name: first, **dict(reading)}
    assert all(same_bits(found[each], tensor) for each, tensor in weights(3).items())


def test_weights_of_another_trainer_under_the_same_number_are_no_base(tmp_path: Path) -> None:
    """The explorer keeps version 2 of a trainer that dies. The next trainer's version 2 differs."""
    ends = Ends(tmp_path)
    ends.publish(1, 2)
    explorer = ends.explorer
    assert_delivers(explorer, 2)
    ends.trainer = ends.end(TRAINER)
    ends.trainer.offer(2, [(name, tensor + 1) for name, tensor in weights(2).items()])
    ends.publish(3)
    assert_delivers(explorer, 3)


def test_a_base_that_another_trainer_replaced_is_not_patched(tmp_path: Path) -> None:
    """Here the next trainer replaces version 1 while an explorer has opened version 2, which is still there."""
    ends = Ends(tmp_path)
    ends.publish(1, 2)
    other = Ends(tmp_path / "other")
    other.trainer.offer(1, [(name, tensor + 1) for name, tensor in weights(1).items()])
    shutil.rmtree(ends.directory / "version-000001")
    shutil.copytree(other.directory / "version-000001", ends.directory / "version-000001")
    with refused(VersionGone, "version 2"):
        ends.end("late").collect(2)


def test_an_offer_that_fails_is_followed_by_a_whole_version(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.publish(1)

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield "few", weights(2)["few"]
        raise RuntimeError("the ranks died")

    with pytest.raises(RuntimeError, match="the ranks died"):
        ends.trainer.offer(2, breaks_off())
    assert ends.explorer.versions == (1,)
    ends.publish(2, 3)
    assert ends.kept() == ["version-000002", "version-000003"], "version 2 is whole"
    assert_delivers(ends.explorer, 3)


def test_a_read_that_breaks_off_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.publish(1)
    assert_delivers(ends.explorer, 1)
    ends.publish(2)
    next(iter(ends.explorer.collect(2)))
    assert_delivers(ends.explorer, 2)


def test_damage_of_a_base_is_named(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.publish(1, 2, 3)
    path = ends.directory / "base-000001" / "weights-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last tensor of the file
    path.write_bytes(data)
    with refused(SyncError, "version 3", "'few'"):
        list(ends.end("late").collect(3))


def test_saved_versions_are_whole(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    ends.publish(1, 2, 3)
    ends.trainer.save(tmp_path / "saved", ends.trainer.versions)
    resumed = Ends(tmp_path)
    resumed.trainer.restore(tmp_path / "saved")
    for version in (2, 3):
        resumed.synchronizer.publish(version)
    assert resumed.kept() == ["version-000002", "version-000003"]
    assert_delivers(resumed.explorer, 2, 3)
    resumed.publish(4, 5)
    assert_delivers(resumed.explorer, 4, 5)


def test_a_trainer_that_is_killed_in_an_offer_leaves_the_version_before_whole(tmp_path: Path) -> None:
    ends = Ends(tmp_path)

    def killed() -> Iterator[tuple[str, torch.Tensor]]:
        named = weights(3)
        yield "few", named["few"]
        yield "most", named["most"]
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            ends.trainer.offer(1, weights(1).items())
            ends.trainer.offer(2, weights(2).items())
            ends.trainer.offer(3, killed())
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    ends.synchronizer.publish(1)
    ends.synchronizer.publish(2)
    assert ends.explorer.versions == (1, 2)
    assert_delivers(ends.explorer, 2)
    ends.publish(3)
    assert ends.kept() == ["version-000003"]
    assert_delivers(ends.explorer, 3)


def test_a_step_of_rl_changes_few_bits_of_bfloat16(tmp_path: Path) -> None:
    """20 AdamW steps at a learning rate of 1e-6 on weights as large as those of a trained model: the 20th version takes
    at most 5 % of the bytes of a whole one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 256))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.999))
    ends = Ends(tmp_path, full_every=100)

    def bytes_of(version: int) -> int:
        state = model.state_dict().items()
        ends.trainer.offer(version, [(name, tensor.to(torch.bfloat16)) for name, tensor in state])
        return sum(path.stat().st_size for path in (ends.directory / f"version-{version:06d}").glob("*.safetensors"))

    sizes = [bytes_of(0)]
    for version in range(1, 21):
        loss = (model(torch.randn(64, 256)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sizes.append(bytes_of(version))
    assert sizes[0] > 1_000_000
    assert 0 < sizes[20] <= 0.05 * sizes[0], sizes
    ends.synchronizer.publish(20)
    found = dict(ends.explorer.collect(20))
    assert all(same_bits(found[name], tensor.to(torch.bfloat16)) for name, tensor in model.state_dict().items())
