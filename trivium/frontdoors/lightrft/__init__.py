"""LightRFT's object API over the components of `trivium run`."""

from __future__ import annotations

from transformers import get_scheduler

from trivium.frontdoors.lightrft.objects.data.data import (
    PromptDatasetVL,
    SFTDatasetVL,
    blending_datasets,
    get_tokenizer_processor_vl,
)
from trivium.frontdoors.lightrft.objects.models.actor import ActorVL
from trivium.frontdoors.lightrft.objects.models.critic import CriticVL, get_vlm_for_sequence_regression
from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL
from trivium.frontdoors.lightrft.objects.script_calls import (
    add_arguments,
    ensure_video_input_available,
    get_current_device,
)
from trivium.frontdoors.lightrft.objects.strategy import FSDPV2Strategy, Strategy, get_strategy
from trivium.frontdoors.lightrft.objects.trainer import PPOTrainerVL, SPMDPPOTrainerVL
from trivium.frontdoors.lightrft.translation import namespace_of

ActorLanguage = ActorVL
"""ActorVL also loads text-only models."""

__all__ = [
    "ActorLanguage",
    "ActorVL",
    "CriticVL",
    "ExperienceVL",
    "FSDPV2Strategy",
    "PPOTrainerVL",
    "PromptDatasetVL",
    "SFTDatasetVL",
    "SPMDPPOTrainerVL",
    "Strategy",
    "add_arguments",
    "blending_datasets",
    "ensure_video_input_available",
    "get_current_device",
    "get_scheduler",
    "get_strategy",
    "get_tokenizer_processor_vl",
    "get_vlm_for_sequence_regression",
    "namespace_of",
]
