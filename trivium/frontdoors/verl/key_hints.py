"""Maps keys of verl's config to keys of Trivium's config, for hints about unknown keys."""

from __future__ import annotations

from collections.abc import Mapping

KEYS: Mapping[str, str] = {
    "actor_rollout_ref": "model, engine, algorithm and train",
    "adv_estimator": "algorithm.kind",
    "clip_ratio": "algorithm.policy_loss.clip_low and algorithm.policy_loss.clip_high",
    "custom_reward_function": "rewards",
    "default_local_dir": "run.dir",
    "entropy_coeff": "algorithm.entropy.coef",
    "experiment_name": "run.name",
    "kl_coef": "algorithm.kl.coef, with algorithm.kl.place",
    "kl_loss_coef": "algorithm.kl.coef",
    "logger": "monitors",
    "max_response_length": "engine.sampling.max_new_tokens",
    "n_gpus_per_node": "cluster.ranks",
    "ppo_epochs": "algorithm.epochs",
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_micro_batch",
    "ppo_micro_batch_size_per_gpu": "train.max_tokens_per_micro_batch",
    "ppo_mini_batch_size": "algorithm.mini_batches (how many, not how large)",
    "response_length": "engine.sampling.max_new_tokens",
    "rollout.n": "schedule.group_size",
    "save_freq": "checkpoint.save_every",
    "test_freq": "evaluation.every",
    "total_epochs": "schedule.steps (train steps, not epochs)",
    "total_training_steps": "schedule.steps",
    "train_batch_size": "schedule.groups_per_step",
    "train_files": "tasks.train",
    "ulysses_sequence_parallel_size": "train.sequence_parallel",
    "use_kl_loss": "algorithm.kl.coef",
    "val_files": "evaluation.taskset, the name of a second entry of tasks",
}
"""Last part of a key, or its last two parts -> key of Trivium. The mapping lists common keys that a suggestion by
similarity misses."""
