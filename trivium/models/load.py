"""Loads Hugging Face language models from a directory; never from a hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from trivium.errors import ConfigError
from trivium.models.allocator import keep_freed_memory
from trivium.models.vision import decoder_of, family_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_lm(
    path: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device | str = "cpu",
    attention: str | None = "sdpa",
) -> PreTrainedModel:
    """A causal language model in eval mode, with its vision tower where it is of a family that sees. The type `auto` is
    the one it was saved in. Raises ConfigError for a model that knows no attention but its own.

    `attention` is a name registered with transformers' AttentionInterface; None leaves the choice to the model. A
    vision tower keeps its own.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    keep_freed_memory()
    if family_in(path) is not None:
        seeing = AutoModelForImageTextToText.from_pretrained(str(path), dtype=dtype, local_files_only=True)
        if attention is not None:
            decoder_of(seeing).set_attn_implementation(attention)
        return _aligned(seeing.to(device).eval())  # pyright: ignore[reportArgumentType]
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise ConfigError(
            f"the attention {attention} in the model {path}",
            "its attention cannot be replaced (it keeps a list of its own)",
            "use another model, or another engine",
        ) from error
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]


def load_backbone(path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The same model without its output layer, in eval mode."""
    from transformers import AutoModel

    keep_freed_memory()
    model: PreTrainedModel = AutoModel.from_pretrained(str(path), dtype=dtype, local_files_only=True)
    model = model.to(device).eval()  # pyright: ignore[reportArgumentType]
    return model if family_in(path) is None else _aligned(model)


def _aligned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its parameters in memory of their own. As they lie in a file, their addresses depend on the length
    of its header, and with them the bits of a tower's matrix products: a resumed run would differ from its original."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def max_positions(model: PreTrainedModel) -> int | None:
    """The longest sequence the model was built for, in tokens; None where its config names no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)
