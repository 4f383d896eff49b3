"""The replay buffer: rollouts before training, one sequence per item."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL


class ReplayBuffer:
    """Holds sequences in arrival order. With a limit, keeps only the newest."""

    def __init__(self, limit: int = 0, cpu_offload: bool = True, pin_memory: bool = False) -> None:
        """`limit` of 0 or less is unlimited. `cpu_offload` stores tensors in host memory. `pin_memory` pins them if a
        GPU is available."""
        self.limit, self.cpu_offload, self.pin_memory = limit, cpu_offload, pin_memory and torch.cuda.is_available()
        self.items: list[ExperienceVL] = []

    def append(self, experience: ExperienceVL) -> None:
        """Adds the sequences of an experience."""
        # Without the padding of the rollout: sequences of one batch differ in length.
        items = experience.split()
        if self.cpu_offload:
            items = [item.to_device(torch.device("cpu")) for item in items]
        if self.pin_memory:
            items = [item.pin_memory() for item in items]
        self.items.extend(items)
        if self.limit > 0:
            del self.items[: -self.limit]

    def clear(self) -> None:
        """Removes all sequences."""
        self.items.clear()

    def __len__(self) -> int:
        return len(self.items)

    def parts(self, number: int) -> Iterator[list[ExperienceVL]]:
        """Yields the sequences in `number` consecutive parts of nearly equal size. Parts may be empty."""
        for part in range(number):
            yield self.items[part * len(self.items) // number : (part + 1) * len(self.items) // number]
