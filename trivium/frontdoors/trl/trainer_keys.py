"""The keys of TRL's trainers, with the defaults of TRL 1.16."""

from __future__ import annotations

from collections.abc import Mapping

from trivium.frontdoors.tables import (
    Entry,
    Ignored,
    KeyTable,
    Mapped,
    Moved,
    Restricted,
    if_on,
    ignored,
    unless_all_linear,
)

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
"""The schedules of TRL that are translated -> train.optimizer.schedule."""
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")


_BASICS: Mapping[str, Entry] = {
    "trainer": Mapped("the algorithm", type=str),
    "model_name_or_path": Mapped("model.path", type=str),
    "dataset_name": Mapped("tasks.train.path", type=str),
    "dataset_config": Mapped("tasks.train.subset", type=str),
    "dataset_train_split": Mapped("tasks.train.split", default="train"),
    "output_dir": Mapped("run.dir", type=str),
    "seed": Mapped("run.seed", default=42),
    "max_steps": Mapped("in schedule.steps: optimizer steps, of which a train step has several", default=-1),
    "num_train_epochs": Mapped("a note on schedule.steps, which counts train steps", default=3.0),
    "save_steps": Mapped("in checkpoint.save_every: optimizer steps", default=500),
    "save_strategy": Mapped("in checkpoint.save_every: `no` is 0", default="steps"),
    "save_total_limit": Mapped("checkpoint.keep", type=int),
    # YAML reads a bare `no` as false.
    "eval_strategy": Mapped("in evaluation.taskset, for rows evaluation.held_out: `test`", type=object, default="no"),
    "eval_steps": Mapped("in evaluation.every, else logging_steps: optimizer steps; below 1, of max_steps", type=float),
    "logging_steps": Mapped("in evaluation.every, if eval_steps is not set; every step is logged", default=10.0),
    "dataset_test_split": Mapped("in tasks.test.split", default="test"),
    "per_device_train_batch_size": Mapped("in schedule.groups_per_step", default=8),
    "gradient_accumulation_steps": Mapped("in schedule.groups_per_step", default=1),
    "lr_scheduler_type": Mapped("train.optimizer.schedule", default="linear", convert=SCHEDULES),
    "warmup_steps": Mapped("in train.optimizer.warmup_steps: optimizer steps; below 1, of max_steps", default=0.0),
    "warmup_ratio": Mapped("in train.optimizer.warmup_steps, if warmup_steps is not set: of max_steps", default=0.0),
    "optim": Restricted((None, *ADAMW), "only AdamW is translated; set train.optimizer in the translated config"),
    "adam_epsilon": Mapped("train.optimizer.eps", type=float),
    "weight_decay": Mapped("train.optimizer.weight_decay", default=0.0),
    "adam_beta1": Mapped("in train.optimizer.betas", default=0.9),
    "adam_beta2": Mapped("in train.optimizer.betas", default=0.999),
    "max_grad_norm": Mapped("train.max_grad_norm", default=1.0),
    "use_peft": Mapped("in train.lora", default=False),
    "lora_r": Mapped("train.lora.rank", default=16, when={"use_peft": True}),
    "lora_alpha": Mapped("train.lora.alpha", default=32, when={"use_peft": True}),
    "lora_target_modules": Mapped(
        "train.lora.targets", type=object, when={"use_peft": True}, convert=unless_all_linear
    ),
    "load_in_4bit": Mapped("train.frozen_dtype", default=False, convert={True: "nf4"}, when={"use_peft": True}),
    "load_in_8bit": Mapped("train.frozen_dtype", default=False, convert={True: "int8"}, when={"use_peft": True}),
    "gradient_checkpointing": Mapped("train.gradient_checkpointing", default=True),
    "chat_template_kwargs": Mapped("model.template_variables", type=object, convert=if_on),
    "report_to": Mapped("monitors"),
    "run_name": Mapped("the name of the run in wandb and mlflow", type=str),
    **ignored("micro-batches are cut by train.max_tokens_per_micro_batch", "auto_find_batch_size"),
    **ignored("every step is logged", "logging_strategy logging_first_step logging_dir log_completions"),
    **ignored("`trivium export` writes a model directory", "push_to_hub hub_model_id hub_strategy save_only_model"),
    **ignored("the machine that runs the config decides", "bf16 fp16 tf32 dtype torch_dtype attn_implementation"),
    **ignored("dropout is always off", "disable_dropout lora_dropout"),
    **ignored("set train.shard, and start the run by torchrun", "deepspeed fsdp fsdp_config"),
    **ignored(
        "a run needs no such option",
        "lora_task_type lora_bias model_init_kwargs model_revision trust_remote_code remove_unused_columns",
        "dataloader_num_workers dataset_num_proc ddp_find_unused_parameters gradient_checkpointing_kwargs",
        "use_liger_kernel activation_offloading",
    ),
    **ignored("eval_strategy says whether a run evaluates", "do_eval"),
    **ignored("a run that evaluates does so before its first step, too", "eval_on_start"),
    **ignored(
        "evaluations are as large as the engine allows, or train.max_tokens_per_micro_batch",
        "per_device_eval_batch_size",
    ),
    **ignored(
        "name a metric of the evaluation in checkpoint.keep_best", "load_best_model_at_end metric_for_best_model"
    ),
}
_ON_POLICY: Mapping[str, Entry] = {
    "reward_funcs": Ignored("Trivium's rewards are named under `rewards`"),
    "reward_weights": Ignored("each entry of `rewards` has its own weight"),
    "steps_per_generation": Mapped("in algorithm.mini_batches, schedule.groups_per_step", type=int),
    "generation_batch_size": Mapped("in algorithm.mini_batches, schedule.groups_per_step", type=int),
    "num_generations": Mapped("schedule.group_size", type=int),
    "num_generations_eval": Mapped("in evaluation.samples, else num_generations", type=int),
    "num_iterations": Mapped("algorithm.epochs", default=1),
    "top_k": Mapped("engine.sampling.top_k", default=0),
    "min_p": Mapped("engine.sampling.min_p", type=float, convert=if_on),
    "use_vllm": Mapped("engine.kind", default=False, convert={True: "vllm"}),
    "vllm_mode": Mapped("server: a note, the run starts vLLM itself", default="colocate"),
    "vllm_gpu_memory_utilization": Mapped(
        "engine.gpu_memory_utilization", default=0.3, when={"use_vllm": True, "vllm_mode": "colocate"}
    ),
    "vllm_tensor_parallel_size": Mapped("engine.tensor_parallel_size", type=int, when={"use_vllm": True}),
    "vllm_max_model_length": Mapped("engine.max_context", type=int, when={"use_vllm": True}),
    # Level 2, which drops the weights, because every step sends them again.
    "vllm_enable_sleep_mode": Mapped("engine.sleep_level", default=False, convert={True: 2}, when={"use_vllm": True}),
    **ignored("the run starts vLLM itself", "vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port"),
    **ignored("prompts are not truncated", "max_prompt_length"),
}
_ROWS: Mapping[str, Entry] = {
    "max_length": Mapped("tasks.train.max_tokens", type=int),
    "truncation_mode": Mapped(
        "tasks.train.on_overlong",
        default="keep_start",
        convert={"keep_start": "cut_right", "keep_end": "cut_left"},
        when={"max_length": True},
    ),
    **ignored("sequences are packed without seeing each other", "packing packing_strategy padding_free"),
    **ignored("rows are rendered by the template of the model", "dataset_text_field eos_token pad_token"),
    **ignored("the reference scores each batch once", "precompute_ref_log_probs"),
}
_DEFAULTS_OF: Mapping[str, tuple[float, int, float, float]] = {
    "grpo": (1e-6, 512, 1.0, 1.0),
    "gmpo": (1e-6, 512, 1.0, 1.0),
    "sdpo": (5e-5, 256, 1.0, 1.0),
    "sdft": (5e-5, 256, 1.0, 1.0),
    "iw_opd": (1e-6, 512, 1.0, 0.95),
    "gold": (1e-7, 128, 0.9, 0.95),
    "gkd": (2e-5, 128, 0.9, 1.0),
    "a2po": (5e-5, 256, 1.0, 1.0),
}
"""Each trainer's defaults of learning_rate, max_completion_length (gkd: max_new_tokens), temperature and top_p."""
_POLICY_GRADIENT: Mapping[str, Entry] = {
    "beta": Mapped("in algorithm.kl", default=0.0),
    "use_bias_correction_kl": Mapped(
        "algorithm.kl.estimator corrected_k3, which also has the weights of algorithm.correction", default=True
    ),
    "epsilon": Mapped("in algorithm.policy_loss.clip_low", default=0.2),
    "epsilon_high": Mapped("in algorithm.policy_loss.clip_high", type=float),
    "delta": Mapped("in algorithm.policy_loss.dual_clip", type=float),
    "loss_type": Mapped("in algorithm.aggregate, algorithm.policy_loss", default="dapo"),
    "importance_sampling_level": Mapped("in algorithm.policy_loss", default="token"),
    "scale_rewards": Mapped("algorithm.advantage"),
    "multi_objective_aggregation": Mapped("in algorithm.advantage", default="sum_then_normalize"),
    "mask_truncated_completions": Mapped("algorithm.mask_truncated", default=False, convert=if_on),
    "top_entropy_quantile": Mapped("in algorithm.gates", default=1.0),
    "off_policy_mask_threshold": Mapped("in algorithm.gates", type=float),
    "entropy_coef": Mapped("algorithm.entropy.coef", default=0.0, convert=if_on),
    "use_adaptive_entropy": Mapped("whether algorithm.entropy.target is set", default=False),
    "entropy_target": Mapped("algorithm.entropy.target", default=0.2, when={"use_adaptive_entropy": True}),
    "entropy_coef_delta": Mapped("algorithm.entropy.step", default=0.005, when={"use_adaptive_entropy": True}),
    "entropy_coef_min": Restricted((0.0, None), "a steered weight is at least 0", 0.0),
    "entropy_coef_max": Restricted((1.0, None), "a steered weight has no upper bound here", 1.0),
    "sync_ref_model": Restricted((None,), "the reference is the model that the stage begins with"),
    "sapo_temperature_neg": Mapped("in algorithm.policy_loss.tau_neg", default=1.05, when={"loss_type": "sapo"}),
    "sapo_temperature_pos": Mapped("in algorithm.policy_loss.tau_pos", default=1.0, when={"loss_type": "sapo"}),
    **{
        f"vespo_{name}_{sign}": Mapped(
            f"algorithm.policy_loss.{name}_{sign}", default=value, when={"loss_type": "vespo"}
        )
        for name, sign, value in (("k", "pos", 2.0), ("lambda", "pos", 3.0), ("k", "neg", 3.0), ("lambda", "neg", 2.0))
    },
    **ignored(
        "algorithm.correction: auto weights tokens where the engine differs from the trainer",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
    ),
}
_TEACHES: Mapping[str, Entry] = {
    "teacher_model_kind": Mapped("in algorithm.teacher.weights", type=str),
    "teacher_update_rate": Mapped("in algorithm.teacher.rate", default=0.05),
    "teacher_sync_steps": Restricted((1, None), "the average follows every update", 1),
    "distillation_alpha": Mapped("the divergence of the loss", type=float),
    "distillation_mode": Mapped("the loss that follows the teacher", type=str),
    "distillation_topk": Mapped("in algorithm.teacher.top_k", type=int),
    "distillation_add_tail": Mapped("the tail of the loss", default=False),
    "distillation_is_clip": Ignored("a token's weight is 1 while its sampler is the current policy"),
}
_HELPER: Mapping[str, Entry] = {
    "teacher_model_name_or_path": Mapped("in algorithm.teacher.path", type=str),
    "lmbda": Mapped("1: the policy samples every completion", default=1.0),
    "use_teacher_server": Restricted((None,), "name the teacher's directory: teacher_model_name_or_path"),
    "seq_kd": Restricted((None,), "train on the teacher's texts by algorithm.kind sft"),
    "use_uld_loss": Restricted((None,), "teacher and policy need one tokenizer here"),
}
TRAINERS: Mapping[str, Mapping[str, Entry]] = {
    "grpo": _POLICY_GRADIENT,
    "gmpo": {
        **_POLICY_GRADIENT,
        "epsilon": Mapped("in algorithm.policy_loss.clip_low", default=0.4),
        "use_bias_correction_kl": Ignored("GMPO's KL has no importance weights"),
    },
    "sdpo": {
        **_POLICY_GRADIENT,
        "use_bias_correction_kl": Ignored("SDPO's KL has no importance weights"),
        **_TEACHES,
        "distillation_weight": Mapped("in algorithm.distill.coef", default=1.0),
        "use_successful_as_teacher": Mapped("in algorithm.teacher.context", default=True),
        "include_environment_feedback": Mapped("in algorithm.teacher.context", default=False),
        "environment_feedback_only_without_solution": Mapped("in algorithm.teacher.context", default=False),
        "reprompt_template": Mapped(
            "in algorithm.teacher.context",
            default="{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        ),
        "solution_template": Mapped(
            "in algorithm.teacher.context", default="\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
        ),
        "feedback_template": Mapped(
            "in algorithm.teacher.context",
            default="\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        ),
        "success_reward_threshold": Restricted((1.0, None), "a success has a reward of at least 1", 1.0),
        "remove_thinking_from_demonstration": Restricted((None,), "completions are shown as they are"),
        "dont_reprompt_on_self_success": Ignored("rollouts that succeeded are taught by another one that did"),
        **ignored("a template that does not fit the context is left out", "max_reprompt_len"),
        **ignored("the doctor finds these", "diagnostics_warning_interval diagnostics_flat_tolerance"),
    },
    "sdft": {
        **_TEACHES,
        "teacher_prompt_template": Mapped("in algorithm.teacher.context", default="{prompt}\n\n{privileged_context}"),
        "generate_from_teacher": Restricted((None,), "the policy samples under its own prompt"),
        "num_loss_tokens_to_skip": Restricted((None,), "all tokens of a completion are learned from"),
    },
    "iw_opd": {
        **_HELPER,
        "distillation_objective": Mapped("in algorithm.advantage", default="iw_opd"),
        "iw_opd_gamma": Mapped("in algorithm.advantage.prefix_gamma", default=0.5),
        "beta": Restricted((1.0, None), "the estimator is the reverse KL at the sampled token", 1.0),
        **ignored("the sampled token alone is read", "loss_top_k loss_add_tail reverse_kl_top_1_mode iw_opd_epsilon"),
    },
    "gold": {**_HELPER, "beta": Mapped("in algorithm.policy_loss.direction", default=0.5)},
    "gkd": {
        **_HELPER,
        "beta": Mapped("in algorithm.policy_loss.direction", default=0.5),
        "max_new_tokens": Moved("max_completion_length"),
    },
    "a2po": {
        "beta1": Mapped("in algorithm.advantage.beta", default=0.5),
        "beta2": Mapped("in algorithm.policy_loss.beta", default=1e-3),
        "num_value_samples": Mapped("evaluation.samples of `trivium eval --tasks`", default=8),
        "filter_all_incorrect": Mapped("algorithm.filters", default=True, convert={True: ["reference_solved"]}),
    },
}
"""Trainer that samples -> its own keys."""
OF_ROWS: Mapping[str, Mapping[str, Entry]] = {
    "sft": {
        "learning_rate": Mapped("train.optimizer.lr", default=2e-5),
        "loss_type": Restricted((None, "nll"), "only nll is translated", "nll"),
        "completion_only_loss": Restricted((None, True), "the loss is over completions: leave it out"),
        "assistant_only_loss": Restricted((None, False), "write a row for each answer: it learns the last message"),
    },
    "dpo": {
        "learning_rate": Mapped("train.optimizer.lr", default=1e-6),
        "beta": Mapped("algorithm.pair_loss.beta", default=0.1),
        "loss_type": Mapped("algorithm.kind: dpo for sigmoid, ipo"),
        "label_smoothing": Ignored("TRL's losses sigmoid and ipo do not read it"),
    },
    "kto": {
        "learning_rate": Mapped("train.optimizer.lr", default=1e-6),
        "beta": Mapped("algorithm.pair_loss.beta", default=0.1),
        "loss_type": Restricted((None, "kto"), "only kto is translated", "kto"),
        "desirable_weight": Mapped("algorithm.pair_loss.desirable_weight", default=1.0),
        "undesirable_weight": Mapped("algorithm.pair_loss.undesirable_weight", default=1.0),
    },
    "reward": {
        "learning_rate": Mapped("train.optimizer.lr", default=1e-4),
        "use_peft": Restricted((None, False), "a reward model is trained without an adapter: leave it out"),
        "truncation_mode": Ignored("TRL drops the longer rows of a reward model"),
    },
}
"""Trainer of rows -> its own keys."""


def table(name: str) -> KeyTable:
    """The keys of a trainer, one of TRAINERS or OF_ROWS."""
    if name in OF_ROWS:
        return KeyTable({**_BASICS, **_ROWS, **OF_ROWS[name]})
    lr, length, temperature, top_p = _DEFAULTS_OF[name]
    with_defaults = {
        "learning_rate": Mapped("train.optimizer.lr", default=lr),
        "max_completion_length": Mapped("engine.sampling.max_new_tokens", default=length),
        "temperature": Mapped("engine.sampling.temperature", default=temperature),
        "top_p": Mapped("engine.sampling.top_p", default=top_p),
    }
    return KeyTable({**_BASICS, **_ON_POLICY, **with_defaults, **TRAINERS[name]})
