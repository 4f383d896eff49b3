"""Evaluates the actor on held-out prompts, over all ranks."""

from __future__ import annotations

from typing import Any

import torch

from trivium.frontdoors.lightrft.experience_maker import ExperienceMaker, gathered
from trivium.types import Sampling

_PARTS = ("format_reward", "accuracy_reward")


def evaluated(
    maker: ExperienceMaker, loader: Any, *, version: int, samples: int, sampling: Sampling
) -> dict[str, float]:
    """Returns means over the completions of all prompts of all ranks.

    A prompt is sampled with the same random numbers in every evaluation, independent of training.
    """
    maker.rollouts().adopt(version)
    rewards, lengths, parts = list[float](), list[int](), {name: list[float]() for name in _PARTS}
    first = 0
    with torch.random.fork_rng(devices=[]):  # a loader may draw from the global generator
        for loaded in loader:
            groups = maker.generate(
                loaded,
                first,
                purpose=f"eval-{maker.ranks.data_rank}",
                version=version,
                samples=samples,
                sampling=sampling,
            )
            first += len(groups)
            members = [member for group in groups for member in group.alive]
            rewards += [member.reward for member in members]
            lengths += [member.num_tokens for member in members]
            for name in _PARTS:
                parts[name] += [member.metrics.get(name, 0.0) for member in members]
    everyone = gathered(maker.ranks, {"reward": rewards, "response_length": lengths, **parts})
    number = sum(len(each["reward"]) for each in everyone)
    means = {
        f"{name}_mean": sum(sum(each[name]) for each in everyone) / max(number, 1)
        for name in ("reward", *_PARTS, "response_length")
    }
    return {**means, "num_samples": float(number)}
