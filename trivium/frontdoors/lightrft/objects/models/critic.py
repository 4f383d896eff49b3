"""CriticVL: LightRFT's critic class, over the core's value model.

Legend: B sequences of S tokens, padding included; A actions, the last A columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trivium.foundation.errors import ConfigError
from trivium.frontdoors.lightrft.objects.models.opening import OpenedModel, Options, refuse_videos, sharing
from trivium.models.heads.trained_models import ValueModel, tensor_names
from trivium.models.heads.value_head import saved_head
from trivium.training.distributed.ranks import Ranks


class CriticVL(OpenedModel[ValueModel]):
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
        """Takes the arguments of ActorVL. An ActorVL or a model as the first argument shares its backbone, and its
        head if it is a model with a linear head of one output (`linear_head`).

        Loads the head that was saved with the model (by `save_model`, or as `value_head_prefix` of a sequence
        classifier). Without a saved head, or with `init_value_head`, initializes it from `seed`.
        """
        del use_flash_attention_2
        options = Options(
            bf16, load_in_4bit, lora_rank, lora_alpha, lora_dropout, target_modules, ds_config, device_map, seed
        )
        # `check` refuses it with the unknown options: values are those of unnormalised returns.
        further |= {"normalize_reward": True} if normalize_reward else {}
        super().__init__(pretrain_or_model, options, further, backbone=True)
        self.packing_samples = packing_samples
        # `build` reads both when `core` is used first: the head of a model that was given, or one of its directory.
        self.value_head = linear_head(pretrain_or_model)
        self._head: dict[str, Tensor] = {}
        if self.model_dir is not None and not init_value_head:
            self._head = saved_head(self.model_dir, (value_head_prefix,))
        self.value_head = self.core.value_head

    def build(self) -> ValueModel:
        """Builds the core's model. One that replaces another has its head."""
        core = ValueModel(sharing(self.model), seed=self._seed, head=self._head, **self.built_of)
        if self.value_head is not None:
            core.value_head = self.value_head
            core.names = tensor_names(core)
        return core

    @property
    def value_model(self) -> ValueModel:
        """The core's model over the same parameters."""
        return self.core

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
        refuse_videos("values of videos", pixel_values_videos, video_grid_thw)
        pixels = {"pixel_values": pixel_values, "image_grid_thws": image_grid_thw, "pixel_inputs": pixel_inputs}
        return self.per_action(sequences, num_actions, attention_mask, pixels)

    def adopt(self, ranks: Ranks) -> None:
        """Sets `ranks`, and sets `model` and `value_head` to those of the core's sharded model."""
        super().adopt(ranks)
        self.value_head = self.core.value_head


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


def linear_head(model: object) -> nn.Linear | None:
    """Returns the head of a sequence or token classifier of transformers with one output, or None."""
    heads = (getattr(model, name, None) for name in ("score", "classifier"))
    return next((head for head in heads if isinstance(head, nn.Linear) and head.out_features == 1), None)
