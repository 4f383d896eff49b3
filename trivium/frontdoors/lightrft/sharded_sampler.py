"""Which samples of a dataset each rank reads, epoch after epoch, from any place on."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from trivium.errors import ConfigError
from trivium.randomness import permutation


class ShardedSampler(Sampler[int]):
    """Deals the samples of an epoch, in an order that follows from `seed` and the epoch, to the ranks in turn.

    Sample number n of an epoch is the same whatever the number of ranks, so a run continues by the number of samples
    that all ranks consumed. With `drop_last` every rank has as many; else the last samples are given out again until
    every rank has as many, because ranks take every step together.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        rank: int = 0,
        size: int = 1,
        shuffle: bool = True,
        seed: int = 42,
        drop_last: bool = True,
        consumed_samples: int = 0,
    ) -> None:
        """`consumed_samples` of the first epoch are left out, over all ranks."""
        self._dataset, self._rank, self._size = dataset, rank, size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch = self.consumed_samples = 0
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Begins an epoch after `consumed_samples` of it, over all ranks."""
        if not 0 <= consumed_samples <= len(self._dataset):
            raise ConfigError(
                f"continue epoch {epoch} after {consumed_samples} samples",
                f"the dataset has {len(self._dataset)}",
                "resume with the dataset, and the batch sizes, of the run that was stopped",
            )
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __len__(self) -> int:
        """Samples of this rank that are left of the epoch."""
        left = len(self._dataset) - self.consumed_samples
        return left // self._size if self._drop_last else -(-left // self._size)

    def __iter__(self) -> Iterator[int]:
        whole = len(self._dataset)
        order = permutation(whole, self._seed, "samples", self.epoch).tolist() if self._shuffle else range(whole)
        left = [int(sample) for sample in order[self.consumed_samples :]]
        if not self._drop_last:
            left += [left[i % len(left)] for i in range(-len(left) % self._size)]
        return iter(left[self._rank : len(self) * self._size : self._size])
