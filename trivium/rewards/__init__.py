"""Rewards: plain functions `f(prompt, completion, **columns) -> float`, and the judge that calls them."""

from __future__ import annotations

from trivium.rewards.judge import Judge, make_judge

__all__ = ["Judge", "make_judge"]
