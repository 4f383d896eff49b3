"""The rollouts that wait to be trained on, one sequence each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trivium.frontdoors.lightrft.experience import ExperienceVL


class ReplayBuffer:
    """Sequences in the order in which they came; with a limit, the newest alone."""

    def __init__(self, limit: int = 0, cpu_offload: bool = True, pin_memory: bool = False) -> None:
        """`limit` of 0 or less holds any number. With `cpu_offload` tensors wait in host memory, pinned for a GPU with
        `pin_memory`."""
        self.limit, self.cpu_offload, self.pin_memory = limit, cpu_offload, pin_memory and torch.cuda.is_available()
        self.items: list[ExperienceVL] = []

    def append(self, experience: ExperienceVL) -> None:
        """Takes the sequences of an experience."""
        items = experience.split()
        if self.cpu_offload:
            items = [item.to_device(torch.device("cpu")) for item in items]
        if self.pin_memory:
            items = [item.pin_memory() for item in items]
        self.items.extend(items)
        if self.limit > 0:
            del self.items[: -self.limit]

    def clear(self) -> None:
        """Forgets all."""
        self.items.clear()

    def __len__(self) -> int:
        return len(self.items)

    def parts(self, number: int) -> Iterator[list[ExperienceVL]]:
        """The sequences in `number` consecutive parts, as equal as they can be; some are empty where there are too
        few."""
        for part in range(number):
            yield self.items[part * len(self.items) // number : (part + 1) * len(self.items) // number]
