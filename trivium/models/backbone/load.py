"""Loads Hugging Face language models from a directory, without network access."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.utils.logging import disable_progress_bar

from trivium.foundation.errors import ConfigError
from trivium.models.cpu.allocator import keep_freed_memory
from trivium.models.vision.encoder import decoder_of
from trivium.models.vision.families import family_in
from trivium.models.weights.filling import built_empty, fill
from trivium.models.weights.saved_tensors import open_tensors, weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

disable_progress_bar()  # transformers' progress bars would break into the console's table


def load_lm(
    path: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device | str = "cpu",
    attention: str | None = "sdpa",
    empty: bool = False,
) -> PreTrainedModel:
    """A causal language model in eval mode, with its vision tower if it has one. The type `auto` is the one that the
    model was saved in. With `empty`, weights are not read (see `filling.fill`).

    `attention` is a name registered with transformers' AttentionInterface; None leaves the choice to the model. A
    vision tower keeps its own attention. Raises ConfigError for a model whose attention cannot be replaced, DataError
    if the files do not fit the model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if family_in(path) is not None:
        seeing = _loaded(AutoModelForImageTextToText, path, dtype, device, empty=empty)
        if attention is not None:
            decoder_of(seeing).set_attn_implementation(attention)
        return seeing
    try:
        return _loaded(AutoModelForCausalLM, path, dtype, device, empty=empty, attention=attention)
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise ConfigError(
            f"the attention {attention} in the model {path}",
            "its attention cannot be replaced (it has a fixed list)",
            "use another model, or another engine",
        ) from error


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that holds the same tensors: its layers may be replaced without changing the model."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def calls_attention(module: PreTrainedModel) -> bool:
    """Whether the attention of a model can be replaced: its class declares transformers' interface or, as in StableLM,
    its layers call it nevertheless."""
    forwards = (inspect.unwrap(type(layer).forward) for layer in module.modules())
    return type(module)._supports_attention_backend or any(
        "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names for forward in forwards if hasattr(forward, "__code__")
    )


def set_attention(module: PreTrainedModel, name: str) -> None:
    """Makes a model compute attention by the function registered under this name. transformers refuses to for classes
    that do not declare the interface (see `calls_attention`)."""
    if type(module)._supports_attention_backend:
        module.set_attn_implementation(name)
    else:
        module.config._attn_implementation = name


def load_backbone(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", empty: bool = False
) -> PreTrainedModel:
    """The same model without its output layer, in eval mode."""
    from transformers import AutoModel

    return _loaded(AutoModel, path, dtype, device, empty=empty)


def load_sequence_classifier(
    path: str | Path, *, dtype: torch.dtype | Literal["auto"], device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """The same model with a head that scores sequences, in eval mode."""
    from transformers import AutoModelForSequenceClassification

    return _loaded(AutoModelForSequenceClassification, path, dtype, device, empty=False)


def _loaded(
    kind: type[Any],
    path: str | Path,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device | str,
    *,
    empty: bool,
    attention: str | None = None,
) -> PreTrainedModel:
    """Builds the model of an auto class of transformers from a directory; see `load_lm`."""
    from transformers import AutoConfig, GenerationConfig

    keep_freed_memory()
    config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    config.name_or_path = str(path)
    dtype = saved_dtype(config, Path(path)) if dtype == "auto" else dtype
    model = built_empty(partial(kind.from_config, config, dtype=dtype, attn_implementation=attention))
    if model.can_generate() and (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
    if not empty:
        fill(model, Path(path), torch.device(device))
    return model


def saved_dtype(config: PretrainedConfig, path: Path) -> torch.dtype:
    """The type that the weights in a directory were saved in."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    types = (entry.dtype for entry in open_tensors(weight_files(path)).entries.values())
    return next((dtype for dtype in types if isinstance(dtype, torch.dtype) and dtype.is_floating_point), torch.float32)


def max_positions(model: PreTrainedModel) -> int | None:
    """The longest sequence that the model supports, in tokens; None if its config has no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)
