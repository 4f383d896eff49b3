"""The size of a model by its config.json: parameters, bytes and arithmetic, counted without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trivium.config.recurrent_shape import NO_STATE, RecurrentShape, layer_types, recurrent_shape
from trivium.config.vision_shape import VisionShape, vision_shape
from trivium.errors import DataError

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
"""Bytes of one number, by the name of its type."""


class FewBits(NamedTuple):
    """A quantised format of a matrix: a few bits for each number, and a float32 scale for each block of numbers."""

    bits: int
    """Bits of one number."""
    block: int
    """Numbers that share a scale."""


FEW_BITS = {"int8": FewBits(8, 256), "nf4": FewBits(4, 64)}
"""By value of `train.frozen_dtype`."""
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
"""Keys of older config files, as in GPT-2's, and their present names."""
_MAMBA_2 = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
"""Sizes that the config.json of Mamba 2 names instead of attention heads."""
_PLAIN = ("gpt2", "bloom", "gpt_neox", "opt", "gpt_bigcode")
"""Model types with biases everywhere and a feed-forward layer of two matrices."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal blocks. Exact for the shapes of Llama, Mistral, Qwen, GPT-2 and Mamba 2; close for others."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Inner width of a feed-forward layer; of one expert, if there are several."""
    vocabulary: int
    tied: bool
    """Whether input and output share one embedding."""
    max_positions: int | None = None
    gated: bool = True
    """Whether the feed-forward layer has a gate, and with it three matrices instead of two."""
    experts: int = 1
    active_experts: int = 1
    """The number of experts that compute a token."""
    shared: int = 0
    """Inner width of the feed-forward layer that computes every token beside the experts, of all shared experts."""
    small: int = 0
    """Parameters of one block outside its matrices: norms and biases."""
    outside: int = 0
    """Parameters outside blocks, embedding and head: the last norm, learned positions."""
    recurrent: RecurrentShape = NO_STATE
    """Layers without keys and values count as blocks of the usual parameters."""
    vision: VisionShape | None = None
    """The vision tower and its projector; None for a model that reads text only."""
    kind: str = field(default="", compare=False)
    """`model_type`; empty for a shape without a config.json."""

    @property
    def query(self) -> int:
        """Width of a token's queries, of all heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def expert(self) -> int:
        """Parameters of the matrices of one expert. A model without experts counts as one with a single expert."""
        return self._matrices * self.hidden * self.mlp

    @property
    def _matrices(self) -> int:
        """The number of matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    @property
    def linear(self) -> int:
        """Parameters of the matrices of one block, without its router."""
        shared = self._matrices * self.hidden * self.shared
        return 2 * self.hidden * (self.query + self.key) + self.experts * self.expert + shared

    @property
    def all_experts(self) -> int:
        """Parameters of the experts of one block; 0 without experts."""
        return self.experts * self.expert if self.experts > 1 else 0

    @property
    def router(self) -> int:
        """Parameters of the matrix of one block that scores the experts for a token."""
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def block(self) -> int:
        """Parameters of one block."""
        return self.linear + self.router + self.small

    @property
    def backbone(self) -> int:
        """Parameters without the output layer; the vision tower and its projector are included."""
        seen = 0 if self.vision is None else self.vision.parameters
        return self.embedding + self.layers * self.block + self.outside + seen

    @property
    def parameters(self) -> int:
        """Parameters; a tied embedding counts once."""
        return self.backbone + (0 if self.tied else self.embedding)

    @property
    def multiplied(self) -> int:
        """Parameters of the blocks that a token is multiplied with: all but those of inactive experts."""
        return self.layers * (self.linear + self.router - (self.experts - self.active_experts) * self.expert)

    @property
    def kv_per_token(self) -> int:
        """Numbers that one token leaves in a cache of keys and values."""
        return 2 * (self.layers - self.recurrent.without_keys) * self.key

    def state_bytes(self, width: int) -> int:
        """Bytes of the recurrent states of one sequence, whose convolutions keep numbers of `width` bytes."""
        return self.recurrent.inputs * width + self.recurrent.scans * max(4, width)

    @property
    def routing_per_token(self) -> int:
        """Most bytes of the recorded experts of one token. An id needs 1 byte up to 255 experts, since 0 stands for an
        unknown expert (`types.EXTRAS`)."""
        return self.layers * self.active_experts * (1 if self.experts <= 255 else 2)

    def adapter(self, rank: int, layers: int | None = None) -> int:
        """Parameters of low-rank adapters of that rank at every linear layer of so many blocks (unset: all)."""
        # A matrix of m inputs and n outputs gets rank * (m + n): q and o, k and v, then the feed-forward matrices.
        ends = 2 * (self.hidden + self.query) + 2 * (self.hidden + self.key)
        ends += self._matrices * (
            self.experts * (self.hidden + self.mlp) + bool(self.shared) * (self.hidden + self.shared)
        )
        return (self.layers if layers is None else layers) * rank * ends

    def num_bytes(self, width: int, few: FewBits | None = None) -> int:
        """Bytes of the weights, with `width` bytes for a number. With `few`, the linear layers are in that format."""
        linear = self.layers * self.linear if few else 0
        return (self.parameters - linear) * width + (linear * few.bits // 8 + linear // few.block * 4 if few else 0)

    def flops(self, tokens: int, squares: int, head_tokens: int, *, backward: bool, adapted: int = 0) -> float:
        """Floating-point operations of one pass of the decoder over sequences with `tokens` tokens in total. `squares`
        is the sum of the squared lengths of the sequences. The head is applied to `head_tokens` of the tokens.

        The forward pass takes two operations per token and multiplied weight: embedding lookups take none, and of the
        experts only the active ones count. Causal attention takes 2 * heads * head_dim * length^2 per layer, half of
        the full square; recurrent states are neglected. The backward pass takes twice as many as the forward pass, for
        the gradients of activations and of weights. If only adapters in the last `adapted` layers are trained, it takes
        as many as the forward pass through these and the head, since frozen weights get no gradient; the arithmetic of
        the adapters is neglected.
        """
        head = 2.0 * self.embedding * head_tokens
        layers = 2.0 * self.multiplied * tokens
        layers += 2.0 * (self.layers - self.recurrent.without_keys) * self.query * squares
        if not backward:
            return layers + head
        return layers * (1 + adapted / self.layers) + 2 * head if adapted else 3 * (layers + head)


def read_shape(directory: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face directory. Raises DataError if config.json lacks a size."""
    return shape_of(_config_in(directory))


def positions_in(directory: str | Path) -> int | None:
    """The longest sequence of the model in a Hugging Face directory, in tokens; None if config.json has no limit."""
    positions = _text_config(_config_in(directory)).get("max_position_embeddings")
    return None if positions is None else int(positions)


def _config_in(directory: str | Path) -> dict[str, Any]:
    path = Path(directory) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"read {path}", str(error), "name a Hugging Face model directory") from error


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json about the language model, by the present names of its keys."""
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else dict(config)
    if "num_hidden_layers" not in text and (types := layer_types(text)):  # Nemotron-H
        text["num_hidden_layers"] = len(types)
    return text | {new: text[old] for old, new in _OLD_NAMES.items() if text.get(old) is not None}


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that the contents of a config.json describe; for a model with several parts, its language model.

    Raises DataError if a size is missing.
    """
    text = _text_config(config)
    kind = str(text.get("model_type", "")).removesuffix("_text")
    sizes = _MAMBA_2 if kind == "mamba2" else ("num_attention_heads",)
    missing = [name for name in ("hidden_size", "num_hidden_layers", *sizes, "vocab_size") if name not in text]
    if missing:
        raise DataError(
            "the size of a model by its config.json",
            f"it names no {', '.join(missing)}",
            "plan the memory by hand: this architecture is not supported",
        )
    hidden, heads = int(text["hidden_size"]), int(text[sizes[0]])
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 1)
    mlp = int(
        (text.get("moe_intermediate_size") if experts > 1 else None) or text.get("intermediate_size") or 4 * hidden
    )
    if kind == "mamba2":
        # The input projection computes a gate and the inputs of convolution and scan. Gate and output projection count
        # as those of queries and outputs, the rest as a feed-forward layer of two matrices.
        kv_heads, mlp = 0, (_convolved(text) + heads) // 2
    plain = kind in _PLAIN
    tied = plain or kind.startswith("gemma")  # the default of these types, if the file has no `tie_word_embeddings`
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
        gated=not plain and kind != "mamba2",
        experts=experts,
        active_experts=int(text.get("num_experts_per_tok") or 1) if experts > 1 else 1,
        shared=_shared(text, mlp) if experts > 1 else 0,
        small=_small(text, kind, hidden, heads * head_dim, kv_heads * head_dim, mlp, head_dim),
        recurrent=recurrent_shape(text),
        vision=vision_shape(config, hidden),
        kind=kind,
        outside=learned + (2 if plain else 1) * hidden + (2 * hidden if kind == "bloom" else 0),
    )


def _shared(text: Mapping[str, Any], mlp: int) -> int:
    """Inner width of all shared experts of a block, whose key depends on the family."""
    width = text.get("shared_expert_intermediate_size") or text.get("shared_intermediate_size")
    return int(width or int(text.get("n_shared_experts") or 0) * mlp)


def _convolved(text: Mapping[str, Any]) -> int:
    """Channels of the convolution of a Mamba 2 block."""
    return int(text["num_heads"]) * int(text["head_dim"]) + 2 * int(text["n_groups"]) * int(text["state_size"])


def _small(text: Mapping[str, Any], kind: str, hidden: int, query: int, key: int, mlp: int, head_dim: int) -> int:
    """Parameters of norms, biases and gates of one block."""
    if kind in _PLAIN:  # two norms with biases, and a bias for every matrix
        return 4 * hidden + query + 2 * key + hidden + mlp + hidden
    if kind == "mamba2":  # a norm, the convolution, three numbers a head, and the norm of the scan's output
        columns, heads = _convolved(text), query // head_dim
        convolution = columns * (int(text["conv_kernel"]) + bool(text.get("use_conv_bias", True)))
        biases = (query + columns + heads + hidden) * bool(text.get("use_bias"))
        return hidden + convolution + 3 * heads + query + biases
    biased = bool(text.get("attention_bias"))
    biases = (query + 2 * key) * (biased or kind in _QKV_BIAS) + hidden * biased
    if text.get("mlp_bias"):
        biases += 2 * mlp + hidden
    biases += hidden * bool(text.get("shared_expert_intermediate_size"))  # the gate of the shared expert
    return 2 * hidden + (2 * head_dim if kind in _QK_NORM else 0) + biases
