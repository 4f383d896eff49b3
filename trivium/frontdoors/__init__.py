"""The seeds' object APIs: thin doors into the same loop."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivium.frontdoors.ray_ppo_trainer import RayPPOTrainer

__all__ = ["RayPPOTrainer"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # Ray is optional: imported when asked for
        return getattr(import_module("trivium.frontdoors.ray_ppo_trainer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
