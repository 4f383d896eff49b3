"""Opens the models of ActorVL and CriticVL from a directory or an existing model, and what both have in common."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from transformers import PreTrainedModel

from trivium.clients.hub import ModelPath
from trivium.foundation.errors import ConfigError, DataError
from trivium.frontdoors.lightrft.objects.models.per_action import per_action
from trivium.frontdoors.tables import announce
from trivium.models.backbone.huggingface import missing_model_error
from trivium.models.backbone.load import load_backbone, load_lm
from trivium.models.heads.trained_models import LanguageModel, ValueModel
from trivium.models.vision.encoder import Vision
from trivium.models.weights.lora import attach
from trivium.models.weights.quantized import quantize
from trivium.models.weights.section import LoraConfig, has_library, refusal
from trivium.training.distributed.ranks import ALONE, Ranks
from trivium.training.gradient_checkpointing import checkpoint_gradients
from trivium.training.launched import launched_ranks

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
        device = self.device().type
        few_bits = refusal(
            installed=has_library(), device=device, dtype="float32", ranks=launched_ranks(), pushes_adapter=False
        )
        refused = {
            "load_in_4bit": (
                self.load_in_4bit and few_bits is not None,
                f"{few_bits and few_bits.reason}: leave it out",
            ),
            "lora_dropout": (self.lora_dropout > 0, "dropout makes two passes over the same tokens disagree: leave it"),
            "ds_config": (
                self.ds_config is not None,
                "there is no DeepSpeed here: leave it out, and use FSDPV2Strategy",
            ),
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
        """Quantises the weights of linear layers with `load_in_4bit`. Attaches the LoRA adapter, if `lora_rank` is
        set."""
        if self.load_in_4bit:
            quantize(model, "nf4", self.device())
        if not self.lora_rank:
            return model
        named = [self.target_modules] if isinstance(self.target_modules, str) else [*(self.target_modules or ())]
        targets = None if not named or named == ["all-linear"] else tuple(named)
        return attach(model, LoraConfig(rank=self.lora_rank, alpha=self.lora_alpha, targets=targets), seed=self.seed)


def _open(
    source: str | Path | nn.Module, options: Options, backbone: bool
) -> tuple[PreTrainedModel, Path | None, bool]:
    """Returns (the model, its directory, whether it was in 16 bits)."""
    if isinstance(source, nn.Module):
        model = source if isinstance(source, PreTrainedModel) else getattr(source, "model", source)
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"a model from a {type(source).__name__}", "no transformers model", "give a PreTrainedModel, or a path"
            )
        model = cast(PreTrainedModel, model.base_model) if backbone else model
        halved = model.dtype in (torch.bfloat16, torch.float16)
        return model.float() if halved else model, None, halved
    # As model.path of a config: an id leads to the local cache of Hugging Face.
    path = Path(TypeAdapter(ModelPath).validate_python(str(source)))
    missing = missing_model_error(path)
    if missing is not None:
        raise missing
    if backbone:
        return load_backbone(path, dtype=torch.float32, device=options.device()), path, False
    return load_lm(path, dtype=torch.float32, device=options.device(), attention=None), path, False


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """Copies the modules of a model and shares its parameters and buffers. Replacing modules of the copy (attention,
    linear layers) does not affect the original."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


Core = TypeVar("Core", LanguageModel, ValueModel)


class OpenedModel(nn.Module, Generic[Core]):
    """A transformers model, `model`, and the core's model over the same parameters.

    Both stay in eval mode, because dropout would make passes over the same tokens differ.
    """

    def __init__(
        self, source: str | Path | nn.Module, options: Options, further: Mapping[str, Any], *, backbone: bool = False
    ) -> None:
        """Opens a directory, an id in the local Hugging Face cache, or an existing model, and attaches the adapter.

        Converts an existing 16-bit model to float32 in place, because the optimizer needs master weights. Raises
        DataError for a missing model, and ConfigError for the options that `Options.check` refuses.
        """
        super().__init__()
        options.check(further)
        model, directory, halved = _open(source, options, backbone)
        self.model: PreTrainedModel = options.adapted(model).eval()
        self.model_dir, self._autocast, self._seed = directory, options.bf16 or halved, options.seed
        self.ranks: Ranks = ALONE
        self._checkpointing = False
        self._cores: list[Core] = []  # in a list, so that it is not registered as a submodule

    def build(self) -> Core:
        """Builds the core's model."""
        raise NotImplementedError

    @property
    def core(self) -> Core:
        """The core's model over the same parameters."""
        # The caller may have moved the model by `.to`.
        if not self._cores or self._cores[0].device != self.model.device:
            self._cores = [self.build()]
            if self._checkpointing:
                checkpoint_gradients(self._cores[0].module)
        return self._cores[0]

    @property
    def built_of(self) -> dict[str, Any]:
        """The arguments of the core's model."""
        return {"dtype": self.model.dtype, "device": self.model.device, "autocast": self._autocast}

    @property
    def vision(self) -> Vision | None:
        """The vision part of the model; None for a text-only model."""
        return self.core.backbone.vision

    def per_action(
        self, sequences: Tensor, num_actions: int | None, attention_mask: Tensor | None, pixels: dict[str, Any]
    ) -> Tensor:
        """Returns (B, A) outputs for the last A tokens, with gradient; 0 on padding. Raises ConfigError without A."""
        if num_actions is None:
            raise ConfigError(f"forward of {type(self).__name__}", "no num_actions", "give it, or set return_output")
        return per_action(self.core, sequences, num_actions, attention_mask, pixels, self.ranks)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Keeps one activation per layer and recomputes the others in the backward pass."""
        if gradient_checkpointing_kwargs:
            announce([f"gradient_checkpointing_kwargs={gradient_checkpointing_kwargs}: there is one way to checkpoint"])
        if not self._checkpointing:
            checkpoint_gradients(self.core.module)
        self._checkpointing = True

    def train(self, mode: bool = True) -> Self:
        """Keeps eval mode for any `mode`. Gradients do not depend on it."""
        return super().train(False)

    def adopt(self, ranks: Ranks) -> None:
        """Sets `ranks`, and sets `model` to the core's sharded model."""
        self.ranks, self.model = ranks, cast(PreTrainedModel, self.core.module)


def refuse_videos(what: str, *pixels: Tensor | None) -> None:
    """Raises DataError for pixels of videos."""
    if any(tensor is not None for tensor in pixels):
        raise DataError(what, "pixel_values_videos", "models read text and images here")
