"""Computes the position of `fit` in rollouts, episodes and consumed prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trivium.errors import ConfigError
from trivium.frontdoors.lightrft.data_order import consumed_argument


@dataclass(frozen=True)
class Position:
    """The progress at the start of `fit`."""

    step: int
    """Completed rollouts."""
    episode: int
    """Completed passes over the prompts."""
    consumed: int
    """Prompts consumed in the current pass, over all ranks."""
    prompts: int
    """Prompts consumed in total."""


def rollouts_per_episode(args: Any, max_epochs: int, num_update_steps: int, loader: Any) -> int:
    """Returns the number of rollouts in a pass over the prompts: the loader's length, or, for a loader without a
    length, `rollouts_for` the optimizer steps of an episode."""
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if set_epoch is not None and consumed_argument(set_epoch):
        set_epoch(0, 0)  # else its length would be that of the remaining pass
    try:
        length = len(loader)
    except TypeError:
        length = 0
    return length or rollouts_for(args, max_epochs, num_update_steps)


def rollouts_for(args: Any, max_epochs: int, num_update_steps: int) -> int:
    """Returns the number of rollouts that this number of optimizer steps trains on, at least 1."""
    total = num_update_steps * args.train_batch_size
    whole = total // max_epochs // args.rollout_batch_size // args.n_samples_per_prompt
    return whole or max(1, math.ceil(total / max_epochs / args.rollout_batch_size / args.n_samples_per_prompt))


def position(args: Any, consumed_samples: int, per_episode: int, step: int | None = None) -> Position:
    """Returns the position after `consumed_samples` prompts. `step` is the checkpoint's number of rollouts, which is
    smaller than the prompts suggest if prompts were replaced."""
    batch = int(args.rollout_batch_size)
    if consumed_samples < 0 or consumed_samples % batch:
        raise ConfigError(
            f"to continue behind {consumed_samples} prompts",
            f"a rollout consumes rollout_batch_size {batch} prompts at a time",
            "resume with the rollout_batch_size of the checkpoint, and its client_states['consumed_samples']",
        )
    done = consumed_samples // batch
    return Position(done if step is None else step, done // per_episode, done % per_episode * batch, consumed_samples)
