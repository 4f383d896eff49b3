"""The rule that a row's label names as a reward of `trivium run`, and how rows say label and reference."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from trivium.config import RewardConfig
from trivium.errors import DataError
from trivium.frontdoors.lightrft.reward_rules import RULES
from trivium.registry import suggest

EXAMPLES_RECIPE = {name: [(name, None, 1.0)] for name in ("geo3k_rule", "gsm8k_rule")}
"""Label -> what rewards it, as in LightRFT's launcher of gsm8k and geometry3k."""


def reference_of(row: Mapping[str, Any], key: str) -> Any:
    """A row's reference: its column, else `reward_model.ground_truth`, `ground_truth` or `extra_info.constraints`."""
    judged, extra = (row.get(name) for name in ("reward_model", "extra_info"))
    places = (
        row.get(key),
        judged.get("ground_truth") if isinstance(judged, Mapping) else None,
        row.get("ground_truth"),
        extra.get("constraints") if isinstance(extra, Mapping) else None,
    )
    return next((value for value in places if value is not None), None)


def label_of(row: Mapping[str, Any], key: str) -> Any:
    """A row's label: its column, else that of `extra_info`, or `extra_info` itself where it is text."""
    extra, own = row.get("extra_info"), row.get(key)
    return own if own is not None else extra.get(key) if isinstance(extra, Mapping) else extra


class ByLabel:
    """The rule of the task's label, of `reward_rules.RULES`, on the completion alone."""

    class Config(RewardConfig):
        label_key: str = "label"
        """Column with the label."""
        reference_key: str = "reference"
        """Column with the reference."""

    def __init__(self, config: Config) -> None:
        self._label, self._reference = config.label_key, config.reference_key

    def __call__(self, prompt: str, completion: str, **columns: Any) -> float:
        """Raises DataError for a label that no rule stands for, and for a row without a reference."""
        del prompt
        label, reference = label_of(columns, self._label), reference_of(columns, self._reference)
        if not isinstance(label, str) or label not in RULES:
            do = f"{suggest(str(label), RULES)}; or name rewards of your own in the config"
            raise DataError(f"a rule for the label of a row ({self._label})", repr(label), do)
        if reference is None:
            do = f"give rows a column {self._reference}, or reward_model.ground_truth"
            raise DataError("a reference of a row", "none", do)
        given = {"completion": completion, "reference": reference, "answer": reference, "label": label}
        rule = RULES[label]
        score = rule(**{name: given[name] for name in inspect.signature(rule).parameters})
        return float(score["reward"] if isinstance(score, Mapping) else score)
