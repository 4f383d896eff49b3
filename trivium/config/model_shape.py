"""The size of a model by its config.json: parameters, arithmetic and caches, counted without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trivium.config.vision_shape import VisionShape, vision_shape
from trivium.errors import DataError

_QKV_BIAS = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl")
"""Model types whose query, key and value projections have a bias that their config does not mention."""
_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_vl")
"""Model types that normalise each head's queries and keys."""
_OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
}
_PLAIN = ("gpt2", "bloom", "gpt_neox", "opt", "gpt_bigcode")
"""Model types with biases everywhere and a feed-forward layer of two matrices."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal blocks. Exact for the shapes of Llama, Mistral, Qwen and GPT-2; close for others."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool
    """Whether input and output share one embedding."""
    max_positions: int | None = None
    gated: bool = True
    """Whether the feed-forward layer has a gate, hence three matrices instead of two."""
    experts: int = 1
    active_experts: int = 1
    """How many of them a token goes through."""
    small: int = 0
    """Parameters of one block outside its matrices: norms and biases."""
    outside: int = 0
    """Parameters outside blocks, embedding and head: the last norm, learned positions."""
    vision: VisionShape | None = None
    """The image side; None for a model that reads text only."""

    @property
    def attention(self) -> int:
        """Matrix parameters of one block's attention."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert(self) -> int:
        """Matrix parameters of one feed-forward layer."""
        return (3 if self.gated else 2) * self.hidden * self.mlp

    @property
    def router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def block(self) -> int:
        """Parameters of one block."""
        return self.attention + self.router + self.experts * self.expert + self.small

    @property
    def backbone(self) -> int:
        """Parameters without the output layer, the image side included."""
        seen = 0 if self.vision is None else self.vision.parameters
        return self.embedding + self.layers * self.block + self.outside + seen

    @property
    def parameters(self) -> int:
        """Parameters, a tied embedding once."""
        return self.backbone + (0 if self.tied else self.embedding)

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with in the blocks: no lookups, of all experts the active ones."""
        return self.layers * (self.attention + self.router + self.active_experts * self.expert)

    @property
    def kv_per_token(self) -> int:
        """Numbers that one token leaves in a cache of keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def routing_per_token(self) -> int:
        """Bytes that the numbers of a token's experts take where they are recorded, at most."""
        return self.layers * self.active_experts * (1 if self.experts <= 255 else 2)


def read_shape(directory: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face directory. Raises DataError where config.json lacks a size."""
    path = Path(directory) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"read {path}", str(error), "name a Hugging Face model directory") from error
    return shape_of(config)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that the contents of a config.json describe; of a model with several parts, its language model.

    Raises DataError where a size is missing.
    """
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else dict(config)
    text |= {new: text[old] for old, new in _OLD_NAMES.items() if text.get(old) is not None}
    missing = [
        name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if name not in text
    ]
    if missing:
        raise DataError(
            "the size of a model by its config.json",
            f"it names no {', '.join(missing)}",
            "plan by hand: this architecture is not one that can be counted",
        )
    hidden, heads, kind = int(text["hidden_size"]), int(text["num_attention_heads"]), str(text.get("model_type", ""))
    kind = kind.removesuffix("_text")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 1)
    mlp = int(
        (text.get("moe_intermediate_size") if experts > 1 else None) or text.get("intermediate_size") or 4 * hidden
    )
    plain = kind in _PLAIN
    tied = plain or kind.startswith("gemma")  # where the file is silent
    positions = text.get("max_position_embeddings")
    learned = int(positions or 0) * hidden if kind in ("gpt2", "opt", "gpt_bigcode") else 0
    return ModelShape(
        hidden=hidden,
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=mlp,
        vocabulary=int(text["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", tied))),
        max_positions=None if positions is None else int(positions),
        gated=not plain,
        experts=experts,
        active_experts=int(text.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        small=_small(text, kind, hidden, heads * head_dim, kv_heads * head_dim, mlp, head_dim),
        vision=vision_shape(config, hidden),
        outside=learned + (2 if plain else 1) * hidden + (2 * hidden if kind == "bloom" else 0),
    )


def _small(text: Mapping[str, Any], kind: str, hidden: int, query: int, key: int, mlp: int, head_dim: int) -> int:
    """Norms and biases of one block."""
    if kind in _PLAIN:  # two norms with biases, and a bias for every matrix
        return 4 * hidden + query + 2 * key + hidden + mlp + hidden
    biased = bool(text.get("attention_bias"))
    biases = (query + 2 * key) * (biased or kind in _QKV_BIAS) + hidden * biased
    if text.get("mlp_bias"):
        biases += 2 * mlp + hidden
    return 2 * hidden + (2 * head_dim if kind in _QK_NORM else 0) + biases


# --------------------------------------------------------------------------- in few bits


class FewBits(NamedTuple):
    """A format that keeps a matrix in few bits, and a float32 scale for each block of its numbers."""

    bits: int
    block: int


FEW_BITS = {"int8": FewBits(8, 256), "nf4": FewBits(4, 64)}
"""By value of `train.frozen_dtype`."""


def frozen_weights(shape: ModelShape, width: int, few: FewBits | None) -> int:
    """Bytes of a model whose numbers have `width` bytes, those of its linear layers few bits."""
    linear = shape.layers * (shape.attention + shape.experts * shape.expert) if few else 0
    return (shape.parameters - linear) * width + (linear * few.bits // 8 + linear // few.block * 4 if few else 0)
