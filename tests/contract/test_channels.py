"""Every channel that ships keeps the contract; broken ones are told which promise they break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trivium.protocols import WeightChannel, Weights
from trivium.sync.collective import CollectiveChannel
from trivium.sync.files import FileChannel
from trivium.sync.memory import MemoryChannel
from trivium.synchronizer import Synchronizer
from trivium.testing import check_channel

Make = Callable[[str, Synchronizer], WeightChannel]


def one_object(kind: type[MemoryChannel]) -> Make:
    """Both ends of a pair are one channel."""
    opened: dict[int, MemoryChannel] = {}
    return lambda _, synchronizer: opened.setdefault(id(synchronizer.board), kind(keep=2))


def makers(tmp_path: Path) -> dict[str, Make]:
    def files(role: str, synchronizer: Synchronizer) -> WeightChannel:
        return FileChannel(keep=2, directory=tmp_path / "sync", synchronizer=synchronizer, role=role)

    def differences(role: str, synchronizer: Synchronizer) -> WeightChannel:
        return FileChannel(keep=2, directory=tmp_path / "sync", synchronizer=synchronizer, role=role, full_every=8)

    def broadcast(role: str, synchronizer: Synchronizer) -> WeightChannel:
        return CollectiveChannel(keep=2, directory=tmp_path, synchronizer=synchronizer, role=role)

    return {"memory": one_object(MemoryChannel), "checkpoint": files, "differences": differences, "nccl": broadcast}


@pytest.mark.parametrize("name", ["memory", "checkpoint", "differences", "nccl"])
async def test_shipped_channels(name: str, tmp_path: Path) -> None:
    await check_channel(makers(tmp_path)[name], tmp_path / "saved")


class Wrong(MemoryChannel):
    """A memory channel with one fault."""

    fault = ""

    def offer(self, version: int, weights: Weights) -> bool:
        if self.fault == "refuses nothing":
            weights = dict(weights).items()
        delivered = super().offer(version, weights)
        return delivered and self.fault != "says no"

    def collect(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        if self.fault == "any version" and version not in self.versions:
            version = self.versions[-1]
        for name, tensor in super().collect(version):
            if self.fault == "rounds":
                yield name, tensor.to(torch.bfloat16).to(tensor.dtype) if tensor.is_floating_point() else tensor
            elif self.fault == "flattens" and name == "scalar":
                yield name, tensor.reshape(1)
            elif self.fault != "forgets" or name != "truth":
                yield name, tensor

    @property
    def versions(self) -> tuple[int, ...]:
        return (0, *super().versions) if self.fault == "promises too much" else super().versions

    def restore(self, directory: Path) -> None:
        if self.fault != "forgets everything":
            super().restore(directory)


@pytest.mark.parametrize(
    ("fault", "promise"),
    [
        ("rounds", "collect yields what was offered, to the bit"),
        ("flattens", "collect yields what was offered, to the bit"),
        ("forgets", "collect yields what was offered, to the bit"),
        ("says no", "offer returns True"),
        ("any version", r"collect\(\d+\) is a SyncError"),
        ("refuses nothing", "a name that comes twice"),
        ("promises too much", "the newest two at most"),
        ("forgets everything", "restore takes back what was saved"),
    ],
)
async def test_a_broken_promise_is_named(fault: str, promise: str, tmp_path: Path) -> None:
    broken: Any = type("Broken", (Wrong,), {"fault": fault})
    with pytest.raises(AssertionError, match=promise):
        await check_channel(one_object(broken), tmp_path / "saved")
