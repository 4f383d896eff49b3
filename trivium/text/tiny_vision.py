"""Tiny vision-language models: a model, tokenizer and processor of a real family, built from a seed.

An image costs few tokens: with the defaults, a 28 x 28 picture is 4 tokens of a Qwen model.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from trivium.models.vision.images import MAX_PIXELS, Images, images_of
from trivium.text.tiny import ROLES, TinyModel, sizes_of, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
    from transformers.image_processing_backends import PilBackend

_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TILES = 2
"""Number of tiles per side that the Idefics families cut an image into, in addition to the whole image."""
_IDEFICS_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row + 1}_col_{column + 1}>" for row in range(_TILES) for column in range(_TILES)),
)
_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message.role not in {ROLES} %}}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "{{ '<|' + message.role + '|>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "llava": "LlavaProcessor",
    "smolvlm": "SmolVLMProcessor",
    "idefics3": "Idefics3Processor",
}


class TinyVisionModel(TinyModel):
    """A small, randomly initialised vision-language model with its own tokenizer and processor. Needs no download."""

    class Config(TinyModel.Config):
        kind: str = "tiny_vision"
        architecture: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "smolvlm", "idefics3"] = "qwen2_vl"  # pyright: ignore[reportIncompatibleVariableOverride]
        """Which Hugging Face model class."""
        vision_layers: int = Field(default=2, ge=1)
        """Transformer blocks of the vision tower."""
        vision_hidden: int = Field(default=32, ge=4)
        """Width of the vision tower."""
        vision_heads: int = Field(default=2, ge=1)
        """Attention heads of the vision tower."""
        patch: int = Field(default=7, ge=1)
        """Side of the squares that an image is cut into, in pixels."""
        merge: int = Field(default=2, ge=1)
        """Squares of `merge` by `merge` patches become one token (in LLaVA, each patch is one)."""
        image_size: int = Field(default=56, ge=2)
        """Side of an image in pixels. Qwen models shrink larger images to this area and keep the aspect ratio; the
        others resize every image to it (Idefics3 and SmolVLM: the whole image, and four tiles of this size)."""

        @model_validator(mode="after")
        def _vision_fits(self) -> Self:
            if self.vision_hidden % (4 * self.vision_heads):
                raise ValueError(f"vision_hidden {self.vision_hidden} is not a multiple of 4 x vision_heads")
            if self.image_size % (self.patch * self.merge):
                raise ValueError(f"image_size {self.image_size} is not a multiple of patch x merge")
            if self.architecture.startswith("qwen") and self.head_width < 8:
                raise ValueError(f"rotary positions of images need a head_dim of at least 8, not {self.head_width}")
            if self.architecture in ("qwen2_vl", "qwen2_5_vl") and self.head_width * self.heads != self.hidden:
                raise ValueError(f"{self.architecture} has head_dim = hidden / heads; leave head_dim out")
            if self._is_idefics and self.alphabet not in ("ascii", "bytes") and "\n" not in self.alphabet:
                raise ValueError(f"{self.architecture} writes a newline between tiles; add it to the alphabet")
            return self

        @property
        def _is_idefics(self) -> bool:
            return self.architecture in ("smolvlm", "idefics3")

        @property
        def image_tokens(self) -> tuple[str, ...]:
            """The special tokens of the family."""
            if self.architecture.startswith("qwen"):
                return _QWEN_TOKENS
            return ("<image>",) if self.architecture == "llava" else _IDEFICS_TOKENS

        def tokenizer(self) -> PreTrainedTokenizerFast:
            """Its tokenizer, without building it."""
            qwen = self.architecture.startswith("qwen")
            image = "<|vision_start|><|image_pad|><|vision_end|>" if qwen else "<image>"
            template = _TEMPLATE.replace("IMAGE", image)
            return tiny_tokenizer(
                self.alphabet, self.max_position, more=self.image_tokens, template=template, strips=True
            )

        def described(self) -> PretrainedConfig:
            """Its config.json, without building it."""
            return _model_config(self, self.tokenizer())

    config: Config

    @staticmethod
    def images(config: Config, max_pixels: int = MAX_PIXELS) -> Images:
        """The image reader of the model that the config describes, without building it."""
        with TemporaryDirectory() as directory:
            config.tokenizer().save_pretrained(directory)
            TinyVisionModel(config, seed=0)._save_processor(Path(directory))
            images = images_of(directory, max_pixels=max_pixels)
        assert images is not None
        return images

    def _model(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        import torch
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_config(_model_config(self.config, tokenizer), dtype=torch.float32)

    def _save_processor(self, directory: Path) -> None:
        name, config = _PROCESSORS[self.config.architecture], self.config
        tokens_of_image = (config.image_size // config.patch // config.merge) ** 2
        further: dict[str, Any] = {}
        if config.architecture == "llava":
            further = {
                "patch_size": config.patch,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            }
        elif config.architecture in ("smolvlm", "idefics3"):
            further = {"image_seq_len": tokens_of_image}
        _image_processor(config).save_pretrained(directory)
        for file, content in (
            ("preprocessor_config.json", json.loads((directory / "preprocessor_config.json").read_text("utf-8"))),
            ("processor_config.json", further),
        ):
            content["processor_class"] = name
            (directory / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _model_config(config: TinyVisionModel.Config, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        config.architecture,
        text_config=_text_config(config, tokenizer),
        vision_config=_vision_config(config),
        tie_word_embeddings=config.tied,
        **_outer_config(config, tokenizer),
    )


def _text_config(config: TinyVisionModel.Config, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    half = config.head_width // 2
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        **sizes_of(config),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": config.hidden**-0.5,
    }
    if config.architecture in ("llava", "smolvlm", "idefics3"):
        return {"model_type": "llama", **text}
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    positions: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections}
    if config.architecture == "qwen3_vl":
        positions["mrope_interleaved"] = True
    else:
        # Their configs have no such key: it is hidden / heads.
        del text["head_dim"]
    return {**text, "rope_parameters": positions}


def _vision_config(config: TinyVisionModel.Config) -> dict[str, Any]:
    width, layers, heads = config.vision_hidden, config.vision_layers, config.vision_heads
    common = {"patch_size": config.patch, "initializer_range": width**-0.5}
    qwen = {**common, "depth": layers, "num_heads": heads, "spatial_merge_size": config.merge, "in_channels": 3}
    side = config.image_size // config.patch
    match config.architecture:
        case "qwen2_vl":
            return {**qwen, "embed_dim": width, "hidden_size": config.hidden, "mlp_ratio": 2}
        case "qwen2_5_vl":
            return {
                **qwen,
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "out_hidden_size": config.hidden,
                "fullatt_block_indexes": [layers - 1],
                "window_size": 2 * config.patch * config.merge,
            }
        case "qwen3_vl":
            return {
                **qwen,
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "out_hidden_size": config.hidden,
                "num_position_embeddings": side * side,
                "deepstack_visual_indexes": [0],
            }
        case "llava" | "smolvlm" | "idefics3":
            sizes = {
                **common,
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "num_hidden_layers": layers,
                "num_attention_heads": heads,
                "image_size": config.image_size,
            }
            clip = {"model_type": "clip_vision_model", "projection_dim": width}
            return {**sizes, **clip} if config.architecture == "llava" else sizes


def _outer_config(config: TinyVisionModel.Config, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ids = tokenizer.get_vocab()
    if config.architecture.startswith("qwen"):
        return {
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
    if config.architecture == "llava":
        tokens = (config.image_size // config.patch) ** 2
        return {"image_token_index": ids["<image>"], "image_seq_length": tokens, "vision_feature_layer": -1}
    return {"image_token_id": ids["<image>"], "scale_factor": config.merge, "pad_token_id": tokenizer.pad_token_id}


def _image_processor(config: TinyVisionModel.Config) -> PilBackend:
    side = config.image_size
    if config.architecture.startswith("qwen"):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(
            patch_size=config.patch,
            merge_size=config.merge,
            temporal_patch_size=2,
            min_pixels=(config.patch * config.merge) ** 2,
            max_pixels=side * side,
        )
    if config.architecture == "llava":
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kind = SmolVLMImageProcessorPil if config.architecture == "smolvlm" else Idefics3ImageProcessorPil
    return kind(size={"longest_edge": _TILES * side}, max_image_size={"longest_edge": side})
