"""LightRFT's object API over the components of `trivium run`.

Names are imported on first use, because most of them import torch; to translate a config needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivium.registry import lazy_module, lazy_names

if TYPE_CHECKING:  # `__getattr__` reads the names and their modules from this block
    from transformers import get_scheduler as get_scheduler

    from trivium.frontdoors.lightrft.objects.data.data import PromptDatasetVL as PromptDatasetVL
    from trivium.frontdoors.lightrft.objects.data.data import SFTDatasetVL as SFTDatasetVL
    from trivium.frontdoors.lightrft.objects.data.data import blending_datasets as blending_datasets
    from trivium.frontdoors.lightrft.objects.data.data import get_tokenizer_processor_vl as get_tokenizer_processor_vl
    from trivium.frontdoors.lightrft.objects.models.actor import ActorLanguage as ActorLanguage
    from trivium.frontdoors.lightrft.objects.models.actor import ActorVL as ActorVL
    from trivium.frontdoors.lightrft.objects.models.critic import CriticVL as CriticVL
    from trivium.frontdoors.lightrft.objects.models.critic import (
        get_vlm_for_sequence_regression as get_vlm_for_sequence_regression,
    )
    from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL as ExperienceVL
    from trivium.frontdoors.lightrft.objects.script_calls import add_arguments as add_arguments
    from trivium.frontdoors.lightrft.objects.script_calls import (
        ensure_video_input_available as ensure_video_input_available,
    )
    from trivium.frontdoors.lightrft.objects.script_calls import get_current_device as get_current_device
    from trivium.frontdoors.lightrft.objects.strategy import FSDPV2Strategy as FSDPV2Strategy
    from trivium.frontdoors.lightrft.objects.strategy import Strategy as Strategy
    from trivium.frontdoors.lightrft.objects.strategy import get_strategy as get_strategy
    from trivium.frontdoors.lightrft.objects.trainer import PPOTrainerVL as PPOTrainerVL
    from trivium.frontdoors.lightrft.objects.trainer import SPMDPPOTrainerVL as SPMDPPOTrainerVL
    from trivium.frontdoors.lightrft.translation import namespace_of as namespace_of

__all__ = [*lazy_names(__file__)]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy_module(__name__, __file__)
