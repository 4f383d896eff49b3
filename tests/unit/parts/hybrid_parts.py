"""Small models with recurrent states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training_parts import SIZE, random_model
from transformers import AutoConfig, PreTrainedModel

_DELTA_RULE: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
_LARGE_ATTENTION = {"num_key_value_heads": 4}
"""Makes attention large enough, beside 4 experts, for a test to detect whether ranks hold all of it or a part."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {**_DELTA_RULE, **_EXPERTS, "num_experts": 4},
    "qwen3_5_text": _DELTA_RULE,
    "mamba2": {"num_heads": 8, "head_dim": 4, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": {
        "head_dim": 8,
        "mamba_n_heads": 8,
        "mamba_d_head": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "mamba_n_groups": 1,
        "mamba_d_ssm": 32,
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "head_dim": 8,
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
    },
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_headdim": 4,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
}
"""Gated delta rule, Mamba 2, short convolutions; beside attention in a layer or in turns, dense or with experts."""
MORE_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {**_DELTA_RULE, **_EXPERTS, "num_experts": 8},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        **_EXPERTS,
        **_LARGE_ATTENTION,
        "num_experts": 4,
        "num_dense_layers": 0,
    },
    "granitemoehybrid": {
        **_LARGE_ATTENTION,
        "layer_types": ["mamba", "attention"],
        "mamba_expand": 1,
        "mamba_n_heads": 4,
        "mamba_d_head": 4,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "num_local_experts": 4,
        "shared_intermediate_size": 2,
        "num_experts_per_tok": 2,
    },
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 4,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
}
"""The same layers in models of other families."""
HYBRID_OF = {name.removesuffix("_text"): name for name in HYBRIDS | MORE_HYBRIDS}
"""The names above by the type of model in `config.parallel`."""


def random_hybrid(name: str, scale: float = 4.0, **changes: Any) -> PreTrainedModel:
    own = {**HYBRIDS, **MORE_HYBRIDS}[name]
    config = AutoConfig.for_model(name, **{**SIZE, "pad_token_id": 0, **own, **changes})
    config.bos_token_id = config.eos_token_id = 1
    with torch.random.fork_rng():
        return random_model(config, seed=0, scale=scale)


def write_hybrid(directory: Path, name: str, scale: float = 4.0, **changes: Any) -> Path:
    random_hybrid(name, scale, **changes).save_pretrained(directory)
    return directory
