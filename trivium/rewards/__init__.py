"""Rewards: plain functions `f(prompt, completion, **columns) -> float`, and the judge that calls them."""

from trivium.rewards.calling import Judge, make_judge

__all__ = ["Judge", "make_judge"]
