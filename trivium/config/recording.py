"""What rollouts record for training beside tokens and log-probabilities, and the shape of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivium.foundation.errors import TriviumError
from trivium.foundation.registry import describe
from trivium.types import capabilities_of

if TYPE_CHECKING:
    from trivium.config.schema import RunConfig
    from trivium.planning.model_shape import ModelShape


def shape_in(config: RunConfig) -> ModelShape | None:
    """The shape of the policy; None if its section does not give it without building or loading the model."""
    shape = getattr(config.model, "shape", None)
    try:
        return shape() if callable(shape) else None  # pyright: ignore[reportReturnType]
    except TriviumError:  # config.json describes the architecture by other keys
        return None


def replays_routing(config: RunConfig) -> bool:
    """Whether rollouts record the experts of their tokens."""
    return getattr(config.train, "router_replay", "off") == "rollout"


def recorded(config: RunConfig) -> tuple[str, ...]:
    """What the engine records of training rollouts: names of `EXTRAS`."""
    cut = config.engine.sampling.changes_distribution()
    return (*["routing"] * replays_routing(config), *["kept"] * bool(cut))


def scores_observations(config: RunConfig) -> bool:
    """Whether evaluations report the cross-entropy of observations (`evaluation.observations`)."""
    if config.evaluation.observations is not None:
        return config.evaluation.observations
    return bool(getattr(config.algorithm, "observation_coef", 0)) and can_score_prompts(config)


def can_score_prompts(config: RunConfig) -> bool:
    """Whether the engine computes the log-probabilities of a prompt's tokens."""
    return "prompt_log_prob" in capabilities_of(describe("engines", config.engine.kind)).extra


def recorded_in(config: RunConfig) -> str | None:
    """What a stage's rollouts record of each token and its size, in words; None if nothing."""
    lines: list[str] = []
    for what in recorded(config):
        if what == "routing":
            shape = shape_in(config)
            width = 0 if shape is None else shape.routing_per_token
            per_token = f", at most {width} bytes a token of prompt and completion" if width else ""
            lines.append(f"experts, chosen again in training{per_token}")
        else:
            sampling, per_token = config.engine.sampling, "up to half of the vocabulary's ids a token, a few as a rule"
            if sampling.top_k:
                per_token = f"at most {4 * sampling.top_k + 4} bytes a token"
            names = ", ".join(sampling.changes_distribution())
            lines.append(f"what {names} keep, over which log-probabilities are computed: {per_token}")
    return "; ".join(lines) or None
