"""The size of a model's vision tower and projector by its config.json: parameters and FLOPs, without loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_QWEN = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": {**_QWEN, "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14},
    "qwen2_5_vl": {
        **_QWEN,
        "depth": 32,
        "hidden_size": 3584,
        "out_hidden_size": 3584,
        "intermediate_size": 3420,
        "patch_size": 14,
    },
    "qwen3_vl": {
        **_QWEN,
        "depth": 27,
        "hidden_size": 1152,
        "out_hidden_size": 3584,
        "intermediate_size": 4304,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
    "llava": {**_SIGLIP, "hidden_size": 768},
    "idefics3": _SIGLIP,
    "smolvlm": _SIGLIP,
}
"""Values of keys that a config.json may leave out, by model type."""


@dataclass(frozen=True)
class VisionShape:
    """A tower of equal blocks over patches of an image, and a projector to the decoder's width."""

    family: str
    """The model's type."""
    hidden: int
    """Width of the tower."""
    layers: int
    block: int
    """Parameters of one block."""
    outside: int
    """Parameters of the tower outside its blocks."""
    projector: int
    """Parameters of the layers that map its outputs to the decoder's width."""
    patches_per_token: int
    """Number of patches of an image that one token stands for."""

    @property
    def tower(self) -> int:
        """Parameters without the projector."""
        return self.layers * self.block + self.outside

    @property
    def parameters(self) -> int:
        return self.tower + self.projector

    def trained(self, which: str | None) -> int:
        """Parameters that are trained if `train.vision_tower` is `which`."""
        return {"frozen": 0, "projector": self.projector}.get(which or "trained", self.parameters)

    def flops(self, image_tokens: int, squares: int) -> float:
        """Floating-point operations of a forward pass over images of `image_tokens` tokens; `squares` is the sum of the
        squared numbers of tokens of each image. Attention within an image is full."""
        patches = image_tokens * self.patches_per_token
        attended = squares * self.patches_per_token**2
        linear = self.layers * self.block * patches + self.projector * image_tokens
        return 2.0 * linear + 4.0 * self.layers * self.hidden * attended


def vision_shape(config: Mapping[str, Any], width: int) -> VisionShape | None:
    """The vision tower of the model that a config.json describes, with a decoder of that width; None for a model that
    reads text only, and for types that are not counted here."""
    kind = str(config.get("model_type"))
    if kind not in _DEFAULTS:
        return None
    vision: dict[str, Any] = {**_DEFAULTS[kind], **(config.get("vision_config") or {})}
    if kind.startswith("qwen"):
        return _qwen(kind, vision)
    hidden, mlp = int(vision["hidden_size"]), int(vision["intermediate_size"])
    patches = (int(vision["image_size"]) // int(vision["patch_size"])) ** 2
    kernel = int(vision["num_channels"]) * int(vision["patch_size"]) ** 2 * hidden
    outside = kernel + patches * hidden + 2 * hidden
    if kind == "llava":  # no bias of the patches; a class token, its position, and a norm before the blocks
        layers = config.get("vision_feature_layer", -2)
        inputs = hidden * (len(layers) if isinstance(layers, list | tuple) else 1)
        bias = 2 * width * bool(config.get("multimodal_projector_bias", True))
        outside, projector, per_token = outside + 4 * hidden, inputs * width + width * width + bias, 1
    else:
        scale = int(config.get("scale_factor", 2)) ** 2
        outside, projector, per_token = outside + hidden, hidden * scale * width, scale
    block = 4 * (hidden * hidden + hidden) + 2 * hidden * mlp + mlp + hidden + 4 * hidden
    return VisionShape(kind, hidden, int(vision["num_hidden_layers"]), block, outside, projector, per_token)


def _qwen(kind: str, vision: Mapping[str, Any]) -> VisionShape:
    old = kind == "qwen2_vl"
    hidden = int(vision["embed_dim" if old else "hidden_size"])
    width = int(vision["hidden_size" if old else "out_hidden_size"])
    mlp = hidden * int(vision["mlp_ratio"]) if old else int(vision["intermediate_size"])
    merge = int(vision["spatial_merge_size"]) ** 2
    channels = int(vision.get("in_chans") or vision["in_channels"])
    kernel = channels * int(vision["temporal_patch_size"]) * int(vision["patch_size"]) ** 2 * hidden
    attention = 4 * hidden * hidden + 4 * hidden
    merged = hidden * merge
    projector = merged * merged + merged + merged * width + width
    if kind == "qwen2_5_vl":  # gated, norms without bias
        block, norm, outside = attention + 3 * hidden * mlp + 2 * mlp + hidden + 2 * hidden, hidden, kernel
    else:
        block, norm, outside = attention + 2 * hidden * mlp + mlp + hidden + 4 * hidden, 2 * hidden, kernel
    if kind == "qwen3_vl":
        outside += hidden + int(vision["num_position_embeddings"]) * hidden
        deep = len(vision["deepstack_visual_indexes"])
        return VisionShape(
            kind, hidden, int(vision["depth"]), block, outside, (deep + 1) * projector + norm + deep * 2 * merged, merge
        )
    return VisionShape(kind, hidden, int(vision["depth"]), block, outside, projector + norm, merge)
