"""Presets: named values from which a user's own words depart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.config import PolicyGradientConfig, SupervisedConfig, policy_gradient, supervised
from trivium.algorithms.distill_config import DistillConfig, distillation
from trivium.algorithms.preference_config import PreferenceConfig, RewardModelConfig, preference, reward_model
from trivium.config import AlgorithmConfig, merged


@dataclass(frozen=True)
class Preset:
    """An algorithm by name: a section class, what it says where the user is silent, and how it is built.

    Users make their own with `replace` and name it by path: `kind: my_algorithms.py:MINE`.
    """

    Config: type[AlgorithmConfig]
    build: Callable[[Any, int], GroupAlgorithm]
    """(section, the run's seed) -> the algorithm."""
    says: Mapping[str, Any]
    """A partial section. A nested section whose `kind` the user changes starts afresh."""
    source: str
    """The paper."""

    def configure(self, data: Mapping[str, Any]) -> AlgorithmConfig:
        """The section that follows from what the user said; raises pydantic's ValidationError."""
        return self.Config.model_validate(merged(self.says, data))

    def replace(self, source: str, **says: Any) -> Preset:
        """Another preset that says something else in these sections."""
        return Preset(self.Config, self.build, merged(self.says, says), source)


GRPO = Preset(
    PolicyGradientConfig,
    policy_gradient,
    {"advantage": {"kind": "grpo"}, "policy_loss": {"kind": "ppo"}},
    source="Shao et al. 2024, with the token mean of DAPO (Yu et al. 2025) and no KL term",
)

PPO = GRPO.replace("Schulman et al. 2017; for language models, Ouyang et al. 2022", advantage={"kind": "gae"})

RLOO = GRPO.replace("Ahmadian et al. 2024, with the ratio of PPO, which stale groups need", advantage={"kind": "rloo"})

REINFORCE = GRPO.replace(
    "Williams 1992", advantage={"kind": "reinforce"}, policy_loss={"kind": "reinforce"}
)  # fmt: skip

SFT = Preset(SupervisedConfig, supervised, {"policy_loss": {"kind": "sft"}}, source="maximum likelihood")

DISTILL = Preset(
    DistillConfig,
    distillation,
    {"policy_loss": {"kind": "distill"}},
    source="Agarwal et al. 2024 on the policy's own samples, with the reverse KL of Gu et al. 2024",
)

DISTILL_TOP_K = DISTILL.replace(
    "Agarwal et al. 2024, over the teacher's likeliest tokens", policy_loss={"kind": "distill_top_k"}
)  # fmt: skip

DPO = Preset(
    PreferenceConfig,
    preference,
    {"pair_loss": {"kind": "dpo"}},
    source="Rafailov et al. 2023; on pairs that the policy itself played, Guo et al. 2024",
)

IPO = DPO.replace("Azar et al. 2024", pair_loss={"kind": "ipo"})

KTO = DPO.replace("Ethayarajh et al. 2024, on pairs", pair_loss={"kind": "kto"})

REWARD_MODEL = Preset(
    RewardModelConfig, reward_model, {"score_loss": {"kind": "sigmoid"}}, source="Ouyang et al. 2022, section 3.5"
)
