"""The transfer of weights from the trainer to the explorers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from trivium.foundation.errors import TriviumError

Weights = Iterable[tuple[str, Any]]
"""(Hugging Face parameter or buffer name, tensor), in a fixed order."""


class TensorSpec(NamedTuple):
    """Name, dtype and shape of a tensor that is not read yet."""

    name: str
    """Its Hugging Face name."""
    dtype: str
    """`float32`, `bfloat16`, ..."""
    shape: tuple[int, ...]


@runtime_checkable
class DescribedWeights(Protocol):
    """Weights that are streamed, from files or a connection, in parts of bounded size.

    Iteration yields the tensors in the order of `tensors`, each verified against its hash. It blocks, and is possible
    only once. Tensors must not be written to; a tensor that is kept holds its part in memory.
    """

    @property
    def tensors(self) -> Sequence[TensorSpec]: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


@runtime_checkable
class WeightHandle(DescribedWeights, Protocol):
    """A reference to the weights of one version, small enough to send to other processes. They can read the weights
    through it any number of times."""

    @property
    def version(self) -> int: ...


class WeightOffer(NamedTuple):
    """What became of an offer of weights."""

    delivered: bool
    """Whether an explorer received them or can fetch them."""
    hash: str = ""
    """Their hash; empty if the channel computes none."""


class WeightChannel(Protocol):
    """Carries weights from the trainer to the explorers."""

    def offer(self, version: int, weights: Weights) -> bool:
        """The trainer's side: keeps or sends version `version`. Returns False if no explorer received it. Blocks.

        A `collective` channel is offered the version again if explorers entered its exchange and it returns False. It
        raises SyncError to give up.

        Reads `weights` once, in order, one tensor at a time, and holds only a bounded part of them: with sharded
        training all ranks gather each tensor when it is read. It may stop early if no explorer needs the weights or an
        error occurs; the caller then notifies the other ranks. A channel that hashes the weights keeps the hash of the
        whole version as `offered`, for the record of the run.
        """
        ...

    def collect(self, version: int) -> Weights:
        """The explorer's side: the weights of `version`, every tensor verified against its hash. May block.

        The explorer passes `DescribedWeights` to its engine unread: the engine or its processes read them. It collects
        other weights as a list, and also those of a `collective` channel if completions in flight have to finish first,
        because the trainer waits until the weights are read.
        """
        ...

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that it can still deliver, oldest first."""
        ...

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        """Writes versions that explorers of a resumed run may still need."""
        ...

    def restore(self, directory: Path) -> None:
        """Restores the versions that `save` wrote."""
        ...


def offer_on(channel: WeightChannel | None, version: int, weights: Weights) -> WeightOffer:
    """Offers weights on the channel of a train engine. Blocks."""
    if channel is None:
        raise TriviumError(
            f"offer the weights of version {version}",
            "the train engine has no channel",
            "set `settings` of the engine to EngineSettings(channel=...)",
        )
    delivered = channel.offer(version, weights)
    return WeightOffer(delivered, getattr(channel, "offered", ""))
