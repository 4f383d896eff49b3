"""The keys of verl's trainer config, and what each is translated to: the table of docs/ray-ppo-trainer.md.

A key that is not in it is an error. So is a value that asks for what is not built: it is refused by name.
"""

from __future__ import annotations

from pathlib import Path

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted, Table, ignored, under
from trivium.frontdoors.verl.keys_of_models import (
    ACTOR,
    CRITIC,
    CRITIC_MODEL,
    FSDP,
    MODEL,
    OFF,
    OPTIM,
    REFERENCE,
    ROLLOUT,
    VAL,
)
from trivium.frontdoors.verl.keys_of_rewards import REWARD_MODEL_TYPES, REWARDS, WHOLE

DATA: dict[str, Entry] = {
    "train_files": Mapped("tasks.train", type=Path),
    "val_files": Mapped("tasks.val", type=Path),
    "train_max_samples": Mapped("tasks.train (its first rows, or a seeded choice where data.shuffle)", -1),
    "val_max_samples": Mapped("tasks.val (its first rows)", -1),
    "prompt_key": Mapped("the column with the prompt", "prompt"),
    "reward_fn_key": Mapped("the column that validation is told apart by", "data_source"),
    "train_batch_size": Mapped("schedule.groups_per_step", 1024),
    "gen_batch_size": Mapped(
        "with algorithm.filter_groups, the prompts of max_num_gen_batches; else must be data.train_batch_size", type=int
    ),
    "val_batch_size": Ignored("the whole validation set is one batch"),
    "max_prompt_length": Mapped("the longest prompt, by data.truncation", 512),
    "max_response_length": Mapped("engine.sampling.max_new_tokens", 512),
    "truncation": Mapped("what is done with longer prompts: error, left, right, middle", "error"),
    "filter_overlong_prompts": Mapped("whether rows with longer prompts are left out", False),
    "filter_overlong_prompts_workers": Ignored("prompts are counted in the driver"),
    "shuffle": Mapped("whether every epoch has an order of its own", True),
    "seed": Mapped("run.seed", type=int),
    "validation_shuffle": Ignored("validation uses every row; its order has no effect"),
    "dataloader_num_workers": Mapped("nothing: rows are read once; must be 0 where a sampler learns", type=int),
    "return_raw_input_ids": Ignored("tokens are kept as they are throughout"),
    "tokenizer": Restricted((None,), "pass the tokenizer to RayPPOTrainer"),
    "use_shm": Ignored("it only copies files"),
    "audio_key": Ignored("rows with audio are refused"),
    "mm_processor_kwargs": Restricted(({},), "set them in the processor that is passed"),
    "tool_config_path": Restricted((None,), "tools are an environment: use a RunConfig with workflow.kind multi_turn"),
    "function_tool_path": Restricted(
        (None,), "tools are an environment: use a RunConfig with workflow.kind multi_turn"
    ),
    "continuous_token": Restricted((None,), "tokens are kept as they are throughout: leave it out"),
    "image_key": Mapped("the column with the images", "images"),
    "video_key": Ignored("rows with videos are refused"),
    "trust_remote_code": Ignored("tokenizers have the classes that transformers ships"),
    "custom_cls.path": Mapped("the class of the datasets, where none are passed: file, or pkg://module", type=str),
    "custom_cls.name": Mapped("the class of the datasets: its name", type=str),
    "sampler.class_path": Mapped("the class of train_sampler, where none is passed: file, or pkg://module", type=str),
    "sampler.class_name": Mapped("the class of train_sampler: its name", type=str),
    "datagen.path": Restricted((None,), "pass a dataset as train_dataset"),
    "datagen.name": Restricted((None,), "pass a dataset as train_dataset"),
    "apply_chat_template_kwargs": Mapped("variables of model.chat_template", {}),
    **ignored(
        "messages are kept throughout",
        "return_raw_chat return_full_prompt",
    ),
    **ignored(
        "the processor knows them",
        "image_patch_size return_multi_modal_inputs",
    ),
}

ALGORITHM: dict[str, Entry] = {
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
    "use_pf_ppo": Restricted(OFF, "PF-PPO is not built here: leave it out"),
    "filter_groups.enable": Mapped("algorithm.filters: groups of one result; algorithm.refill", False),
    "filter_groups.metric": Mapped("the filter's metric: the reward, or a number that the scorer gives", "reward"),
    "filter_groups.max_num_gen_batches": Mapped("algorithm.refill, in batches of data.gen_batch_size", 0),
    "filter_groups": Ignored("the buffer has rollouts as soon as they are there"),
    "rollout_correction.rollout_is": Mapped("algorithm.correction.weights"),
    "rollout_correction.rollout_is_threshold": Mapped("algorithm.correction.threshold", 2.0, type=object),
    "rollout_correction.rollout_is_batch_normalize": Mapped("algorithm.correction.normalise", False),
    "rollout_correction.rollout_rs": Mapped("algorithm.correction.rejection: its options"),
    "rollout_correction.rollout_rs_threshold": Mapped("algorithm.correction.rejection: their bounds"),
    "rollout_correction.bypass_mode": Mapped("algorithm.old_log_prob: rollout", False),
    "rollout_correction.loss_type": Mapped("algorithm.policy_loss.kind reinforce, in bypass mode", "ppo_clip"),
    "rollout_correction.rollout_rs_threshold_lower": Restricted(
        (None,), "write the interval as low_high in rollout_rs_threshold"
    ),
    "rollout_correction.rollout_token_veto_threshold": Restricted((None,), "bound the ratios by rollout_rs"),
    "rollout_correction.use_policy_gradient": Restricted(OFF, "set loss_type: reinforce, and bypass_mode: true"),
    **dict.fromkeys(
        ("gdpo_reward_keys", "gdpo_reward_weights"),
        Restricted((None,), "use a RunConfig with several rewards"),
    ),
    "rollout_is": Restricted(OFF, "set algorithm.rollout_correction.rollout_is: token or sequence"),
    **ignored(
        "off",
        "pf_ppo rollout_is_level rollout_is_mode rollout_is_threshold rollout_is_threshold_lower",
        "rollout_is_veto_threshold",
    ),
}

TRAINER: dict[str, Entry] = {
    "total_epochs": Mapped("schedule.steps", 30),
    "total_training_steps": Mapped("schedule.steps", type=int),
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
    "resume_from_path": Mapped("the checkpoint that resume_path continues from", type=Path),
    "default_local_dir": Mapped("run.dir", type=Path),
    "max_actor_ckpt_to_keep": Mapped("checkpoint.keep", type=int),
    "max_critic_ckpt_to_keep": Mapped("checkpoint.keep: the same as max_actor_ckpt_to_keep", type=int),
    "default_hdfs_dir": Mapped("checkpoint.remote", type=Path),
    "n_gpus_per_node": Mapped("the pools, where no resource_pool_manager is given", 8),
    "nnodes": Mapped("the pools, where no resource_pool_manager is given", 1),
    "device": Mapped("device_name, where that is not given; cuda is the GPU where there is one, else the CPU", "cuda"),
    "balance_batch": Mapped("whether `_balance_batch` is called; ranks share the work evenly all the same", True),
    "rollout_data_dir": Ignored("every rollout is journaled in run.dir/rollouts"),
    "validation_data_dir": Ignored("use log_val_generations"),
    "del_local_ckpt_after_load": Restricted(OFF, "max_actor_ckpt_to_keep decides what is kept"),
    "remove_previous_ckpt_in_save": Restricted(OFF, "set max_actor_ckpt_to_keep to 1"),
    "esi_redundant_time": Restricted((None, 0), "leave it out"),
    "ray_wait_register_center_timeout": Ignored("sync.deadline_s bounds every wait"),
    "use_legacy_worker_impl": Ignored("there is one implementation"),
    "use_v1": Ignored("there is one implementation"),
    "v1.trainer_mode": Restricted((None, "sync"), "use schedule.max_staleness in a RunConfig"),
    "v1.sampler.custom_sampler": Restricted((None,), "pass the sampler as train_sampler"),
    "v1.sampler.sync_refill_failed_groups": Restricted(OFF, "refill is algorithm.kind dapo in a RunConfig"),
    "v1": Ignored("trainer_mode is sync"),
    "checkpoint_callback_class": Restricted((None,), "override _save_checkpoint of RayPPOTrainer"),
    "wandb_proxy": Restricted((None,), "set HTTPS_PROXY"),
    "balance_batch_keep_minibatch": Ignored("rows are always balanced inside a mini-batch"),
    "val_generations_to_log_to_wandb": Restricted((None, 0), "set log_val_generations"),
    **ignored(
        "phases are timed in every step",
        "profile_steps profile_continuous_steps npu_profile worker_nsight_options controller_nsight_options",
    ),
}


_ROLE = "actor_rollout_ref"
_FOLLOWS: dict[str, Entry] = dict.fromkeys(FSDP, Ignored("actor.fsdp_config holds for every role"))
_KEYS: dict[str, Entry] = {
    **under("data", DATA),
    f"{_ROLE}.hybrid_engine": Restricted(
        (None, True), "actor and rollout share their workers; separate ones are not built"
    ),
    f"{_ROLE}.nccl_timeout": Ignored("sync.deadline_s bounds every wait"),
    f"{_ROLE}.profiler": Ignored("phases are timed in every step"),
    **under(f"{_ROLE}.model", MODEL),
    **under(f"{_ROLE}.actor", ACTOR),
    **under(f"{_ROLE}.actor.optim", OPTIM | {"lr": Mapped("optimizer.lr", 1e-6)}),
    **under(f"{_ROLE}.actor.fsdp_config", FSDP),
    f"{_ROLE}.actor.megatron": Ignored("Megatron is not built here; actor.strategy must be fsdp or fsdp2"),
    **under(f"{_ROLE}.ref", REFERENCE),
    **under(f"{_ROLE}.ref.fsdp_config", _FOLLOWS),
    f"{_ROLE}.ref.fsdp_config.model_dtype": Mapped("train.frozen_dtype, without LoRA", "fp32"),
    **under(f"{_ROLE}.rollout", ROLLOUT),
    **under(f"{_ROLE}.rollout.val_kwargs", VAL),
    **under("critic", CRITIC),
    **under("critic.model", CRITIC_MODEL),
    **under("critic.optim", OPTIM | {"lr": Mapped("critic_optimizer.lr", 1e-5)}),
    "critic.optim.clip_grad": Mapped("as critic.grad_clip, where that is not set"),
    **under("critic.fsdp", _FOLLOWS),
    **under("critic.fsdp_config", _FOLLOWS),
    **under("critic.model.fsdp_config", _FOLLOWS),
    "critic.megatron": Ignored("Megatron is not built here; critic.strategy must be fsdp or fsdp2"),
    **REWARDS,
    **under("reward_model.model.fsdp_config", dict.fromkeys(FSDP, Ignored(WHOLE))),
    **under("reward_model", REWARD_MODEL_TYPES),
    **under("algorithm", ALGORITHM),
    **under("trainer", TRAINER),
    "hydra": Ignored("settings of Hydra itself"),
    "defaults": Ignored("the defaults are those of this table"),
    "model_engine": Restricted((None, "dp"), "the other engines are not built here: leave it out"),
    "ray_kwargs": Mapped("ray.init, where Ray does not run yet (its ray_init)", type=dict),
    "ray_init": Mapped("ray.init, where Ray does not run yet", type=dict),
    "global_profiler": Ignored("phases are timed in every step"),
    "transfer_queue": Ignored("tensors do not pass through the driver twice"),
    "distillation": Restricted((None,), "use algorithm.kind distill in a RunConfig, with trivium run"),
    "skip": Restricted((None,), "use buffer.kind recorded in a RunConfig"),
}

_NOT_BUILT = {
    "verl_megatron": "Megatron",
    "megatron": "Megatron",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
}

TABLE = Table(_KEYS, not_built=_NOT_BUILT, marks=frozenset({"_target_"}))
