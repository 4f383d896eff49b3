"""Flags of LightRFT's launchers about models, the rollout engine and the ranks that share the work."""

from __future__ import annotations

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted, ignored

OFF = (None, False)

MODELS: dict[str, Entry] = {
    "pretrain": Mapped("model.path", type=str),
    "reward_pretrain": Mapped(
        "rewards: a model (kind model); `{}` for none. Several, as `{name: path}`, need a `reward_fn`", type=object
    ),
    "critic_pretrain": Mapped("the critic starts from the actor's backbone: must be pretrain, or unset", type=str),
    "remote_rm_url": Mapped("rewards: a reward model behind a URL (kind remote), or several", type=object),
    "value_head_prefix": Ignored("a critic's value head is a file of its own in the checkpoint"),
    "text_only": Mapped("tasks.train.images: none are read, and model.path may be a language model", False),
    "freeze_prefix": Mapped("train.vision_tower: frozen", type=object),
    "bf16": Mapped("train.dtype and engine.dtype: bfloat16", False),
    "load_in_4bit": Restricted((None, False), "a base in 4 bits takes a GPU library not built in: leave it out"),
    "lora_rank": Mapped("train.lora.rank; 0 trains every weight", 0),
    "lora_alpha": Mapped("train.lora.alpha", 16),
    "target_modules": Mapped("train.lora.targets", "all-linear", type=object),
    "lora_dropout": Restricted((None, 0), "adapters are trained without dropout: leave it out", 0),
    "aux_loss_coef": Restricted((None, 0), "no loss balances the experts of a mixture here: leave it out", 0),
    "disable_fast_tokenizer": Ignored("transformers 5 has one kind of tokenizer"),
    "use_ms": Restricted(OFF, "download the model and the data first, and name their folders"),
    **ignored("attention is packed, and exact", "flash_attn disable_logprobs_flashattn"),
    **ignored("models are loaded where they are used", "actor_init_on_gpu meta_init initial_model_shard_size"),
}

ENGINE: dict[str, Entry] = {
    "engine_type": Ignored("the trainer samples in its own process; engine.kind vllm is for `trivium run`"),
    "engine_tp_size": Ignored("every process samples with an engine of its own"),
    "temperature": Mapped("engine.sampling.temperature", 1.0),
    "top_p": Restricted((None, 1.0), "a truncated distribution is not the one that is trained: leave it out", 1.0),
    "use_fire": Restricted(OFF, "FIRE sampling is not built here: leave it out"),
    "first_token_temperature": Ignored("use_fire alone reads it"),
    **ignored(
        "the engine shares its process with the trainer, and its memory follows from the batch",
        "engine_mem_util enable_engine_sleep disable_engine_sleep",
    ),
    **ignored("reward models score in this process", "rm_use_engine rm_engine_cudagraph"),
}

RANKS: dict[str, Entry] = {
    "fsdp": Ignored("several processes shard their models by FSDP2, one process has them whole"),
    "fsdp_cpu_offload": Mapped("train.cpu_offload", False),
    "sp_size": Mapped("train.sequence_parallel", 1),
    "seed": Mapped("run.seed", 42),
    "torchrun": Mapped("so many processes: `torchrun --nproc-per-node N -m trivium.cli run FILE` starts them", 1),
    "local_rank": Ignored("torchrun says it in the environment"),
    "packing_samples": Ignored("sequences are always packed"),
    "gradient_checkpointing": Mapped("train.gradient_checkpointing", False),
    "gradient_checkpointing_use_reentrant": Ignored("layers are computed again, without reentrant autograd"),
    "fused_linear_logprob": Ignored("log-probabilities never need the whole of the logits"),
    "chunk_size": Ignored("logits are always made in chunks"),
    "mixed_mm_data": Ignored("rows with and without images always mix"),
    "use_mp_opt": Ignored("weights and optimizer are float32 master copies"),
    **ignored(
        "settings of DeepSpeed, which is not built here: FSDP2 shards weights, gradients and optimizer",
        "zero_stage zpg overlap_comm grad_accum_dtype adam_offload no_shard_vit deepspeed_config bucket_cap_mb",
    ),
}
