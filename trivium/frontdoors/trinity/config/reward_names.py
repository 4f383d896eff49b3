"""Trinity-RFT's names of reward functions, as rewards of Trivium."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HERE = "trivium.frontdoors.trinity.reward_functions"
_LABELS = {"Accuracy": "accuracy", "Boxed": "accuracy", "Dapo": "accuracy", "Countdown": "score", "ToolCall": "reward"}
_FORMAT_OF_MATH = r".*?<think>.*?</think>\s*<answer>.*?</answer>\s*$"


def reward(name: str, **options: Any) -> dict[str, Any]:
    """Returns a reward of `reward_functions.py`, under the name of its metric in Trinity-RFT."""
    return {"kind": f"{HERE}:{name}", "name": _LABELS.get(name, "format_score"), **options}


REWARDS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "math_reward": (reward("Accuracy"), reward("Format", pattern=_FORMAT_OF_MATH)),
    "math_boxed_reward": (reward("Boxed"),),
    "format_reward": (reward("Format"),),
    "accuracy_reward": ({"kind": "math_verify", "name": "accuracy"},),
    "countdown_reward": (reward("Countdown"),),
    "math_dapo_reward": (reward("Dapo"),),
}
"""Reward functions by name -> the rewards that sum up to them."""
