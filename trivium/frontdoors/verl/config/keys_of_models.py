"""The keys of the models in verl's config: actor, rollout, reference and critic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Moved, Restricted, if_on, ignored, unless_all_linear
from trivium.frontdoors.verl.config.keys_of_conversations import CONVERSATIONS

CUT = "micro-batches are formed by number of tokens; the gradient does not depend on them"
ENGINE = "a tuning option of an inference engine; results do not depend on it"
OFF = (None, False)
_CHUNKS = "logits are always computed in chunks"
_PADDING = "sequences are always packed"
_QAT = Restricted((None,), "quantization-aware training is not supported: leave it out")
_REMOTE_CODE = Ignored("no code of a model repository is run; a model that needs it is refused")
_ATTENTION = Ignored("attention is computed by torch's scaled_dot_product_attention")
_FLOAT32 = Ignored("weights and optimizer state are float32; fsdp_config.dtype sets the dtype of the computation")
_BACKENDS = "veomni torchtitan automodel mindspeed"
_SHM = Ignored("files are not copied to shared memory")

GAE = {"algorithm.adv_estimator": "gae"}
"""The condition for a critic."""


def optim(to: str, lr: float, when: Mapping[str, Any]) -> dict[str, Entry]:
    """Returns the keys of an optimizer. They set the section `to`, on a condition."""
    return OPTIM | {
        "lr": Mapped(f"{to}.lr", lr, when=when),
        "betas": Mapped(f"{to}.betas", (0.9, 0.999), when=when),
        "weight_decay": Mapped(f"{to}.weight_decay", 0.01, when=when),
        "warmup_style": Mapped(f"{to}.schedule", type=str, when=when, note="lr_scheduler_type overrides it"),
        "lr_scheduler_type": Mapped(f"{to}.schedule", "constant", when=when),
        "min_lr_ratio": Mapped(f"{to}.min_lr_ratio", 0.0, when=when),
        "lr_warmup_steps": Mapped(f"the field warmup_steps of {to}", -1),
        "lr_warmup_steps_ratio": Mapped(f"the field warmup_steps of {to}, as a fraction of schedule.steps", 0.0),
    }


ADAMW = ("AdamW", "AdamW8bit", "AdamW4bit", "AdamWFp8", "PagedAdamW", "PagedAdamW8bit", "_AdamW")
"""Optimizers that become AdamW: they differ in the numbers of their state."""

OPTIM: dict[str, Entry] = {
    "clip_grad": Mapped("train.max_grad_norm", 1.0, note="grad_clip overrides it"),
    "num_cycles": Restricted((None, 0.5), "set 0.5: the cosine schedule has half a period"),
    "zero_indexed_step": Restricted((None, True), "the schedule counts steps from 0: leave it out"),
    "total_training_steps": Ignored("schedule.steps is the length of the learning rate's schedule"),
    "optimizer": Restricted((None, *ADAMW), "only AdamW is translated; set train.optimizer in a RunConfig"),
    "optimizer_impl": Ignored("AdamW has a float32 state"),
    "grad_clip": Restricted((None,), "set grad_clip of the actor and of the critic"),
    "override_optimizer_config": Restricted(({},), "set the optimizer's own keys"),
}

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp64": "float64",
    "float64": "float64",
}
"""verl's name of a dtype -> torch's name."""


def dtype_of(name: object) -> str:
    """Returns torch's name of a dtype; an unknown name stays as it is."""
    return DTYPES.get(str(name), str(name))


FSDP: dict[str, Entry] = {
    **dict.fromkeys(
        ("param_offload", "optimizer_offload", "offload_policy"),
        Mapped("train.cpu_offload", False, convert=if_on),
    ),
    # -1 stands for all ranks, which is what an unset train.shard means.
    "fsdp_size": Mapped("train.shard", -1, convert=lambda size: size if size > 0 else None),
    "ulysses_sequence_parallel_size": Mapped("train.sequence_parallel", 1),
    "mixed_precision": Restricted((None,), "set mixed_precision.param_dtype"),
    "mixed_precision.param_dtype": Mapped("train.dtype", convert=dtype_of, note="fsdp_config.dtype overrides it"),
    "dtype": Mapped("train.dtype", convert=dtype_of),
    "mixed_precision.reduce_dtype": Ignored("gradients are reduced in float32"),
    "mixed_precision.buffer_dtype": Ignored("buffers keep the model's dtype"),
    "model_dtype": _FLOAT32,
    "use_orig_params": Ignored("FSDP2 always does"),
    "seed": Ignored("run.seed seeds everything"),
    "full_determinism": Mapped("train.deterministic_kernels", False, convert=if_on),
    "forward_only": Restricted(OFF, "leave it out"),
    "use_torch_compile": Ignored("models are not compiled"),
    "entropy_checkpointing": Ignored("logits are always computed in chunks, and recomputed in the backward pass"),
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not supported: use strategy fsdp2"),
    "qat": _QAT,
    "turbo_config": Ignored("a setting of another backend"),
    "grad_offload": Ignored("gradients are offloaded with their weights"),
    "use_fused_kernels": Ignored("log-probabilities are always computed over chunks of the logits"),
    "router_replay": Ignored("actor.router_replay.mode sets it"),
    **ignored(_CHUNKS, "entropy_from_logits_with_chunking entropy_from_logits_chunk_size"),
    **ignored(_PADDING, "pad_to_length pad_to_length_bucket use_remove_padding"),
    **ignored(
        "each layer is a unit of FSDP2",
        "wrap_policy wrap_policy.min_num_params",
    ),
    **ignored(
        "torch's defaults are used",
        "reshard_after_forward forward_prefetch use_no_sync_for_gradient_accumulation",
    ),
    **ignored(
        CUT,
        "use_dynamic_bsz infer_micro_batch_size_per_gpu infer_max_token_len_per_gpu micro_batch_size_per_gpu",
        "max_token_len_per_gpu",
    ),
}

UPDATE: dict[str, Entry] = {
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not supported: use strategy fsdp2"),
    "rollout_n": Ignored("rollout.n sets it"),
    "ppo_mini_batch_size": Mapped("the number algorithm.mini_batches, which is data.train_batch_size over it", 256),
    "ppo_epochs": Mapped("algorithm.epochs", 1),
    "ppo_max_token_len_per_gpu": Mapped("train.max_tokens_per_micro_batch", 16384),
    "grad_clip": Mapped("train.max_grad_norm", 1.0),
    "ulysses_sequence_parallel_size": Mapped("train.sequence_parallel", 1),
    "shuffle": Ignored("prompts are shuffled in every epoch, and mini-batches keep their order"),
    "data_loader_seed": Ignored("mini-batches are not shuffled"),
    "checkpoint": Ignored("a checkpoint always contains models, optimizers and counters"),
    "profiler": Ignored("the phases of every step are timed"),
    "nccl_timeout": Ignored("sync.deadline_s bounds every wait"),
    "use_prefix_grouper": Mapped("train.share_prefix", type=bool),
    "router_replay": Ignored("only the policy replays experts; actor.router_replay.mode sets it"),
    "loss_scale_factor": Restricted(
        (None,), "leave it out: seq-mean-token-sum-norm divides by data.max_response_length"
    ),
    "use_remove_padding": Ignored(_PADDING),
    "pad_to_length": Ignored(_PADDING),
    "use_fused_kernels": Ignored("log-probabilities are always computed over chunks of the logits"),
    "load_weight": Restricted((None, True), "leave it out"),
    **ignored("settings of backends that are not supported; strategy must be fsdp or fsdp2", _BACKENDS),
    **ignored(
        CUT,
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu",
        "ppo_infer_micro_batch_size_per_gpu",
        "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu",
        "use_dynamic_bsz",
    ),
}

_LOSS = "algorithm.policy_loss"
_CLIPPED = {"loss": ("ppo", "gspo", "gmpo", "cispo", "clip_cov")}
_DPPO = "with loss dppo_tv or dppo_kl,"
_KL_LOSS = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": True}

ACTOR: dict[str, Entry] = {
    **UPDATE,
    "loss_agg_mode": Mapped(
        "algorithm.aggregate",
        "token-mean",
        note="sapo and geo_mean always average over the tokens of each sequence, as gspo does in verl before 0.9.1",
    ),
    "clip_ratio": Mapped(
        (f"{_LOSS}.clip_low", f"{_LOSS}.clip_high"), 0.2, when=_CLIPPED, note=f"{_DPPO} both bounds of the divergence"
    ),
    "clip_ratio_low": Mapped(f"{_LOSS}.clip_low", type=float, when=_CLIPPED, note=f"{_DPPO} tv_low or kl_low"),
    "clip_ratio_high": Mapped(f"{_LOSS}.clip_high", type=float, when=_CLIPPED, note=f"{_DPPO} tv_high or kl_high"),
    "clip_ratio_c": Mapped(f"{_LOSS}.dual_clip", 3.0, when={"loss": "ppo"}, note=f"{_DPPO} max_ratio"),
    "tau_pos": Mapped(f"{_LOSS}.tau_pos", type=float, when={"loss": "sapo"}),
    "tau_neg": Mapped(f"{_LOSS}.tau_neg", type=float, when={"loss": "sapo"}),
    "policy_loss.loss_mode": Mapped("the kind of algorithm.policy_loss", "vanilla"),
    "policy_loss.clip_cov_ratio": Mapped(f"{_LOSS}.ratio", when={"loss": "clip_cov"}),
    "policy_loss.clip_cov_lb": Mapped(f"{_LOSS}.cov_low", when={"loss": "clip_cov"}),
    "policy_loss.clip_cov_ub": Mapped(f"{_LOSS}.cov_high", when={"loss": "clip_cov"}),
    "policy_loss.kl_cov_ratio": Mapped(f"{_LOSS}.ratio", when={"loss": "kl_cov"}),
    "policy_loss.ppo_kl_coef": Mapped(f"{_LOSS}.coef", when={"loss": "kl_cov"}),
    "policy_loss.dro_beta": Restricted((None,), "the loss that reads it is not supported: leave it out"),
    "entropy_coeff": Mapped("algorithm.entropy.coef", 0.0, convert=if_on),
    "calculate_entropy": Ignored("the entropy is always logged"),
    "calculate_sum_pi_squared": Ignored("computed if the estimator needs it"),
    "use_kl_loss": Mapped("algorithm.kl.place", False, convert={True: "loss"}, when=_KL_LOSS),
    "kl_loss_coef": Mapped("algorithm.kl.coef", 0.001, when=_KL_LOSS),
    "kl_loss_type": Mapped("algorithm.kl.estimator.kind", "low_var_kl", when=_KL_LOSS),
    "use_torch_compile": Ignored("models are not compiled"),
    "tis_imp_ratio_cap": Mapped("above 0: the threshold of algorithm.correction, with weights for tokens", type=float),
    "behav_imp_weight_cap": Moved("actor_rollout_ref.actor.tis_imp_ratio_cap"),
    "policy_loss.tau_pos": Moved("actor_rollout_ref.actor.tau_pos"),
    "policy_loss.tau_neg": Moved("actor_rollout_ref.actor.tau_neg"),
    "use_rollout_log_probs": Mapped("true: rollout as algorithm.old_log_prob", False),
    "entropy_checkpointing": Ignored("logits are always computed in chunks, and recomputed in the backward pass"),
    "freeze_vision_tower": Mapped("train.vision_tower", False, convert={True: "frozen"}),
    "router_replay.mode": Restricted(
        (None, "disabled", "R3"), "use R3, which replays the experts of the rollouts (train.router_replay)", "disabled"
    ),
    "router_replay": Ignored("experts are recorded with the rollouts"),
    "qat": _QAT,
    **ignored(
        _CHUNKS,
        "sum_pi_squared_checkpointing entropy_from_logits_with_chunking entropy_from_logits_chunk_size",
    ),
}

CRITIC: dict[str, Entry] = {
    **UPDATE,
    "enable": Mapped("a critic is trained if algorithm.advantage needs values"),
    "ppo_mini_batch_size": Mapped("the number algorithm.critic.mini_batches, if it is not the actor's", type=int),
    "ppo_epochs": Mapped("the number algorithm.critic.epochs, if it is not the actor's", type=int),
    "ppo_max_token_len_per_gpu": Ignored("the actor's value applies to both; the gradient does not depend on it"),
    "use_prefix_grouper": Ignored("the actor's value applies to both; the gradient does not depend on it"),
    "loss_agg_mode": Mapped("algorithm.critic.aggregate", when=GAE, note="unset: the actor's"),
    "grad_clip": Mapped("the number train.critic_max_grad_norm, if it is not the actor's", 1.0),
    "ulysses_sequence_parallel_size": Mapped("must be the actor's, which sets train.sequence_parallel"),
    "cliprange_value": Mapped("algorithm.critic.clip", 0.5, when=GAE),
}

REFERENCE: dict[str, Entry] = {
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not supported: use strategy fsdp2"),
    "model": Restricted((None,), "leave it out: the reference is the initial actor"),
    "model.override_config.attn_implementation": _ATTENTION,
    "override_config.attn_implementation": _ATTENTION,
    "megatron": Ignored("Megatron is not supported; ref.strategy must be fsdp or fsdp2"),
    "load_weight": Restricted((None, True), "leave it out"),
    **ignored("settings of backends that are not supported; strategy must be fsdp or fsdp2", _BACKENDS),
    **ignored(
        "the actor's settings apply to the reference; results do not depend on them",
        "rollout_n use_torch_compile log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu",
        "ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_checkpointing",
        "use_dynamic_bsz use_remove_padding use_fused_kernels nccl_timeout profiler router_replay",
        "entropy_from_logits_chunk_size pad_to_length",
    ),
}

# An adapter that is loaded has its own rank and alpha.
_LORA = {"actor_rollout_ref.model.lora_rank": True, "actor_rollout_ref.model.lora_adapter_path": False}


MODEL: dict[str, Entry] = {
    "path": Mapped("model.path", type=Path),
    "hf_config_path": Restricted((None,), "put config.json into the model directory"),
    "tokenizer_path": Ignored("the tokenizer is passed to RayPPOTrainer"),
    "use_shm": _SHM,
    "trust_remote_code": _REMOTE_CODE,
    "custom_chat_template": Mapped("model.chat_template", type=str),
    "external_lib": Restricted((None,), "import it in your script"),
    "override_config": Restricted(({},), "change config.json of the model"),
    **{
        f"override_config.{name}": Restricted((None,), "models are trained without dropout: leave it out")
        for name in ("attention_dropout", "embd_pdrop", "resid_pdrop")
    },
    "override_config.use_cache": Ignored("only the rollout engine has a KV cache"),
    "override_config.max_position_embeddings": Ignored("the value in the model's config.json applies"),
    "override_config.attn_implementation": _ATTENTION,
    "enable_gradient_checkpointing": Mapped("train.gradient_checkpointing", True),
    "gradient_checkpointing_kwargs": Ignored("gradient checkpointing is always non-reentrant"),
    "enable_activation_offload": Ignored("train.gradient_checkpointing and train.cpu_offload save memory"),
    "torch_dtype": _FLOAT32,
    "use_remove_padding": Ignored(_PADDING),
    "lora_rank": Mapped("train.lora.rank", 0, when=_LORA),
    "lora_alpha": Mapped("train.lora.alpha", 16, when=_LORA),
    "target_modules": Mapped("train.lora.targets", "all-linear", type=object, when=_LORA, convert=unless_all_linear),
    "exclude_modules": Mapped("train.lora.exclude", type=object, when=_LORA),
    "target_parameters": Restricted((None,), "list the adapted modules in target_modules"),
    "lora_adapter_path": Mapped("train.lora.path", type=Path, note="the adapter has its own rank, alpha and targets"),
    "lora": Restricted(
        (None,), "a setting of Megatron, which is not supported: set lora_rank and lora_alpha", switch="rank"
    ),
    "use_liger": Ignored("layers are computed by torch's kernels; results do not depend on it"),
    "tiled_mlp": Ignored("train.max_tokens_per_micro_batch bounds the activations"),
    "mtp": Restricted((None,), "multi-token prediction is not supported: leave it out"),
    **ignored(
        "log-probabilities are always computed over chunks of the logits",
        "use_fused_kernels fused_kernel_options",
    ),
}

CRITIC_MODEL: dict[str, Entry] = {
    **MODEL,
    "custom_chat_template": Ignored("the actor's template renders the prompts"),
    # verl's default, a folder of its authors, counts as unset (`translation._critic`).
    "path": Mapped("the path train.critic_path, if it is not the actor's", "~/models/deepseek-llm-7b-chat", Path),
    "enable_gradient_checkpointing": Ignored("train.gradient_checkpointing applies to every role"),
    "lora_rank": Restricted((None, 0), "leave it out: the critic is trained without LoRA"),
    "lora": Restricted((None,), "leave it out: the critic is trained without LoRA", switch="rank"),
    "lora_adapter_path": Restricted((None,), "leave it out: the critic is trained without LoRA"),
    **ignored("the critic is trained without LoRA", "lora_alpha target_modules exclude_modules"),
}


def at_least_0(number: int) -> int:
    """Returns 0 for a negative number, which verl's keys take for a disabled feature."""
    return max(0, number)


VAL: dict[str, Entry] = {
    "temperature": Mapped("evaluation.sampling.temperature", 0.0),
    "top_p": Mapped("evaluation.sampling.top_p", 1.0),
    "top_k": Mapped("evaluation.sampling.top_k", -1, convert=at_least_0),
    "n": Mapped("evaluation.samples", 1),
    "do_sample": Mapped("false: evaluation.sampling.temperature is 0", False),
}

REPLACED_ENGINES = ("sglang", "trtllm")
"""Engines that vLLM replaces on a GPU, and the built-in engine on a CPU."""
VLLM = {"engine": "vllm"}
VLLM_ON_GPU = {"engine": "vllm", "device": "cuda"}


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


ROLLOUT: dict[str, Entry] = {
    "name": Restricted(("torch", "hf", "vllm", *REPLACED_ENGINES), "set rollout.name: torch or vllm", "torch"),
    "mode": Ignored("requests are always asynchronous; weights are updated between steps"),
    "n": Mapped("schedule.group_size", 1),
    "temperature": Mapped("engine.sampling.temperature", 1.0),
    "top_p": Mapped("engine.sampling.top_p", 1.0),
    "top_k": Mapped("engine.sampling.top_k", -1, convert=at_least_0),
    "do_sample": Restricted((None, True), "greedy rollouts give equal completions: leave it out"),
    "prompt_length": Moved("data.max_prompt_length"),
    "response_length": Moved("data.max_response_length"),
    "max_model_len": Mapped(
        "the field max_context of engine; at most data.max_prompt_length + data.max_response_length", type=int
    ),
    "max_num_seqs": Mapped("engine.max_rows", type=int),
    "dtype": Mapped("engine.dtype", convert=dtype_of),
    "seed": Ignored("run.seed seeds everything"),
    "ignore_eos": Restricted(OFF, "leave it out"),
    # verl's rate is a part of what is requested, over_rollout of what is trained.
    "over_sample_rate": Mapped("schedule.over_rollout", 0.0, convert=lambda rate: rate / (1 - rate) if rate else None),
    "tensor_model_parallel_size": Mapped("engine.tensor_parallel_size", type=int, when=VLLM_ON_GPU),
    "data_parallel_size": Mapped("engine.data_parallel_size", type=int, when=VLLM_ON_GPU),
    # A number in verl; here, the experts are spread over all GPUs of an engine.
    "expert_parallel_size": Mapped(
        "engine.expert_parallel", type=int, convert=lambda size: True if size > 1 else None, when=VLLM_ON_GPU
    ),
    "pipeline_model_parallel_size": Ignored("results do not depend on how an engine is spread over GPUs"),
    "load_format": Ignored("the trainer sends the weights before the first rollout"),
    "calculate_log_probs": Ignored("the engine's log-probabilities are always recorded"),
    "update_weights_bucket_megabytes": Ignored("weights are sent in buckets of a fixed size"),
    **CONVERSATIONS,
    "disaggregation": Restricted((None,), "separate engines for prefill and decode are not supported: leave it out"),
    "full_determinism": Ignored("sampling repeats bit for bit on a CPU; there is no such setting for a GPU"),
    "qat": _QAT,
    "checkpoint_engine": Ignored("sync.method transfers the weights"),
    "trace": Ignored("every rollout is recorded in the run directory"),
    "prometheus": Ignored("use the monitors"),
    "repetition_penalty": Restricted((None, 1, 0), "a repetition penalty is not supported: leave it out"),
    "custom": Restricted((None,), "use a RunConfig with workflow.kind"),
    "checkpoint_manager_class": Restricted((None,), "use sync.method in a RunConfig"),
    "quantization": Mapped("engine.options.quantization", type=str, when=VLLM_ON_GPU),
    "skip_rollout": Restricted(OFF, "rollouts of another run are not trained on: leave it out"),
    "skip": Restricted((None,), "rollouts of another run are not trained on: leave it out"),
    "gpu_memory_utilization": Mapped("engine.gpu_memory_utilization", 0.5, when=VLLM_ON_GPU),
    "enforce_eager": Mapped("engine.enforce_eager", False, when=VLLM_ON_GPU),
    "max_num_batched_tokens": Mapped("engine.prefill_tokens", type=int, when=VLLM_ON_GPU),
    "enable_chunked_prefill": Mapped("engine.options.enable_chunked_prefill", type=bool, when=VLLM_ON_GPU),
    "enable_prefix_caching": Mapped("engine.options.enable_prefix_caching", type=bool, when=VLLM),
    "scheduling_policy": Mapped("engine.options.scheduling_policy", type=str, when=VLLM),
    "engine_kwargs": Ignored("arguments of an engine that is not used"),
    "enable_rollout_routing_replay": Ignored("actor.router_replay.mode R3 records experts and replays them"),
    "logprobs_mode": Ignored("log-probabilities are those of the distribution that was sampled from"),
    "free_cache_engine": Mapped("2 as engine.sleep_level with vLLM on a GPU; false: 0", True),
    "enable_sleep_mode": Mapped("false: 0 as engine.sleep_level with vLLM on a GPU", True),
    "limit_images": Mapped("engine.options.limit_mm_per_prompt.image", type=int, when=VLLM),
    "cudagraph_capture_sizes": Mapped("engine.options.cudagraph_capture_sizes", type=list, when=VLLM_ON_GPU),
    "engine_kwargs.vllm": Mapped("engine.options", type=dict, when=VLLM, convert=_given),
    **dict.fromkeys(
        ("use_fire_sampling", "quantization_config_file", "mtp"),
        Restricted((None,), "it would change the rollouts, and is not supported: leave it out"),
    ),
    **ignored(
        ENGINE,
        "disable_log_stats layered_summon skip_tokenizer_init",
        "server profiler multi_stage_wake_up moe_load_balance_metrics_interval router_config_path skip_dump_dir",
        "sglang_engine_mode standalone_gpu_memory_utilization moe_tensor_parallel_size",
        "nnodes n_gpus_per_node layer_name_map",
    ),
    **ignored(
        CUT,
        "log_prob_use_dynamic_bsz log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        "log_prob_max_token_len_per_gpu",
    ),
}
