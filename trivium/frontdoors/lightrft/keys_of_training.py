"""Flags of LightRFT's launchers about the algorithm, the optimizers and the run itself."""

from __future__ import annotations

from trivium.frontdoors.tables import Entry, Ignored, Mapped, Restricted, ignored

_JOURNAL = "every rollout is journaled in run.dir: `trivium rollouts` shows them"

ALGORITHM: dict[str, Entry] = {
    "num_episodes": Mapped("schedule.steps: whole batches of an episode, times episodes", 1),
    "rollout_batch_size": Mapped("schedule.groups_per_step", 512),
    "micro_rollout_batch_size": Mapped(
        "sequences that PPOTrainerVL scores at once; a run batches what is in flight", 8
    ),
    "train_batch_size": Mapped("algorithm.mini_batches: a step's sequences by it", 128),
    "micro_train_batch_size": Mapped(
        "train.max_tokens_per_micro_batch: so many of the longest sequences; the gradient does not depend on it", 4
    ),
    "max_epochs": Mapped("algorithm.epochs", 1),
    "n_samples_per_prompt": Mapped("schedule.group_size", 1),
    "advantage_estimator": Mapped("algorithm.advantage.kind", "gae"),
    "kl_estimator": Mapped("algorithm.kl.estimator; in the loss k1 is k1+", "k1"),
    "init_kl_coef": Mapped("algorithm.kl.coef", 0.01),
    "kl_target": Mapped("algorithm.kl.target, with controller adaptive", type=float),
    "kl_horizon": Mapped("algorithm.kl.horizon", 10000),
    "use_kl_loss": Mapped("algorithm.kl.place: loss; off: reward", False),
    "eps_clip": Mapped("algorithm.policy_loss.clip_low and clip_high", 0.2),
    "value_clip": Mapped("algorithm.critic.clip", 0.2),
    "lambd": Mapped("algorithm.advantage.lam", 0.95),
    "gamma": Mapped("algorithm.advantage.gamma", 1.0),
    "ptx_coef": Mapped("the weight of pretrain_data's loss", 0.05),
    "use_cpg_loss": Mapped("algorithm.policy_loss.kind: cpgd", False),
    "use_gspo": Mapped("algorithm.policy_loss.kind: gspo", False),
    "loss_agg_mode": Mapped("algorithm.aggregate", "seq-mean-token-mean"),
    "high_entropy_token_ratio": Mapped("algorithm.gates: top_entropy, per sequence; 0 for every token", 0.0),
    "dynamic_sampling": Mapped("algorithm.filters: zero_variance", False),
    "dynamic_sampling_refills": Mapped("algorithm.refill, where dynamic_sampling", 5),
    "overlong_buffer": Mapped("algorithm.shaping: overlong_penalty", False),
    "overlong_buffer_len": Mapped("the last tokens of generate_max_len, over which the penalty grows", 1024),
    "overlong_buffer_penalty_factor": Mapped("the penalty of a completion of full length; none is larger", 1.0),
    "reward_running_norm": Mapped("algorithm.shaping: running_normalise", False),
    "reward_running_norm_minus_mean": Mapped("algorithm.shaping: running_normalise, less the mean", False),
    "reward_clip": Mapped("algorithm.shaping: clip to plus and minus this; 0 for none", 0.0),
    "advantages_norm": Mapped(
        "algorithm.normalise_advantages: std, of rloo; gae, reinforce and reinforce_baseline have it anyway", False
    ),
    "no_advantage_std_norm": Mapped("algorithm.normalise_advantages: mean in the place of std", False),
    "advantage_clip": Mapped("algorithm.clip_advantages; 0 for none", 0.0),
    "freezing_actor_steps": Mapped("algorithm.critic_warmup", -1),
    "normalize_reward_for_critic": Restricted((None, False), "a critic fits returns as they are: leave it out"),
    "normalize_advantages": Ignored("LightRFT does not read it: see advantages_norm"),
    "use_sequence_rewards": Ignored("LightRFT does not read it: a completion has one reward"),
    "use_dapo": Ignored("LightRFT does not read it: set dynamic_sampling and overlong_buffer"),
}

OPTIMISATION: dict[str, Entry] = {
    "actor_learning_rate": Mapped("train.optimizer.lr", 1e-6),
    "critic_learning_rate": Mapped("train.critic_optimizer.lr", 9e-6),
    "lr_warmup_ratio": Mapped("warmup_steps of both optimizers, as a part of schedule.steps", 0.03),
    "l2": Mapped("weight_decay of both optimizers", 0.0),
    "max_norm": Mapped("train.max_grad_norm", 1.0),
    "adam_betas": Mapped("betas of both optimizers", (0.9, 0.95), type=object),
    "enable_ema": Mapped("an average of the actor's weights, which PPOTrainerVL alone keeps", False),
    "ema_beta": Mapped("how much of that average an optimizer step leaves", 0.992),
}

RUN: dict[str, Entry] = {
    "save_path": Mapped(
        "where PPOTrainerVL's launcher writes the trained model; a run has it in its checkpoints", "./ckpt"
    ),
    "ckpt_path": Mapped("run.dir", "./ckpt/checkpoints_ppo"),
    "save_steps": Mapped("checkpoint.save_every; -1 saves at the end alone", -1),
    "eval_steps": Mapped("evaluation.every; -1 once per episode", -1),
    "logging_steps": Mapped("rollouts from one row of PPOTrainerVL's log to the next; a run logs every step", 1),
    "eval_n_samples": Mapped("evaluation.samples", 1),
    "eval_temperature": Mapped("evaluation.sampling.temperature; unset: temperature", type=float),
    "rollout_deadline_s": Mapped("workflow.deadline_s", 3600.0),
    "max_failed_fraction": Mapped("workflow.max_failed_fraction", 0.5),
    "max_ckpt_num": Mapped("checkpoint.keep", 3),
    "max_ckpt_mem": Mapped("GiB of PPOTrainerVL's checkpoints of one role; of a run checkpoint.keep decides", 1e8),
    "load_checkpoint": Mapped("run.resume", False),
    "save_hf_ckpt": Mapped("every checkpoint has the policy as a Hugging Face directory", False),
    "disable_ds_ckpt": Mapped("no checkpoints; a run always has one to continue from", False),
    "save_value_network": Ignored("checkpoints hold the critic"),
    "use_wandb": Mapped("monitors: wandb. A key given here is not written down: set WANDB_API_KEY", type=object),
    "wandb_org": Mapped("the entity of monitors: wandb", type=str),
    "wandb_group": Mapped("the group of monitors: wandb", type=str),
    "wandb_project": Mapped("the project of monitors: wandb", type=str),
    "wandb_run_name": Mapped("the name of monitors: wandb", type=str),
    "use_tensorboard": Mapped("monitors: tensorboard, in run.dir", type=object),
    **ignored(
        _JOURNAL,
        "save_trajectories num_trajectories_to_save mark_high_entropy_tokens trajectory_analysis",
    ),
    **ignored(
        "lengths and rewards are among the metrics of every step", "print_replay_buffer_stats plot_every log_dir"
    ),
}
