"""Opens the models of ActorVL and CriticVL from a directory or an existing model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import TypeAdapter
from torch import nn
from transformers import PreTrainedModel

from trivium.clients.hub import ModelPath
from trivium.errors import ConfigError
from trivium.models.backbone.huggingface import missing_model_error
from trivium.models.backbone.load import load_backbone, load_lm
from trivium.models.weights.lora import LoraConfig, attach

_SAME_ANYWAY = ("use_flash_attention_2", "packing_samples", "disable_logprobs_flashattn", "fused_linear_logprob")
"""Options that select a kernel in the original. They have no effect: sequences are always packed, and log-probabilities
are always computed in chunks."""


@dataclass(frozen=True)
class Options:
    """Options for opening a model."""

    bf16: bool = False
    load_in_4bit: bool = False
    lora_rank: int = 0
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str | None = None
    ds_config: Mapping[str, Any] | None = None
    device_map: Any = None
    seed: int = 0

    def check(self, further: Mapping[str, Any]) -> None:
        """Raises a ConfigError that lists all unsupported and unknown options."""
        refused = {
            "load_in_4bit": (self.load_in_4bit, "4-bit base weights are not supported: leave it out"),
            "lora_dropout": (self.lora_dropout > 0, "dropout makes two passes over the same tokens disagree: leave it"),
            "ds_config": (self.ds_config is not None, "there is no DeepSpeed here: leave it out, and use --fsdp"),
        }
        problems = {name: do for name, (wanted, do) in refused.items() if wanted}
        unknown = [name for name in further if name not in _SAME_ANYWAY]
        problems |= dict.fromkeys(unknown, "no such option")
        if problems:
            raise ConfigError(
                f"a model with {', '.join(problems)}",
                "; ".join(f"{name}: {do}" for name, do in problems.items()),
                "leave these out",
            )

    def device(self) -> torch.device:
        """Returns the device of `device_map`. Raises ConfigError for a map over several devices."""
        where: object = self.device_map
        if isinstance(where, Mapping) and len(cast("Mapping[str, object]", where)) == 1:
            where = next(iter(cast("Mapping[str, object]", where).values()))
        try:
            device = torch.device("cuda", where) if isinstance(where, int) else torch.device(str(where or "cpu"))
        except RuntimeError as error:
            raise ConfigError(
                f"device_map {self.device_map!r}",
                "a model lies on one device, or sharded over ranks",
                "name one device, or start ranks with torchrun and FSDPV2Strategy",
            ) from error
        return device

    def adapted(self, model: PreTrainedModel) -> PreTrainedModel:
        """Attaches the LoRA adapter, if `lora_rank` is set."""
        if not self.lora_rank:
            return model
        named = [self.target_modules] if isinstance(self.target_modules, str) else [*(self.target_modules or ())]
        targets = None if not named or named == ["all-linear"] else tuple(named)
        return attach(model, LoraConfig(rank=self.lora_rank, alpha=self.lora_alpha, targets=targets), seed=self.seed)


@dataclass(frozen=True)
class Opened:
    """An open model."""

    model: PreTrainedModel
    directory: Path | None
    """The model's directory; None for an existing model."""
    autocast: bool
    """Whether the backbone computes in bfloat16. The weights are at least float32."""


def open_model(source: str | Path | nn.Module, options: Options, *, backbone: bool = False) -> Opened:
    """Opens a directory, an id in the local Hugging Face cache, or an existing model, and attaches the adapter.

    Converts an existing 16-bit model to float32 in place, because the optimizer needs master weights. Raises DataError
    for a missing model.
    """
    if isinstance(source, nn.Module):
        model = source if isinstance(source, PreTrainedModel) else getattr(source, "model", source)
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"a model from a {type(source).__name__}", "no transformers model", "give a PreTrainedModel, or a path"
            )
        model = cast(PreTrainedModel, model.base_model) if backbone else model
        halved = model.dtype in (torch.bfloat16, torch.float16)
        return Opened(options.adapted(model.float() if halved else model), None, options.bf16 or halved)
    path = Path(TypeAdapter(ModelPath).validate_python(str(source)))
    missing = missing_model_error(path)
    if missing is not None:
        raise missing
    if backbone:
        model = load_backbone(path, dtype=torch.float32, device=options.device())
    else:
        model = load_lm(path, dtype=torch.float32, device=options.device(), attention=None)
    return Opened(options.adapted(model), path, options.bf16)


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """Copies the modules of a model and shares its parameters and buffers. Replacing modules of the copy (attention,
    linear layers) does not affect the original."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
