"""The rule rewards of LightRFT's gsm8k and geometry3k examples: a row's label says which of them is its reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.config import RewardConfig
from trivium.errors import DataError
from trivium.registry import suggest
from trivium.rewards.by_source import default_compute_score

RULES: Mapping[str, str] = {"geo3k_rule": "hiyouga/geometry3k", "gsm8k_rule": "hiyouga/geometry3k"}
"""Label -> the grader of the core: 0.9 for the boxed answer, 0.1 for thinking in its tags before it."""


def rule_score(label: object, completion: str, reference: object) -> float:
    """What a completion (special tokens left out, without its prompt) is worth by the rule of a label.

    Raises DataError for a label that no rule stands for, and for a row without a reference.
    """
    if not isinstance(label, str) or label not in RULES:
        do = f"{suggest(str(label), RULES)}; or give a reward_fn, or rewards in a Trivium config"
        raise DataError("a rule for the label of a row", repr(label), do)
    if reference is None or reference == "":
        raise DataError("a reference of a row", "none", "give reference_key its column, or reward_model.ground_truth")
    score = default_compute_score(RULES[label], completion, reference)
    return float(score["score"] if isinstance(score, dict) else score)


def reference_of(row: Mapping[str, Any], key: str) -> Any:
    """A row's reference: its column, else `reward_model.ground_truth`, `ground_truth` or `extra_info.constraints`."""
    inner = {
        name: row.get(name) if isinstance(row.get(name), Mapping) else {} for name in ("reward_model", "extra_info")
    }
    places = (row.get(key), inner["reward_model"].get("ground_truth"), row.get("ground_truth"))
    return next((value for value in (*places, inner["extra_info"].get("constraints")) if value is not None), None)


def label_of(row: Mapping[str, Any], key: str) -> Any:
    """A row's label: its column, else `extra_info.label`, or `extra_info` itself where that is text."""
    extra = row.get("extra_info")
    own = row.get(key)
    return own if own is not None else extra.get(key) if isinstance(extra, Mapping) else extra


class ByLabel:
    """The rule of the task's label, against its reference."""

    class Config(RewardConfig):
        label_key: str = "label"
        """Column with the label."""
        reference_key: str = "reference"
        """Column with the reference."""

    def __init__(self, config: Config) -> None:
        self._label, self._reference = config.label_key, config.reference_key

    def __call__(self, prompt: str, completion: str, **columns: Any) -> float:
        del prompt
        return rule_score(label_of(columns, self._label), completion, reference_of(columns, self._reference))
