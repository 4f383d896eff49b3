"""Gradient checkpointing of a model that stays in eval mode."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

from trivium.foundation.errors import TriviumError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_gradients(module: PreTrainedModel) -> None:
    """Keeps one activation per layer and computes the others again in the backward pass.

    transformers would do so in train mode only, which would also turn dropout on; so the layers are wrapped here.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise TriviumError(
            "train.gradient_checkpointing",
            f"{type(module).__name__} has no layers that transformers can checkpoint",
            "turn it off and lower train.max_tokens_per_micro_batch instead",
        )
    for layer in layers:  # in eval mode they draw no random numbers, so no random state has to be restored
        forward: Any = layer.forward
        layer.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
