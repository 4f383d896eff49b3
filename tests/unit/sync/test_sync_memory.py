"""The memory channel beyond the contract: damage, versions that are replaced while they are read, empty saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from failing import refused

from trivium.foundation.errors import SyncError, VersionGone
from trivium.sync.memory import MemoryChannel

ODD = {
    "matrix": torch.randn(3, 5),
    "brain": torch.randn(7).to(torch.bfloat16),
    "mean": torch.randn(4, dtype=torch.float64),
    "scalar": torch.tensor(1.5),
    "seen": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", ODD)
def test_a_tensor_that_was_written_to_is_refused_by_name(name: str) -> None:
    channel = MemoryChannel()
    channel.offer(1, ODD.items())
    tensor = dict(channel.collect(1))[name]
    tensor.reshape(-1).view(torch.uint8)[-1] ^= 1  # one bit
    with refused(SyncError, f"'{name}'", "version 1"):
        list(channel.collect(1))


def test_the_newest_versions_are_kept() -> None:
    channel = MemoryChannel(keep=2)
    assert channel.versions == ()
    for version in (0, 2, 3, 7):
        channel.offer(version, [("weight", torch.full((2,), float(version)))])
    assert channel.versions == (3, 7)
    assert dict(channel.collect(3))["weight"].tolist() == [3.0, 3.0]
    with refused(VersionGone, "version 2", "(3, 7)"):
        channel.collect(2)


def test_a_version_pruned_while_it_is_read_is_read_to_its_end() -> None:
    channel = MemoryChannel()
    channel.offer(1, [("a", torch.ones(2)), ("b", torch.ones(3))])
    reading = iter(channel.collect(1))
    assert next(reading)[0] == "a"
    channel.offer(2, [("a", torch.zeros(2)), ("b", torch.zeros(3))])
    assert next(reading)[1].tolist() == [1.0, 1.0, 1.0]


def test_the_same_version_offered_again_replaces_it() -> None:
    channel = MemoryChannel(keep=2)
    for value in (1.0, 5.0):
        channel.offer(3, [("weight", torch.full((2,), value))])
    assert channel.versions == (3,)
    assert dict(channel.collect(3))["weight"].tolist() == [5.0, 5.0]


def test_nothing_saved_is_nothing_restored(tmp_path: Path) -> None:
    channel = MemoryChannel()
    channel.offer(1, [("weight", torch.ones(1))])
    channel.save(tmp_path / "versions", [])
    assert not (tmp_path / "versions").exists()
    channel.restore(tmp_path / "versions")
    assert channel.versions == (1,)
