"""Generates the groups of each step from the prompts of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trivium.errors import ConfigError
from trivium.frontdoors.lightrft.arguments import option
from trivium.frontdoors.lightrft.data_order import in_order
from trivium.frontdoors.lightrft.fit_position import Position
from trivium.training.ranks import Ranks
from trivium.types import Group


class RolloutStep(NamedTuple):
    """The training data of one step."""

    episode: int
    groups: list[Group]
    """The groups of this rank."""
    consumed: int
    """Prompts consumed so far, over all ranks."""


def rollout_steps(
    args: Any, loader: Any, start: Position, generate: Callable[[Any, int], list[Group]], ranks: Ranks
) -> Iterator[RolloutStep]:
    """Yields one step for each batch of the loader, in every pass.

    `generate(batch, number of its first prompt)` returns the groups that pass the filters. With `dynamic_sampling`, up
    to `dynamic_sampling_refills` further batches replace filtered groups until each rank has its share. The accepted
    groups are trained on even if there are fewer.
    """
    share = args.rollout_batch_size // ranks.data_size
    refills = int(option(args, "dynamic_sampling_refills")) if option(args, "dynamic_sampling") else 0
    batches, consumed = _batches(args, loader, start, share), start.prompts
    for episode, loaded in batches:
        groups = list[Group]()
        for refill in range(refills + 1):
            groups += generate(loaded, consumed + ranks.data_rank * share)
            consumed += args.rollout_batch_size
            lacking = ranks.all_reduce_max(share - len(groups)) > 0
            following = next(batches, None) if lacking and refill < refills else None
            if following is None:
                break
            episode, loaded = following
        yield RolloutStep(episode, groups[:share], consumed)


def _batches(args: Any, loader: Any, start: Position, size: int) -> Iterator[tuple[int, Any]]:
    """Yields (episode, batch of the loader). A batch is this rank's share of a rollout's prompts."""
    of_loader = getattr(loader, "batch_size", None)
    if of_loader is not None and of_loader != size:
        raise ConfigError(
            f"prompts_dataloader with {size} prompts to a batch: rollout_batch_size over the ranks",
            f"its batch_size is {of_loader}",
            "set up the one with the other",
        )
    for episode in range(start.episode, args.num_episodes):
        consumed = start.consumed if episode == start.episode else 0
        seed = int(option(args, "seed"))
        for loaded in in_order(loader, seed, "prompts", episode, consumed=consumed, batch_size=args.rollout_batch_size):
            yield episode, loaded
