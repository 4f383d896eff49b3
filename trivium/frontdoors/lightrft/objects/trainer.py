"""PPOTrainerVL: LightRFT's trainer object over the core's train step, algorithms and rollout engine.

Each step of `fit` is a `loops.train_step`. Its algorithm has one update, `self.ppo_train`, which calls
`self.training_step`, which calls `self.training_step_actor` and `self.training_step_critic`: a subclass may override
any of them.
"""

from __future__ import annotations

import math
from abc import ABC
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from trivium.algorithms import GroupAlgorithm
from trivium.algorithms.kl import AdaptiveKLController, get_kl_controller
from trivium.explorer import RolloutLimits
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.lightrft.arguments import check_args, check_numbers, check_values, option, sorted_arguments
from trivium.frontdoors.lightrft.objects.checkpoints import load, refuse_newer, save
from trivium.frontdoors.lightrft.objects.experience_maker import ExperienceMaker
from trivium.frontdoors.lightrft.objects.models.critic import CriticVL, linear_head
from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL
from trivium.frontdoors.lightrft.objects.models.rollout_engine import Rollouts, sampling_of
from trivium.frontdoors.lightrft.objects.ppo_objective import (
    ObjectiveSettings,
    WithPretraining,
    algorithm_of,
    critic_objective,
    high_entropy_mask,
    policy_objective,
    with_kl,
)
from trivium.frontdoors.lightrft.objects.pretraining import PretrainingBatches, joined, supervised_batch
from trivium.frontdoors.lightrft.objects.prompt_order import PromptOrder
from trivium.frontdoors.lightrft.objects.replay_buffer import ReplayBuffer
from trivium.frontdoors.lightrft.objects.step_algorithm import StepAlgorithm
from trivium.frontdoors.lightrft.objects.strategy import core_of
from trivium.frontdoors.lightrft.objects.trainer_engine import Trained, TrainerEngine
from trivium.frontdoors.lightrft.objects.trainer_logs import Logs, row_of
from trivium.frontdoors.lightrft.objects.updates import (
    ACTOR_NAMES,
    CRITIC_NAMES,
    blank_experience,
    bounded,
    buffer_status,
    columns_of,
    mean_status,
    narrowed,
    renamed,
    rollout_status,
    rollout_summary,
)
from trivium.frontdoors.lightrft.rewards.reward_scoring import RewardScorer
from trivium.loops import train_step
from trivium.models.vision.images import Images, check_processor
from trivium.types import Batch, Group, Metrics


class PPOTrainerVL(ABC):  # noqa: B024 - the original has this base
    """Trains an actor, and optionally a critic, by PPO or a related algorithm. Also trains text-only models.

    Under torchrun every rank runs the same script. `rollout_batch_size` and `train_batch_size` count over all ranks.
    """

    def __init__(
        self,
        strategy: Any,
        actor: Any,
        critic: torch.nn.Module | None,
        reward_model: Any,
        initial_model: Any,
        ema_model: Any,
        actor_optim: torch.optim.Optimizer,
        critic_optim: torch.optim.Optimizer | None,
        actor_scheduler: Any,
        critic_scheduler: Any,
        ema_beta: float = 0.992,
        init_kl_coef: float = 0.001,
        kl_target: float | None = None,
        kl_horizon: int = 10000,
        ptx_coef: float = 0,
        micro_train_batch_size: int = 8,
        buffer_limit: int = 0,
        buffer_cpu_offload: bool = True,
        eps_clip: float = 0.2,
        value_clip: float | None = 0.2,
        micro_rollout_batch_size: int = 8,
        gradient_checkpointing: bool = False,
        max_epochs: int = 1,
        max_norm: float = 1.0,
        tokenizer: Callable[[Any], dict[str, Any]] | None = None,
        processor: Callable[[Any], dict[str, Any]] | None = None,
        prompt_max_len: int = 128,
        dataloader_pin_memory: bool = True,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_fn: Callable[..., Any] | None = None,
        reward_fn_label_map: dict[str, int] | None = None,
        reward_recipe: dict[Any, Any] | None = None,
        save_hf_ckpt: bool = False,
        disable_ds_ckpt: bool = False,
        **generate_kwargs: Any,
    ) -> None:
        """Takes LightRFT's arguments. `value_clip` None disables clipping. `strategy.args` has more (see `arguments`).

        `generate_kwargs` accepts `max_new_tokens`, `max_length`, `min_new_tokens`, `temperature`, `top_p`, `top_k`,
        `do_sample`, `stop`, `eos_token_id`, `gamma`, `lambd`, and overrides of `args`. Raises ConfigError for other
        keywords.
        """
        self.generate_kwargs, self._overrides = sorted_arguments(generate_kwargs)
        sizes = {"micro_train_batch_size": micro_train_batch_size, "micro_rollout_batch_size": micro_rollout_batch_size}
        coefs = {"ema_beta": ema_beta, "init_kl_coef": init_kl_coef, "ptx_coef": ptx_coef, "value_clip": value_clip}
        check_numbers(**sizes, **coefs, max_epochs=max_epochs, max_norm=max_norm, prompt_max_len=prompt_max_len)
        core_of(actor)  # raises ConfigError for an unwrapped transformers model
        critic = _wrapped(critic)
        if critic is not None and critic_optim is None:
            raise ConfigError("a critic", "no critic_optim", "give it an optimizer")
        if getattr(processor, "image_processor", None) is not None and actor.model_dir is not None:
            check_processor(Images(processor), actor.model_dir)
        self.strategy, self.actor, self.critic = strategy, actor, critic
        self.reward_model, self.initial_model, self.ema_model = reward_model, initial_model, ema_model
        self.actor_optim, self.critic_optim = actor_optim, critic_optim
        self.actor_scheduler, self.critic_scheduler = actor_scheduler, critic_scheduler
        self.ema_beta, self.ptx_coef, self.max_norm, self.max_epochs = ema_beta, ptx_coef, max_norm, max_epochs
        self.eps_clip, self.value_clip, self.prompt_max_len = eps_clip, value_clip, prompt_max_len
        self.micro_train_batch_size, self.micro_rollout_batch_size = micro_train_batch_size, micro_rollout_batch_size
        self.tokenizer = tokenizer if tokenizer is not None else getattr(processor, "tokenizer", processor)
        self.processor, self.gradient_checkpointing = processor, gradient_checkpointing
        self.save_hf_ckpt, self.disable_ds_ckpt = save_hf_ckpt, disable_ds_ckpt
        self.sampling = sampling_of({"temperature": actor.temperature, **self.generate_kwargs}, prompt_max_len)
        self.kl_ctl = get_kl_controller(
            {
                "type": "adaptive" if kl_target else "fixed",
                "kl_coef": init_kl_coef,
                "target_kl": kl_target,
                "horizon": kl_horizon,
            }
        )
        self.replay_buffer = ReplayBuffer(buffer_limit, buffer_cpu_offload, dataloader_pin_memory)
        self.rewards = RewardScorer(
            reward_model,
            reward_fn,
            reward_fn_label_map,
            reward_recipe,
            remote_rm_url,
            tokenizer=self.tokenizer,
            batch_size=micro_rollout_batch_size,
        )
        self.metrics: Metrics = {}
        """Metrics of the last step over all ranks, by the core's names, such as the mismatch of engine and trainer."""
        self.policy_version = 0
        """Grows whenever the actor's weights may have changed: the rollout engine then loads them again."""
        self.pretrain_dataloader: Iterator[Any] | None = None
        """An endless iterator over supervised batches. Each step of the actor takes one."""
        self._rollouts: Rollouts | None = None
        self._logs: Logs | None = None
        self._state: dict[str, Any] = {}
        self._eval_dataloader: Any = None
        self.args = strategy.args
        for model in (actor, critic) if gradient_checkpointing else ():
            if model is not None:
                model.gradient_checkpointing_enable()  # pyright: ignore[reportCallIssue]
        self._set_temperature()
        self.engine = self._train_engine()
        self._read_args(strategy.args)

    # ------------------------------------------------------------------ parts

    def _set_temperature(self) -> None:
        """Sets the sampling temperature in all models, so that log-probabilities match the sampled distribution."""
        temperature = self.sampling.temperature or 1.0  # greedy sampling has no distribution of its own
        for model in (self.actor, self.initial_model, self.ema_model):
            if model is not None:
                model.temperature = temperature

    def _train_engine(self) -> TrainerEngine:
        """Opens the models, with the micro-batch size of training in updates and that of rollouts in scores."""
        trained = {"policy": Trained(self.actor, self.actor_optim, self.actor_scheduler)}
        if self.critic is not None:
            assert self.critic_optim is not None
            trained["critic"] = Trained(self.critic, self.critic_optim, self.critic_scheduler)
        return TrainerEngine(
            self.strategy,
            trained,
            self.initial_model,
            self.ema_model,
            max_norm=self.max_norm,
            max_response_length=self.sampling.max_new_tokens,
            train_sequences=self.micro_train_batch_size,
            score_sequences=self.micro_rollout_batch_size,
        )

    def _read_args(self, args: Any) -> None:
        """Builds the algorithm and the experience maker from `args`. The constructor's keywords override `args`."""
        self.args = Namespace(**{**vars(args), **self._overrides})
        check_values(self.args)
        self.freezing_actor_steps = int(option(self.args, "freezing_actor_steps"))
        ratio = option(self.args, "high_entropy_token_ratio") or self.actor.high_entropy_token_ratio
        self.high_entropy_token_ratio = float(ratio)
        # `fit` reads its `args` again; the running moments of rewards continue.
        previous = self.algorithm.state() if hasattr(self, "algorithm") else {}
        self.algorithm: GroupAlgorithm = algorithm_of(
            self.args,
            ObjectiveSettings(
                eps_clip=self.eps_clip,
                value_clip=self.value_clip,
                gamma=float(self.generate_kwargs.get("gamma", option(self.args, "gamma"))),
                lambd=float(self.generate_kwargs.get("lambd", option(self.args, "lambd"))),
                has_reference=self.initial_model is not None,
                has_critic=self.critic is not None,
                max_new_tokens=self.sampling.max_new_tokens,
            ),
        )
        self.algorithm.restore(previous)
        self.experience_maker = ExperienceMaker(
            rollouts=self._rollout_engine,
            scorer=self.rewards,
            tokenizer=self.tokenizer,
            ranks=self.strategy.ranks,
        )

    def _rollout_engine(self) -> Rollouts:
        """Returns the rollout engine, created on first use."""
        if self.tokenizer is None:
            raise ConfigError("rollouts", "the trainer has no tokenizer", "give it tokenizer, or a processor with one")
        if self._rollouts is None:
            eos = self.generate_kwargs.get("eos_token_id")
            ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
            self._rollouts = Rollouts(
                self.actor,
                self.tokenizer,  # pyright: ignore[reportArgumentType]
                self.processor or self.tokenizer,
                prompt_max_len=self.prompt_max_len,
                eos_token_ids=frozenset(ids),
                seed=int(option(self.args, "seed")),
                limits=RolloutLimits(
                    float(option(self.args, "rollout_deadline_s")),
                    self.micro_rollout_batch_size,
                    max_failed_fraction=float(option(self.args, "max_failed_fraction")),
                ),
            )
        return self._rollouts

    # ------------------------------------------------------------------ fit

    def fit(
        self,
        args: Any,
        prompts_dataloader: Any,
        pretrain_dataloader: Any,
        eval_dataloader: Any = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int = 1,
    ) -> None:
        """Runs rollouts and updates for `args.num_episodes` passes over the prompts.

        `args` must have the attributes in `arguments.REQUIRED` and may have those in `arguments.OPTIONAL`. Training
        continues after `consumed_samples` prompts, from the checkpoint of this position if `args.ckpt_path` has it;
        with `args.load_checkpoint`, from the newest checkpoint. Both are exact. With `args.eval_steps` -1, an
        evaluation follows every `num_update_steps_per_episodes` optimizer steps; for the default of 1, it follows every
        pass over the prompts.

        Raises RunDirError if it would save beside checkpoints of later steps.
        """
        check_args(args)
        self._read_args(args)
        args = self.args
        self._check_sizes(args)
        order = PromptOrder(
            args, prompts_dataloader, self.strategy.ranks, self.max_epochs, num_update_steps_per_episodes
        )
        self._continue(args, consumed_samples, order)
        # LightRFT evaluates once per episode by this value.
        if args.eval_steps == -1:
            args.eval_steps = order.per_evaluation
        seed = int(option(args, "seed"))
        self.pretrain_dataloader = None
        if pretrain_dataloader is not None:
            self.pretrain_dataloader = PretrainingBatches(pretrain_dataloader, seed, self._state.get("pretraining", 0))
        self._eval_dataloader = eval_dataloader
        self._logs = self._logs or Logs(args, self.strategy, order.step)
        bar = tqdm(
            total=order.per_episode * args.num_episodes,
            initial=order.consumed // args.rollout_batch_size,
            desc="rollouts",
            disable=not self.strategy.is_rank_0(),
        )
        try:
            for episode, groups in order.steps(self._generated):
                status = self._trained(groups, order.step)
                bar.update(order.consumed // args.rollout_batch_size - bar.n)
                state = self._client_states(order)
                self.save_logs_and_checkpoints(args, order.step, bar, status, state, episode)
        finally:
            bar.close()
            self.close()

    def _generated(self, loaded: Any, first: int) -> list[Group]:
        """Returns the groups of a batch of prompts that pass the filters, sampled with the current weights."""
        groups = self.experience_maker.generate(
            loaded,
            first,
            purpose="train",
            version=self.policy_version,
            samples=int(self.args.n_samples_per_prompt),
            sampling=self.sampling,
        )
        return self.algorithm.filter(groups)[0]

    def _trained(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Trains on a step's groups and returns the status of the step."""
        status: dict[str, float] = {}

        def train(batch: Batch) -> None:
            for experience in self.experience_maker.experiences(batch, groups, self.micro_rollout_batch_size):
                self.replay_buffer.append(experience)
            status.update(rollout_summary(self.strategy.ranks, self.replay_buffer.items))
            status.update(self.ppo_train(step))
            # The experiences are of the policy before the update.
            self.replay_buffer.clear()

        self.metrics = train_step(self.engine, groups, self.step_algorithm(train))
        self.policy_version += 1  # an override may have updated the weights without `training_step_actor`
        if "kl" in status:
            self.kl_ctl.update(status["kl"], self.args.rollout_batch_size * self.args.n_samples_per_prompt)
        return status

    def step_algorithm(self, train: Callable[[Batch], None]) -> StepAlgorithm:
        """Returns the algorithm of a step, whose update is `train`, with the current KL coefficient."""
        algorithm = with_kl(self.algorithm, self.kl_ctl.value)
        needs = set(algorithm.needs) | ({"entropy"} if 0 < self.high_entropy_token_ratio < 1 else set())
        needs |= {"ref"} if self.initial_model is not None else set()
        return StepAlgorithm(algorithm, self.strategy.ranks, frozenset(needs), train)

    def _check_sizes(self, args: Any) -> None:
        """Raises ConfigError for batch sizes that do not divide evenly."""
        size, sequences = self.strategy.ranks.data_size, args.rollout_batch_size * args.n_samples_per_prompt
        for name in ("rollout_batch_size", "train_batch_size"):
            if getattr(args, name) % size:
                raise ConfigError(
                    f"{name} {getattr(args, name)} over {size} ranks", "the ranks do not divide it", "use a multiple"
                )
        # LightRFT carries an incomplete batch into the next rollout, whose tokens come from another policy.
        if sequences % args.train_batch_size:
            raise ConfigError(
                f"train_batch_size {args.train_batch_size}, in sequences",
                f"a rollout has {sequences}: rollout_batch_size {args.rollout_batch_size} prompts with "
                f"n_samples_per_prompt {args.n_samples_per_prompt} completions each",
                "make it a divisor of that: each optimizer step takes equally many sequences of one rollout",
            )

    def _continue(self, args: Any, consumed_samples: int, order: PromptOrder) -> None:
        """Moves to the start position, and loads its checkpoint if there is one."""
        states: dict[str, Any] = {}
        if consumed_samples or option(args, "load_checkpoint"):
            states = load(self.engine, Path(args.ckpt_path), consumed_samples, ranks=self.strategy.ranks)
            consumed_samples = consumed_samples or int(states.get("consumed_samples", 0))
            missing = "" if states else f": {args.ckpt_path} has no checkpoint of this position"
            self.strategy.print(f"continuing behind {consumed_samples} prompts{missing}")
        self.policy_version += 1  # an engine that `evaluate` opened may hold the weights of before
        self._state = dict(states)
        if "algorithm" in states:
            self.algorithm.restore(states["algorithm"])
        # A run that is resumed with another init_kl_coef starts from that one, not from what the controller had
        # reached.
        if isinstance(self.kl_ctl, AdaptiveKLController) and states.get("kl_initial") == self.kl_ctl.initial:
            self.kl_ctl.value = float(states["kl_coef"])
        order.move_to(consumed_samples, states.get("global_step"))
        if args.save_steps > 0 and not self.disable_ds_ckpt:
            refuse_newer(Path(args.ckpt_path), order.step, ranks=self.strategy.ranks)
        self.engine.version = order.step

    def _client_states(self, order: PromptOrder) -> dict[str, Any]:
        """Returns the checkpoint state besides weights and optimizers."""
        return {
            "consumed_samples": order.consumed,
            "global_step": order.step,
            "kl_coef": self.kl_ctl.value,
            "kl_initial": getattr(self.kl_ctl, "initial", self.kl_ctl.value),
            "algorithm": self.algorithm.state(),
            "pretraining": getattr(self.pretrain_dataloader, "consumed", 0),
        }

    # ------------------------------------------------------------------ updates

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        """Runs `max_epochs` passes over the replay buffer. Each `training_step` takes `args.train_batch_size` sequences
        over all ranks. Returns the mean status and statistics of the rollout."""
        ranks, items = self.strategy.ranks, len(self.replay_buffer)
        share = int(getattr(self.args, "train_batch_size", 0)) // ranks.data_size or max(items, 1)
        parts = ranks.all_reduce_max(math.ceil(items / share))
        statuses: list[tuple[float, dict[str, float]]] = []
        for _ in range(self.max_epochs):
            for part in self.replay_buffer.parts(parts):
                experience = ExperienceVL.join(part) if part else blank_experience()
                mask = self._entropy_mask(experience)
                take = self.training_step if mask is None else partial(self.training_step, entropy_mask=mask)
                statuses.append((float(len(part)), take(experience, global_steps)))
        return {**mean_status(ranks, statuses), **buffer_status(ranks, self.replay_buffer.items)}

    def _entropy_mask(self, experience: ExperienceVL) -> torch.Tensor | None:
        """Returns the mask of high-entropy tokens, or None if the policy loss covers all tokens."""
        if experience.action_entropy is None or not 0 < self.high_entropy_token_ratio < 1:
            return None
        return high_entropy_mask(experience.action_entropy, experience.action_mask, self.high_entropy_token_ratio)

    def training_step(
        self, experience: ExperienceVL, global_steps: int, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Runs one optimizer step of the actor, if `global_steps` exceeds `freezing_actor_steps`, and one of the
        critic, if any. All ranks must call it, each with its share of the sequences."""
        status: dict[str, float] = {}
        if global_steps > self.freezing_actor_steps:
            take = self.training_step_actor
            if entropy_mask is not None:  # an override of the user's may not have the parameter
                take = partial(take, entropy_mask=entropy_mask)
            status |= take(experience)
        if self.critic is not None:
            status |= self.training_step_critic(experience)
        return status

    def training_step_actor(
        self, experience: ExperienceVL, entropy_mask: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Runs one optimizer step of the actor, then updates the moving average.

        Adds up the policy loss (over the tokens of `entropy_mask` (B, A), if given), the KL loss over all tokens, and,
        with `pretrain_dataloader`, the supervised loss. Raises TriviumError for a non-finite gradient, before any
        weight changes.
        """
        learner = self.engine.learners["policy"]
        objective: Any = policy_objective(self.algorithm, self.kl_ctl.value, masked=entropy_mask is not None)
        batch = bounded(columns_of(experience, learner, objective.needs - {"counted", "token_weight"}))
        if entropy_mask is not None:
            batch = narrowed(batch, experience, entropy_mask)
        # As in LightRFT, the loader switches the loss on, not a coefficient above 0.
        if self.pretrain_dataloader is not None:
            objective = WithPretraining(**vars(objective), coef=self.ptx_coef)
            batch = joined(batch, supervised_batch(next(self.pretrain_dataloader), learner.model.backbone.vision))
        metrics = self.engine.update("policy", batch, objective)
        self.policy_version += 1
        if self.ema_model is not None:
            self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta)
        status = {**rollout_status(experience), **renamed(metrics, ACTOR_NAMES)}
        if "policy_loss" not in status and "actor_loss" in status:
            # An objective of one loss reports no terms.
            status["policy_loss"] = status["actor_loss"] - self.ptx_coef * status.get("ptx_loss", 0.0)
        return status | ({"kl": status["kl_loss"]} if "kl_loss" in status else {})

    def training_step_critic(self, experience: ExperienceVL) -> dict[str, float]:
        """Runs one optimizer step of the critic. The loss is half the squared error, with values clipped to within
        `value_clip` of the old values."""
        objective = critic_objective(self.algorithm)
        batch = columns_of(experience, self.engine.learners["critic"], objective.needs)
        return renamed(self.engine.update("critic", batch, objective), CRITIC_NAMES)

    # ------------------------------------------------------------------ evaluation, logs, checkpoints

    def evaluate(self, eval_dataloader: Any, global_step: int) -> dict[str, float]:
        """Returns `reward_mean`, `format_reward_mean`, `accuracy_reward_mean`, `response_length_mean` and `num_samples`
        over the held-out prompts of all ranks, and logs them at `global_step` under `eval/`; {} without a loader. Does
        not affect training.

        Samples `args.eval_n_samples` completions of each prompt at `args.eval_temperature` (unset: as in training).
        """
        if eval_dataloader is None:
            return {}
        temperature = option(self.args, "eval_temperature")
        sampling = self.sampling if temperature is None else replace(self.sampling, temperature=float(temperature))
        # LightRFT evaluates with the samples and the temperature of training; both may differ here.
        samples = int(option(self.args, "eval_n_samples"))
        measured = self.experience_maker.evaluated(eval_dataloader, self.policy_version, samples, sampling)
        self._logs_from(global_step).log(global_step, {f"eval/{name}": value for name, value in measured.items()})
        return measured

    def _logs_from(self, global_step: int) -> Logs:
        """Returns the logs, which are opened at this step if `fit` has not opened them. `close` closes them."""
        if self._logs is None:
            self._logs = Logs(self.args, self.strategy, max(0, global_step - 1))
        return self._logs

    def save_logs_and_checkpoints(
        self,
        args: Any,
        global_step: int,
        step_bar: Any,
        logs_dict: Mapping[str, float] = {},
        client_states: Mapping[str, Any] = {},
        episode: int = 0,
    ) -> None:
        """Logs every `args.logging_steps` steps, evaluates every `eval_steps` and saves every `save_steps`.

        A checkpoint is the folder `step-00000N` of `args.ckpt_path`. `save_hf_ckpt` adds `global_step{N}_hf`.
        """
        if step_bar is not None and hasattr(step_bar, "set_postfix"):
            names = ("reward", "policy_loss", "kl", "response_length")
            step_bar.set_postfix({name: round(logs_dict[name], 4) for name in names if name in logs_dict})
        if global_step % args.logging_steps == 0:
            row = {**row_of(logs_dict), "train/episode": float(episode)}
            self._logs_from(global_step).log(global_step, row)
        if self._eval_dataloader is not None and args.eval_steps > 0 and global_step % args.eval_steps == 0:
            self.evaluate(self._eval_dataloader, global_step)
        if args.save_steps > 0 and global_step % args.save_steps == 0:
            self._save(args, global_step, client_states)

    def _save(self, args: Any, global_step: int, client_states: Mapping[str, Any]) -> None:
        folder = Path(args.ckpt_path)
        if not self.disable_ds_ckpt:
            keep = int(option(args, "max_ckpt_num"))
            save(self.engine, folder, global_step, client_states, keep=keep, ranks=self.strategy.ranks)
        if self.save_hf_ckpt:
            self.strategy.save_model(
                self.actor, self.processor or self.tokenizer, folder / f"global_step{global_step}_hf"
            )

    def close(self) -> None:
        """Closes the rollout engine and the logs. A further `fit` opens them again."""
        if self._rollouts is not None:
            self._rollouts.close()
            self._rollouts = None
        if self._logs is not None:
            self._logs.close()
            self._logs = None


def _wrapped(critic: torch.nn.Module | None) -> CriticVL | None:
    """Returns a critic of transformers as a CriticVL over the same parameters. Raises ConfigError for other modules."""
    if critic is None or isinstance(critic, CriticVL):
        return critic
    if linear_head(critic) is None:
        raise ConfigError(
            f"a critic of the class {type(critic).__name__}",
            "no CriticVL, and no classifier of transformers with a linear head of one output (score, classifier)",
            "give one of these: values are computed over packed sequences",
        )
    return CriticVL(critic)


SPMDPPOTrainerVL = PPOTrainerVL
"""The class name that LightRFT's scripts use."""
