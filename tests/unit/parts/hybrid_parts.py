"""Small models with recurrent states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training_parts import SIZE, random_model
from transformers import AutoConfig

HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
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
        "layers_block_type": ["mamba", "hybrid"],
        "use_mem_rope": True,
    },
}
"""Gated delta rule, Mamba 2, short convolutions; beside attention in a layer or in turns, dense or with experts."""


def write_hybrid(directory: Path, name: str, scale: float = 4.0) -> Path:
    config = AutoConfig.for_model(name, **{**SIZE, "pad_token_id": 0, **HYBRIDS[name]})
    config.bos_token_id = config.eos_token_id = 1
    with torch.random.fork_rng():
        random_model(config, seed=0, scale=scale).save_pretrained(directory)
    return directory
