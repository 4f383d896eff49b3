"""LightRFT's object API over the components of `trivium run`.

Names are imported on first use, because they import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivium.foundation.registry import lazy_module, lazy_names

if TYPE_CHECKING:  # `__getattr__` reads the names and their modules from this block
    from trivium.frontdoors.lightrft.objects.models.actor import ActorLanguage as ActorLanguage
    from trivium.frontdoors.lightrft.objects.models.actor import ActorVL as ActorVL
    from trivium.frontdoors.lightrft.objects.models.critic import CriticVL as CriticVL
    from trivium.frontdoors.lightrft.objects.models.critic import (
        get_vlm_for_sequence_regression as get_vlm_for_sequence_regression,
    )
    from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL as ExperienceVL
    from trivium.frontdoors.lightrft.objects.strategy import FSDPV2Strategy as FSDPV2Strategy
    from trivium.frontdoors.lightrft.objects.strategy import Strategy as Strategy
    from trivium.frontdoors.lightrft.objects.strategy import get_strategy as get_strategy
    from trivium.frontdoors.lightrft.objects.trainer import PPOTrainerVL as PPOTrainerVL
    from trivium.frontdoors.lightrft.objects.trainer import SPMDPPOTrainerVL as SPMDPPOTrainerVL

__all__ = [*lazy_names(__file__)]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy_module(__name__, __file__)
