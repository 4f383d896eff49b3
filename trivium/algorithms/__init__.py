"""Policy optimisation as pure functions on tensors, and the algorithms composed of them."""

from dataclasses import replace

from trivium.algorithms.aggregation import Counts, agg_loss
from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.correction import Correction, NamedCorrection
from trivium.algorithms.entropy import compute_entropy_loss, entropy_from_logits
from trivium.algorithms.estimators.base import AdvantageInputs, Advantages
from trivium.algorithms.importance_weights import correct
from trivium.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from trivium.algorithms.logits import gpt_lm_loss, kd_loss, logprobs_from_logits, sum_pi_squared_from_logits
from trivium.algorithms.losses.base import PerToken, PolicyInputs, policy_inputs
from trivium.algorithms.losses.clipped import compute_policy_loss
from trivium.algorithms.losses.value_loss import ValueObjective, compute_value_loss
from trivium.algorithms.metadata import (
    When,
    advantage,
    aggregation,
    catalogue,
    entropy_term,
    gate,
    group_filter,
    kl_estimator,
    pair_loss,
    policy_loss,
    reward_shaping,
    score_loss,
    selection,
)
from trivium.algorithms.objective import PolicyObjective
from trivium.algorithms.preference.losses import PairInputs, PerPair, ScoreInputs, pair_inputs
from trivium.algorithms.preference.objective import PreferenceObjective, ScoreObjective
from trivium.algorithms.presets import Preset
from trivium.algorithms.shaping import ShapingInputs
from trivium.config import AlgorithmConfig
from trivium.foundation.registry import resolve


def build_algorithm(config: AlgorithmConfig, seed: int = 0, max_new_tokens: int = 0) -> GroupAlgorithm:
    """Builds the algorithm of a config's section. `kind` names a Preset, or another object with `build(config, seed)`.

    `max_new_tokens` is the longest completion that sampling allows, for shapings that depend on length.
    """
    return replace(resolve("algorithms", config.kind).build(config, seed), max_new_tokens=max_new_tokens)


__all__ = [
    "AdaptiveKLController",
    "AdvantageInputs",
    "Advantages",
    "Correction",
    "Counts",
    "FixedKLController",
    "GroupAlgorithm",
    "NamedCorrection",
    "PairInputs",
    "PerPair",
    "PerToken",
    "PolicyInputs",
    "PolicyObjective",
    "PreferenceObjective",
    "Preset",
    "ScoreInputs",
    "ScoreObjective",
    "ShapingInputs",
    "ValueObjective",
    "When",
    "advantage",
    "agg_loss",
    "aggregation",
    "apply_kl_penalty",
    "build_algorithm",
    "catalogue",
    "compute_entropy_loss",
    "compute_policy_loss",
    "compute_value_loss",
    "correct",
    "entropy_from_logits",
    "entropy_term",
    "gate",
    "get_kl_controller",
    "gpt_lm_loss",
    "group_filter",
    "kd_loss",
    "kl_estimator",
    "kl_penalty",
    "logprobs_from_logits",
    "pair_inputs",
    "pair_loss",
    "policy_inputs",
    "policy_loss",
    "reward_shaping",
    "score_loss",
    "selection",
    "sum_pi_squared_from_logits",
]
