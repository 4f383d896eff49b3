"""The part of the section `engine` that is common to engines which hold the policy's weights themselves."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field

from trivium.config import EngineConfig
from trivium.models.placement import resolve_auto

ENGINE_GPUS = "TRIVIUM_ENGINE_GPUS"
"""Environment variable with the GPUs of this process's rollout engine, if the process itself sees only one of them."""


class LocalEngineConfig(EngineConfig):
    """Base of the sections of engines that run the model on this machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy samples; `auto` uses a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights, keys and values; logits and log-probabilities are always float32. `auto` is bfloat16 on a GPU
    that supports it, else float32. On a CPU, bfloat16 is faster only with hardware support (AVX-512 or AMX)."""
    max_context: int | None = Field(default=None, ge=2)
    """Longest prompt and completion together, in tokens; unset: the context length of the model."""

    @property
    def gpus(self) -> int:
        """The GPUs that one engine computes on."""
        return 1

    def on_this_machine(self) -> Self:
        return resolve_auto(self)
