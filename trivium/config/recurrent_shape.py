"""The size of the recurrent states of a model by its config.json, without loading it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WITHOUT_KEYS = ("linear_attention", "conv", "mamba", "mlp", "moe")
"""Types of layers without keys and values."""
_STATEFUL = ("linear_attention", "conv", "mamba", "hybrid")
"""Types of layers with a recurrent state."""
_EVERY_LAYER = {"mamba2": "mamba", "falcon_h1": "hybrid"}
"""The type of all layers, for model types whose config.json lists no types."""
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The letters of `hybrid_override_pattern`."""


@dataclass(frozen=True)
class RecurrentShape:
    """Layers whose state has the same size whatever the length of a sequence."""

    without_keys: int
    """Layers without keys and values: with a recurrent state, a convolution, or a feed-forward layer alone."""
    inputs: int = 0
    """Numbers of one sequence that convolutions of all layers keep: their last inputs."""
    scans: int = 0
    """Numbers of one sequence in the states of all scans, which are float32 in models of any dtype."""


NO_STATE = RecurrentShape(0)


def layer_types(config: Mapping[str, Any]) -> Sequence[str]:
    """The type of each layer; empty if config.json does not list them."""
    if named := config.get("layer_types") or config.get("layers_block_type"):
        return named
    if pattern := config.get("hybrid_override_pattern"):
        return [_LETTERS.get(letter, letter) for letter in str(pattern)]
    count, kind = int(config.get("num_hidden_layers") or 0), str(config.get("model_type", ""))
    if kind in _EVERY_LAYER:
        return [_EVERY_LAYER[kind]] * count
    attention: Collection[int] | None = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    if attention is None and kind == "bamba":  # without indices, no layer has attention
        attention = ()
    if attention is None and "linear_conv_kernel_dim" in config:
        interval = int(config.get("full_attention_interval") or 4)
        attention = range(interval - 1, count, interval)
    if attention is None:
        return []
    return ["attention" if layer in attention else "linear_attention" for layer in range(count)]


def recurrent_shape(config: Mapping[str, Any]) -> RecurrentShape:
    """The states of a language model, by the contents of its config.json. Sizes that it does not name count as 0."""
    types = layer_types(config)
    stateful = sum(kind in _STATEFUL for kind in types)
    inputs, scan = _of_a_layer(config)
    return RecurrentShape(sum(kind in _WITHOUT_KEYS for kind in types), stateful * inputs, stateful * scan)


def _of_a_layer(config: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of a layer: the last inputs of its convolution, and the state of its scan."""
    if taps := config.get("conv_L_cache"):
        return int(config["hidden_size"]) * int(taps), 0
    if taps := config.get("linear_conv_kernel_dim"):
        key, value = _first(config, "linear_key_head_dim"), _first(config, "linear_value_head_dim")
        heads = _first(config, "linear_num_value_heads")
        channels = 2 * _first(config, "linear_num_key_heads") * key + heads * value
        return channels * int(taps), heads * key * value
    heads = _first(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    state = _first(config, "ssm_state_size", "mamba_d_state", "state_size")
    width = heads * _first(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    groups = _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    taps = _first(config, "mamba_d_conv", "conv_kernel")
    return (width + 2 * groups * state) * taps, width * state


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The first of these keys that is a number; 0 if there is none."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
