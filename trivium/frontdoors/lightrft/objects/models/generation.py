"""The arguments of `ActorVL.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trivium.foundation.errors import ConfigError
from trivium.frontdoors.lightrft.objects.models.placing import media_of_rows
from trivium.models.vision.encoder import Pixels, Vision
from trivium.types import Prompt, Sampling

_PIXEL_INPUTS = ("pixel_attention_mask", "image_sizes")
_NO_EFFECT = ("use_cache", "early_stopping", "return_dict_in_generate", "synced_gpus")
_KNOWN = (
    "attention_mask",
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_new_tokens",
    "num_beams",
    "pad_token_id",
    "seed",
    "temperature",
    "top_k",
    "top_p",
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call of `generate`."""

    sampling: Sampling
    attention_mask: Tensor
    """(B, P)."""
    eos_token_ids: frozenset[int]
    pad_token_id: int
    seed: int
    pixel_inputs: dict[str, Tensor]

    @classmethod
    def of(cls, keywords: dict[str, Any], model: PreTrainedModel, input_ids: Tensor, temperature: float) -> Self:
        """Parses keyword arguments. Raises ConfigError for unknown or unsupported ones, and without a token limit."""
        values = {name: value for name, value in keywords.items() if value is not None}
        unknown = sorted(values.keys() - {*_KNOWN, *_PIXEL_INPUTS, *_NO_EFFECT})
        if unknown or values.get("num_beams", 1) != 1:
            raise ConfigError(
                "generate of ActorVL",
                f"unknown: {', '.join(unknown)}" if unknown else f"num_beams {values['num_beams']}",
                f"known: {', '.join(_KNOWN)}; num_beams 1",
            )
        # As in transformers, max_length counts the prompt as well.
        longest = values.get("max_new_tokens", values.get("max_length", 0) - input_ids.shape[1])
        if longest < 1:
            raise ConfigError("generate of ActorVL", f"{longest} new tokens", "set max_new_tokens to at least 1")
        stops = stops_of(values.get("eos_token_id"), model)
        # Any token does: the masks exclude it.
        pad = int(values.get("pad_token_id", min(stops)))
        greedy = not values.get("do_sample", True)
        sampling = Sampling(
            max_new_tokens=longest,
            temperature=0.0 if greedy else float(values.get("temperature", temperature)),
            top_p=float(values.get("top_p", 1.0)),
            # transformers writes 0 for all tokens, vLLM -1.
            top_k=max(0, int(values.get("top_k", 0))),
            min_new_tokens=min(longest, int(values.get("min_new_tokens", 1))),
        )
        mask = values.get("attention_mask")
        if mask is None:  # masks the padding before the first token
            named = "pad_token_id" in values and pad not in stops
            mask = ((input_ids != pad).cumsum(1) > 0).to(input_ids) if named else torch.ones_like(input_ids)
        inputs = {name: values[name] for name in _PIXEL_INPUTS if name in values}
        return cls(sampling, mask, stops, pad, int(values.get("seed", torch.initial_seed())), inputs)

    def prompts(self, input_ids: Tensor, pieces: Sequence[Pixels], vision: Vision | None) -> list[Prompt]:
        """Returns each row without padding, with its images."""
        if pieces and vision is None:
            raise ConfigError("generate from images", "the model reads text only, here", "leave pixel_values out")
        rows = [
            row[mask != 0].cpu().numpy().astype(np.int32)
            for row, mask in zip(input_ids, self.attention_mask, strict=True)
        ]
        media = [()] * len(rows) if vision is None else media_of_rows(vision, rows, pieces)
        return [Prompt(tokens, images) for tokens, images in zip(rows, media, strict=True)]


def stops_of(eos_token_id: int | Sequence[int] | None, model: PreTrainedModel) -> frozenset[int]:
    """Returns the end-of-sequence tokens: those given, else the model's. Raises ConfigError if there are neither."""
    default: Any = getattr(model.generation_config, "eos_token_id", None)
    named: Any = next(
        (ids for ids in (eos_token_id, default, model.config.get_text_config().eos_token_id) if ids is not None), None
    )
    if named is None:
        raise ConfigError("the end of a completion", "the model names no end of sequence", "give eos_token_id")
    return frozenset([named] if isinstance(named, int) else (int(token) for token in named))
