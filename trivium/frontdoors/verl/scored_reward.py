"""`compute_score(data_source, solution_str, ground_truth, extra_info)` as a reward of a RunConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trivium.config import PluginPath, RewardConfig
from trivium.foundation.errors import DataError
from trivium.foundation.registry import resolve


class ScoredReward:
    """Returns a verl scorer's score of a completion. If the scorer returns a dict, the reward is its value at `key`."""

    class Config(RewardConfig):
        kind: str = "trivium.frontdoors.verl.scored_reward:ScoredReward"
        function: PluginPath
        """`file.py:name` or `package.module:name`."""
        options: dict[str, Any] = Field(default_factory=dict)
        """Further arguments."""
        batched: bool = False
        """Whether the scorer takes lists (`data_sources, solution_strs, ground_truths, extra_infos`); each has one
        item."""
        key: str = "score"
        """The key of the scorer's dict that is the reward."""

    def __init__(self, config: Config) -> None:
        self._function, self._options = resolve("rewards", config.function), config.options
        self._key, self._batched = config.key, config.batched

    def __call__(
        self,
        prompt: str,
        completion: str,
        data_source: str = "",
        reward_model: object = None,
        answer: object = None,
        extra_info: object = None,
    ) -> float:
        truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else answer
        arguments = {
            "data_source": data_source,
            "solution_str": completion,
            "ground_truth": truth,
            "extra_info": extra_info,
        }
        if self._batched:
            # The arguments of verl's batch manager have the same names in the plural.
            (score,) = self._function(**{f"{name}s": [value] for name, value in arguments.items()}, **self._options)
        else:
            score = self._function(**arguments, **self._options)
        if not isinstance(score, Mapping) and self._key == "score":
            return score
        if not isinstance(score, Mapping) or self._key not in score:
            cause = f"{sorted(score)}" if isinstance(score, Mapping) else f"a {type(score).__name__}"
            raise DataError(f"{self._key!r} in the result of the scorer", cause, f"return {{{self._key!r}: number}}")
        return score[self._key]
