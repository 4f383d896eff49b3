"""How weights travel from the trainer to the explorers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

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

    Iterating over it gives the tensors in this order, every one verified against its hash; they must not be written
    to, and a tensor that is kept holds its part in memory. It blocks, and it can be done once.
    """

    @property
    def tensors(self) -> Sequence[TensorSpec]: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


@runtime_checkable
class WeightHandle(DescribedWeights, Protocol):
    """A reference to the weights of one version: small enough to be sent to other processes, which read the weights
    through it, any number of times."""

    @property
    def version(self) -> int: ...


class WeightChannel(Protocol):
    """Carries weights from the trainer to the explorers."""

    def offer(self, version: int, weights: Weights) -> bool:
        """The trainer's side: keeps or sends version `version`. False where it reached no explorer. Blocks.

        Reads `weights` once, in order, one tensor at a time, and holds no more of them than a bounded part: with
        sharded training each one is gathered when it is asked for, by all ranks. It may not ask for all of them, where
        no explorer wants them or an error ends it; the caller then tells the other ranks that gather. A channel that
        hashes what it sends keeps the hash of all of it as `offered`, for the record of the run.
        """
        ...

    def collect(self, version: int) -> Weights:
        """The explorer's side: the weights of `version`, every tensor verified against its hash. May block.

        `DescribedWeights` go to the explorer's engine as they are: the engine reads them, or its processes do, the
        explorer does not. Of other weights the explorer collects a list, and of those of a `collective` channel where
        completions in flight have to finish first: the trainer waits until they are read.
        """
        ...

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions it can still deliver, oldest first."""
        ...

    def save(self, directory: Path, versions: Sequence[int]) -> None:
        """Writes versions that explorers of a resumed run may still need."""
        ...

    def restore(self, directory: Path) -> None:
        """Takes back what `save` wrote."""
        ...
