"""Loads Hugging Face causal language models from a directory; never from a hub."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_lm(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", attention: str = "sdpa"
) -> PreTrainedModel:
    """A causal language model in eval mode; `attention` is a name registered with transformers' AttentionInterface."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]
