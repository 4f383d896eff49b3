"""Flags of LightRFT's launchers about models, the rollout engine and the ranks."""

from __future__ import annotations

from typing import Any

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted, ignored

OFF = (None, False)


def above_zero(number: float) -> float | None:
    """Returns the number, or None, which sets nothing, if it is not above 0."""
    return number if number > 0 else None


def _targets(value: Any) -> list[str] | None:
    """Returns the names of the layers; None for every linear layer."""
    listed = [value] if isinstance(value, str) else list(value)
    return None if listed == ["all-linear"] else listed


MODELS: dict[str, Entry] = {
    "pretrain": Mapped("model.path", type=str),
    "reward_pretrain": Mapped(
        "rewards: kind model; `{}`: no reward model. Several models, as `{name: path}`, need a `reward_fn`", type=object
    ),
    "critic_pretrain": Mapped(
        "the critic starts from the actor's backbone: must be equal to pretrain, or unset", type=str
    ),
    "remote_rm_url": Mapped(
        "rewards: kind remote, one for each URL; a Python file with a `reward_func`: only PPOTrainerVL", type=object
    ),
    "value_head_prefix": Ignored("a checkpoint stores the critic's value head in a separate file"),
    "text_only": Mapped("true: images of rows are not read, and model.path may be a text model", False),
    "freeze_prefix": Mapped("train.vision_tower: frozen", type=object),
    "bf16": Mapped(("train.dtype", "engine.dtype"), False, convert={True: "bfloat16", False: "float32"}),
    "load_in_4bit": Mapped("train.frozen_dtype", False, convert={True: "nf4"}, note="needs lora_rank"),
    "lora_rank": Mapped("train.lora.rank", 0, convert=above_zero, note="0 trains every weight"),
    "lora_alpha": Mapped("train.lora.alpha", 16, when={"lora_rank": True}),
    "target_modules": Mapped(
        "train.lora.targets", "all-linear", type=object, convert=_targets, when={"lora_rank": True}
    ),
    "lora_dropout": Restricted((None, 0), "adapters are trained without dropout: leave it out", 0),
    "aux_loss_coef": Restricted((None, 0), "an auxiliary load-balancing loss is not supported: leave it out", 0),
    "disable_fast_tokenizer": Ignored("transformers 5 has no slow tokenizers"),
    "use_ms": Restricted(OFF, "download the model and the data from ModelScope first, and set their folders"),
    **ignored("packed attention is used where the model allows it", "flash_attn disable_logprobs_flashattn"),
    **ignored("models are loaded directly on their device", "actor_init_on_gpu meta_init initial_model_shard_size"),
}

ENGINE: dict[str, Entry] = {
    "engine_type": Ignored("the trainer samples in its own process; engine.kind vllm is for `trivium run`"),
    "engine_tp_size": Ignored("every process samples with an engine of its own"),
    "temperature": Mapped("engine.sampling.temperature", 1.0),
    "top_p": Mapped("engine.sampling.top_p", 1.0),
    "use_fire": Restricted(OFF, "FIRE sampling is not supported: leave it out"),
    "first_token_temperature": Ignored("only use_fire reads it"),
    **ignored(
        "the engine shares the trainer's process and allocates memory as the batch needs it",
        "engine_mem_util enable_engine_sleep disable_engine_sleep",
    ),
    **ignored("reward models score in this process", "rm_use_engine rm_engine_cudagraph"),
}

RANKS: dict[str, Entry] = {
    "fsdp": Ignored("models are sharded by FSDP2 if there are several processes"),
    "fsdp_cpu_offload": Mapped("train.cpu_offload", False, convert={True: True}),
    "sp_size": Mapped("train.sequence_parallel", 1),
    "seed": Mapped("run.seed", 42),
    "torchrun": Mapped("number of processes; start them with `torchrun --nproc-per-node N -m trivium run FILE`", 1),
    "local_rank": Ignored("read from the environment that torchrun sets"),
    "packing_samples": Ignored("sequences are always packed"),
    "gradient_checkpointing": Mapped("train.gradient_checkpointing", False),
    "gradient_checkpointing_use_reentrant": Ignored("gradient checkpointing is always non-reentrant"),
    "fused_linear_logprob": Ignored("log-probabilities are always computed over chunks of the logits"),
    "chunk_size": Ignored("the chunk size of the logits is chosen automatically"),
    "mixed_mm_data": Ignored("a batch may always contain rows with and without images"),
    "use_mp_opt": Ignored("weights and optimizer are float32 master copies"),
    **ignored(
        "DeepSpeed is not supported; FSDP2 shards weights, gradients and optimizer state",
        "zero_stage zpg overlap_comm grad_accum_dtype adam_offload no_shard_vit deepspeed_config bucket_cap_mb",
    ),
}
