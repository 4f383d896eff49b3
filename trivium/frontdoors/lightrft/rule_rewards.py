"""LightRFT's rules as rewards of `trivium run`, and the label and reference of a row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from trivium.config import RewardConfig, RunConfig
from trivium.errors import DataError, Problem
from trivium.frontdoors.lightrft.reward_rules import RULES
from trivium.registry import suggest

EXAMPLES_RECIPE: dict[Any, Any] = {name: [(name, None, 1.0)] for name in ("geo3k_rule", "gsm8k_rule")}
"""Label -> recipe, as in LightRFT's launcher of gsm8k and geometry3k."""


def reference_of(row: Mapping[str, Any], key: str) -> Any:
    """Returns a row's reference: the column `key`, else `reward_model.ground_truth`, `ground_truth` or
    `extra_info.constraints`."""
    judged, extra = (row.get(name) for name in ("reward_model", "extra_info"))
    places = (
        row.get(key),
        judged.get("ground_truth") if isinstance(judged, Mapping) else None,
        row.get("ground_truth"),
        extra.get("constraints") if isinstance(extra, Mapping) else None,
    )
    return next((value for value in places if value is not None), None)


def label_of(row: Mapping[str, Any], key: str) -> Any:
    """Returns a row's label: the column `key`, else that key of `extra_info`, or `extra_info` itself if it is text."""
    extra, own = row.get("extra_info"), row.get(key)
    return own if own is not None else extra.get(key) if isinstance(extra, Mapping) else extra


class RuleReward:
    """Scores the completion with a rule of `reward_rules.RULES`."""

    class Config(RewardConfig):
        rule: str
        """Name of the rule."""
        reference_key: str = "reference"
        """Column with the reference."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            yield from super().problems(run, where)
            if self.rule not in RULES:
                yield Problem(f"{where}.rule", repr(self.rule), "no such rule", suggest(self.rule, RULES))

    def __init__(self, config: Config) -> None:
        self._rule, self._reference = RULES[config.rule], config.reference_key

    def __call__(self, prompt: str, completion: str, **columns: Any) -> float:
        """Raises DataError for a row without a reference."""
        reference = reference_of(columns, self._reference)
        if reference is None:
            do = f"give rows a column {self._reference}, or reward_model.ground_truth"
            raise DataError("a reference of a row", "none", do)
        given = {"prompt": prompt, "completion": completion, "reference": reference, "answer": reference}
        score: Any = self._rule(**{name: given[name] for name in inspect.signature(self._rule).parameters})
        return float(score["reward"] if isinstance(score, Mapping) else score)
