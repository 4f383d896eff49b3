"""The keys of the original trainer's config, and what becomes of each: one table, also the one in the documentation.

A key that is not in it is an error. So is a value that asks for what is not built: it is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Becomes:
    """A key that decides something here."""

    to: str
    """The RunConfig key, or the part, that it decides."""
    default: Any = None
    """What the original takes where it is not said."""


@dataclass(frozen=True, slots=True)
class Only:
    """A key of which some values are built."""

    values: tuple[Any, ...]
    instead: str
    """What to do about another value."""
    default: Any = None


@dataclass(frozen=True, slots=True)
class Idle:
    """A key that changes no result here: any value is taken, and has no effect."""

    why: str


Entry = Becomes | Only | Idle

_CUT = "batches are cut by tokens, and the gradient does not depend on how"
_ENGINE = "tuning of an inference engine that is not the one used here"
_OFF = (None, False)

_DATA: dict[str, Entry] = {
    "train_files": Becomes("tasks.train"),
    "val_files": Becomes("tasks.val"),
    "train_max_samples": Becomes("tasks.train (its first rows, or a seeded choice where data.shuffle)", -1),
    "val_max_samples": Becomes("tasks.val (its first rows)", -1),
    "prompt_key": Becomes("the column with the prompt", "prompt"),
    "reward_fn_key": Becomes("the column that validation is told apart by", "data_source"),
    "train_batch_size": Becomes("schedule.groups_per_step", 1024),
    "gen_batch_size": Only(
        (None,),
        "leave it out: a step plays data.train_batch_size prompts; refill is algorithm.kind dapo in a RunConfig",
    ),
    "val_batch_size": Idle("the whole validation set is one batch"),
    "max_prompt_length": Becomes("the longest prompt, by data.truncation", 512),
    "max_response_length": Becomes("engine.sampling.max_new_tokens", 512),
    "truncation": Becomes("what becomes of longer prompts: error, left, right, middle", "error"),
    "filter_overlong_prompts": Becomes("whether rows with longer prompts are left out", False),
    "filter_overlong_prompts_workers": Idle("prompts are counted in the driver"),
    "shuffle": Becomes("whether every epoch has an order of its own", True),
    "seed": Becomes("run.seed"),
    "validation_shuffle": Idle("validation plays every row; its order has no effect"),
    "dataloader_num_workers": Idle("rows are read once, at the start"),
    "return_raw_input_ids": Idle("tokens are kept as they are throughout"),
    "return_raw_chat": Idle("messages are kept throughout"),
    "return_full_prompt": Idle("messages are kept throughout"),
    "tokenizer": Only((None,), "pass the tokenizer to RayPPOTrainer"),
    "use_shm": Only(_OFF, "put the files where they can be read fast"),
    "image_key": Idle("rows with images are refused: nothing here reads images yet"),
    "video_key": Idle("rows with videos are refused: nothing here reads videos yet"),
    "image_patch_size": Idle("rows with images are refused"),
    "trust_remote_code": Only(_OFF, "use a model class that transformers ships"),
    "custom_cls": Only((None,), "build the dataset and pass it as train_dataset and val_dataset"),
    "custom_cls.path": Only((None,), "build the dataset and pass it as train_dataset and val_dataset"),
    "custom_cls.name": Only((None,), "build the dataset and pass it as train_dataset and val_dataset"),
    "sampler.class_path": Only((None,), "pass the sampler as train_sampler"),
    "sampler.class_name": Only((None,), "pass the sampler as train_sampler"),
    "datagen.path": Only((None,), "pass a dataset as train_dataset"),
    "datagen.name": Only((None,), "pass a dataset as train_dataset"),
    "apply_chat_template_kwargs": Only((None, {}), "set the template in the tokenizer that is passed"),
    "return_multi_modal_inputs": Idle("rows with images are refused"),
}

_OPTIM: dict[str, Entry] = {
    "lr": Becomes("optimizer.lr"),
    "betas": Becomes("optimizer.betas", (0.9, 0.999)),
    "weight_decay": Becomes("optimizer.weight_decay", 0.01),
    "lr_warmup_steps": Becomes("optimizer.warmup_steps", -1),
    "lr_warmup_steps_ratio": Becomes("optimizer.warmup_steps, as a part of schedule.steps", 0.0),
    "lr_scheduler_type": Becomes("optimizer.schedule: constant or cosine", "constant"),
    "warmup_style": Becomes("optimizer.schedule, where lr_scheduler_type is not said"),
    "min_lr_ratio": Becomes("optimizer.min_lr_ratio", 0.0),
    "clip_grad": Becomes("train.max_grad_norm, where grad_clip is not said", 1.0),
    "num_cycles": Only((None, 0.5), "a cosine goes down once"),
    "total_training_steps": Idle("schedule.steps is the length of the learning rate's schedule"),
    "optimizer": Only((None, "AdamW"), "AdamW is the optimizer"),
    "optimizer_impl": Only((None, "torch.optim"), "AdamW of torch is the optimizer"),
    "override_optimizer_config": Only((None, {}), "say the optimizer's own keys"),
}

_FSDP: dict[str, Entry] = {
    "param_offload": Becomes("train.cpu_offload", False),
    "optimizer_offload": Becomes("train.cpu_offload", False),
    "offload_policy": Becomes("train.cpu_offload", False),
    "fsdp_size": Becomes("train.shard", -1),
    "ulysses_sequence_parallel_size": Becomes("train.sequence_parallel", 1),
    "dtype": Becomes("train.dtype"),
    "mixed_precision": Only((None,), "say mixed_precision.param_dtype"),
    "mixed_precision.param_dtype": Becomes("train.dtype, where fsdp_config.dtype is not said"),
    "mixed_precision.reduce_dtype": Only((None, "fp32", "float32"), "gradients are summed in float32"),
    "mixed_precision.buffer_dtype": Idle("buffers are as the model makes them"),
    "model_dtype": Only(
        (None, "fp32", "float32"), "weights and optimizer are float32; fsdp_config.dtype says how is computed"
    ),
    "wrap_policy": Idle("layers are sharded one by one"),
    "wrap_policy.min_num_params": Idle("layers are sharded one by one"),
    "reshard_after_forward": Idle("what torch does by default"),
    "forward_prefetch": Idle("what torch does by default"),
    "use_orig_params": Idle("FSDP2 always does"),
    "seed": Idle("run.seed is the seed of everything"),
    "full_determinism": Idle("runs repeat bit for bit on one machine anyway"),
    "forward_only": Only(_OFF, "leave it out"),
    "use_torch_compile": Idle("models run as they are"),
    "entropy_from_logits_with_chunking": Idle("logits are always made in chunks"),
    "entropy_checkpointing": Idle("logits are always made in chunks, and again in the backward pass"),
    "strategy": Only((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "use_dynamic_bsz": Idle(_CUT),
    "infer_micro_batch_size_per_gpu": Idle(_CUT),
    "infer_max_token_len_per_gpu": Idle(_CUT),
    "micro_batch_size_per_gpu": Idle(_CUT),
    "max_token_len_per_gpu": Idle(_CUT),
}

_UPDATE: dict[str, Entry] = {
    "strategy": Only((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "rollout_n": Idle("rollout.n says it"),
    "ppo_mini_batch_size": Becomes("algorithm.mini_batches", 256),
    "ppo_epochs": Becomes("algorithm.epochs", 1),
    "ppo_micro_batch_size": Idle(_CUT),
    "ppo_micro_batch_size_per_gpu": Idle(_CUT),
    "ppo_infer_max_token_len_per_gpu": Idle(_CUT),
    "forward_micro_batch_size": Idle(_CUT),
    "forward_micro_batch_size_per_gpu": Idle(_CUT),
    "forward_max_token_len_per_gpu": Idle(_CUT),
    "use_dynamic_bsz": Idle(_CUT),
    "ppo_max_token_len_per_gpu": Becomes("train.max_tokens_per_micro_batch", 16384),
    "loss_agg_mode": Becomes("algorithm.aggregate", "token-mean"),
    "grad_clip": Becomes("train.max_grad_norm", 1.0),
    "ulysses_sequence_parallel_size": Becomes("train.sequence_parallel", 1),
    "shuffle": Only(_OFF, "mini-batches are the step's groups in order, as in the original's default actor"),
    "data_loader_seed": Idle("mini-batches are not shuffled"),
    "checkpoint": Idle("everything is saved: models as Hugging Face directories, optimizers, counters"),
    "profiler": Idle("phases are timed in every step"),
    "nccl_timeout": Idle("sync.deadline_s bounds every wait"),
    "use_prefix_grouper": Only(_OFF, "leave it out"),
    "router_replay": Idle("there is no routing to replay in dense models"),
    "use_remove_padding": Idle("sequences are always packed"),
    "use_fused_kernels": Idle("log-probabilities never need the whole of the logits"),
    "load_weight": Only((None, True), "leave it out"),
}

_ACTOR: dict[str, Entry] = {
    **_UPDATE,
    "clip_ratio": Becomes("algorithm.policy_loss.clip_low and clip_high", 0.2),
    "clip_ratio_low": Becomes("algorithm.policy_loss.clip_low"),
    "clip_ratio_high": Becomes("algorithm.policy_loss.clip_high"),
    "clip_ratio_c": Becomes("algorithm.policy_loss.dual_clip", 3.0),
    "tau_pos": Becomes("algorithm.policy_loss.tau_pos"),
    "tau_neg": Becomes("algorithm.policy_loss.tau_neg"),
    "loss_scale_factor": Only((None,), "seq-mean-token-sum-norm divides by data.max_response_length"),
    "policy_loss.loss_mode": Becomes("algorithm.policy_loss.kind", "vanilla"),
    "policy_loss.clip_cov_ratio": Becomes("algorithm.policy_loss.ratio (clip_cov)"),
    "policy_loss.clip_cov_lb": Becomes("algorithm.policy_loss.cov_low"),
    "policy_loss.clip_cov_ub": Becomes("algorithm.policy_loss.cov_high"),
    "policy_loss.kl_cov_ratio": Becomes("algorithm.policy_loss.ratio (kl_cov)"),
    "policy_loss.ppo_kl_coef": Becomes("algorithm.policy_loss.coef (kl_cov)"),
    "entropy_coeff": Becomes("algorithm.entropy.coef", 0.0),
    "calculate_entropy": Idle("the entropy is always logged"),
    "calculate_sum_pi_squared": Idle("computed where the estimator reads it"),
    "sum_pi_squared_checkpointing": Idle("logits are always made in chunks"),
    "use_kl_loss": Becomes("algorithm.kl.place: loss", False),
    "kl_loss_coef": Becomes("algorithm.kl.coef, where use_kl_loss", 0.001),
    "kl_loss_type": Becomes("algorithm.kl.estimator, where use_kl_loss", "low_var_kl"),
    "use_torch_compile": Idle("models run as they are"),
    "use_rollout_log_probs": Becomes("algorithm.old_log_prob: rollout", False),
    "entropy_from_logits_with_chunking": Idle("logits are always made in chunks"),
    "entropy_checkpointing": Idle("logits are always made in chunks, and again in the backward pass"),
    "freeze_vision_tower": Idle("there is no vision tower"),
    "qat": Only((None, {}), "quantisation-aware training is not built here: leave it out"),
}

_CRITIC: dict[str, Entry] = {
    **_UPDATE,
    "enable": Becomes("algorithm.advantage: a critic is there where the estimator reads values"),
    "ppo_mini_batch_size": Becomes("algorithm.mini_batches: the actor's, or refused"),
    "ppo_epochs": Becomes("algorithm.epochs: the actor's, or refused"),
    "ppo_max_token_len_per_gpu": Idle("the actor's cuts the micro-batches of both; the gradient does not depend on it"),
    "loss_agg_mode": Becomes("algorithm.critic.aggregate, where it is not the actor's"),
    "grad_clip": Becomes("train.max_grad_norm: the actor's, or refused"),
    "ulysses_sequence_parallel_size": Becomes("train.sequence_parallel: the actor's, or refused"),
    "cliprange_value": Becomes("algorithm.critic.clip", 0.5),
    "model.path": Becomes("the critic starts from the actor's backbone: must be the actor's path"),
    "model.tokenizer_path": Idle("RayPPOTrainer is given the tokenizer"),
    "model.enable_gradient_checkpointing": Idle("train.gradient_checkpointing holds for every role"),
    "model.enable_activation_offload": Only(_OFF, "use gradient checkpointing"),
    "model.use_remove_padding": Idle("sequences are always packed"),
    "model.use_shm": Only(_OFF, "leave it out"),
    "model.external_lib": Only((None,), "import it in your script"),
    "model.override_config": Only((None, {}), "change config.json of the model"),
    "model.trust_remote_code": Only(_OFF, "use a model class that transformers ships"),
    "model.lora_rank": Only((None, 0), "the critic is trained whole"),
    "model.lora_alpha": Idle("the critic is trained whole"),
    "model.target_modules": Idle("the critic is trained whole"),
}

_REFERENCE: dict[str, Entry] = {
    "strategy": Only((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "model": Only((None,), "the reference is the actor as it began"),
    "megatron": Idle("Megatron is not built here; ref.strategy must be fsdp or fsdp2"),
    "load_weight": Only((None, True), "leave it out"),
    **{name: Idle("the reference is scored as the actor is, in parts that change no result") for name in (
        "rollout_n", "use_torch_compile", "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu",
        "ulysses_sequence_parallel_size", "entropy_from_logits_with_chunking", "entropy_checkpointing",
        "use_dynamic_bsz", "use_remove_padding", "use_fused_kernels", "nccl_timeout", "profiler", "router_replay",
    )},
}  # fmt: skip

_MANAGER: dict[str, Entry] = {
    "reward_manager": Becomes("rewards.load_reward_manager, where no reward_fn is passed: its name"),
    "reward_manager.name": Becomes("rewards.load_reward_manager: the manager's name"),
    "reward_manager.source": Only((None, "register", "importlib"), "say register, or importlib and module.path"),
    "reward_manager.module.path": Becomes("rewards.load_reward_manager: the manager's file or package"),
    "reward_manager.module.name": Idle("modules go by their paths"),
}
_SANDBOX: dict[str, Entry] = {
    "url": Only((None, ""), "programs run in a sandbox on this machine (docs/extend-rewards.md): leave it out"),
    "max_concurrent": Idle("programs run on this machine, as many at a time as reward_kwargs.workers says"),
}
_WHOLE = "the reward model is whole on every rank"

_REWARD_MODEL: dict[str, Entry] = {
    "enable": Becomes("whether Role.RewardModel must be mapped", False),
    "strategy": Only((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "model.path": Becomes("the model of Role.RewardModel"),
    "model.input_tokenizer": Becomes("the reward model reads the policy's tokens: the actor's path, or refused"),
    "model.use_shm": Only(_OFF, "leave it out"),
    "model.external_lib": Only((None,), "import it in your script"),
    "model.override_config": Only((None, {}), "change config.json of the model"),
    "model.trust_remote_code": Only(_OFF, "use a model class that transformers ships"),
    "model.use_remove_padding": Idle("sequences are always packed"),
    "model.use_fused_kernels": Idle("a reward model makes no logits"),
    "megatron": Idle("Megatron is not built here; reward_model.strategy must be fsdp or fsdp2"),
    "max_length": Only((None,), "leave it out: the reward model reads whole sequences"),
    "reward_kwargs": Becomes("what the reward manager is built with", {}),
    "reward_loop_source": Only((None, "register"), "say reward_model.reward_manager"),
    "reward_loop_module_path": Only((None,), "say reward_model.reward_manager"),
    "reward_loop_class_name": Only((None,), "say reward_model.reward_manager"),
    "use_reward_loop": Idle("rewards are the reward manager's, one way"),
    "launch_reward_fn_async": Idle("rewards are always made in a thread of their own"),
    "num_workers": Idle("reward_kwargs.workers says how many processes score"),
    "enable_resource_pool": Only(_OFF, "give Role.RewardModel a pool of its own in resource_pool_manager"),
    "n_gpus_per_node": Idle("the resource_pool_manager says where it runs"),
    "nnodes": Idle("the resource_pool_manager says where it runs"),
    "rollout": Idle("a reward model scores, and samples nothing"),
    "profiler": Idle("phases are timed in every step"),
    "ulysses_sequence_parallel_size": Idle(_WHOLE),
    **{name: Idle(_CUT) for name in (
        "micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu",
    )},
    **_MANAGER,
}  # fmt: skip

_MODEL: dict[str, Entry] = {
    "path": Becomes("model.path"),
    "hf_config_path": Only((None,), "config.json belongs into the model directory"),
    "tokenizer_path": Idle("RayPPOTrainer is given the tokenizer"),
    "use_shm": Only(_OFF, "leave it out"),
    "trust_remote_code": Only(_OFF, "use a model class that transformers ships"),
    "custom_chat_template": Only((None,), "set the template in the tokenizer that is passed"),
    "external_lib": Only((None,), "import it in your script"),
    "override_config": Only((None, {}), "change config.json of the model"),
    "enable_gradient_checkpointing": Becomes("train.gradient_checkpointing", True),
    "gradient_checkpointing_kwargs": Idle("layers are computed again, without reentrant autograd"),
    "enable_activation_offload": Only(_OFF, "use gradient checkpointing"),
    "use_remove_padding": Idle("sequences are always packed"),
    "lora_rank": Becomes("train.lora.rank", 0),
    "lora_alpha": Becomes("train.lora.alpha", 16),
    "target_modules": Becomes("train.lora.targets", "all-linear"),
    "exclude_modules": Only((None,), "name what is adapted in target_modules"),
    "lora_adapter_path": Only((None,), "merge the adapter into the model directory first"),
    "lora": Only((None, {}), "that is for Megatron, which is not built here: say lora_rank and lora_alpha"),
    "use_liger": Only(_OFF, "Liger kernels are not built here: leave it out"),
    "use_fused_kernels": Idle("log-probabilities never need the whole of the logits"),
    "fused_kernel_options": Idle("log-probabilities never need the whole of the logits"),
    "tiled_mlp": Idle("activations are bounded by train.max_tokens_per_micro_batch"),
    "mtp": Idle("multi-token heads are not trained"),
}

_VAL: dict[str, Entry] = {
    "temperature": Becomes("evaluation.sampling.temperature", 0.0),
    "top_p": Becomes("evaluation.sampling.top_p", 1.0),
    "top_k": Becomes("evaluation.sampling.top_k", -1),
    "n": Becomes("evaluation.samples", 1),
    "do_sample": Becomes("false: evaluation.sampling.temperature 0", False),
}

_ROLLOUT: dict[str, Entry] = {
    "name": Only(("torch", "hf"), "vLLM, SGLang and TensorRT-LLM are not built here: say rollout.name: torch", "torch"),
    "mode": Idle("replies are always asynchronous, weights always pushed between steps"),
    "n": Becomes("schedule.group_size", 1),
    "temperature": Becomes("engine.sampling.temperature", 1.0),
    "top_p": Becomes("engine.sampling.top_p", 1.0),
    "top_k": Becomes("engine.sampling.top_k", -1),
    "do_sample": Only((None, True), "training samples"),
    "prompt_length": Idle("data.max_prompt_length says it"),
    "response_length": Idle("data.max_response_length says it"),
    "max_model_len": Becomes("engine.max_context"),
    "max_num_seqs": Becomes("engine.max_rows"),
    "dtype": Becomes("engine.dtype"),
    "seed": Idle("run.seed is the seed of everything"),
    "ignore_eos": Only(_OFF, "leave it out"),
    "over_sample_rate": Only((None, 0), "use schedule.over_rollout in a RunConfig"),
    "tensor_model_parallel_size": Only((None, 1), "one engine per worker; tensor parallelism needs vLLM or SGLang, which are not built here", 1),  # noqa: E501
    "data_parallel_size": Only((None, 1), "one engine per worker of the actor's group"),
    "expert_parallel_size": Only((None, 1), "one engine per worker of the actor's group"),
    "pipeline_model_parallel_size": Only((None, 1), "one engine per worker of the actor's group"),
    "load_format": Idle("weights are pushed from the trainer before the first reply"),
    "log_prob_use_dynamic_bsz": Idle(_CUT),
    "log_prob_micro_batch_size": Idle(_CUT),
    "log_prob_micro_batch_size_per_gpu": Idle(_CUT),
    "log_prob_max_token_len_per_gpu": Idle(_CUT),
    "calculate_log_probs": Idle("the engine's log-probabilities are always recorded"),
    "update_weights_bucket_megabytes": Idle("weights travel in parts of bounded size"),
    "multi_turn.enable": Only(_OFF, "several turns are a workflow: use a RunConfig with workflow.kind multi_turn"),
    "multi_turn": Idle("off"),
    "agent": Idle("replies of a batch are asked for all at once"),
    "checkpoint_engine": Idle("sync.method carries the weights"),
    "trace": Idle("rollouts are journaled whole in the run directory"),
    "prometheus": Idle("use the monitors"),
    "quantization": Only((None,), "leave it out: quantised engines need vLLM or SGLang, which are not built here"),
    "skip_rollout": Only(_OFF, "use buffer.kind recorded in a RunConfig"),
    **{name: Idle(_ENGINE) for name in (
        "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine",
        "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats",
        "scheduling_policy", "logprobs_mode", "engine_kwargs", "enable_rollout_routing_replay", "enable_sleep_mode",
        "layered_summon", "use_fire_sampling", "skip_tokenizer_init", "quantization_config_file", "server",
        "profiler", "skip_dump_dir", "nnodes", "n_gpus_per_node", "layer_name_map", "mtp", "limit_images",
    )},
}  # fmt: skip

_ALGORITHM: dict[str, Entry] = {
    "adv_estimator": Becomes("algorithm.advantage.kind", "gae"),
    "gamma": Becomes("algorithm.advantage.gamma", 1.0),
    "lam": Becomes("algorithm.advantage.lam", 1.0),
    "norm_adv_by_std_in_grpo": Becomes("algorithm.advantage.norm_by_std", True),
    "use_kl_in_reward": Becomes("algorithm.kl.place: reward", False),
    "kl_penalty": Becomes("algorithm.kl.estimator, where use_kl_in_reward", "kl"),
    "kl_ctrl.type": Becomes("algorithm.kl.controller", "fixed"),
    "kl_ctrl.kl_coef": Becomes("algorithm.kl.coef, where use_kl_in_reward", 0.001),
    "kl_ctrl.horizon": Becomes("algorithm.kl.horizon", 10000),
    "kl_ctrl.target_kl": Becomes("algorithm.kl.target", 0.1),
    "use_pf_ppo": Only(_OFF, "PF-PPO is not built here: leave it out"),
    "pf_ppo": Idle("off"),
    "filter_groups.enable": Only(_OFF, "dynamic sampling is algorithm.kind dapo in a RunConfig"),
    "filter_groups": Idle("off"),
    "rollout_correction.rollout_is": Becomes("algorithm.correction.weights"),
    "rollout_correction.rollout_is_threshold": Becomes("algorithm.correction.threshold", 2.0),
    "rollout_correction.rollout_is_batch_normalize": Becomes("algorithm.correction.normalise", False),
    "rollout_correction.rollout_rs": Becomes("algorithm.correction.rejection: its options"),
    "rollout_correction.rollout_rs_threshold": Becomes("algorithm.correction.rejection: their bounds"),
    "rollout_correction.bypass_mode": Becomes("algorithm.old_log_prob: rollout", False),
    "rollout_correction.loss_type": Becomes("algorithm.policy_loss.kind reinforce, in bypass mode", "ppo_clip"),
}

_TRAINER: dict[str, Entry] = {
    "total_epochs": Becomes("schedule.steps", 30),
    "total_training_steps": Becomes("schedule.steps"),
    "project_name": Becomes("the name of the run in wandb and mlflow", "verl_examples"),
    "experiment_name": Becomes("the name of the run in wandb and mlflow", "gsm8k"),
    "logger": Becomes("monitors", ("console", "wandb")),
    "save_freq": Becomes("checkpoint.save_every; the last step is always saved", -1),
    "test_freq": Becomes("evaluation.every", -1),
    "val_before_train": Becomes("evaluation at the start", True),
    "val_only": Becomes("fit validates once and returns", False),
    "log_val_generations": Becomes("a table `val_generations` of so many samples", 0),
    "critic_warmup": Becomes("algorithm.critic_warmup", 0),
    "resume_mode": Becomes("run.resume: auto, disable, resume_path", "auto"),
    "resume_from_path": Becomes("the checkpoint that resume_path continues from"),
    "default_local_dir": Becomes("run.dir"),
    "max_actor_ckpt_to_keep": Becomes("checkpoint.keep"),
    "max_critic_ckpt_to_keep": Becomes("checkpoint.keep: the same as max_actor_ckpt_to_keep"),
    "default_hdfs_dir": Becomes("checkpoint.remote"),
    "n_gpus_per_node": Becomes("the pools, where no resource_pool_manager is given", 8),
    "nnodes": Becomes("the pools, where no resource_pool_manager is given", 1),
    "device": Becomes("device_name, where that is not given"),
    "balance_batch": Idle("rows are always balanced over ranks, and the gradient does not depend on it"),
    "rollout_data_dir": Idle("every rollout is journaled in run.dir/rollouts"),
    "validation_data_dir": Idle("use log_val_generations"),
    "del_local_ckpt_after_load": Only(_OFF, "max_actor_ckpt_to_keep says what is kept"),
    "remove_previous_ckpt_in_save": Only(_OFF, "set max_actor_ckpt_to_keep to 1"),
    "esi_redundant_time": Only((None, 0), "leave it out"),
    "ray_wait_register_center_timeout": Idle("sync.deadline_s bounds every wait"),
    "use_legacy_worker_impl": Idle("there is one implementation"),
    "profile_steps": Only((None,), "phases are timed in every step"),
    "profile_continuous_steps": Idle("phases are timed in every step"),
    "wandb_proxy": Only((None,), "set HTTPS_PROXY"),
    "npu_profile": Idle("phases are timed in every step"),
    "worker_nsight_options": Idle("phases are timed in every step"),
    "controller_nsight_options": Idle("phases are timed in every step"),
    "balance_batch_keep_minibatch": Idle("rows are always balanced inside a mini-batch"),
    "val_generations_to_log_to_wandb": Only((None, 0), "say log_val_generations"),
}


def _under(prefix: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    return {f"{prefix}.{name}": entry for name, entry in entries.items()}


_ROLE = "actor_rollout_ref"
TABLE: dict[str, Entry] = {
    **_under("data", _DATA),
    f"{_ROLE}.hybrid_engine": Only((None, True), "actor and rollout share their workers; separate ones are not built"),
    f"{_ROLE}.nccl_timeout": Idle("sync.deadline_s bounds every wait"),
    **_under(f"{_ROLE}.model", _MODEL),
    **_under(f"{_ROLE}.actor", _ACTOR),
    **_under(f"{_ROLE}.actor.optim", _OPTIM | {"lr": Becomes("optimizer.lr", 1e-6)}),
    **_under(f"{_ROLE}.actor.fsdp_config", _FSDP),
    f"{_ROLE}.actor.megatron": Idle("Megatron is not built here; actor.strategy must be fsdp or fsdp2"),
    **_under(f"{_ROLE}.ref", _REFERENCE),
    **_under(f"{_ROLE}.ref.fsdp_config", {name: Idle("actor.fsdp_config holds for every role") for name in _FSDP}),
    **_under(f"{_ROLE}.rollout", _ROLLOUT),
    **_under(f"{_ROLE}.rollout.val_kwargs", _VAL),
    **_under("critic", _CRITIC),
    **_under("critic.optim", _OPTIM | {"lr": Becomes("critic_optimizer.lr", 1e-5)}),
    "critic.optim.clip_grad": Becomes("as critic.grad_clip, where that is not said"),
    **_under("critic.fsdp_config", {name: Idle("actor.fsdp_config holds for every role") for name in _FSDP}),
    **_under("critic.model.fsdp_config", {name: Idle("actor.fsdp_config holds for every role") for name in _FSDP}),
    "critic.megatron": Idle("Megatron is not built here; critic.strategy must be fsdp or fsdp2"),
    **_under("reward_model", _REWARD_MODEL),
    **_under("reward_model.model.fsdp_config", {name: Idle(_WHOLE) for name in _FSDP}),
    **_under("reward_model.sandbox_fusion", _SANDBOX),
    "reward_model.sandbox_fusion.memory_limit_mb": Becomes("the memory of a program that is scored, in MiB"),
    **_MANAGER,
    "custom_reward_function.path": Becomes("rewards.load_reward_manager, where no reward_fn is passed: the scorer"),
    "custom_reward_function.name": Becomes("the scorer's name in that file (default 'compute_score')"),
    "custom_reward_function.reward_kwargs": Becomes("further arguments of the scorer"),
    **_under("sandbox_fusion", _SANDBOX),
    "sandbox_fusion.memory_limit_mb": Only((None, 1024), "say reward_model.sandbox_fusion.memory_limit_mb"),
    **_under("algorithm", _ALGORITHM),
    **_under("trainer", _TRAINER),
    "ray_kwargs": Becomes("ray.init, where Ray does not run yet (its ray_init)"),
    "ray_init": Becomes("ray.init, where Ray does not run yet"),
    "global_profiler": Idle("phases are timed in every step"),
    "transfer_queue": Only((None, {}, {"enable": False}), "leave it out: tensors do not pass through the driver twice"),
    "_target_": Idle("a mark of Hydra's"),
}  # fmt: skip
"""Dotted key -> what becomes of it. `Idle` and `Only` for `a` hold for every `a.b` that has no entry of its own."""


def entry_of(key: str) -> Entry | None:
    """The entry of a key: its own, or that of the nearest key above it, if that one decides nothing."""
    if key.rpartition(".")[2] == "_target_":
        return TABLE["_target_"]
    above = key
    while above and above not in TABLE:
        above = above.rpartition(".")[0]
    entry = TABLE.get(above)
    return None if isinstance(entry, Becomes) and above != key else entry


def default_of(key: str) -> Any:
    """What the original takes where a key is not said."""
    entry = TABLE[key]
    return None if isinstance(entry, Idle) else entry.default


def table_rows() -> Iterator[tuple[str, str]]:
    """(key, what becomes of it) of every key, in words."""
    for key, entry in TABLE.items():
        match entry:
            case Becomes(to, default):
                yield key, to + ("" if default is None else f" (default {default!r})")
            case Only(values, instead):
                built = ", ".join("unset" if value is None else repr(value) for value in values)
                yield key, f"{built} alone; else refused: {instead}"
            case Idle(why):
                yield key, f"no effect: {why}"
