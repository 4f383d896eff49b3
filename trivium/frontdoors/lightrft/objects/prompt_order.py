"""The order of a loader's batches in every pass, and the position of a resumed run in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch

from trivium.foundation.errors import ConfigError
from trivium.foundation.randomness import stream
from trivium.frontdoors.lightrft.arguments import option
from trivium.training.distributed.ranks import Ranks
from trivium.types import Group


class PromptOrder:
    """The prompts of each step of `fit`, and the position in them."""

    def __init__(self, args: Any, loader: Any, ranks: Ranks, max_epochs: int, num_update_steps: int) -> None:
        """Raises ConfigError if a batch of the loader is not this rank's share of `rollout_batch_size`."""
        self._args, self._loader, self._ranks = args, loader, ranks
        self._batch = int(args.rollout_batch_size)
        self._share = self._batch // ranks.data_size
        if getattr(loader, "batch_size", None) not in (None, self._share):
            raise ConfigError(
                f"prompts_dataloader with {self._share} prompts to a batch: rollout_batch_size over the ranks",
                f"its batch_size is {loader.batch_size}",
                "set up the one with the other",
            )
        # As LightRFT counts the rollouts of an episode.
        updates = num_update_steps * args.train_batch_size / max_epochs / self._batch / args.n_samples_per_prompt
        self.per_episode = _length(loader) or max(1, int(updates))
        """Rollouts in a pass over the prompts: the length of the loader, or those that the updates take."""
        self.per_evaluation = self.per_episode if num_update_steps == 1 else max(1, int(updates))
        """Rollouts from one evaluation to the next, if `args` does not set it. The default of one update step does not
        describe a pass."""
        self.step = self.consumed = 0
        """Completed steps, and consumed prompts over all ranks and passes."""

    def move_to(self, consumed: int, step: int | None = None) -> None:
        """Continues after `consumed` prompts. `step` is the checkpoint's number of steps, which is smaller than the
        prompts suggest if prompts were replaced."""
        if consumed < 0 or consumed % self._batch:
            raise ConfigError(
                f"to continue behind {consumed} prompts",
                f"a rollout consumes rollout_batch_size {self._batch} prompts at a time",
                "resume with the rollout_batch_size of the checkpoint, and its client_states['consumed_samples']",
            )
        self.consumed, self.step = consumed, consumed // self._batch if step is None else step

    def steps(self, generate: Callable[[Any, int], list[Group]]) -> Iterator[tuple[int, list[Group]]]:
        """Yields (pass, this rank's groups) of each step.

        `generate(batch, number of its first prompt)` returns the groups that pass the filters. With `dynamic_sampling`,
        up to `dynamic_sampling_refills` further batches replace filtered groups until each rank has its share. The
        accepted groups are trained on even if there are fewer.
        """
        refills = int(option(self._args, "dynamic_sampling_refills")) if option(self._args, "dynamic_sampling") else 0
        batches = self._batches()
        for episode, loaded in batches:
            groups = list[Group]()
            for refill in range(refills + 1):
                groups += generate(loaded, self.consumed + self._ranks.data_rank * self._share)
                self.consumed += self._batch
                # All ranks take another batch if one lacks groups, because sampling gathers the weights of all.
                lacking = self._ranks.all_reduce_max(self._share - len(groups)) > 0
                following = next(batches, None) if lacking and refill < refills else None
                if following is None:
                    break
                episode, loaded = following
            self.step += 1
            yield episode, groups[: self._share]

    def _batches(self) -> Iterator[tuple[int, Any]]:
        """Yields (pass, batch of the loader) from the current position."""
        first, position = divmod(self.consumed // self._batch, self.per_episode)
        seed = int(option(self._args, "seed"))
        for episode in range(first, self._args.num_episodes):
            consumed = position * self._batch if episode == first else 0
            for loaded in in_order(self._loader, seed, "prompts", episode, consumed=consumed, batch_size=self._batch):
                yield episode, loaded


def _length(loader: Any) -> int:
    """Returns the number of batches in a pass; 0 for a loader without a length."""
    try:
        return len(loader)
    except TypeError:
        return 0


def in_order(
    loader: Any, seed: int, purpose: str, number: int, *, consumed: int = 0, batch_size: int = 1
) -> Iterator[Any]:
    """Yields the batches of pass `number` over a loader, without the first `consumed` samples (`batch_size` per batch).

    Calls the sampler's `set_epoch` with the pass. Generators of the loader and sampler are seeded for the pass. Batches
    of consumed samples are read and dropped.
    """
    sampler = getattr(loader, "sampler", None)
    if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
        set_epoch(number)
    pass_seed = stream(seed, purpose, number) % 2**63
    # The state of a generator depends on what was drawn before, and a resumed run did not draw it.
    for generator in (getattr(loader, "generator", None), getattr(sampler, "generator", None)):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(pass_seed)
    with torch.random.fork_rng(devices=[]):  # a sampler draws its seed with its first batch
        torch.manual_seed(pass_seed)
        batches = iter(loader)
        first = list(islice(batches, 1))
    yield from islice(chain(first, batches), consumed // batch_size, None)
