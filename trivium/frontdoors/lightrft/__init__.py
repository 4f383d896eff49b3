"""The object API of LightRFT: what its users import, over the same parts that `trivium run` uses."""

from __future__ import annotations

from trivium.frontdoors.lightrft.actor import ActorVL
from trivium.frontdoors.lightrft.critic import CriticVL, get_vlm_for_sequence_regression
from trivium.frontdoors.lightrft.experience import ExperienceVL, SamplesVL
from trivium.frontdoors.lightrft.strategy import FSDPV2Strategy, Strategy, get_strategy
from trivium.frontdoors.lightrft.trainer import PPOTrainerVL, SPMDPPOTrainerVL

ActorLanguage = ActorVL
"""Text-only models are read by the same class."""

__all__ = [
    "ActorLanguage",
    "ActorVL",
    "CriticVL",
    "ExperienceVL",
    "FSDPV2Strategy",
    "PPOTrainerVL",
    "SPMDPPOTrainerVL",
    "SamplesVL",
    "Strategy",
    "get_strategy",
    "get_vlm_for_sequence_regression",
]
