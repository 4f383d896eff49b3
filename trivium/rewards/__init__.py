"""Rewards: plain functions `f(prompt, completion, **columns) -> float` with the judge that calls them, and the seeds'
reward managers, which score whole batches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trivium.rewards.calling import Judge, make_judge

if TYPE_CHECKING:
    from trivium.rewards.batch_view import BatchView, Scored, living, scored_rows
    from trivium.rewards.by_source import default_compute_score
    from trivium.rewards.loading import compute_reward, load_compute_score, load_reward_manager, score_groups
    from trivium.rewards.managers import (
        AbstractRewardManager,
        BatchRewardManager,
        DAPORewardManager,
        NaiveRewardManager,
    )
    from trivium.rewards.sandbox import Limits, Sandbox

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "BatchView",
    "DAPORewardManager",
    "Judge",
    "Limits",
    "NaiveRewardManager",
    "Sandbox",
    "Scored",
    "compute_reward",
    "default_compute_score",
    "living",
    "load_compute_score",
    "load_reward_manager",
    "make_judge",
    "score_groups",
    "scored_rows",
]

_HOMES = {
    "batch_view": ("BatchView", "Scored", "living", "scored_rows"),
    "by_source": ("default_compute_score",),
    "loading": ("compute_reward", "load_compute_score", "load_reward_manager", "score_groups"),
    "managers": ("AbstractRewardManager", "BatchRewardManager", "DAPORewardManager", "NaiveRewardManager"),
    "sandbox": ("Limits", "Sandbox"),
}
"""Names that are imported when they are asked for: torch comes with most of them."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"trivium.rewards.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
