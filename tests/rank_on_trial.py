"""A process that `TrainProcess` starts, whose rank does what tests/unit/training/test_train_process.py asks for."""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trivium.foundation.concurrency import ProcessLife, end_with
from trivium.foundation.errors import DataError
from trivium.models.weights.stream import described
from trivium.protocols import WeightChannel
from trivium.training.distributed.train_process import serve_driver

if TYPE_CHECKING:
    from torch import Tensor


def weights() -> list[tuple[str, Tensor]]:
    import torch  # most of the processes offer none, and start without it

    return [
        ("wide", torch.arange(6.0).reshape(2, 3).T),
        ("narrow", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        ("empty", torch.empty(0, 4)),
        ("number", torch.tensor(7)),
        ("large", torch.arange(5_000_000, dtype=torch.int32)),
        ("last", torch.tensor([True])),
    ]


class Rank:
    def __init__(self, spec: dict[str, str], channel: WeightChannel) -> None:
        if "refuses" in spec:
            raise DataError("a model", spec["refuses"], "choose another one")
        self._spec, self._channel = spec, channel

    def spec(self) -> dict[str, str]:
        return self._spec

    def refuse(self) -> None:
        raise DataError("a short sequence", "a long one", "shorten it")

    def reach(self, host: str) -> None:
        raise ConnectionRefusedError(host)

    def rest(self, seconds: float, begun: str = "") -> None:
        """A call that hangs. Creates the file `begun` first."""
        if begun:
            Path(begun).touch()
        time.sleep(seconds)

    def compute(self, seconds: float) -> float:
        """An update that takes long: it computes all the time, and answers."""
        began = time.process_time()
        while time.process_time() - began < seconds:
            pass
        return seconds

    def divide(self, number: int) -> float:
        return 1 / number

    def offer(self, version: int) -> tuple[bool, str]:
        delivered = self._channel.offer(version, described(weights()))
        return delivered, cast(Any, self._channel).offered


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        end_with(ProcessLife.of(os.getppid()))
        serve_driver(connection, lambda spec, channel: cast(Any, Rank(spec, channel)))
