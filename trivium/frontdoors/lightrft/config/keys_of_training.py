"""Flags of LightRFT's launchers about the algorithm, the optimizers and the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivium.frontdoors.lightrft.config.keys_of_models import above_zero
from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted, ignored

ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "gae": {"kind": "gae", "whiten": False},
    "reinforce": {"kind": "reinforce"},
    "reinforce++": {"kind": "reinforce"},
    "group_norm": {"kind": "group_norm"},
    "grpo": {"kind": "group_norm"},
    "rloo": {"kind": "reinforce_baseline", "baseline": "others"},
    "reinforce_baseline": {"kind": "reinforce_baseline"},
    "cpgd": {"kind": "cpgd"},
}
"""advantage_estimator -> algorithm.advantage."""
KL_ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    "k1": {"kind": "k1"},
    "k2": {"kind": "k2"},
    "k3": {"kind": "k3", "cap": None},
}
"""kl_estimator -> algorithm.kl.estimator."""
_GAE = {"advantage_estimator": "gae"}
_DISCOUNTED = {"advantage_estimator": tuple(name for name in ESTIMATORS if name not in ("reinforce_baseline", "cpgd"))}
_KL = {"init_kl_coef": True}


def _gates(ratio: float) -> list[dict[str, Any]] | None:
    """Returns the gate that keeps the fraction `ratio` of a sequence's tokens."""
    return [{"kind": "top_entropy", "fraction": ratio, "per": "sequence"}] if 0 < ratio < 1 else None


def _adaptive(target: float) -> dict[str, Any] | None:
    return {"controller": "adaptive", "target": target} if target else None


def betas_of(value: Any) -> list[float] | None:
    """Returns the two decay rates of Adam, or None for an invalid value."""
    try:
        betas = [float(part) for part in value]
    except (TypeError, ValueError):
        return None
    return betas if len(betas) == 2 and all(0 <= beta < 1 for beta in betas) else None


WANDB = {"project": "wandb_project", "name": "wandb_run_name", "group": "wandb_group", "entity": "wandb_org"}
"""Option of the W&B monitor -> its flag."""
_JOURNAL = "every rollout is recorded in run.dir; `trivium rollouts` prints them"

ALGORITHM: dict[str, Entry] = {
    "num_episodes": Mapped("schedule.steps is the number of full batches in an episode, times num_episodes", 1),
    "rollout_batch_size": Mapped("schedule.groups_per_step", 512),
    "micro_rollout_batch_size": Mapped(
        "completions that PPOTrainerVL samples, or scores, at a time; `trivium run` batches by tokens", 8
    ),
    "train_batch_size": Mapped("algorithm.mini_batches is the number of sequences in a step, divided by this", 128),
    "micro_train_batch_size": Mapped(
        "train.max_tokens_per_micro_batch is this times the longest sequence; the gradient does not depend on it", 4
    ),
    "max_epochs": Mapped("algorithm.epochs", 1),
    "n_samples_per_prompt": Mapped("schedule.group_size", 1),
    "advantage_estimator": Mapped("algorithm.advantage", "gae", convert=ESTIMATORS),
    "kl_estimator": Mapped(
        "algorithm.kl.estimator", "k1", convert=KL_ESTIMATORS, when=_KL, note="with use_kl_loss k1 becomes k1+"
    ),
    "init_kl_coef": Mapped("algorithm.kl.coef", 0.01, convert=lambda coef: coef or None),
    "kl_target": Mapped("algorithm.kl", type=float, convert=_adaptive, when=_KL, note="the target of adaptive control"),
    "kl_horizon": Mapped("algorithm.kl.horizon", 10000, when={**_KL, "kl_target": True}),
    "use_kl_loss": Mapped("algorithm.kl.place", False, convert={True: "loss", False: "reward"}, when=_KL),
    "eps_clip": Mapped(("algorithm.policy_loss.clip_low", "algorithm.policy_loss.clip_high"), 0.2),
    "value_clip": Mapped("sets algorithm.critic.clip; 0: no clipping", 0.2),
    "lambd": Mapped("algorithm.advantage.lam", 0.95, when=_GAE),
    "gamma": Mapped("algorithm.advantage.gamma", 1.0, when=_DISCOUNTED),
    "ptx_coef": Mapped("the weight of pretrain_data's loss", 0.05),
    "use_cpg_loss": Mapped("algorithm.policy_loss", False, convert={True: {"kind": "cpgd"}}),
    "use_gspo": Mapped(
        "algorithm.policy_loss",
        False,
        convert={True: {"kind": "gspo"}, False: {"kind": "ppo", "dual_clip": None}},
        when={"use_cpg_loss": False},
    ),
    "loss_agg_mode": Mapped("algorithm.aggregate", "seq-mean-token-mean", note="also that of the critic"),
    "high_entropy_token_ratio": Mapped(
        "algorithm.gates", 0.0, convert=_gates, note="top_entropy, per sequence; 0: every token"
    ),
    "dynamic_sampling": Mapped("algorithm.filters", False, convert={True: ["zero_variance"]}),
    "dynamic_sampling_refills": Mapped("algorithm.refill", 5, when={"dynamic_sampling": True}),
    "overlong_buffer": Mapped("algorithm.shaping: overlong_penalty", False),
    "overlong_buffer_len": Mapped("the penalty grows linearly over this many last tokens of generate_max_len", 1024),
    "overlong_buffer_penalty_factor": Mapped("the penalty at generate_max_len, which is the largest one", 1.0),
    "reward_running_norm": Mapped("algorithm.shaping: running_normalise", False),
    "reward_running_norm_minus_mean": Mapped(
        "algorithm.shaping: running_normalise, with the running mean subtracted", False
    ),
    "reward_clip": Mapped("algorithm.shaping: clip to [-this, this]; 0: no clipping", 0.0),
    "advantages_norm": Mapped(
        "for rloo: algorithm.normalise_advantages std; gae, reinforce and reinforce_baseline always normalise", False
    ),
    "no_advantage_std_norm": Mapped("algorithm.normalise_advantages: mean instead of std", False),
    "advantage_clip": Mapped("algorithm.clip_advantages", 0.0, convert=above_zero, note="0: no clipping"),
    "freezing_actor_steps": Mapped("algorithm.critic_warmup", -1, convert=above_zero, when=_GAE),
    "normalize_reward_for_critic": Restricted(
        (None, False), "leave it out: the critic is trained on unnormalised returns"
    ),
    "normalize_advantages": Ignored("LightRFT does not read it either; see advantages_norm"),
    "use_sequence_rewards": Ignored("LightRFT does not read it either; a completion has one reward"),
    "use_dapo": Ignored("LightRFT does not read it either; set dynamic_sampling and overlong_buffer"),
}

OPTIMISATION: dict[str, Entry] = {
    "actor_learning_rate": Mapped("train.optimizer.lr", 1e-6),
    "critic_learning_rate": Mapped("train.critic_optimizer.lr", 9e-6, when=_GAE),
    "lr_warmup_ratio": Mapped("warmup_steps of both optimizers, as a fraction of schedule.steps", 0.03),
    "l2": Mapped(("train.optimizer.weight_decay", "train.critic_optimizer.weight_decay"), 0.0),
    "max_norm": Mapped("train.max_grad_norm", 1.0),
    "adam_betas": Mapped(
        ("train.optimizer.betas", "train.critic_optimizer.betas"), (0.9, 0.95), type=object, convert=betas_of
    ),
    "enable_ema": Mapped("keeps a moving average of the actor's weights; only PPOTrainerVL", False),
    "ema_beta": Mapped("decay of that average in an optimizer step", 0.992),
}

RUN: dict[str, Entry] = {
    "save_path": Mapped(
        "directory to which the launcher writes the trained model; `trivium run` writes checkpoints only", "./ckpt"
    ),
    "ckpt_path": Mapped("run.dir", "./ckpt/checkpoints_ppo"),
    "save_steps": Mapped("checkpoint.save_every", -1, convert=lambda n: max(0, n), note="-1: only at the end"),
    "eval_steps": Mapped("evaluation.every; -1: once per episode", -1),
    "logging_steps": Mapped("PPOTrainerVL logs after this many rollout steps; `trivium run` logs every step", 1),
    "eval_n_samples": Mapped("sets evaluation.samples", 1),
    "eval_temperature": Mapped("evaluation.sampling.temperature; unset: temperature", type=float),
    "rollout_deadline_s": Mapped("workflow.deadline_s", 3600.0),
    "max_failed_fraction": Mapped("workflow.max_failed_fraction", 0.5),
    "max_ckpt_num": Mapped("checkpoint.keep", 3),
    "max_ckpt_mem": Mapped(
        "PPOTrainerVL: maximum size of all checkpoints of a role, in GiB; `trivium run` uses checkpoint.keep", 1e8
    ),
    "load_checkpoint": Mapped("run.resume", False),
    "save_hf_ckpt": Mapped("also saves a Hugging Face directory; `trivium run` always does", False),
    "disable_ds_ckpt": Mapped("PPOTrainerVL saves no checkpoints; `trivium run` always does", False),
    "save_value_network": Ignored("checkpoints contain the critic"),
    "use_wandb": Mapped("monitors: wandb. An API key given here is not copied: set WANDB_API_KEY", type=object),
    "wandb_org": Mapped("the entity of monitors: wandb", type=str),
    "wandb_group": Mapped("the group of monitors: wandb", type=str),
    "wandb_project": Mapped("the project of monitors: wandb", "trivium"),
    "wandb_run_name": Mapped("the name of monitors: wandb", ""),
    "use_tensorboard": Mapped("monitors: tensorboard, in run.dir", type=object),
    **ignored(
        _JOURNAL,
        "save_trajectories num_trajectories_to_save mark_high_entropy_tokens trajectory_analysis",
    ),
    **ignored("the metrics of every step contain lengths and rewards", "print_replay_buffer_stats plot_every log_dir"),
}
