"""A model that is made while it is read, for tests of channels."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch


class Reading:
    """A model as sharded training exports it: every tensor made when it is asked for. Counts those that live."""

    def __init__(self, count: int, size: int = 64) -> None:
        self._count, self._size = count, size
        self.living: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(self._count):
            tensor = torch.full((self._size,), float(number))
            self.living = [ref for ref in self.living if ref() is not None] + [weakref.ref(tensor)]
            self.most = max(self.most, len(self.living))
            yield f"layer.{number}", tensor
