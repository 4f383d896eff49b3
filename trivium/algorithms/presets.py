"""Presets: named algorithms whose keys a config can override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.sections.distill import DistillConfig, distillation
from trivium.algorithms.sections.policy_gradient import (
    PolicyGradientConfig,
    SupervisedConfig,
    policy_gradient,
    supervised,
)
from trivium.algorithms.sections.preference import PreferenceConfig, RewardModelConfig, preference, reward_model
from trivium.config import AlgorithmConfig, merged


@dataclass(frozen=True)
class Preset:
    """A named algorithm: a section class, the values of keys that the config leaves out, and a build function.

    Users create their own with `replace` and name it by path: `kind: my_algorithms.py:MINE`.
    """

    Config: type[AlgorithmConfig]
    build: Callable[[Any, int], GroupAlgorithm]
    """(section, the run's seed) -> the algorithm."""
    says: Mapping[str, Any]
    """A partial section. If the config changes the `kind` of a nested section, that section's values are dropped."""
    source: str
    """The paper."""

    def configure(self, data: Mapping[str, Any]) -> AlgorithmConfig:
        """The section with the config's keys merged in. Raises pydantic's ValidationError."""
        return self.Config.model_validate(merged(self.says, data))

    def replace(self, source: str, **says: object) -> Preset:
        """A copy with other values in these sections."""
        return Preset(self.Config, self.build, merged(self.says, says), source)


GRPO = Preset(
    PolicyGradientConfig,
    policy_gradient,
    {"advantage": {"kind": "grpo"}, "policy_loss": {"kind": "ppo"}},
    source="Shao et al. 2024, with the token mean of DAPO (Yu et al. 2025) and no KL term",
)

# --------------------------------------------------------------------------- other estimators, the loss of PPO

PPO = GRPO.replace("Schulman et al. 2017; for language models, Ouyang et al. 2022", advantage={"kind": "gae"})

RLOO = GRPO.replace("Ahmadian et al. 2024, with the ratio of PPO, which stale groups need", advantage={"kind": "rloo"})

REMAX = GRPO.replace("ReMax, Li et al. 2024, with the ratio of PPO", advantage={"kind": "remax"})

OPO = GRPO.replace("OPO, Hao et al. 2025, with the ratio of PPO", advantage={"kind": "opo"})

REINFORCE_PLUS_PLUS = GRPO.replace("REINFORCE++, Hu et al. 2025", advantage={"kind": "reinforce_plus_plus"})

REINFORCE_PLUS_PLUS_BASELINE = GRPO.replace(
    "REINFORCE++ with a baseline, Hu et al. 2025", advantage={"kind": "reinforce_plus_plus_baseline"}
)

MAX_RL = GRPO.replace("MaxRL, Tajwar et al. 2026, with the ratio of PPO", advantage={"kind": "max_rl"})

GDPO = GRPO.replace("GDPO, Liu et al. 2026: several rewards, normalised one by one", advantage={"kind": "gdpo"})

GIGPO = GRPO.replace("GiGPO, Feng et al. 2025: several turns", advantage={"kind": "gigpo"})

STEP_WISE_GRPO = GRPO.replace("GRPO over episodes of several turns", advantage={"kind": "step_wise_grpo"})

# --------------------------------------------------------------------------- other losses, the advantage of GRPO

DR_GRPO = GRPO.replace(
    "Dr. GRPO, Liu et al. 2025", advantage={"norm_by_std": False}, aggregate="seq-mean-token-sum-norm"
)

DAPO = GRPO.replace(
    "DAPO, Yu et al. 2025",
    policy_loss={"clip_high": 0.28, "dual_clip": 10.0},
    filters=("zero_variance",),
    refill=5,
    shaping=({"kind": "overlong_penalty"},),
)

GSPO = GRPO.replace("GSPO, Zheng et al. 2025", policy_loss={"kind": "gspo"}, aggregate="seq-mean-token-mean")

LUSPO = GSPO.replace(
    "LUSPO, Liu et al. 2026: GSPO with sequences weighed by their length", aggregate="seq-mean-token-sum"
)

SAPO = GRPO.replace("SAPO, Gao et al. 2025", policy_loss={"kind": "sapo"}, aggregate="seq-mean-token-mean")

GMPO = GRPO.replace("GMPO, Zhao et al. 2025", policy_loss={"kind": "gmpo"}, aggregate="seq-mean-token-mean")

CISPO = GRPO.replace("CISPO, MiniMax-M1, 2025", policy_loss={"kind": "cispo"})

CLIP_COV = GRPO.replace("Clip-Cov, Cui et al. 2025", policy_loss={"kind": "clip_cov"})

KL_COV = GRPO.replace("KL-Cov, Cui et al. 2025", policy_loss={"kind": "kl_cov"})

DPPO = GRPO.replace("DPPO, Qi et al. 2026, by total variation", policy_loss={"kind": "dppo_tv"})

M2PO = GRPO.replace("M2PO, Zheng et al. 2025", policy_loss={"kind": "m2po"})

VESPO = GRPO.replace("VESPO, 2026", policy_loss={"kind": "vespo"}, aggregate="token-mean")

CPGD = GRPO.replace(
    "CPGD, Liu et al. 2025, without the drift (policy_loss.drift_coef adds it)",
    advantage={"kind": "cpgd"},
    policy_loss={"kind": "cpgd"},
)

PRIME = GRPO.replace(
    "the default objective of prime-rl (INTELLECT-3, 2025)",
    advantage={"norm_by_std": False},
    policy_loss={"kind": "prime"},
)

DECOUPLED_PPO = GRPO.replace(
    "AReaL, Fu et al. 2025: the ratio against the weights before the step, times their truncated ratio against the "
    "engine's",
    correction={"kind": "decoupled_token_is"},
)

FIPO = GRPO.replace("FIPO, Ma et al. 2026 (arXiv 2603.19835)", policy_loss={"kind": "fipo"})

SCALE_RL = CISPO.replace(
    "the loss of ScaleRL, Khatri et al. 2025 (arXiv 2510.13786): CISPO, prompt means, no groups of equal rewards",
    advantage={"std_level": "batch"},
    gates=("prompt_mean",),
    filters=("zero_variance",),
)

REAL = GRPO.replace(
    "REAL, Zhai et al. 2026 (arXiv 2602.05630): rewards above 0 are labels",
    advantage={"kind": "reinforce"},
    policy_loss={"kind": "real"},
    aggregate="seq-mean-token-mean",
)

A_STAR_PO = GRPO.replace(
    "A*-PO, Brantley et al. 2025 (arXiv 2505.20686): a rollout per task, whose optimal value is known before",
    advantage={"kind": "a_star_po"},
    policy_loss={"kind": "a_star_po"},
    aggregate="seq-mean-token-mean",
)

IW_OPD = GRPO.replace(
    "IW-OPD, Xie et al. 2026 (arXiv 2606.22600), with the ratio of PPO",
    advantage={"kind": "on_policy_distill", "prefix_gamma": 0.5},
)

ECHO = GRPO.replace("ECHO, Shrivastava et al. 2026: GRPO, and the prediction of observations", observation_coef=0.05)

SDPO = GRPO.replace(
    "SDPO, Huebotter et al. 2026 (arXiv 2601.20802): towards the policy that has read feedback or a success; "
    "distill.coef below 1 adds the rewards",
    distill={"coef": 1.0, "loss": {"kind": "distill_student_top_k"}},
    teacher={
        "top_k": 100,
        "weights": "average",
        "context": (
            "{prompt}\n\nA correct answer:\n{success}\n\nFeedback on an earlier attempt:\n{feedback}",
            "{prompt}\n\nA correct answer:\n{success}",
            "{prompt}\n\nFeedback on an earlier attempt:\n{feedback}",
        ),
    },
)

# --------------------------------------------------------------------------- without PPO's ratio

REINFORCE = GRPO.replace("Williams 1992", advantage={"kind": "reinforce"}, policy_loss={"kind": "reinforce"})

GPG = GRPO.replace("GPG, Chu et al. 2025", advantage={"kind": "gpg"}, policy_loss={"kind": "reinforce"})

OPMD = GRPO.replace(
    "OPMD, Kimi k1.5, 2025; Trinity-RFT, Pan et al. 2025", advantage={"kind": "opmd"}, policy_loss={"kind": "opmd"}
)

ASYMRE = GRPO.replace(
    "AsymRE, Arnal et al. 2025", advantage={"kind": "asymre"}, policy_loss={"kind": "opmd", "tau": 0.0}
)

TOPR = GRPO.replace(
    "TOPR, Le Roux et al. 2025, made for rewards of -1 and 1",
    advantage={"kind": "reinforce"},
    policy_loss={"kind": "topr"},
)

SPPO = GRPO.replace("sPPO, Trinity-RFT, Pan et al. 2025", advantage={"kind": "opmd"}, policy_loss={"kind": "sppo"})

RAFT = GRPO.replace("RAFT, Dong et al. 2023", advantage={"kind": "accept"}, policy_loss={"kind": "reinforce"})

REC = GRPO.replace("REC, Yao et al. 2025", advantage={"kind": "rec"}, policy_loss={"kind": "rec"})

# --------------------------------------------------------------------------- imitation, preferences, reward models

SFT = Preset(SupervisedConfig, supervised, {"policy_loss": {"kind": "sft"}}, source="maximum likelihood")

DISTILL = Preset(
    DistillConfig,
    distillation,
    {"policy_loss": {"kind": "distill"}},
    source="Agarwal et al. 2024 on the policy's own samples, with the reverse KL of Gu et al. 2024",
)

DISTILL_TOP_K = DISTILL.replace(
    "Agarwal et al. 2024, over the teacher's top_k tokens", policy_loss={"kind": "distill_top_k"}
)

DISTILL_STUDENT_TOP_K = DISTILL.replace(
    "Li et al. 2026 (arXiv 2604.13016), over the policy's top_k tokens", policy_loss={"kind": "distill_student_top_k"}
)

OPSD = DISTILL.replace(
    "OPSD, Zhao et al. 2026 (arXiv 2601.18734): towards the initial policy that has read the answer",
    policy_loss={"kind": "distill_top_k", "direction": "forward", "clip": 0.05},
    teacher={"weights": "initial", "context": ("{prompt}\n\nA reference solution:\n{answer}",)},
)

SDFT = DISTILL.replace(
    "SDFT, Shenfeld et al. 2026 (arXiv 2601.19897): towards the averaged policy that has read a demonstration",
    policy_loss={"kind": "distill_student_top_k"},
    teacher={"weights": "average", "context": ("{prompt}\n\nAn example of a good answer:\n{answer}",)},
)

DPO = Preset(
    PreferenceConfig,
    preference,
    {"pair_loss": {"kind": "dpo"}},
    source="Rafailov et al. 2023; on pairs that the policy itself sampled, Guo et al. 2024",
)

IPO = DPO.replace("Azar et al. 2024", pair_loss={"kind": "ipo"})

KTO = DPO.replace("Ethayarajh et al. 2024, on pairs or on rows with a label", pair_loss={"kind": "kto_mismatched"})

REWARD_MODEL = Preset(
    RewardModelConfig, reward_model, {"score_loss": {"kind": "sigmoid"}}, source="Ouyang et al. 2022, section 3.5"
)
