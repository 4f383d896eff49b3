"""CriticVL: LightRFT's critic class, over the core's value model.

Legend: B sequences of S tokens, padding included; A actions, the last A columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from trivium.errors import ConfigError, DataError
from trivium.frontdoors.lightrft.opening import Options, open_model, sharing
from trivium.frontdoors.lightrft.per_action import per_action
from trivium.frontdoors.tables import announce
from trivium.models.heads.trained_models import ValueModel
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.models.vision.encoder import Vision
from trivium.training.gradient_checkpointing import checkpoint_gradients
from trivium.training.ranks import ALONE, Ranks


class CriticVL(nn.Module):
    """Predicts the values of the states before actions.

    `model` is the transformers backbone of a causal or vision-language model, and `value_head` a linear layer on its
    states. `value_model` is the core's model over the same parameters.
    """

    def __init__(
        self,
        pretrain_or_model: str | Path | nn.Module,
        use_flash_attention_2: bool = False,
        bf16: bool = False,
        load_in_4bit: bool = False,
        lora_rank: int = 0,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        target_modules: Sequence[str] | str | None = None,
        ds_config: Any = None,
        device_map: Any = None,
        packing_samples: bool = False,
        *,
        normalize_reward: bool = False,
        value_head_prefix: str = "score",
        init_value_head: bool = False,
        seed: int = 0,
        **further: Any,
    ) -> None:
        """Takes the arguments of ActorVL. An ActorVL or a model as the first argument shares its backbone.

        Loads the head that was saved with the model (by `save_model`, or as `value_head_prefix` of a sequence
        classifier). Without a saved head, or with `init_value_head`, initializes it from `seed`.
        """
        super().__init__()
        del use_flash_attention_2
        options = Options(
            bf16, load_in_4bit, lora_rank, lora_alpha, lora_dropout, target_modules, ds_config, device_map, seed
        )
        options.check({**further, **({"normalize_reward": True} if normalize_reward else {})})
        opened = open_model(pretrain_or_model, options, backbone=True)
        self.model: PreTrainedModel = opened.model.eval()
        self.model_dir, self._autocast, self._seed = opened.directory, opened.autocast, seed
        self.packing_samples, self.ranks, self._checkpointing = packing_samples, ALONE, False
        head = {} if init_value_head or self.model_dir is None else saved_head(self.model_dir, value_head_prefix)
        first = self._built(head)
        self.value_head = first.value_head
        self._core: list[ValueModel] = [first]  # in a list, so that it is not registered as a submodule

    def _built(self, head: dict[str, Tensor]) -> ValueModel:
        core = ValueModel(
            sharing(self.model),
            dtype=self.model.dtype,
            device=self.model.device,
            seed=self._seed,
            autocast=self._autocast,
            head=head,
        )
        if self._checkpointing:
            checkpoint_gradients(core.module)
        return core

    @property
    def value_model(self) -> ValueModel:
        """The core's model over the same parameters."""
        if self._core[0].device != self.model.device:
            core = self._built({})
            core.value_head = self.value_head
            self._core = [core]
        return self._core[0]

    @property
    def vision(self) -> Vision | None:
        """The vision part of the model; None for a text-only model."""
        return self.value_model.backbone.vision

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        **pixel_inputs: Tensor,
    ) -> Tensor:
        """Returns (B, A) values of the states before the last A tokens, with gradient; 0 on padding."""
        if pixel_values_videos is not None or video_grid_thw is not None:
            raise DataError("values of videos", "pixel_values_videos", "models read text and images here")
        if num_actions is None:
            raise ConfigError("forward of CriticVL", "no num_actions", "give it")
        pixels = {"pixel_values": pixel_values, "image_grid_thws": image_grid_thw, "pixel_inputs": pixel_inputs}
        return per_action(self.value_model, sequences, num_actions, attention_mask, pixels, self.ranks)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Keeps one activation per layer and recomputes the others in the backward pass."""
        if gradient_checkpointing_kwargs:
            announce([f"gradient_checkpointing_kwargs={gradient_checkpointing_kwargs}: there is one way to checkpoint"])
        if not self._checkpointing:
            checkpoint_gradients(self.value_model.module)
        self._checkpointing = True

    def train(self, mode: bool = True) -> Self:
        """Keeps eval mode for any `mode`. Gradients do not depend on it."""
        return super().train(False)

    def adopt(self, ranks: Ranks) -> None:
        """Sets `ranks`, and sets `model` and `value_head` to those of the core's sharded model."""
        core = self.value_model
        self.ranks, self.model, self.value_head = ranks, core.module, core.value_head


def get_vlm_for_sequence_regression(
    model_name_or_path: str | Path | nn.Module, model_type: str, **options: Any
) -> CriticVL:
    """Builds a critic, as LightRFT's function of this name. Raises ConfigError for any other `model_type`."""
    if model_type != "critic":
        raise ConfigError(
            f"get_vlm_for_sequence_regression with model_type {model_type!r}",
            "it builds critics",
            "give the directory of a reward model as reward_model, or write a reward_recipe",
        )
    return CriticVL(model_name_or_path, **options)


def saved_head(directory: Path, prefix: str) -> dict[str, Tensor]:
    """Returns the head that was saved with a model, or {}. Raises DataError if it has several outputs."""
    own = directory / f"{VALUE_HEAD}.safetensors"
    if own.is_file():
        return _biased(load_file(own))
    head: dict[str, Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = {name for name in file.keys() if name.rpartition(".")[0] == prefix}  # noqa: SIM118
            head |= {name.rpartition(".")[2]: file.get_tensor(name).float() for name in names}
    if head and head["weight"].shape[0] != 1:
        raise DataError(f"the head {prefix!r} in {directory}", f"{len(head['weight'])} outputs", "set init_value_head")
    return _biased(head) if head else {}


def _biased(head: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"bias": torch.zeros(1), **head}
