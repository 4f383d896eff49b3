"""A resumable sampler that divides a dataset among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from trivium.errors import ConfigError
from trivium.randomness import permutation


class ShardedSampler(Sampler[int]):
    """Distributes the samples of an epoch to the ranks in turn. `seed` and the epoch determine their order.

    The order does not depend on the number of ranks, so a run resumes by the number of samples that all ranks consumed.
    All ranks get equally many samples: `drop_last` drops the remainder, otherwise the first remaining samples are
    repeated.
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
        """Skips `consumed_samples` of the first epoch, counted over all ranks."""
        self._dataset, self._rank, self._size = dataset, rank, size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self.epoch = self.consumed_samples = 0
        self.set_epoch(0, consumed_samples)

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Starts an epoch after its first `consumed_samples`, counted over all ranks."""
        if not 0 <= consumed_samples <= len(self._dataset):
            raise ConfigError(
                f"continue epoch {epoch} after {consumed_samples} samples",
                f"the dataset has {len(self._dataset)}",
                "resume with the dataset, and the batch sizes, of the run that was stopped",
            )
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __len__(self) -> int:
        """Returns the number of remaining samples of this rank in the epoch."""
        left = len(self._dataset) - self.consumed_samples
        return left // self._size if self._drop_last else -(-left // self._size)

    def __iter__(self) -> Iterator[int]:
        whole = len(self._dataset)
        order = permutation(whole, self._seed, "samples", self.epoch).tolist() if self._shuffle else range(whole)
        left = [int(sample) for sample in order[self.consumed_samples :]]
        if not self._drop_last:
            left += [left[i % len(left)] for i in range(-len(left) % self._size)]
        return iter(left[self._rank : len(self) * self._size : self._size])
