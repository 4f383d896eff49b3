"""Golden answers: advantage estimators."""

from typing import Any

import torch
from golden_runners import Arguments, answers, section

from trivium.algorithms import AdvantageInputs
from trivium.algorithms.registered import EstimatorLaw, chosen


def _advantages(inputs: Arguments, kind: str, **options: Any) -> Arguments:
    estimator, law = chosen("advantages", section("advantages", kind, **options), EstimatorLaw)
    rewards = inputs["token_level_rewards"]
    rows = torch.arange(len(rewards))
    done = estimator(
        AdvantageInputs(
            rewards, inputs["response_mask"].bool(), inputs.get("index", rows), rows,
            {name: inputs[name] for name in law.needs},
        )
    )  # fmt: skip
    return {"advantages": done.advantages, "returns": done.returns}


@answers("advantages", "gae")
def _gae(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _advantages(inputs, "gae", **kwargs)


@answers("advantages", "grpo")
def _grpo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _advantages(inputs, "grpo", norm_by_std=kwargs["norm_adv_by_std_in_grpo"])


@answers("advantages", "rloo")
def _rloo(inputs: Arguments, kwargs: Arguments) -> Arguments:
    return _advantages(inputs, "rloo", **kwargs)
