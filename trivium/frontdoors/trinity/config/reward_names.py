"""Trinity-RFT's names of reward functions, as rewards of Trivium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HERE = "trivium.frontdoors.trinity.reward_functions"
_LABELS = {"Accuracy": "accuracy", "Boxed": "accuracy", "Countdown": "score"}
_FORMAT_OF_MATH = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"


def reward(name: str, **options: Any) -> dict[str, Any]:
    """Returns a reward of `reward_functions.py`, under the name of its metric in Trinity-RFT."""
    return {"kind": f"{HERE}:{name}", "name": _LABELS.get(name, "format_score"), **options}


REWARDS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "math_reward": (reward("Accuracy"), reward("Format", pattern=_FORMAT_OF_MATH)),
    "math_boxed_reward": (reward("Boxed"),),
    "countdown_reward": (reward("Countdown"),),
}
"""Reward functions by name -> the rewards that sum up to them."""
REFUSED_REWARDS = ("format_reward", "accuracy_reward", "math_dapo_reward")
"""Trinity-RFT's other names, which no module of a user registers."""
