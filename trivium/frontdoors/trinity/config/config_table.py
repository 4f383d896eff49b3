"""The keys of Trinity-RFT's config, versions 0.2.1 to 0.6.0, with their translations: the table of docs/trinity.md.

A key outside the table is an error. So is an unsupported value.
"""

from __future__ import annotations

from dataclasses import replace

from trivium.frontdoors.tables import Entry, Ignored, KeyTable, Mapped, Moved, Restricted, if_on, ignored, under
from trivium.frontdoors.trinity.config.keys_of_data import (
    DATA_PROCESSOR,
    EXPLORER_INPUT,
    FILLED_IN,
    TRAINER_INPUT,
)
from trivium.frontdoors.verl.config.config_table import TABLE as VERL

_OFF = (None, False)
_CUT = "batches are cut by tokens, and the gradient does not depend on how"
_ENGINE = "tuning of an inference engine that is not the one used here"
_PLACED = "where the roles run follows from `cluster` and the engines"

_TOP: dict[str, Entry] = {
    "mode": Mapped("run.mode: both (colocate too), explore, train, bench, serve", "both"),
    "project": Mapped("run.dir and run.name; the project of wandb, the experiment of mlflow", "Trinity-RFT"),
    "group": Mapped("run.dir and run.name; the group of wandb", ""),
    "name": Mapped("run.dir and run.name; the name of the run in wandb and mlflow", "rft"),
    "checkpoint_root_dir": Mapped("run.dir: checkpoint_root_dir/project/group/name", ""),
    "checkpoint_job_dir": Ignored("run.dir is made of checkpoint_root_dir, project, group and name"),
    "ray_namespace": Mapped("run.name: what commands that share a buffer call the run", ""),
    "continue_from_checkpoint": Mapped("run.resume", True, note="false refuses a directory that holds a run"),
    "ignore_validator_suggestions": Ignored("`trivium check` says what fits"),
    "stages": Mapped("stages", (), list),
    "log": Ignored("log.txt in the run directory has everything"),
    "service": Ignored("nothing asks Data-Juicer's service: run a task pipeline before the run"),
}

_OPTIMIZER: dict[str, Entry] = {
    "lr": Mapped("train.optimizer.lr; unset, that of trainer_config", 1e-6),
    "lr_warmup_steps": Mapped("train.optimizer.warmup_steps; -1 leaves it to the ratio", -1),
    "lr_warmup_steps_ratio": Mapped("train.optimizer.warmup_steps, as a part of schedule.steps", 0.0),
    "min_lr_ratio": Mapped("train.optimizer.min_lr_ratio, where the schedule is cosine", 0.01),
    "lr_scheduler_type": Mapped("train.optimizer.schedule: constant or cosine", "constant"),
    "warmup_style": Mapped("train.optimizer.schedule: it goes before lr_scheduler_type", type=str),
    "optimizer_type": Restricted((None, "adam", "adamw"), "AdamW is the optimizer: leave it out"),
    "betas": Mapped("train.optimizer.betas; unset, that of trainer_config", (0.9, 0.999)),
    "weight_decay": Mapped("train.optimizer.weight_decay; unset, that of trainer_config", 0.01),
    "clip_grad": Ignored("trainer.grad_clip bounds the gradient"),
}

_ALGORITHM: dict[str, Entry] = {
    "algorithm_type": Mapped("algorithm: advantage, policy_loss, KL and entropy that stand for the name", "ppo"),
    "repeat_times": Mapped("schedule.group_size, of rollouts", 1),
    **under("optimizer", _OPTIMIZER),
    "sample_strategy": Mapped("buffer.strategy: default, staleness_control, mix, or a class of yours", type=str),
    "sample_strategy_args": Mapped("the options of buffer.strategy", {}),
    "advantage_fn": Mapped("the kind of algorithm.advantage", type=str),
    "advantage_fn_args": Mapped("the options of algorithm.advantage; they override the defaults", {}),
    "policy_loss_fn": Mapped("algorithm.policy_loss.kind (pair_loss, where that is dpo)", type=str),
    "policy_loss_fn_args": Mapped("the options of algorithm.policy_loss; they override the defaults", {}),
    "kl_penalty_fn": Mapped("algorithm.kl, place: reward", type=str),
    "kl_penalty_fn_args": Mapped("algorithm.kl.coef and its controller", {}),
    "kl_loss_fn": Mapped("algorithm.kl, place: loss", type=str),
    "kl_loss_fn_args": Mapped("algorithm.kl.coef; for dpo the beta of the pair loss", {}),
    "entropy_loss_fn": Mapped("the term of algorithm.entropy", type=str),
    "entropy_loss_fn_args": Mapped("the coef of algorithm.entropy", {}),
    "loss_agg_mode": Mapped("algorithm.aggregate, of rollouts", type=str),
    "use_token_level_loss": Mapped("algorithm.aggregate: false is seq-mean-token-mean", True),
    "bypass_old_logprobs": Mapped("algorithm.old_log_prob: false is recompute", True),
    "enable_router_replay": Mapped("train.router_replay", False, convert={True: "rollout"}),
    "rollout_correction": Restricted((None,), "set algorithm.correction in the translated config"),
    "add_strategy": Mapped("as advantage_fn, which it goes before", type=str),
    "add_strategy_args": Mapped("as advantage_fn_args", {}),
}

_MODEL: dict[str, Entry] = {
    "model_path": Mapped("model.path: a folder, or a Hugging Face id", ""),
    "critic_model_path": Mapped("the critic starts from the policy's backbone: model_path, or refused", ""),
    "trust_remote_code": Restricted(_OFF, "use a model class that transformers ships"),
    "custom_chat_template": Mapped("model.chat_template, if no file is named", type=str),
    "chat_template_path": Mapped("model.chat_template: it goes before custom_chat_template", type=str),
    "temperature": Mapped("engine.sampling.temperature, where no rollout_args set it", 1.0),
    "top_p": Mapped("engine.sampling.top_p, where no rollout_args set it", 1.0),
    "top_k": Mapped("engine.sampling.top_k, where no rollout_args set it", -1),
    "logprobs": Ignored("the log-probability of every token is recorded"),
    "max_model_len": Mapped("engine.max_context, of rollouts", type=int),
    "max_prompt_tokens": Mapped("engine.max_context, with max_response_tokens", type=int),
    "max_response_tokens": Mapped("engine.sampling.max_new_tokens, of rollouts", type=int),
    "min_response_tokens": Mapped("engine.sampling.min_new_tokens, of rollouts", 0),
    "enable_prompt_truncation": Ignored("a prompt without room is a failed rollout: as there, nothing is learnt of it"),
    "repetition_penalty": Restricted((None, 1, 1.0), "it changes the sampled distribution: leave it out"),
    "enable_thinking": Mapped("model.template_variables.enable_thinking, if the chat template reads it", type=bool),
    "lora_configs": Mapped("train.lora (one adapter)", (), list),
    "rope_scaling": Restricted((None,), "write it into config.json of the model"),
    "rope_theta": Restricted((None,), "write it into config.json of the model"),
    "tinker": Restricted((None,), "Tinker is not supported: leave it out"),
    "external_model": Mapped(
        "engine.kind endpoint, in mode bench: a model behind an endpoint cannot be trained", type=dict
    ),
    **ignored("the adapter is added to the weights", "fully_sharded_loras max_cpu_loras"),
}

_CLUSTER: dict[str, Entry] = {
    "ray_address": Mapped("cluster.address, where GPUs are used", "auto"),
    "node_num": Mapped("cluster.ranks: the GPUs that the engines leave", 0),
    "gpu_per_node": Mapped("cluster.ranks: the GPUs that the engines leave", 0),
    **ignored(
        _PLACED,
        "total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num trainer_gpu_num trainer_node_num",
        "trainer_gpu_num_per_node",
    ),
}

_BUFFER: dict[str, Entry] = {
    "batch_size": Mapped("schedule.groups_per_step, where train_batch_size is not set", 1),
    "train_batch_size": Mapped("schedule.groups_per_step: train_batch_size / repeat_times", 0),
    "total_epochs": Mapped("schedule.steps: epochs of the taskset", 1),
    "total_steps": Mapped("schedule.steps: batches of batch_size tasks", type=int),
    **under("explorer_input", EXPLORER_INPUT),
    **under("trainer_input", TRAINER_INPUT),
    "explorer_output": Ignored("trainer_input.experience_buffer is the buffer of both"),
    **ignored("sync.deadline_s bounds every wait", "max_retry_times max_retry_interval"),
    **ignored(FILLED_IN, "tokenizer_path cache_dir pad_token_id"),
}

_ON_GPUS = ", with vLLM on a GPU"
_ROLLOUT_MODEL: dict[str, Entry] = {
    "engine_type": Restricted(
        (None, "vllm", "vllm_async", "sglang", "torch"),
        "engine.kind vllm samples where vLLM is asked for and installed, else torch: leave it out",
        "vllm",
    ),
    "engine_num": Mapped("cluster.engines, on Ray", 1),
    "tensor_parallel_size": Mapped(f"the GPUs of an engine: engine.tensor_parallel_size{_ON_GPUS}", 1),
    "data_parallel_size": Mapped(f"the GPUs of an engine: engine.data_parallel_size{_ON_GPUS}", 1),
    "pipeline_parallel_size": Mapped("the GPUs that an engine is counted with: it uses none of them", 1),
    "gpu_memory_utilization": Mapped(f"engine.gpu_memory_utilization{_ON_GPUS}", 0.9),
    "dtype": Mapped("engine.dtype, on a GPU", "bfloat16"),
    "seed": Mapped("run.seed", 42),
    "temperature": Mapped("as model.temperature, which it goes before", type=float),
    "top_p": Mapped("as model.top_p, which it goes before", type=float),
    "top_k": Mapped("as model.top_k, which it goes before", type=int),
    "max_model_len": Mapped("as model.max_model_len, which it goes before", type=int),
    "max_prompt_tokens": Mapped("as model.max_prompt_tokens, which it goes before", type=int),
    "max_response_tokens": Mapped("as model.max_response_tokens, which it goes before", type=int),
    "min_response_tokens": Mapped("as model.min_response_tokens, which it goes before", type=int),
    "chat_template": Mapped("as model.custom_chat_template, which it goes before", type=str),
    "repetition_penalty": Restricted((None, 1, 1.0), "it changes the sampled distribution: leave it out"),
    "ignore_eos": Restricted(_OFF, "leave it out"),
    "enable_multimodal": Ignored("the model says what it reads"),
    "trust_remote_code": Restricted(_OFF, "use a model class that transformers ships"),
    "external_model_config": Restricted((None,), "a model behind an endpoint cannot be trained: leave it out"),
    "enable_expert_parallel": Mapped(f"engine.expert_parallel{_ON_GPUS}", False),
    "enable_return_routed_experts": Ignored("algorithm.enable_router_replay records experts and replays them"),
    "enable_thinking": Mapped("as model.enable_thinking, which it goes before", type=bool),
    "enable_prompt_truncation": Ignored("a prompt without room is a failed rollout"),
    "logprobs": Ignored("the log-probability of every token is recorded"),
    **ignored("every rollout is journaled", "enable_history"),
    **ignored(
        "run.mode serve is the endpoint",
        "enable_openai_api enable_log_requests base_port api_key enable_auto_tool_choice tool_call_parser",
        "reasoning_parser",
    ),
    **ignored(
        _ENGINE,
        "extra_engine_args use_v1 enforce_eager enable_prefix_caching enable_chunked_prefill",
        "weight_sync_buffer_size max_num_seqs max_num_batched_tokens",
    ),
    **ignored(
        FILLED_IN,
        "model_path name gpu_per_engine nnodes node_rank bundle_indices engine_id ray_namespace ray_actor_name",
        "sync_method checkpoint_job_dir cuda_visible_devices enable_lora enable_runtime_lora_updating lora_modules",
        "lora_kwargs rope_scaling rope_theta",
    ),
}

_EXPLORER: dict[str, Entry] = {
    "name": Mapped("run.explorer", "explorer", when={"mode": ("explore", "serve")}),
    "max_timeout": Mapped("workflow.deadline_s", 1800.0),
    "max_retry_times": Mapped("workflow.max_retries", 2),
    "env_vars": Ignored("set them in the shell: they are inherited by every process of the run"),
    **under("rollout_model", _ROLLOUT_MODEL),
    "auxiliary_models": Mapped(
        "algorithm.teacher: the first one, where the algorithm distils; else models that a workflow or a reward asks",
        (),
        list,
    ),
    "eval_interval": Mapped("evaluation.every, made a multiple of the sync interval", 100),
    "eval_on_startup": Ignored("an evaluation at the start and at the end is what others are compared with"),
    "bench_on_latest_checkpoint": Restricted(_OFF, "use `trivium eval CONFIG --step N`"),
    "proxy_port": Mapped("serve.port", 8010, when={"mode": "serve"}),
    "listen_address": Mapped("serve.host", type=str, when={"mode": "serve"}, note="127.0.0.1 if it is not set"),
    "over_rollout.ratio": Mapped("the number schedule.over_rollout; ratio / (1 - ratio)", 0.0),
    "over_rollout.wait_after_min": Ignored("the step takes the groups that finish first"),
    "over_rollout.return_partial_tasks": Ignored("a group is trained on as a whole, as there"),
    "dynamic_timeout": Ignored("workflow.deadline_s is the deadline of a rollout"),
    "max_inflight_batches": Mapped("schedule.max_staleness, where sync_style is fully_async", 2),
    "collect_experiences": Ignored("groups are always whole"),
    **ignored(
        "the rollouts of a step are requested all at once, workflow.max_concurrent at a time",
        "runner_per_model runner_num runner_prepare_concurrency runner_prepare_max_retries concurrent_mode",
        "max_repeat_times_per_runner runner_state_report_interval",
    ),
    **ignored(
        "an endpoint has one engine, whose weights are updated in place",
        "service_status_check_interval min_running_model_num db_url",
    ),
}

_TRAINER: dict[str, Entry] = {
    "name": Mapped("the trainer's name (Trainer)", "trainer"),
    "trainer_type": Mapped("train.kind torch for verl; `my_engine.py:Mine` is an engine of yours (Trainer)", "verl"),
    "trainer_strategy": Restricted((None, "fsdp", "fsdp2"), "Megatron is not supported: use fsdp2", "fsdp2"),
    "save_interval": Mapped("checkpoint.save_every", 0, note="the last step is always saved"),
    "enable_preview": Mapped("run.enable_preview", False, convert={True: True}, when={"learning from rows": False}),
    "total_steps": Mapped("schedule.steps, where the data does not end earlier", type=int),
    "save_hf_checkpoint": Ignored("every checkpoint holds the policy as a Hugging Face directory"),
    "grad_clip": Mapped("train.max_grad_norm; unset, that of trainer_config", 1.0),
    "actor_grad_clip": Mapped("train.max_grad_norm: it goes before grad_clip", type=float),
    "critic_warmup": Mapped("algorithm.critic_warmup, of a critic", 0),
    "max_token_len_per_gpu": Mapped(
        "train.max_tokens_per_micro_batch; unset, twice max_model_len over the ranks of a sequence", type=int
    ),
    "ulysses_sequence_parallel_size": Mapped("train.sequence_parallel; unset, that of trainer_config", 1),
    "param_offload": Mapped("train.cpu_offload", False, convert={True: True}),
    "optimizer_offload": Mapped("train.cpu_offload", False, convert={True: True}),
    "grad_offload": Mapped("train.cpu_offload", False, convert={True: True}),
    "offload_policy": Mapped("train.cpu_offload", False, convert={True: True}),
    "save_strategy": Mapped("checkpoint.save_strategy", "unrestricted", convert=str.lower),
    "max_checkpoints_to_keep": Mapped("checkpoint.keep", 0, convert=if_on, note="0 keeps all"),
    "megatron": Ignored("Megatron is not supported; trainer_strategy must be fsdp or fsdp2"),
    "trust_remote_code": Restricted(_OFF, "use a model class that transformers ships"),
    "trainer_config": Mapped("train: keys of verl's config, see below", {}),
    "trainer_config_path": Mapped("train: the same in a file", ""),
    **ignored(_CUT, "use_dynamic_bsz fix_actor_microbatch_loss_scale"),
    "use_remove_padding": Ignored("sequences are always packed"),
    "balance_batch": Ignored("rows are always balanced over ranks, and the gradient does not depend on it"),
}

_MONITOR: dict[str, Entry] = {
    "monitor_type": Mapped(
        "monitors: that one beside console and jsonl; tensorboard, wandb, mlflow, or a class of yours", "tensorboard"
    ),
    "monitor_args.base_url": Mapped("monitors: base_url of wandb", type=str),
    "monitor_args.uri": Mapped("monitors: tracking_uri of mlflow", type=str),
    **under(
        "monitor_args",
        dict.fromkeys(("api_key", "username", "password"), Restricted((None,), "a secret belongs in the environment")),
    ),
    "detailed_stats": Ignored("metrics of rewards have mean, deviation and extremes"),
    "enable_ray_timeline": Ignored("phases are timed in every step"),
    "cache_dir": Ignored(FILLED_IN),
}

_SYNCHRONIZER: dict[str, Entry] = {
    "sync_method": Mapped("sync.method; nccl is memory where the roles share a process", "nccl"),
    "sync_style": Mapped("sync.style: fixed, trainer_driven, explorer_driven, fully_async, and the old names", "fixed"),
    "sync_interval": Mapped("sync.interval, of rollouts", 1),
    "explorer_sync_interval": Mapped("schedule.max_staleness, where it is not the trainer's", type=int),
    "trainer_sync_interval": Mapped("sync.interval: it goes before sync_interval", type=int),
    "sync_offset": Mapped("sync.offset (schedule.max_staleness, where steps of the two roles differ)", 0),
    "sync_timeout": Mapped("sync.deadline_s", 3600.0),
    "wait_for_checkpoint": Ignored("explorers wait for the version that their slot needs"),
    **ignored(FILLED_IN, "explorer_world_size ray_namespace group_name"),
}

TABLE = KeyTable(
    {
        **_TOP,
        **under("algorithm", _ALGORITHM),
        **under("model", _MODEL),
        **under("cluster", _CLUSTER),
        **under("buffer", _BUFFER),
        **under("explorer", _EXPLORER),
        **under("trainer", _TRAINER),
        **under("monitor", _MONITOR),
        **under("synchronizer", _SYNCHRONIZER),
        **under("data_processor", DATA_PROCESSOR),
    },
    unsupported={"megatron": "Megatron", "tinker": "Tinker", "external": "an engine behind an endpoint"},
)
"""The whole config; values that are lists of sections have tables of their own."""


def _targets(names: object) -> list[str] | None:
    """Returns the modules that an adapter changes. None stands for the default, all linear layers."""
    return None if names == "all-linear" else [names] if isinstance(names, str) else names  # pyright: ignore[reportReturnType]


LORA = KeyTable(
    {
        "path": Mapped("train.lora.path", type=str),
        "lora_rank": Mapped("train.lora.rank", 32, when={"path": False}),
        "lora_alpha": Mapped("train.lora.alpha", 32, when={"path": False}),
        "target_modules": Mapped("train.lora.targets", "all-linear", convert=_targets, when={"path": False}),
        "exclude_modules": Restricted((None,), "name what is adapted in target_modules"),
        **ignored("the adapter has the dtype of training", "lora_dtype"),
        **ignored(FILLED_IN, "name base_model_name is_dummy"),
    }
)
"""An item of model.lora_configs."""

AUXILIARY_MODEL = KeyTable(
    {name: Ignored("the trainer scores a teacher, and the user serves a judge") for name in _ROLLOUT_MODEL}
    | {"model_path": Mapped("algorithm.teacher.path", type=str)}
    | {"engine_num": Mapped("the GPUs that the trainer does not get", 1)}
    | {"base_port": Mapped("the port of its endpoint, where a workflow or a reward asks it", type=int)}
)
"""An item of explorer.auxiliary_models."""

_TAKEN = (
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "trainer.max_actor_ckpt_to_keep",
)
"""Keys of verl's config that are translated as verl's."""
_READ = (
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    *(
        f"{role}.optim.{name}"
        for role in ("actor_rollout_ref.actor", "critic")
        for name in _OPTIMIZER
        if name != "optimizer_type"
    ),
    "critic.cliprange_value",
    "trainer.critic_warmup",
)
"""Keys of verl's config that rules read, most of them where Trinity-RFT's own key is unset."""

_DECIDES = "Trinity-RFT's own key of the same meaning decides, as there"
_FSDP = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.model.fsdp_config")
_MODELS = ("actor_rollout_ref.model", "critic.model")
_EXPLORED = "explorers read the tasks and judge the rollouts: nothing of it is read, as there"
_SECTIONS = ("data", "reward", "reward_model", "custom_reward_function")
_OPTIMIZERS = ("actor_rollout_ref.actor.optim", "critic.optim")
_OF_MEGATRON = (
    "lr_warmup_init lr_decay_steps lr_decay_style min_lr weight_decay_incr_style lr_wsd_decay_style lr_wsd_decay_steps "
    "use_checkpoint_opt_param_scheduler"
)


def _of_trainer_config(key: str, entry: Entry) -> Entry:
    """Returns the entry of a key of verl's config inside trainer.trainer_config."""
    if isinstance(entry, Moved) and entry.to.partition(".")[0] in _SECTIONS:
        return Ignored(_EXPLORED)
    if not isinstance(entry, Mapped):
        return entry
    if key.endswith("actor.ppo_epochs"):
        return replace(
            entry, convert=lambda epochs: epochs if epochs != 1 else None, when={"learning from rows": False}
        )
    if key in _TAKEN:
        return entry
    described = f"{entry.to}, if Trinity-RFT's own key is unset"
    return replace(entry, to=described, convert=None, when={}) if key in _READ else Ignored(_DECIDES)


# Trinity ignores, with a warning, the keys here that it owns itself: they are accepted, without effect.
TRAINER_CONFIG = KeyTable(
    {
        **{
            key: _of_trainer_config(key, entry)
            for key, entry in VERL.entries.items()
            if key.partition(".")[0] not in _SECTIONS
        },
        **dict.fromkeys(_SECTIONS, Ignored(_EXPLORED)),
        "actor_rollout_ref.rollout.name": Ignored("explorer.rollout_model is the engine"),
        **under("actor_rollout_ref.actor", ignored(_CUT, "fix_actor_microbatch_loss_scale profile tau")),
        **under(
            "actor_rollout_ref.ref", ignored("a reference is not updated", "checkpoint profile use_prefix_grouper")
        ),
        **under("critic", ignored("phases are timed in every step", "profile ray_namespace nccl_timeout")),
        "critic.model.freeze_vision_tower": Restricted(_OFF, "every weight of the critic is trained: leave it out"),
        **{
            key: entry
            for where in _OPTIMIZERS
            for key, entry in under(
                where,
                ignored("Megatron's optimizer reads it", _OF_MEGATRON)
                | {"optimizer": Restricted((None, "adam", "adamw", "AdamW"), "AdamW is the optimizer: leave it out")},
            ).items()
        },
        **{f"{where}.min_num_params": Ignored("layers are sharded one by one") for where in _FSDP},
        **{f"{where}.rope_{name}": Ignored(_DECIDES) for where in _MODELS for name in ("scaling", "theta")},
        **under("actor_rollout_ref", ignored(_DECIDES, "synchronizer explorer_name")),
        **under(
            "trainer",
            ignored(
                _DECIDES,
                "group_name sync_freq training_rollout_mode enable_exp_buffer sft_warmup_steps total_epochs",
            ),
        ),
        **ignored(_DECIDES, "buffer synchronizer enable_preview"),
    },
    unsupported=VERL.unsupported,
    marks=VERL.marks,
)
"""trainer.trainer_config: the keys of verl's config that are read there."""
