"""Small mixtures of experts, and rollouts with further arrays, for tests."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training_parts import random_model
from transformers import AutoConfig, PreTrainedModel

from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.randomness import SampleKey
from trivium.types import Batch, Completion, Group, Request, Sampling, Task, Trajectory, Turn, experiences_of

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
    return random_model(config, seed=seed, scale=scale)


def write_mixture(directory: Path, kind: str = "qwen3_moe", **how: Any) -> Path:
    mixture(kind, **how).save_pretrained(directory)
    return directory


def sampled(model_dir: Path, prompts: Sequence[Any], **sampling: Any) -> list[Completion]:
    engine = TorchEngine(
        TorchEngine.Config(device="cpu", dtype="float32", batch_invariant=False),
        model_dir=model_dir,
        eos_token_ids=frozenset({1}),
        decode=str,
        threads=1,
    )

    async def main() -> list[Completion]:
        try:
            requests = [
                Request(prompt, Sampling(24, **sampling), SampleKey(0, "train", "train", "a", index=i))
                for i, prompt in enumerate(prompts)
            ]
            return list(await asyncio.gather(*map(engine.generate, requests)))
        finally:
            await engine.close()

    return asyncio.run(main())


def turn_of(prompt: Any, done: Completion) -> Turn:
    return Turn(prompt, done.tokens, done.log_prob, done.policy_version, done.stop_reason, "", extra=done.extra)


def group_of(*members: Sequence[Turn]) -> Group:
    trajectories = tuple(Trajectory(i, tuple(turns), {"r": float(i)}) for i, turns in enumerate(members))
    return Group(0, Task("a", ()), trajectories)


def batch_of(group: Group) -> Batch:
    return Batch(tuple(e for member in group.trajectories for e in experiences_of(group, member)))
