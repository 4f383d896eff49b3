"""The keys of the models in verl's config: actor, rollout, reference and critic."""

from __future__ import annotations

from pathlib import Path

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted, ignored

CUT = "batches are cut by tokens, and the gradient does not depend on how"
ENGINE = "tuning of an inference engine that changes no result"
OFF = (None, False)
_CHUNKS = "logits are always made in chunks"
_PADDING = "sequences are always packed"
_QAT = Restricted((None,), "quantisation-aware training is not built here: leave it out")
_TOOLS = Restricted((None,), "tools are an environment: use a RunConfig with workflow.kind multi_turn")
_REMOTE_CODE = Ignored("models and tokenizers have the classes that transformers ships")
_ATTENTION = Ignored("attention is torch's own, whose result does not depend on it")
_BACKENDS = "veomni torchtitan automodel mindspeed"
_SHM = Ignored("it only copies files")

OPTIM: dict[str, Entry] = {
    "lr": Mapped("optimizer.lr"),
    "betas": Mapped("optimizer.betas", (0.9, 0.999)),
    "weight_decay": Mapped("optimizer.weight_decay", 0.01),
    "lr_warmup_steps": Mapped("optimizer.warmup_steps", -1),
    "lr_warmup_steps_ratio": Mapped("optimizer.warmup_steps, as a part of schedule.steps", 0.0),
    "lr_scheduler_type": Mapped("optimizer.schedule: constant or cosine", "constant"),
    "warmup_style": Mapped("optimizer.schedule, where lr_scheduler_type is not set"),
    "min_lr_ratio": Mapped("optimizer.min_lr_ratio", 0.0),
    "clip_grad": Mapped("train.max_grad_norm, where grad_clip is not set", 1.0),
    "num_cycles": Restricted((None, 0.5), "a cosine goes down once"),
    "zero_indexed_step": Restricted((None, True), "the schedule counts steps from 0: leave it out"),
    "total_training_steps": Ignored("schedule.steps is the length of the learning rate's schedule"),
    "optimizer": Restricted((None, "AdamW"), "AdamW is the optimizer"),
    "optimizer_impl": Restricted((None, "torch.optim"), "AdamW of torch is the optimizer"),
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
"""A type of numbers by the names that verl gives it."""

FSDP: dict[str, Entry] = {
    "param_offload": Mapped("train.cpu_offload", False),
    "optimizer_offload": Mapped("train.cpu_offload", False),
    "offload_policy": Mapped("train.cpu_offload", False),
    "fsdp_size": Mapped("train.shard", -1),
    "ulysses_sequence_parallel_size": Mapped("train.sequence_parallel", 1),
    "dtype": Mapped("train.dtype"),
    "mixed_precision": Restricted((None,), "set mixed_precision.param_dtype"),
    "mixed_precision.param_dtype": Mapped("train.dtype, where fsdp_config.dtype is not set"),
    "mixed_precision.reduce_dtype": Restricted((None, "fp32", "float32"), "gradients are summed in float32"),
    "mixed_precision.buffer_dtype": Ignored("buffers are as the model makes them"),
    "model_dtype": Restricted(
        (None, "fp32", "float32"), "weights and optimizer are float32; fsdp_config.dtype is the dtype of computation"
    ),
    "use_orig_params": Ignored("FSDP2 always does"),
    "seed": Ignored("run.seed is the seed of everything"),
    "full_determinism": Ignored("runs repeat bit for bit on one machine anyway"),
    "forward_only": Restricted(OFF, "leave it out"),
    "use_torch_compile": Ignored("models run as they are"),
    "entropy_checkpointing": Ignored("logits are always made in chunks, and again in the backward pass"),
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "qat": _QAT,
    "turbo_config": Ignored("settings of another backend's sharding"),
    "grad_offload": Ignored("gradients follow their weights"),
    "use_fused_kernels": Ignored("log-probabilities never need the whole of the logits"),
    "router_replay": Ignored("actor.router_replay.mode sets it"),
    **ignored(_CHUNKS, "entropy_from_logits_with_chunking entropy_from_logits_chunk_size"),
    **ignored(_PADDING, "pad_to_length pad_to_length_bucket use_remove_padding"),
    **ignored(
        "layers are sharded one by one",
        "wrap_policy wrap_policy.min_num_params",
    ),
    **ignored(
        "what torch does by default",
        "reshard_after_forward forward_prefetch use_no_sync_for_gradient_accumulation",
    ),
    **ignored(
        CUT,
        "use_dynamic_bsz infer_micro_batch_size_per_gpu infer_max_token_len_per_gpu micro_batch_size_per_gpu",
        "max_token_len_per_gpu",
    ),
}

UPDATE: dict[str, Entry] = {
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "rollout_n": Ignored("rollout.n sets it"),
    "ppo_mini_batch_size": Mapped("algorithm.mini_batches", 256),
    "ppo_epochs": Mapped("algorithm.epochs", 1),
    "ppo_max_token_len_per_gpu": Mapped("train.max_tokens_per_micro_batch", 16384),
    "loss_agg_mode": Mapped("algorithm.aggregate", "token-mean"),
    "grad_clip": Mapped("train.max_grad_norm", 1.0),
    "ulysses_sequence_parallel_size": Mapped("train.sequence_parallel", 1),
    "shuffle": Restricted(OFF, "mini-batches are the step's groups in order, as in verl's default actor"),
    "data_loader_seed": Ignored("mini-batches are not shuffled"),
    "checkpoint": Ignored("everything is saved: models as Hugging Face directories, optimizers, counters"),
    "profiler": Ignored("phases are timed in every step"),
    "nccl_timeout": Ignored("sync.deadline_s bounds every wait"),
    "use_prefix_grouper": Mapped("train.share_prefix", type=bool),
    "router_replay": Ignored("actor.router_replay.mode sets it for the policy; other models route by themselves"),
    "loss_scale_factor": Restricted((None,), "seq-mean-token-sum-norm divides by data.max_response_length"),
    "use_remove_padding": Ignored(_PADDING),
    "pad_to_length": Ignored(_PADDING),
    "use_fused_kernels": Ignored("log-probabilities never need the whole of the logits"),
    "load_weight": Restricted((None, True), "leave it out"),
    **ignored("settings of backends that are not built here; strategy must be fsdp or fsdp2", _BACKENDS),
    **ignored(
        CUT,
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu",
        "ppo_infer_micro_batch_size_per_gpu",
        "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu",
        "use_dynamic_bsz",
    ),
}

ACTOR: dict[str, Entry] = {
    **UPDATE,
    "clip_ratio": Mapped("algorithm.policy_loss.clip_low and clip_high", 0.2),
    "clip_ratio_low": Mapped("algorithm.policy_loss.clip_low", type=float),
    "clip_ratio_high": Mapped("algorithm.policy_loss.clip_high", type=float),
    "clip_ratio_c": Mapped("algorithm.policy_loss.dual_clip", 3.0),
    "tau_pos": Mapped("algorithm.policy_loss.tau_pos", type=float),
    "tau_neg": Mapped("algorithm.policy_loss.tau_neg", type=float),
    "policy_loss.loss_mode": Mapped("algorithm.policy_loss.kind", "vanilla"),
    "policy_loss.clip_cov_ratio": Mapped("algorithm.policy_loss.ratio (clip_cov)"),
    "policy_loss.clip_cov_lb": Mapped("algorithm.policy_loss.cov_low"),
    "policy_loss.clip_cov_ub": Mapped("algorithm.policy_loss.cov_high"),
    "policy_loss.kl_cov_ratio": Mapped("algorithm.policy_loss.ratio (kl_cov)"),
    "policy_loss.ppo_kl_coef": Mapped("algorithm.policy_loss.coef (kl_cov)"),
    "policy_loss.dro_beta": Restricted((None,), "the loss that reads it is not built here: leave it out"),
    "entropy_coeff": Mapped("algorithm.entropy.coef", 0.0),
    "calculate_entropy": Ignored("the entropy is always logged"),
    "calculate_sum_pi_squared": Ignored("computed where the estimator reads it"),
    "use_kl_loss": Mapped("algorithm.kl.place: loss", False),
    "kl_loss_coef": Mapped("algorithm.kl.coef, where use_kl_loss", 0.001),
    "kl_loss_type": Mapped("algorithm.kl.estimator, where use_kl_loss", "low_var_kl"),
    "use_torch_compile": Ignored("models run as they are"),
    "use_rollout_log_probs": Mapped("algorithm.old_log_prob: rollout", False),
    "entropy_checkpointing": Ignored("logits are always made in chunks, and again in the backward pass"),
    "freeze_vision_tower": Mapped("train.vision_tower: frozen", False),
    "router_replay.mode": Restricted(
        (None, "disabled", "R3"), "R3 replays the experts of the rollouts (train.router_replay): use it", "disabled"
    ),
    "router_replay": Ignored("experts travel with the rollouts, in no file of their own"),
    "qat": _QAT,
    **ignored(
        _CHUNKS,
        "sum_pi_squared_checkpointing entropy_from_logits_with_chunking entropy_from_logits_chunk_size",
    ),
}

CRITIC: dict[str, Entry] = {
    **UPDATE,
    "enable": Mapped("algorithm.advantage: a critic is there where the estimator reads values"),
    "ppo_mini_batch_size": Mapped("algorithm.mini_batches: the actor's, or refused"),
    "ppo_epochs": Mapped("algorithm.epochs: the actor's, or refused"),
    "ppo_max_token_len_per_gpu": Ignored(
        "the actor's cuts the micro-batches of both; the gradient does not depend on it"
    ),
    "use_prefix_grouper": Ignored("the actor's is that of both; the gradient does not depend on it"),
    "loss_agg_mode": Mapped("algorithm.critic.aggregate, where it is not the actor's"),
    "grad_clip": Mapped("train.max_grad_norm: the actor's, or refused"),
    "ulysses_sequence_parallel_size": Mapped("train.sequence_parallel: the actor's, or refused"),
    "cliprange_value": Mapped("algorithm.critic.clip", 0.5),
}

REFERENCE: dict[str, Entry] = {
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "model": Restricted((None,), "the reference is the actor as it began"),
    "model.override_config.attn_implementation": _ATTENTION,
    "override_config.attn_implementation": _ATTENTION,
    "megatron": Ignored("Megatron is not built here; ref.strategy must be fsdp or fsdp2"),
    "load_weight": Restricted((None, True), "leave it out"),
    **ignored("settings of backends that are not built here; strategy must be fsdp or fsdp2", _BACKENDS),
    **ignored(
        "the reference is scored as the actor is, in parts that change no result",
        "rollout_n use_torch_compile log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu",
        "ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_checkpointing",
        "use_dynamic_bsz use_remove_padding use_fused_kernels nccl_timeout profiler router_replay",
        "entropy_from_logits_chunk_size pad_to_length",
    ),
}

MODEL: dict[str, Entry] = {
    "path": Mapped("model.path", type=Path),
    "hf_config_path": Restricted((None,), "config.json belongs into the model directory"),
    "tokenizer_path": Ignored("RayPPOTrainer is given the tokenizer"),
    "use_shm": _SHM,
    "trust_remote_code": _REMOTE_CODE,
    "custom_chat_template": Mapped("model.chat_template", type=str),
    "external_lib": Restricted((None,), "import it in your script"),
    "override_config": Restricted(({},), "change config.json of the model"),
    **{
        f"override_config.{name}": Restricted((None,), "models are trained without dropout: leave it out")
        for name in ("attention_dropout", "embd_pdrop", "resid_pdrop")
    },
    "override_config.use_cache": Ignored("the rollout engine alone has a cache"),
    "override_config.max_position_embeddings": Ignored(
        "a sequence longer than config.json of the model says is refused"
    ),
    "override_config.attn_implementation": _ATTENTION,
    "enable_gradient_checkpointing": Mapped("train.gradient_checkpointing", True),
    "gradient_checkpointing_kwargs": Ignored("layers are computed again, without reentrant autograd"),
    "enable_activation_offload": Restricted(OFF, "use gradient checkpointing"),
    "use_remove_padding": Ignored(_PADDING),
    "lora_rank": Mapped("train.lora.rank", 0),
    "lora_alpha": Mapped("train.lora.alpha", 16),
    "target_modules": Mapped("train.lora.targets", "all-linear", type=object),
    "exclude_modules": Restricted((None,), "name what is adapted in target_modules"),
    "target_parameters": Restricted((None,), "name what is adapted in target_modules"),
    "lora_adapter_path": Restricted((None,), "merge the adapter into the model directory first"),
    "lora": Restricted(
        (None,), "that is for Megatron, which is not built here: set lora_rank and lora_alpha", switch="rank"
    ),
    "use_liger": Restricted(OFF, "Liger kernels are not built here: leave it out"),
    "tiled_mlp": Ignored("activations are bounded by train.max_tokens_per_micro_batch"),
    "mtp": Restricted((None,), "multi-token heads are not trained: leave it out"),
    **ignored(
        "log-probabilities never need the whole of the logits",
        "use_fused_kernels fused_kernel_options",
    ),
}

CRITIC_MODEL: dict[str, Entry] = {
    **MODEL,
    "custom_chat_template": Ignored("the actor's template renders the prompts"),
    "path": Mapped(
        "the critic starts from the actor's backbone: must be the actor's path", "~/models/deepseek-llm-7b-chat", Path
    ),
    "enable_gradient_checkpointing": Ignored("train.gradient_checkpointing holds for every role"),
    "lora_rank": Restricted((None, 0), "the critic is trained whole"),
    "lora": Restricted((None,), "the critic is trained whole", switch="rank"),
    **ignored("the critic is trained whole", "lora_alpha target_modules exclude_modules"),
}

VAL: dict[str, Entry] = {
    "temperature": Mapped("evaluation.sampling.temperature", 0.0),
    "top_p": Mapped("evaluation.sampling.top_p", 1.0),
    "top_k": Mapped("evaluation.sampling.top_k", -1),
    "n": Mapped("evaluation.samples", 1),
    "do_sample": Mapped("false: evaluation.sampling.temperature 0", False),
}

ROLLOUT: dict[str, Entry] = {
    "name": Restricted(
        ("torch", "hf", "vllm"), "SGLang and TensorRT-LLM are not built here: set rollout.name: torch or vllm", "torch"
    ),
    "mode": Ignored("generation is always asynchronous, weights always pushed between steps"),
    "n": Mapped("schedule.group_size", 1),
    "temperature": Mapped("engine.sampling.temperature", 1.0),
    "top_p": Mapped("engine.sampling.top_p", 1.0),
    "top_k": Mapped("engine.sampling.top_k", -1),
    "do_sample": Restricted((None, True), "training samples"),
    "prompt_length": Ignored("data.max_prompt_length sets it"),
    "response_length": Ignored("data.max_response_length sets it"),
    "max_model_len": Mapped(
        "engine.max_context: at most data.max_prompt_length and max_response_length together", type=int
    ),
    "max_num_seqs": Mapped("engine.max_rows", type=int),
    "dtype": Mapped("engine.dtype"),
    "seed": Ignored("run.seed is the seed of everything"),
    "ignore_eos": Restricted(OFF, "leave it out"),
    "over_sample_rate": Restricted((None, 0), "use schedule.over_rollout in a RunConfig"),
    "tensor_model_parallel_size": Restricted(
        (None, 1), "one engine per worker; over several GPUs: engine.tensor_parallel_size of a RunConfig, with vLLM", 1
    ),
    "data_parallel_size": Restricted((None, 1), "one engine per worker of the actor's group"),
    "expert_parallel_size": Restricted((None, 1), "one engine per worker of the actor's group"),
    "pipeline_model_parallel_size": Restricted((None, 1), "one engine per worker of the actor's group"),
    "load_format": Ignored("weights are pushed from the trainer before the first rollout"),
    "calculate_log_probs": Ignored("the engine's log-probabilities are always recorded"),
    "update_weights_bucket_megabytes": Ignored("weights travel in parts of bounded size"),
    "multi_turn.enable": Restricted(OFF, "several turns are a workflow: use a RunConfig with workflow.kind multi_turn"),
    "multi_turn.tool_config_path": _TOOLS,
    "multi_turn.function_tool_path": _TOOLS,
    "multi_turn.interaction_config_path": _TOOLS,
    "multi_turn": Ignored("off"),
    "chat_scheduler": _TOOLS,
    "agent.agent_loop_config_path": _TOOLS,
    "agent.agent_loop_manager_class": _TOOLS,
    "agent.custom_async_server": Restricted((None,), "use an engine by path in a RunConfig: engine.kind"),
    "agent.default_agent_loop": Restricted((None, "single_turn_agent"), "use a RunConfig with workflow.kind"),
    "agent": Ignored("the rollouts of a batch are requested all at once"),
    "disaggregation": Restricted((None,), "one engine both reads the prompt and samples: leave it out"),
    "full_determinism": Ignored("runs repeat bit for bit on one machine anyway"),
    "qat": _QAT,
    "checkpoint_engine": Ignored("sync.method carries the weights"),
    "trace": Ignored("rollouts are journaled whole in the run directory"),
    "prometheus": Ignored("use the monitors"),
    "repetition_penalty": Restricted((None, 1, 0), "completions are sampled without penalties"),
    "custom": Restricted((None,), "use a RunConfig with workflow.kind"),
    "checkpoint_manager_class": Restricted((None,), "use sync.method in a RunConfig"),
    "quantization": Restricted(
        (None,), "leave it out; with rollout.name vllm: engine_kwargs.vllm.quantization, as vLLM names it"
    ),
    "skip_rollout": Restricted(OFF, "use buffer.kind recorded in a RunConfig"),
    "skip": Restricted((None,), "use buffer.kind recorded in a RunConfig"),
    "gpu_memory_utilization": Mapped("engine.gpu_memory_utilization, with vLLM on a GPU", 0.5),
    "enforce_eager": Mapped("engine.enforce_eager, with vLLM on a GPU", type=bool),
    "max_num_batched_tokens": Mapped("engine.prefill_tokens, with vLLM on a GPU", type=int),
    "enable_chunked_prefill": Mapped("engine.options.enable_chunked_prefill, with vLLM on a GPU", type=bool),
    "enable_prefix_caching": Mapped("engine.options.enable_prefix_caching, with vLLM", type=bool),
    "scheduling_policy": Mapped("engine.options.scheduling_policy, with vLLM", type=str),
    "engine_kwargs.vllm": Mapped("engine.options, with vLLM", type=dict),
    "engine_kwargs": Ignored("arguments of another engine"),
    "enable_rollout_routing_replay": Ignored("actor.router_replay.mode R3 records experts and replays them"),
    "logprobs_mode": Ignored("log-probabilities are those of the distribution that was sampled from"),
    "free_cache_engine": Mapped("engine.sleep_level: 2, with vLLM on a GPU; false: 0", True),
    "enable_sleep_mode": Mapped("false: engine.sleep_level 0, with vLLM on a GPU", True),
    "limit_images": Mapped("engine.options.limit_mm_per_prompt, with vLLM", type=int),
    "cudagraph_capture_sizes": Mapped("engine.options.cudagraph_capture_sizes, with vLLM on a GPU", type=list),
    **ignored(
        ENGINE,
        "disable_log_stats layered_summon use_fire_sampling skip_tokenizer_init quantization_config_file",
        "server profiler multi_stage_wake_up moe_load_balance_metrics_interval router_config_path skip_dump_dir",
        "sglang_engine_mode standalone_gpu_memory_utilization moe_tensor_parallel_size",
        "nnodes n_gpus_per_node layer_name_map mtp",
    ),
    **ignored(
        CUT,
        "log_prob_use_dynamic_bsz log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        "log_prob_max_token_len_per_gpu",
    ),
}
