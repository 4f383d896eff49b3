"""Computes a model's outputs for the actions of padded sequences, for `forward` of ActorVL and CriticVL.

Legend: B sequences of S tokens, padding included; A actions, the last A columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trivium.foundation.errors import ConfigError
from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL
from trivium.models.backbone.load import max_positions
from trivium.models.heads.trained_models import LanguageModel, ValueModel
from trivium.models.vision.encoder import pixel_reader
from trivium.training.batching import Sight, check_lengths, collate
from trivium.training.distributed.fsdp import reshard
from trivium.training.distributed.ranks import Ranks


def per_action(
    model: LanguageModel | ValueModel,
    sequences: Tensor,
    actions: int,
    attention_mask: Tensor | None,
    pixels: dict[str, Any],
    ranks: Ranks,
) -> Tensor:
    """Returns (B, A) log-probabilities of a language model or values of a value model, with gradient.

    Padding and the first token of a sequence have 0. `pixels` are the pixel fields of an ExperienceVL. If the model is
    sharded, all ranks must call it. Raises ConfigError unless 0 < A < S.
    """
    if not 0 < actions < sequences.shape[1]:
        raise ConfigError(
            f"{actions} actions of sequences of {sequences.shape[1]} tokens",
            "an action is predicted from what precedes it",
            "give num_actions between 1 and the length less one",
        )
    mask = torch.ones_like(sequences, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    mask[:, -1] |= ~mask.any(1)  # an all-padding row gets one token, which is not an action
    first = mask.cumsum(1) == 1
    trained = (mask & ~first)[:, -actions:]
    experience = ExperienceVL(sequences, attention_mask=mask, action_mask=trained, **pixels)
    batch = experience.to_batch(model.backbone.vision)
    check_lengths(batch, max_positions(model.module))
    sight = None if model.backbone.vision is None else Sight(model.backbone.vision, pixel_reader(Path()))
    # FSDP gathers the vision tower collectively: if one rank has images, one without them passes a blank one.
    has_images = ranks.all_reduce_max(int(any(row.media for row in batch.experiences)))
    micro = collate(
        batch,
        range(len(batch)),
        (),
        device=model.device,
        dtype=model.dtype,
        sight=sight,
        blank=bool(has_images) and ranks.size > 1,
    )
    # With the model's own positions: LightRFT overrides those of M-RoPE, and its log-probabilities are not the
    # engine's.
    numbers = model(micro.pack, micro.rows)
    numbers = numbers if isinstance(numbers, Tensor) else numbers[0]
    # FSDP keeps parameters gathered for a backward pass that does not follow.
    if not torch.is_grad_enabled():
        reshard(model)
    trained = trained.to(numbers.device)
    return numbers.new_zeros(trained.shape).masked_scatter(trained, numbers)
