"""Log-probabilities of the training engine: the reference for rollout engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trivium.models.backbone.packed import pack
from trivium.models.heads.trained_models import LanguageModel
from trivium.models.weights.lora import base_state

if TYPE_CHECKING:
    from trivium.protocols import Weights
    from trivium.types import FloatArray, IntArray


@dataclass(frozen=True)
class ReferencePolicy:
    """Weights, and the log-probabilities that the training engine computes with them."""

    weights: Callable[[], Weights]
    """The weights for `load`."""
    log_probs: Callable[[Sequence[IntArray], float], Sequence[FloatArray]]
    """(sequences, temperature) -> the log-probabilities of each sequence, (L,), 0 for the first token."""


def reference_policy(model_dir: Path, dtype: torch.dtype = torch.float32) -> ReferencePolicy:
    """The policy in a Hugging Face directory, computed by the training engine on the CPU."""
    model = LanguageModel(model_dir, dtype=dtype, device=torch.device("cpu"), temperature=1.0)

    @torch.no_grad()
    def log_probs(sequences: Sequence[IntArray], temperature: float) -> list[FloatArray]:
        model.set_temperature(temperature)
        batch = pack(sequences, model.device)
        numbers, _ = model(batch, batch.positions.nonzero().squeeze(1))  # the first tokens have no log-probability
        parts = numbers.float().split([length - 1 for length in batch.lengths])
        return [np.concatenate([np.zeros(1, np.float32), part.numpy()]) for part in parts]

    state = base_state(model.module)
    return ReferencePolicy(lambda: [(name, state[name].clone()) for name in model.names], log_probs)
