"""The keys of verl's trainer config, and what each is translated to: the table of docs/ray-ppo-trainer.md.

A key that is not in it is an error. So is a value that asks for what is not built: it is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mapped:
    """A key that sets something here."""

    to: str
    """The RunConfig key, or the part, that it sets."""
    default: Any = None
    """verl's default."""


@dataclass(frozen=True, slots=True)
class Restricted:
    """A key of which some values are supported."""

    values: tuple[Any, ...]
    instead: str
    """What to do about another value."""
    default: Any = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """A key that changes no result here: any value is taken, and has no effect."""

    why: str


Entry = Mapped | Restricted | Ignored


def _ignored(why: str, *names: str) -> dict[str, Entry]:
    """Entries of the same kind for names separated by blanks."""
    return dict.fromkeys(" ".join(names).split(), Ignored(why))


_CUT = "batches are cut by tokens, and the gradient does not depend on how"
_ENGINE = "tuning of an inference engine that is not the one used here"
_OFF = (None, False)

_DATA: dict[str, Entry] = {
    "train_files": Mapped("tasks.train"),
    "val_files": Mapped("tasks.val"),
    "train_max_samples": Mapped("tasks.train (its first rows, or a seeded choice where data.shuffle)", -1),
    "val_max_samples": Mapped("tasks.val (its first rows)", -1),
    "prompt_key": Mapped("the column with the prompt", "prompt"),
    "reward_fn_key": Mapped("the column that validation is told apart by", "data_source"),
    "train_batch_size": Mapped("schedule.groups_per_step", 1024),
    "gen_batch_size": Restricted(
        (None,),
        "leave it out: a step has data.train_batch_size prompts; refill is algorithm.kind dapo in a RunConfig",
    ),
    "val_batch_size": Ignored("the whole validation set is one batch"),
    "max_prompt_length": Mapped("the longest prompt, by data.truncation", 512),
    "max_response_length": Mapped("engine.sampling.max_new_tokens", 512),
    "truncation": Mapped("what is done with longer prompts: error, left, right, middle", "error"),
    "filter_overlong_prompts": Mapped("whether rows with longer prompts are left out", False),
    "filter_overlong_prompts_workers": Ignored("prompts are counted in the driver"),
    "shuffle": Mapped("whether every epoch has an order of its own", True),
    "seed": Mapped("run.seed"),
    "validation_shuffle": Ignored("validation uses every row; its order has no effect"),
    "dataloader_num_workers": Ignored("rows are read once, at the start"),
    "return_raw_input_ids": Ignored("tokens are kept as they are throughout"),
    "tokenizer": Restricted((None,), "pass the tokenizer to RayPPOTrainer"),
    "use_shm": Restricted(_OFF, "put the files where they can be read fast"),
    "image_key": Ignored("rows with images are refused: nothing here reads images yet"),
    "video_key": Ignored("rows with videos are refused: nothing here reads videos yet"),
    "trust_remote_code": Restricted(_OFF, "use a model class that transformers ships"),
    "custom_cls": Restricted((None,), "build the dataset and pass it as train_dataset and val_dataset"),
    "custom_cls.path": Restricted((None,), "build the dataset and pass it as train_dataset and val_dataset"),
    "custom_cls.name": Restricted((None,), "build the dataset and pass it as train_dataset and val_dataset"),
    "sampler.class_path": Restricted((None,), "pass the sampler as train_sampler"),
    "sampler.class_name": Restricted((None,), "pass the sampler as train_sampler"),
    "datagen.path": Restricted((None,), "pass a dataset as train_dataset"),
    "datagen.name": Restricted((None,), "pass a dataset as train_dataset"),
    "apply_chat_template_kwargs": Restricted((None, {}), "set the template in the tokenizer that is passed"),
    **_ignored(
        "messages are kept throughout",
        "return_raw_chat return_full_prompt",
    ),
    **_ignored(
        "rows with images are refused",
        "image_patch_size return_multi_modal_inputs",
    ),
}

_OPTIM: dict[str, Entry] = {
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
    "total_training_steps": Ignored("schedule.steps is the length of the learning rate's schedule"),
    "optimizer": Restricted((None, "AdamW"), "AdamW is the optimizer"),
    "optimizer_impl": Restricted((None, "torch.optim"), "AdamW of torch is the optimizer"),
    "override_optimizer_config": Restricted((None, {}), "set the optimizer's own keys"),
}

_FSDP: dict[str, Entry] = {
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
    "forward_only": Restricted(_OFF, "leave it out"),
    "use_torch_compile": Ignored("models run as they are"),
    "entropy_from_logits_with_chunking": Ignored("logits are always made in chunks"),
    "entropy_checkpointing": Ignored("logits are always made in chunks, and again in the backward pass"),
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    **_ignored(
        "layers are sharded one by one",
        "wrap_policy wrap_policy.min_num_params",
    ),
    **_ignored(
        "what torch does by default",
        "reshard_after_forward forward_prefetch",
    ),
    **_ignored(
        _CUT,
        "use_dynamic_bsz infer_micro_batch_size_per_gpu infer_max_token_len_per_gpu micro_batch_size_per_gpu",
        "max_token_len_per_gpu",
    ),
}

_UPDATE: dict[str, Entry] = {
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "rollout_n": Ignored("rollout.n sets it"),
    "ppo_mini_batch_size": Mapped("algorithm.mini_batches", 256),
    "ppo_epochs": Mapped("algorithm.epochs", 1),
    "ppo_max_token_len_per_gpu": Mapped("train.max_tokens_per_micro_batch", 16384),
    "loss_agg_mode": Mapped("algorithm.aggregate", "token-mean"),
    "grad_clip": Mapped("train.max_grad_norm", 1.0),
    "ulysses_sequence_parallel_size": Mapped("train.sequence_parallel", 1),
    "shuffle": Restricted(_OFF, "mini-batches are the step's groups in order, as in verl's default actor"),
    "data_loader_seed": Ignored("mini-batches are not shuffled"),
    "checkpoint": Ignored("everything is saved: models as Hugging Face directories, optimizers, counters"),
    "profiler": Ignored("phases are timed in every step"),
    "nccl_timeout": Ignored("sync.deadline_s bounds every wait"),
    "use_prefix_grouper": Restricted(_OFF, "leave it out"),
    "router_replay": Ignored("there is no routing to replay in dense models"),
    "use_remove_padding": Ignored("sequences are always packed"),
    "use_fused_kernels": Ignored("log-probabilities never need the whole of the logits"),
    "load_weight": Restricted((None, True), "leave it out"),
    **_ignored(
        _CUT,
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu",
        "forward_micro_batch_size forward_micro_batch_size_per_gpu forward_max_token_len_per_gpu",
        "use_dynamic_bsz",
    ),
}

_ACTOR: dict[str, Entry] = {
    **_UPDATE,
    "clip_ratio": Mapped("algorithm.policy_loss.clip_low and clip_high", 0.2),
    "clip_ratio_low": Mapped("algorithm.policy_loss.clip_low"),
    "clip_ratio_high": Mapped("algorithm.policy_loss.clip_high"),
    "clip_ratio_c": Mapped("algorithm.policy_loss.dual_clip", 3.0),
    "tau_pos": Mapped("algorithm.policy_loss.tau_pos"),
    "tau_neg": Mapped("algorithm.policy_loss.tau_neg"),
    "loss_scale_factor": Restricted((None,), "seq-mean-token-sum-norm divides by data.max_response_length"),
    "policy_loss.loss_mode": Mapped("algorithm.policy_loss.kind", "vanilla"),
    "policy_loss.clip_cov_ratio": Mapped("algorithm.policy_loss.ratio (clip_cov)"),
    "policy_loss.clip_cov_lb": Mapped("algorithm.policy_loss.cov_low"),
    "policy_loss.clip_cov_ub": Mapped("algorithm.policy_loss.cov_high"),
    "policy_loss.kl_cov_ratio": Mapped("algorithm.policy_loss.ratio (kl_cov)"),
    "policy_loss.ppo_kl_coef": Mapped("algorithm.policy_loss.coef (kl_cov)"),
    "entropy_coeff": Mapped("algorithm.entropy.coef", 0.0),
    "calculate_entropy": Ignored("the entropy is always logged"),
    "calculate_sum_pi_squared": Ignored("computed where the estimator reads it"),
    "use_kl_loss": Mapped("algorithm.kl.place: loss", False),
    "kl_loss_coef": Mapped("algorithm.kl.coef, where use_kl_loss", 0.001),
    "kl_loss_type": Mapped("algorithm.kl.estimator, where use_kl_loss", "low_var_kl"),
    "use_torch_compile": Ignored("models run as they are"),
    "use_rollout_log_probs": Mapped("algorithm.old_log_prob: rollout", False),
    "entropy_checkpointing": Ignored("logits are always made in chunks, and again in the backward pass"),
    "freeze_vision_tower": Ignored("there is no vision tower"),
    "qat": Restricted((None, {}), "quantisation-aware training is not built here: leave it out"),
    **_ignored(
        "logits are always made in chunks",
        "sum_pi_squared_checkpointing entropy_from_logits_with_chunking",
    ),
}

_CRITIC: dict[str, Entry] = {
    **_UPDATE,
    "enable": Mapped("algorithm.advantage: a critic is there where the estimator reads values"),
    "ppo_mini_batch_size": Mapped("algorithm.mini_batches: the actor's, or refused"),
    "ppo_epochs": Mapped("algorithm.epochs: the actor's, or refused"),
    "ppo_max_token_len_per_gpu": Ignored(
        "the actor's cuts the micro-batches of both; the gradient does not depend on it"
    ),
    "loss_agg_mode": Mapped("algorithm.critic.aggregate, where it is not the actor's"),
    "grad_clip": Mapped("train.max_grad_norm: the actor's, or refused"),
    "ulysses_sequence_parallel_size": Mapped("train.sequence_parallel: the actor's, or refused"),
    "cliprange_value": Mapped("algorithm.critic.clip", 0.5),
    "model.path": Mapped("the critic starts from the actor's backbone: must be the actor's path"),
    "model.tokenizer_path": Ignored("RayPPOTrainer is given the tokenizer"),
    "model.enable_gradient_checkpointing": Ignored("train.gradient_checkpointing holds for every role"),
    "model.enable_activation_offload": Restricted(_OFF, "use gradient checkpointing"),
    "model.use_remove_padding": Ignored("sequences are always packed"),
    "model.use_shm": Restricted(_OFF, "leave it out"),
    "model.external_lib": Restricted((None,), "import it in your script"),
    "model.override_config": Restricted((None, {}), "change config.json of the model"),
    "model.trust_remote_code": Restricted(_OFF, "use a model class that transformers ships"),
    "model.lora_rank": Restricted((None, 0), "the critic is trained whole"),
    **_ignored(
        "the critic is trained whole",
        "model.lora_alpha model.target_modules",
    ),
}

_REFERENCE: dict[str, Entry] = {
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "model": Restricted((None,), "the reference is the actor as it began"),
    "megatron": Ignored("Megatron is not built here; ref.strategy must be fsdp or fsdp2"),
    "load_weight": Restricted((None, True), "leave it out"),
    **_ignored(
        "the reference is scored as the actor is, in parts that change no result",
        "rollout_n use_torch_compile log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu",
        "ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_checkpointing",
        "use_dynamic_bsz use_remove_padding use_fused_kernels nccl_timeout profiler router_replay",
    ),
}

_MANAGER: dict[str, Entry] = {
    "reward_manager": Mapped("rewards.load_reward_manager, where no reward_fn is passed: its name"),
    "reward_manager.name": Mapped("rewards.load_reward_manager: the manager's name"),
    "reward_manager.source": Restricted((None, "register", "importlib"), "set register, or importlib and module.path"),
    "reward_manager.module.path": Mapped("rewards.load_reward_manager: the manager's file or package"),
    "reward_manager.module.name": Ignored("modules go by their paths"),
}
_SANDBOX: dict[str, Entry] = {
    "url": Restricted((None, ""), "programs run in a sandbox on this machine (docs/extend-rewards.md): leave it out"),
    "max_concurrent": Ignored("programs run on this machine, reward_kwargs.workers at a time"),
}
_WHOLE = "the reward model is whole on every rank"

_REWARD_MODEL: dict[str, Entry] = {
    "enable": Mapped("whether Role.RewardModel must be mapped", False),
    "strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not built here: use strategy fsdp2"),
    "model.path": Mapped("the model of Role.RewardModel"),
    "model.input_tokenizer": Mapped("the reward model reads the policy's tokens: the actor's path, or refused"),
    "model.use_shm": Restricted(_OFF, "leave it out"),
    "model.external_lib": Restricted((None,), "import it in your script"),
    "model.override_config": Restricted((None, {}), "change config.json of the model"),
    "model.trust_remote_code": Restricted(_OFF, "use a model class that transformers ships"),
    "model.use_remove_padding": Ignored("sequences are always packed"),
    "model.use_fused_kernels": Ignored("a reward model makes no logits"),
    "megatron": Ignored("Megatron is not built here; reward_model.strategy must be fsdp or fsdp2"),
    "max_length": Restricted((None,), "leave it out: the reward model reads whole sequences"),
    "reward_kwargs": Mapped("what the reward manager is built with", {}),
    "reward_loop_source": Restricted((None, "register"), "set reward_model.reward_manager"),
    "reward_loop_module_path": Restricted((None,), "set reward_model.reward_manager"),
    "reward_loop_class_name": Restricted((None,), "set reward_model.reward_manager"),
    "use_reward_loop": Ignored("rewards are the reward manager's, one way"),
    "launch_reward_fn_async": Ignored("rewards are always made in a thread of their own"),
    "num_workers": Ignored("reward_kwargs.workers is the number of processes that score"),
    "enable_resource_pool": Restricted(_OFF, "give Role.RewardModel a pool of its own in resource_pool_manager"),
    "n_gpus_per_node": Ignored("the resource_pool_manager places it"),
    "nnodes": Ignored("the resource_pool_manager places it"),
    "rollout": Ignored("a reward model scores, and samples nothing"),
    "profiler": Ignored("phases are timed in every step"),
    "ulysses_sequence_parallel_size": Ignored(_WHOLE),
    **_ignored(
        _CUT,
        "micro_batch_size micro_batch_size_per_gpu use_dynamic_bsz forward_max_token_len_per_gpu",
    ),
    **_MANAGER,
}

_MODEL: dict[str, Entry] = {
    "path": Mapped("model.path"),
    "hf_config_path": Restricted((None,), "config.json belongs into the model directory"),
    "tokenizer_path": Ignored("RayPPOTrainer is given the tokenizer"),
    "use_shm": Restricted(_OFF, "leave it out"),
    "trust_remote_code": Restricted(_OFF, "use a model class that transformers ships"),
    "custom_chat_template": Restricted((None,), "set the template in the tokenizer that is passed"),
    "external_lib": Restricted((None,), "import it in your script"),
    "override_config": Restricted((None, {}), "change config.json of the model"),
    "enable_gradient_checkpointing": Mapped("train.gradient_checkpointing", True),
    "gradient_checkpointing_kwargs": Ignored("layers are computed again, without reentrant autograd"),
    "enable_activation_offload": Restricted(_OFF, "use gradient checkpointing"),
    "use_remove_padding": Ignored("sequences are always packed"),
    "lora_rank": Mapped("train.lora.rank", 0),
    "lora_alpha": Mapped("train.lora.alpha", 16),
    "target_modules": Mapped("train.lora.targets", "all-linear"),
    "exclude_modules": Restricted((None,), "name what is adapted in target_modules"),
    "lora_adapter_path": Restricted((None,), "merge the adapter into the model directory first"),
    "lora": Restricted((None, {}), "that is for Megatron, which is not built here: set lora_rank and lora_alpha"),
    "use_liger": Restricted(_OFF, "Liger kernels are not built here: leave it out"),
    "tiled_mlp": Ignored("activations are bounded by train.max_tokens_per_micro_batch"),
    "mtp": Ignored("multi-token heads are not trained"),
    **_ignored(
        "log-probabilities never need the whole of the logits",
        "use_fused_kernels fused_kernel_options",
    ),
}

_VAL: dict[str, Entry] = {
    "temperature": Mapped("evaluation.sampling.temperature", 0.0),
    "top_p": Mapped("evaluation.sampling.top_p", 1.0),
    "top_k": Mapped("evaluation.sampling.top_k", -1),
    "n": Mapped("evaluation.samples", 1),
    "do_sample": Mapped("false: evaluation.sampling.temperature 0", False),
}

_ROLLOUT: dict[str, Entry] = {
    "name": Restricted(
        ("torch", "hf"), "vLLM, SGLang and TensorRT-LLM are not built here: set rollout.name: torch", "torch"
    ),
    "mode": Ignored("generation is always asynchronous, weights always pushed between steps"),
    "n": Mapped("schedule.group_size", 1),
    "temperature": Mapped("engine.sampling.temperature", 1.0),
    "top_p": Mapped("engine.sampling.top_p", 1.0),
    "top_k": Mapped("engine.sampling.top_k", -1),
    "do_sample": Restricted((None, True), "training samples"),
    "prompt_length": Ignored("data.max_prompt_length sets it"),
    "response_length": Ignored("data.max_response_length sets it"),
    "max_model_len": Mapped("engine.max_context"),
    "max_num_seqs": Mapped("engine.max_rows"),
    "dtype": Mapped("engine.dtype"),
    "seed": Ignored("run.seed is the seed of everything"),
    "ignore_eos": Restricted(_OFF, "leave it out"),
    "over_sample_rate": Restricted((None, 0), "use schedule.over_rollout in a RunConfig"),
    "tensor_model_parallel_size": Restricted(
        (None, 1), "one engine per worker; tensor parallelism needs vLLM or SGLang, which are not built here", 1
    ),
    "data_parallel_size": Restricted((None, 1), "one engine per worker of the actor's group"),
    "expert_parallel_size": Restricted((None, 1), "one engine per worker of the actor's group"),
    "pipeline_model_parallel_size": Restricted((None, 1), "one engine per worker of the actor's group"),
    "load_format": Ignored("weights are pushed from the trainer before the first rollout"),
    "calculate_log_probs": Ignored("the engine's log-probabilities are always recorded"),
    "update_weights_bucket_megabytes": Ignored("weights travel in parts of bounded size"),
    "multi_turn.enable": Restricted(
        _OFF, "several turns are a workflow: use a RunConfig with workflow.kind multi_turn"
    ),
    "multi_turn": Ignored("off"),
    "agent": Ignored("the rollouts of a batch are requested all at once"),
    "checkpoint_engine": Ignored("sync.method carries the weights"),
    "trace": Ignored("rollouts are journaled whole in the run directory"),
    "prometheus": Ignored("use the monitors"),
    "quantization": Restricted(
        (None,), "leave it out: quantised engines need vLLM or SGLang, which are not built here"
    ),
    "skip_rollout": Restricted(_OFF, "use buffer.kind recorded in a RunConfig"),
    **_ignored(
        _ENGINE,
        "gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine",
        "max_num_batched_tokens enable_chunked_prefill enable_prefix_caching disable_log_stats",
        "scheduling_policy logprobs_mode engine_kwargs enable_rollout_routing_replay enable_sleep_mode",
        "layered_summon use_fire_sampling skip_tokenizer_init quantization_config_file server profiler",
        "skip_dump_dir nnodes n_gpus_per_node layer_name_map mtp limit_images",
    ),
    **_ignored(
        _CUT,
        "log_prob_use_dynamic_bsz log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        "log_prob_max_token_len_per_gpu",
    ),
}

_ALGORITHM: dict[str, Entry] = {
    "adv_estimator": Mapped("algorithm.advantage.kind", "gae"),
    "gamma": Mapped("algorithm.advantage.gamma", 1.0),
    "lam": Mapped("algorithm.advantage.lam", 1.0),
    "norm_adv_by_std_in_grpo": Mapped("algorithm.advantage.norm_by_std", True),
    "use_kl_in_reward": Mapped("algorithm.kl.place: reward", False),
    "kl_penalty": Mapped("algorithm.kl.estimator, where use_kl_in_reward", "kl"),
    "kl_ctrl.type": Mapped("algorithm.kl.controller", "fixed"),
    "kl_ctrl.kl_coef": Mapped("algorithm.kl.coef, where use_kl_in_reward", 0.001),
    "kl_ctrl.horizon": Mapped("algorithm.kl.horizon", 10000),
    "kl_ctrl.target_kl": Mapped("algorithm.kl.target", 0.1),
    "use_pf_ppo": Restricted(_OFF, "PF-PPO is not built here: leave it out"),
    "filter_groups.enable": Restricted(_OFF, "dynamic sampling is algorithm.kind dapo in a RunConfig"),
    "rollout_correction.rollout_is": Mapped("algorithm.correction.weights"),
    "rollout_correction.rollout_is_threshold": Mapped("algorithm.correction.threshold", 2.0),
    "rollout_correction.rollout_is_batch_normalize": Mapped("algorithm.correction.normalise", False),
    "rollout_correction.rollout_rs": Mapped("algorithm.correction.rejection: its options"),
    "rollout_correction.rollout_rs_threshold": Mapped("algorithm.correction.rejection: their bounds"),
    "rollout_correction.bypass_mode": Mapped("algorithm.old_log_prob: rollout", False),
    "rollout_correction.loss_type": Mapped("algorithm.policy_loss.kind reinforce, in bypass mode", "ppo_clip"),
    **_ignored(
        "off",
        "pf_ppo filter_groups",
    ),
}

_TRAINER: dict[str, Entry] = {
    "total_epochs": Mapped("schedule.steps", 30),
    "total_training_steps": Mapped("schedule.steps"),
    "project_name": Mapped("the name of the run in wandb and mlflow", "verl_examples"),
    "experiment_name": Mapped("the name of the run in wandb and mlflow", "gsm8k"),
    "logger": Mapped("monitors", ("console", "wandb")),
    "save_freq": Mapped("checkpoint.save_every; the last step is always saved", -1),
    "test_freq": Mapped("evaluation.every", -1),
    "val_before_train": Mapped("evaluation at the start", True),
    "val_only": Mapped("fit validates once and returns", False),
    "log_val_generations": Mapped("a table `val_generations` of so many samples", 0),
    "critic_warmup": Mapped("algorithm.critic_warmup", 0),
    "resume_mode": Mapped("run.resume: auto, disable, resume_path", "auto"),
    "resume_from_path": Mapped("the checkpoint that resume_path continues from"),
    "default_local_dir": Mapped("run.dir"),
    "max_actor_ckpt_to_keep": Mapped("checkpoint.keep"),
    "max_critic_ckpt_to_keep": Mapped("checkpoint.keep: the same as max_actor_ckpt_to_keep"),
    "default_hdfs_dir": Mapped("checkpoint.remote"),
    "n_gpus_per_node": Mapped("the pools, where no resource_pool_manager is given", 8),
    "nnodes": Mapped("the pools, where no resource_pool_manager is given", 1),
    "device": Mapped("device_name, where that is not given"),
    "balance_batch": Ignored("rows are always balanced over ranks, and the gradient does not depend on it"),
    "rollout_data_dir": Ignored("every rollout is journaled in run.dir/rollouts"),
    "validation_data_dir": Ignored("use log_val_generations"),
    "del_local_ckpt_after_load": Restricted(_OFF, "max_actor_ckpt_to_keep decides what is kept"),
    "remove_previous_ckpt_in_save": Restricted(_OFF, "set max_actor_ckpt_to_keep to 1"),
    "esi_redundant_time": Restricted((None, 0), "leave it out"),
    "ray_wait_register_center_timeout": Ignored("sync.deadline_s bounds every wait"),
    "use_legacy_worker_impl": Ignored("there is one implementation"),
    "profile_steps": Restricted((None,), "phases are timed in every step"),
    "wandb_proxy": Restricted((None,), "set HTTPS_PROXY"),
    "balance_batch_keep_minibatch": Ignored("rows are always balanced inside a mini-batch"),
    "val_generations_to_log_to_wandb": Restricted((None, 0), "set log_val_generations"),
    **_ignored(
        "phases are timed in every step",
        "profile_continuous_steps npu_profile worker_nsight_options controller_nsight_options",
    ),
}


def _under(prefix: str, entries: dict[str, Entry]) -> dict[str, Entry]:
    return {f"{prefix}.{name}": entry for name, entry in entries.items()}


_ROLE = "actor_rollout_ref"
TABLE: dict[str, Entry] = {
    **_under("data", _DATA),
    f"{_ROLE}.hybrid_engine": Restricted(
        (None, True), "actor and rollout share their workers; separate ones are not built"
    ),
    f"{_ROLE}.nccl_timeout": Ignored("sync.deadline_s bounds every wait"),
    **_under(f"{_ROLE}.model", _MODEL),
    **_under(f"{_ROLE}.actor", _ACTOR),
    **_under(f"{_ROLE}.actor.optim", _OPTIM | {"lr": Mapped("optimizer.lr", 1e-6)}),
    **_under(f"{_ROLE}.actor.fsdp_config", _FSDP),
    f"{_ROLE}.actor.megatron": Ignored("Megatron is not built here; actor.strategy must be fsdp or fsdp2"),
    **_under(f"{_ROLE}.ref", _REFERENCE),
    **_under(f"{_ROLE}.ref.fsdp_config", {name: Ignored("actor.fsdp_config holds for every role") for name in _FSDP}),
    **_under(f"{_ROLE}.rollout", _ROLLOUT),
    **_under(f"{_ROLE}.rollout.val_kwargs", _VAL),
    **_under("critic", _CRITIC),
    **_under("critic.optim", _OPTIM | {"lr": Mapped("critic_optimizer.lr", 1e-5)}),
    "critic.optim.clip_grad": Mapped("as critic.grad_clip, where that is not set"),
    **_under("critic.fsdp_config", {name: Ignored("actor.fsdp_config holds for every role") for name in _FSDP}),
    **_under("critic.model.fsdp_config", {name: Ignored("actor.fsdp_config holds for every role") for name in _FSDP}),
    "critic.megatron": Ignored("Megatron is not built here; critic.strategy must be fsdp or fsdp2"),
    **_under("reward_model", _REWARD_MODEL),
    **_under("reward_model.model.fsdp_config", {name: Ignored(_WHOLE) for name in _FSDP}),
    **_under("reward_model.sandbox_fusion", _SANDBOX),
    "reward_model.sandbox_fusion.memory_limit_mb": Mapped("the memory of a program that is scored, in MiB"),
    **_MANAGER,
    "custom_reward_function.path": Mapped("rewards.load_reward_manager, where no reward_fn is passed: the scorer"),
    "custom_reward_function.name": Mapped("the scorer's name in that file (default 'compute_score')"),
    "custom_reward_function.reward_kwargs": Mapped("further arguments of the scorer"),
    **_under("sandbox_fusion", _SANDBOX),
    "sandbox_fusion.memory_limit_mb": Restricted((None, 1024), "set reward_model.sandbox_fusion.memory_limit_mb"),
    **_under("algorithm", _ALGORITHM),
    **_under("trainer", _TRAINER),
    "ray_kwargs": Mapped("ray.init, where Ray does not run yet (its ray_init)"),
    "ray_init": Mapped("ray.init, where Ray does not run yet"),
    "global_profiler": Ignored("phases are timed in every step"),
    "transfer_queue": Restricted(
        (None, {}, {"enable": False}), "leave it out: tensors do not pass through the driver twice"
    ),
    "_target_": Ignored("a mark of Hydra's"),
}
"""Dotted key -> its entry. `Ignored` and `Restricted` for `a` hold for every `a.b` that has no entry of its own."""


def entry_of(key: str) -> Entry | None:
    """The entry of a key: its own, or that of the nearest key above it, if that one is not mapped."""
    if key.rpartition(".")[2] == "_target_":
        return TABLE["_target_"]
    above = key
    while above and above not in TABLE:
        above = above.rpartition(".")[0]
    entry = TABLE.get(above)
    return None if isinstance(entry, Mapped) and above != key else entry


def default_of(key: str) -> object:
    """verl's default of a key."""
    entry = TABLE[key]
    return None if isinstance(entry, Ignored) else entry.default


def table_rows() -> Iterator[tuple[str, str]]:
    """(key, its entry in words) of every key."""
    for key, entry in TABLE.items():
        match entry:
            case Mapped(to, default):
                yield key, to + ("" if default is None else f" (default {default!r})")
            case Restricted(values, instead):
                built = ", ".join("unset" if value is None else repr(value) for value in values)
                yield key, f"{built} alone; else refused: {instead}"
            case Ignored(why):
                yield key, f"no effect: {why}"
