"""TRL: `trivium translate --from trl` (`translation`), and hints about its keys in a config of Trivium."""

from __future__ import annotations

from collections.abc import Mapping

KEYS: Mapping[str, str] = {
    "beta": "algorithm.kl.coef",
    "bf16": "train.dtype: bfloat16",
    "epsilon": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "chat_template_kwargs": "model.template_variables",
    "eval_dataset": "evaluation.taskset, the name of a second entry of tasks",
    "eval_steps": "evaluation.every",
    "gradient_accumulation_steps": "train.max_tokens_per_micro_batch (the gradient does not depend on it)",
    "learning_rate": "train.optimizer.lr",
    "logging_steps": "monitors (every step is logged)",
    "lora.r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "lora_r": "train.lora.rank",
    "lora_rank": "train.lora.rank",
    "lr": "train.optimizer.lr",
    "lr_scheduler_type": "train.optimizer.schedule",
    "max_completion_length": "engine.sampling.max_new_tokens",
    "max_prompt_length": "engine.max_context (prompt and completion together)",
    "max_seq_length": "engine.max_context (prompt and completion together)",
    "max_steps": "schedule.steps",
    "micro_batch_size": "train.max_tokens_per_micro_batch",
    "model_name_or_path": "model.path",
    "num_generations": "schedule.group_size",
    "num_train_epochs": "schedule.steps (train steps, not epochs)",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "schedule.groups_per_step (groups, over all devices)",
    "report_to": "monitors",
    "reward_funcs": "rewards",
    "reward_weights": "rewards[].weight",
    "save_steps": "checkpoint.save_every",
    "target_modules": "train.lora.targets",
    "train_dataset": "tasks.train",
}
"""The last part of a key, or its last two -> the key of Trivium."""
