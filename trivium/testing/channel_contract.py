"""The contract tests of a weight channel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trivium.foundation.board import MemoryBoard
from trivium.foundation.errors import SyncError
from trivium.synchronizer import Synchronizer
from trivium.testing.promises import require, same_bits
from trivium.types import TRAINER, capabilities_of

if TYPE_CHECKING:
    from pathlib import Path

    from trivium.protocols import WeightChannel, Weights


async def check_channel(
    make: Callable[[str, Synchronizer], WeightChannel], directory: Path, *, patience_s: float = 30.0
) -> None:
    """A channel delivers every kind of tensor bit for bit, even if the trainer changes its own tensors afterwards. It
    delivers exactly the versions that it lists, and restores exactly those that it saved.

    `make(role, synchronizer)` opens the trainer's or an explorer's end of a channel that keeps two versions. Ends over
    the same `synchronizer.board` belong together, and each pair replaces the previous one. `directory` is an empty
    directory to save in.
    """
    async with asyncio.timeout(patience_s):
        pair = await _ChannelEnds.open(make, patience_s)
        sent = [_odd_tensors(seed) for seed in range(3)]
        for version, tensors in enumerate(sent):
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            require(_same(await pair.deliver(version, copies), tensors), "collect yields what was offered, to the bit")
            for tensor in copies.values():
                # As a trainer does, which changes its tensors in the next step.
                tensor.zero_()
        versions = pair.trainer.versions
        require(
            list(versions) == sorted({*versions} & {1, 2}),
            f"versions: the newest two at most, oldest first, not {versions}",
        )
        for version in versions:
            same = _same(await pair.collect(version), sent[version])
            require(same, "what versions promises can be collected again, whatever the trainer did to its tensors")
        for version in {0, 1, 2, 99} - {*versions}:
            require(await pair.refuses(version), f"collect({version}) is a SyncError: versions does not promise it")
        twice = [("weight", torch.ones(2)), ("weight", torch.zeros(2))]
        offered = await asyncio.gather(asyncio.to_thread(pair.trainer.offer, 3, twice), return_exceptions=True)
        require(isinstance(offered[0], SyncError), "offer refuses, with a SyncError, a name that comes twice")
        await asyncio.to_thread(pair.trainer.save, directory, versions[:1])
        again = await _ChannelEnds.open(make, patience_s)
        await asyncio.to_thread(again.trainer.restore, directory)
        require(
            again.trainer.versions == versions[:1], "restore takes back what was saved, and nothing that lies about"
        )
        for version in versions[:1]:
            require(_same(await again.collect(version), sent[version]), "what was saved comes back, to the bit")
        for version in versions[1:]:
            require(await again.refuses(version), "a version that was not saved is gone: a trainer will make it anew")


class _ChannelEnds:
    """Both ends of a channel, with the handshake of the loops in a run."""

    def __init__(self, make: Callable[[str, Synchronizer], WeightChannel], patience_s: float) -> None:
        board = MemoryBoard()
        self.trainer_side, self.explorer_side = (Synchronizer(board, deadline_s=patience_s) for _ in range(2))
        self.trainer = make(TRAINER, self.trainer_side)
        self.explorer = make("explorer-0", self.explorer_side)
        for side in (self.trainer_side, self.explorer_side):
            side.collective = capabilities_of(self.trainer).collective

    @classmethod
    async def open(cls, make: Callable[[str, Synchronizer], WeightChannel], patience_s: float) -> _ChannelEnds:
        ends = cls(make, patience_s)
        ends.trainer_side.open()
        await ends.explorer_side.wait_for_trainer("explorer-0")
        await ends.explorer_side.join("explorer-0")
        return ends

    async def deliver(self, version: int, weights: Mapping[str, Any]) -> Weights:
        """Offers, publishes and collects one version."""
        # An iterator, as trainers pass one: a channel reads the weights once.
        offering = asyncio.ensure_future(asyncio.to_thread(self.trainer.offer, version, iter(weights.items())))
        if not self.trainer_side.collective:
            require(await offering, "offer returns True: the version can be had")
            self.trainer_side.publish(version)
        offered_version = await self.explorer_side.next_version("explorer-0", None, newest=True)
        require(offered_version == version, f"the version on offer is {version}, not {offered_version}")
        collected = await self.collect(version)
        require(await offering, "offer returns True: an explorer has the version")
        self.explorer_side.adopted("explorer-0", version)
        return collected

    async def collect(self, version: int) -> Weights:
        return await asyncio.to_thread(lambda: list(self.explorer.collect(version)))

    async def refuses(self, version: int) -> bool:
        try:
            await self.collect(version)
        except SyncError:
            return True
        return False


def _odd_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Every kind of tensor of a model: types, shapes, strides, and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "matrix": drawn(3, 5),
        "bfloat16": drawn(7).to(torch.bfloat16),
        "half": drawn(3).half(),
        "double": drawn(4).double(),
        "scalar": drawn(),
        "whole": torch.tensor([seed, 2**40]),
        "small": torch.arange(5, dtype=torch.int8) - seed,
        "truth": drawn(3) > 0,
        "empty": torch.empty(0, 4),
        "transposed": drawn(4, 6).T,
        "part": drawn(6, 4)[1:5, ::2],
        "strange": torch.tensor([torch.nan, torch.inf, -0.0, 1e-45, float(seed)]),
    }


def _same(actual: Weights, expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether names, order, types, shapes and bits are the same."""
    pairs = list(actual)
    in_order = [name for name, _ in pairs] == [*expected]
    return in_order and all(same_bits(tensor, expected[name]) for name, tensor in pairs)
