"""Small mixtures of experts for tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "norm_topk_prob": True,
}
_LOCAL, _ROUTED = "num_local_experts", "n_routed_experts"
_EXPERTS = {"mixtral": _LOCAL, "granitemoe": _LOCAL, "gpt_oss": _LOCAL, "glm4_moe": _ROUTED, "deepseek_v3": _ROUTED}


def mixture(kind: str = "qwen3_moe", *, seed: int = 0, scale: float = 6.0, **changes: Any) -> PreTrainedModel:
    """A random model of 8 experts, 2 for each token, whose weights are large enough to tell them apart."""
    experts = {_EXPERTS.get(kind, "num_experts"): 8, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, **{**_SIZES, **experts, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def write_mixture(directory: Path, kind: str = "qwen3_moe", **how: Any) -> Path:
    mixture(kind, **how).save_pretrained(directory)
    return directory
