"""The keys of verl's trainer config and their translations: the table of docs/ray-ppo-trainer.md.

A key that is not in the table is an error. An unsupported value is an error, too.
"""

from __future__ import annotations

from pathlib import Path

from trivium.frontdoors.tables import Entry, Ignored, KeyTable, Mapped, Moved, Restricted, if_on, ignored, under
from trivium.frontdoors.verl.config.keys_of_models import (
    ACTOR,
    CRITIC,
    CRITIC_MODEL,
    FSDP,
    GAE,
    MODEL,
    OFF,
    REFERENCE,
    ROLLOUT,
    VAL,
    at_least_0,
    dtype_of,
    optim,
)
from trivium.frontdoors.verl.config.keys_of_rewards import REWARD_MODEL_TYPES, REWARDS, WHOLE

_ROLLOUT = "actor_rollout_ref.rollout"

DATA: dict[str, Entry] = {
    "train_files": Mapped("the taskset train", type=Path),
    "val_files": Mapped("the taskset val", type=Path),
    "train_max_samples": Mapped("tasks.train: the first rows, or a random choice with data.shuffle", -1),
    "val_max_samples": Mapped("tasks.val: the first rows", -1),
    "prompt_key": Mapped("the column with the prompt", "prompt"),
    "reward_fn_key": Mapped("the column by which validation metrics are grouped", "data_source"),
    "train_batch_size": Mapped("schedule.groups_per_step", 1024),
    "gen_batch_size": Mapped(
        "with algorithm.filter_groups: the unit of max_num_gen_batches, in prompts; else data.train_batch_size",
        type=int,
    ),
    "val_batch_size": Ignored("the whole validation set is one batch"),
    "max_prompt_length": Mapped("maximum prompt length; data.truncation sets what happens to longer prompts", 512),
    "max_response_length": Mapped(("engine.sampling.max_new_tokens", "evaluation.sampling.max_new_tokens"), 512),
    "truncation": Mapped("treatment of longer prompts: error, left, right or middle", "error"),
    "filter_overlong_prompts": Mapped("whether rows with longer prompts are dropped", False),
    "filter_overlong_prompts_workers": Ignored("the driver tokenizes the prompts"),
    "shuffle": Mapped("schedule.shuffle", True),
    "seed": Mapped("run.seed", type=int),
    "validation_shuffle": Ignored("validation uses every row; its order has no effect"),
    "dataloader_num_workers": Mapped(
        "no effect: rows are read at the start; must be 0 with a sampler that has update()", type=int
    ),
    "return_raw_input_ids": Ignored("prompts are tokenized once"),
    "tokenizer": Restricted((None,), "pass the tokenizer to RayPPOTrainer"),
    "use_shm": Ignored("files are not copied to shared memory"),
    "audio_key": Ignored("rows with audio are refused"),
    "mm_processor_kwargs": Restricted(({},), "set them in the processor that is passed"),
    "tool_config_path": Moved(f"{_ROLLOUT}.multi_turn.tool_config_path"),
    "function_tool_path": Moved(f"{_ROLLOUT}.multi_turn.function_tool_path"),
    "continuous_token": Restricted((None,), "tokens of earlier turns are never tokenized again: leave it out"),
    "image_key": Mapped("the column with the images", "images"),
    "video_key": Ignored("rows with videos are refused"),
    "trust_remote_code": Ignored("no code of a model repository is run; a model that needs it is refused"),
    "custom_cls.path": Mapped("file or pkg://module with the dataset class, if no dataset is passed", type=str),
    "custom_cls.name": Mapped("name of the dataset class", type=str),
    "sampler.class_path": Mapped(
        "file or pkg://module with the sampler class, if no train_sampler is passed", type=str
    ),
    "sampler.class_name": Mapped("name of the sampler class", type=str),
    "datagen.path": Restricted((None,), "pass a dataset as train_dataset"),
    "datagen.name": Restricted((None,), "pass a dataset as train_dataset"),
    "apply_chat_template_kwargs": Mapped("variables of the chat template", {}),
    **ignored(
        "messages are always kept",
        "return_raw_chat return_full_prompt",
    ),
    **ignored(
        "the processor has these settings",
        "image_patch_size return_multi_modal_inputs",
    ),
}

_KL_REWARD = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": True}
"""The condition (`Mapped.when`) of rows about the KL penalty in the reward: it is on, and its coefficient is not 0."""
_VETO = Mapped("the bound seq_max_k1 of algorithm.correction.rejection", type=float)
_ADAPTIVE = _KL_REWARD | {"algorithm.kl_ctrl.type": "adaptive"}
"""The condition of rows about the adaptive coefficient of that penalty."""
PF_PPO = {"pow": "power", "max_min": "extremes", "max_random": "best"}
"""Method of PF-PPO -> the weights of `algorithm.resample`."""
_PF_PPO = {"algorithm.use_pf_ppo": True, "advantage": "gae"}
"""The condition of rows about PF-PPO, which verl applies to GAE alone."""

ALGORITHM: dict[str, Entry] = {
    "adv_estimator": Mapped("the kind of algorithm.advantage", "gae"),
    "gamma": Mapped("algorithm.advantage.gamma", 1.0, when={"advantage": ("gae", "reinforce_plus_plus")}),
    "lam": Mapped("algorithm.advantage.lam", 1.0, when={"advantage": "gae"}),
    "norm_adv_by_std_in_grpo": Mapped(
        "algorithm.advantage.norm_by_std", True, when={"advantage": ("grpo", "grpo_passk")}
    ),
    "use_kl_in_reward": Mapped("algorithm.kl.place", False, convert={True: "reward"}, when=_KL_REWARD),
    "kl_penalty": Mapped("algorithm.kl.estimator.kind", "kl", when=_KL_REWARD),
    "kl_ctrl.type": Mapped("algorithm.kl.controller", "fixed", convert={"adaptive": "adaptive"}, when=_KL_REWARD),
    "kl_ctrl.kl_coef": Mapped("algorithm.kl.coef", 0.001, when=_KL_REWARD),
    "kl_ctrl.horizon": Mapped("algorithm.kl.horizon", 10000, when=_ADAPTIVE),
    "kl_ctrl.target_kl": Mapped("algorithm.kl.target", 0.1, when=_ADAPTIVE),
    "use_pf_ppo": Mapped("whether algorithm.resample is set, with advantage gae", False),
    "pf_ppo.reweight_method": Mapped(
        "algorithm.resample.weights",
        "pow",
        convert=PF_PPO,
        when=_PF_PPO,
    ),
    "pf_ppo.weight_pow": Mapped(
        "algorithm.resample.power", 2.0, when=_PF_PPO | {"algorithm.pf_ppo.reweight_method": "pow"}
    ),
    "filter_groups.enable": Mapped(
        "whether algorithm.filters refuses groups whose metric is constant, with algorithm.refill", False
    ),
    "filter_groups.metric": Mapped(
        "the metric of the filter: the reward, or a number that the scorer returns", "reward"
    ),
    "filter_groups.max_num_gen_batches": Mapped("the number algorithm.refill, in batches of data.gen_batch_size", 0),
    "filter_groups": Ignored("rollouts are passed on as soon as they finish"),
    "rollout_correction.rollout_is": Mapped("the weights of algorithm.correction"),
    # Of any type: a number, or `low_high` as text.
    "rollout_correction.rollout_is_threshold": Mapped("the threshold of algorithm.correction", 2.0, type=object),
    "rollout_correction.rollout_is_batch_normalize": Mapped("the field normalise of algorithm.correction", False),
    "rollout_correction.rollout_rs": Mapped("the kinds in algorithm.correction.rejection"),
    "rollout_correction.rollout_rs_threshold": Mapped("the bounds in algorithm.correction.rejection"),
    "rollout_correction.bypass_mode": Mapped("true: rollout as algorithm.old_log_prob", False),
    "rollout_correction.loss_type": Mapped(
        "reinforce: the kind of algorithm.policy_loss, with bypass_mode", "ppo_clip"
    ),
    "rollout_correction.rollout_rs_threshold_lower": Restricted(
        (None,), "write the interval as low_high in rollout_rs_threshold"
    ),
    "rollout_correction.rollout_token_veto_threshold": _VETO,
    "rollout_correction.use_policy_gradient": Restricted(OFF, "set loss_type: reinforce, and bypass_mode: true"),
    "gdpo_reward_keys": Mapped("the names of rewards, one reward for each of them; with adv_estimator gdpo", type=list),
    "gdpo_reward_weights": Mapped("the weights of algorithm.advantage, one for each of gdpo_reward_keys", type=list),
    "rollout_is": Mapped("whether algorithm.correction has weights, at rollout_is_level", False),
    "rollout_is_level": Restricted((None, "token", "sequence"), "use token or sequence", "token"),
    "rollout_is_mode": Restricted((None, "truncate", "mask"), "use truncate or mask", "truncate"),
    "rollout_is_threshold": Mapped("the threshold of algorithm.correction, with rollout_is", type=object),
    "rollout_is_threshold_lower": Mapped(
        "the lower bound of algorithm.correction, with rollout_is_mode mask", type=float
    ),
    "rollout_is_veto_threshold": _VETO,
}

DISTILLATION: dict[str, Entry] = {
    "enabled": Mapped("whether algorithm.kind is distill", False),
    "teacher_models": Mapped("the teacher of algorithm.kind distill: the model_path of the only one", type=dict),
    "teacher_model": Mapped("the same for the only teacher: its model_path", type=dict),
    "distillation_loss.loss_mode": Mapped("the kind of algorithm.policy_loss: distill or distill_top_k", "k3"),
    "distillation_loss.topk": Mapped("the top_k of the teacher, for forward_kl_topk", type=int),
    "distillation_loss.use_task_rewards": Restricted(OFF, "set false: the loss reads only the teacher"),
    "distillation_loss.use_policy_gradient": Ignored("the loss is a policy gradient towards the teacher"),
    "distillation_loss": Ignored("the loss has no such option"),
    **ignored(
        "the trainer scores the completions with the teacher",
        "n_gpus_per_node nnodes num_workers enable_resource_pool strategy teacher_key",
    ),
}

TRAINER: dict[str, Entry] = {
    "total_epochs": Mapped("the number schedule.steps, which is the batches of an epoch times it", 30),
    "total_training_steps": Mapped("the number schedule.steps", type=int),
    "project_name": Mapped("the name of the run in wandb and mlflow", "verl_examples"),
    "experiment_name": Mapped("the name of the run in wandb and mlflow", "gsm8k"),
    "logger": Mapped("monitors", ("console", "wandb")),
    "save_freq": Mapped("checkpoint.save_every", -1, convert=at_least_0, note="the last step is always saved"),
    "test_freq": Mapped("evaluation.every", -1, convert=at_least_0),
    "val_before_train": Mapped("whether to validate before training", True),
    "val_only": Mapped("whether fit only validates", False),
    "log_val_generations": Mapped("number of samples in the table `val_generations`", 0),
    "critic_warmup": Mapped("algorithm.critic_warmup", 0, convert=if_on, when=GAE),
    "resume_mode": Mapped("run.resume", "auto", convert={"auto": True, "resume_path": True, "disable": False}),
    "resume_from_path": Mapped("the checkpoint that resume_path continues from", type=Path),
    "default_local_dir": Mapped("run.dir", type=Path, convert=if_on),
    "max_critic_ckpt_to_keep": Mapped(
        "checkpoint.keep", type=int, convert=if_on, note="max_actor_ckpt_to_keep overrides it"
    ),
    "max_actor_ckpt_to_keep": Mapped("checkpoint.keep", type=int, convert=if_on),
    "default_hdfs_dir": Mapped("checkpoint.remote", type=Path),
    "n_gpus_per_node": Mapped("size of the resource pool, if no resource_pool_manager is passed", 8),
    "nnodes": Mapped("size of the resource pool, if no resource_pool_manager is passed", 1),
    "device": Mapped("device_name, if that is not passed; cuda: the GPU if there is one, else the CPU", "cuda"),
    "balance_batch": Mapped("whether `_balance_batch` is called; sequences are balanced over ranks in any case", True),
    "rollout_data_dir": Mapped("RayPPOTrainer writes <step>.jsonl there: what each step trained on", type=Path),
    "validation_data_dir": Mapped("RayPPOTrainer writes <step>.jsonl there: every validation sample", type=Path),
    "del_local_ckpt_after_load": Ignored("checkpoint.keep is the number of checkpoints on disk"),
    # verl, too, keeps one checkpoint then.
    "remove_previous_ckpt_in_save": Mapped("checkpoint.keep", False, convert={True: 1}),
    "esi_redundant_time": Ignored("save_freq determines when a checkpoint is written"),
    "ray_wait_register_center_timeout": Ignored("sync.deadline_s bounds every wait"),
    "use_legacy_worker_impl": Ignored("there is one implementation"),
    "use_v1": Ignored("there is one implementation"),
    "v1.trainer_mode": Restricted((None, "sync"), "use schedule.max_staleness in a RunConfig"),
    "v1.sampler.custom_sampler": Restricted((None,), "pass the sampler as train_sampler"),
    "v1.sampler.sync_refill_failed_groups": Restricted(OFF, "use algorithm.refill in a RunConfig"),
    "v1": Ignored("only trainer_mode sync is supported"),
    "checkpoint_callback_class": Restricted((None,), "override _save_checkpoint of RayPPOTrainer"),
    "wandb_proxy": Ignored("wandb reads the environment variable HTTPS_PROXY"),
    "balance_batch_keep_minibatch": Ignored("sequences are always balanced within a mini-batch"),
    "val_generations_to_log_to_wandb": Moved("trainer.log_val_generations"),
    **ignored(
        "the phases of every step are timed",
        "profile_steps profile_continuous_steps npu_profile worker_nsight_options controller_nsight_options",
    ),
}


def _unless_float32(dtype: str) -> str | None:
    """Returns torch's name of a dtype; None for float32."""
    return None if dtype_of(dtype) == "float32" else dtype_of(dtype)


_ROLE = "actor_rollout_ref"
_FOLLOWS: dict[str, Entry] = dict.fromkeys(FSDP, Ignored("actor.fsdp_config applies to every role"))
"""The FSDP keys of the other roles, which follow the actor's."""
_KEYS: dict[str, Entry] = {
    **under("data", DATA),
    f"{_ROLE}.hybrid_engine": Restricted((None, True), "leave it out: actor and rollout share their workers"),
    f"{_ROLE}.nccl_timeout": Ignored("sync.deadline_s bounds every wait"),
    f"{_ROLE}.profiler": Ignored("the phases of every step are timed"),
    **under(f"{_ROLE}.model", MODEL),
    **under(f"{_ROLE}.actor.optim", optim("train.optimizer", 1e-6, {})),
    **under(f"{_ROLE}.actor.fsdp_config", FSDP),
    **under(f"{_ROLE}.actor", ACTOR),
    f"{_ROLE}.actor.megatron": Ignored("Megatron is not supported; actor.strategy must be fsdp or fsdp2"),
    **under(f"{_ROLE}.ref", REFERENCE),
    **under(f"{_ROLE}.ref.fsdp_config", _FOLLOWS),
    f"{_ROLE}.ref.fsdp_config.model_dtype": Mapped(
        "train.frozen_dtype", "fp32", convert=_unless_float32, when={f"{_ROLE}.model.lora_rank": False}
    ),
    **under(f"{_ROLE}.rollout", ROLLOUT),
    **under(f"{_ROLE}.rollout.val_kwargs", VAL),
    **under("critic", CRITIC),
    **under("critic.model", CRITIC_MODEL),
    **under("critic.optim", optim("train.critic_optimizer", 1e-5, GAE)),
    "critic.optim.clip_grad": Mapped("the same as critic.grad_clip, which overrides it", type=float),
    **under("critic.fsdp", _FOLLOWS),
    **under("critic.fsdp_config", _FOLLOWS),
    **under("critic.model.fsdp_config", _FOLLOWS),
    "critic.megatron": Ignored("Megatron is not supported; critic.strategy must be fsdp or fsdp2"),
    **REWARDS,
    **under("reward_model.model.fsdp_config", dict.fromkeys(FSDP, Ignored(WHOLE))),
    **under("reward_model", REWARD_MODEL_TYPES),
    **under("algorithm", ALGORITHM),
    **under("trainer", TRAINER),
    "hydra": Ignored("settings of Hydra itself"),
    "defaults": Ignored("the defaults are those in this table"),
    "model_engine": Restricted((None, "dp"), "the other engines are not supported: leave it out"),
    "ray_kwargs": Mapped("the ray_init in it: arguments of ray.init, if Ray does not run yet", type=dict),
    "ray_init": Mapped("arguments of ray.init, if Ray does not run yet", type=dict),
    "global_profiler": Ignored("the phases of every step are timed"),
    "transfer_queue": Ignored("not needed: workers receive their rows directly from the driver"),
    **under("distillation", DISTILLATION),
    "skip": Restricted((None,), "rollouts of another run are not trained on: leave it out"),
}

_UNSUPPORTED = {"verl_megatron": "Megatron", "megatron": "Megatron"}

# `_target_` names the class that Hydra would build of a section: it is no setting.
TABLE = KeyTable(_KEYS, unsupported=_UNSUPPORTED, marks=frozenset({"_target_"}))
