"""Orders a loader's batches by seed and pass, and skips the consumed batches of a resumed run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from trivium.randomness import stream


def in_order(
    loader: Any, seed: int, purpose: str, number: int, *, consumed: int = 0, batch_size: int = 1
) -> Iterator[Any]:
    """Yields the batches of pass `number` over a loader, without the first `consumed` samples (`batch_size` per batch).

    Calls the sampler's `set_epoch` with the pass, and with `consumed` if it takes a second argument. Generators of the
    loader and sampler are seeded for the pass. Unless `set_epoch` skips consumed samples, their batches are read and
    dropped.
    """
    skip = consumed // batch_size
    sampler = getattr(loader, "sampler", None)
    set_epoch = getattr(sampler, "set_epoch", None)
    if set_epoch is not None:
        if consumed_argument(set_epoch):
            set_epoch(number, consumed)
            skip = 0
        else:
            set_epoch(number)
    own = stream(seed, purpose, number) % 2**63
    for generator in (getattr(loader, "generator", None), getattr(sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
    with torch.random.fork_rng(devices=[]):  # a sampler draws its seed with its first batch
        torch.manual_seed(own)
        batches = iter(loader)
        first = list(next_of(batches))
    rest = chain(first, batches)
    for _ in range(skip):
        next(rest, None)
    yield from rest


def next_of(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields the next batch, or nothing at the end."""
    for batch in batches:
        yield batch
        return


def consumed_argument(set_epoch: Any) -> bool:
    """Whether a sampler's `set_epoch` accepts the number of consumed samples."""
    code = getattr(set_epoch, "__code__", None)
    return code is not None and code.co_argcount > 2
