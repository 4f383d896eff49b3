"""LightRFT's launcher of gsm8k and geometry3k: builds models, data and trainer from the flags, and runs `fit`."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from trivium.errors import ConfigError, Problem
from trivium.frontdoors.lightrft.config.algorithm_section import freezes_vision, launch_conflicts
from trivium.frontdoors.lightrft.config.data_section import evaluated
from trivium.frontdoors.lightrft.config.reward_section import remote_urls, reward_models
from trivium.frontdoors.lightrft.objects.data.data import (
    PromptDatasetVL,
    SFTDatasetVL,
    blending_datasets,
    get_tokenizer_processor_vl,
)
from trivium.frontdoors.lightrft.objects.models.actor import ActorVL
from trivium.frontdoors.lightrft.objects.models.critic import CriticVL, get_vlm_for_sequence_regression
from trivium.frontdoors.lightrft.objects.strategy import Strategy, get_strategy
from trivium.frontdoors.lightrft.objects.trainer import PPOTrainerVL
from trivium.frontdoors.lightrft.rule_rewards import EXAMPLES_RECIPE
from trivium.frontdoors.lightrft.translation import of_settings, settings_of
from trivium.frontdoors.tables import Settings, announce, refuse
from trivium.models.vision.encoder import freeze_vision

_NOT_HERE = ("sp_size",)
"""Flags that only `trivium run` supports."""


def train(config: object) -> PPOTrainerVL:
    """Trains by launch arguments (a Namespace, a mapping or a list of words) and returns the trainer.

    Under torchrun every rank must call it. Writes the actor to `save_path`, or its moving average with `enable_ema`.
    Raises a ConfigError that lists all unsupported arguments.
    """
    lightrft, problems = settings_of(config), list[Problem]()
    models = reward_models(lightrft, problems)
    refuse([*problems, *launch_conflicts(lightrft), *_problems(lightrft)], "launch arguments whose values fit together")
    announce(lightrft.notes())
    args = of_settings(lightrft)
    strategy = get_strategy(args)
    strategy.args = args
    tokenizer, processor = get_tokenizer_processor_vl(args.pretrain, strategy=strategy)
    loaders = _Loaders(lightrft, args, strategy, tokenizer, processor)
    steps = loaders.updates_per_episode
    roles = strategy.prepare_models_and_optimizers(
        _actor(lightrft, args),
        _critic(args),
        [*models.values()] or None,
        ActorVL(args.pretrain, bf16=args.bf16, load_in_4bit=args.load_in_4bit) if args.init_kl_coef > 0 else None,
        args,
        max(1, math.ceil(args.num_episodes * steps)),
    )
    (actor, actor_optim, actor_scheduler), (critic, critic_optim, critic_scheduler), reward_model, initial_model = roles
    average = strategy.prepare(ActorVL(args.pretrain, bf16=args.bf16)) if args.enable_ema else None
    has_reward = bool(models or remote_urls(lightrft))
    trainer = PPOTrainerVL(
        strategy,
        actor,
        critic,
        reward_model,
        initial_model,
        average,
        actor_optim,
        critic_optim,
        actor_scheduler,
        critic_scheduler,
        tokenizer=tokenizer,
        processor=processor,
        remote_rm_url=remote_urls(lightrft) or None,
        do_sample=True,
        max_new_tokens=args.generate_max_len,
        value_clip=args.value_clip or None,
        kl_target=args.kl_target or None,
        reward_recipe=None if has_reward else EXAMPLES_RECIPE,
        dataloader_pin_memory=False,
        **{name: getattr(args, name) for name in _OF_THE_SAME_NAME},
    )
    trainer.fit(args, loaders.prompts, loaders.pretraining, loaders.evaluation, 0, steps)
    strategy.save_model(average or actor, processor, args.save_path)
    return trainer


_OF_THE_SAME_NAME = (
    *("ema_beta", "init_kl_coef", "kl_horizon", "ptx_coef", "micro_train_batch_size", "eps_clip", "max_norm"),
    *("micro_rollout_batch_size", "gradient_checkpointing", "max_epochs", "prompt_max_len", "save_hf_ckpt"),
    *("disable_ds_ckpt", "temperature", "top_p", "gamma", "lambd"),
)
"""Arguments of the trainer with the same name as their flag."""


def _problems(lightrft: Settings) -> Iterator[Problem]:
    """Yields a problem for each flag that PPOTrainerVL does not support, and for missing or invalid values."""
    for flag in _NOT_HERE:
        if lightrft[flag] != lightrft.table.default_of(flag):
            do = "leave it out, or translate the flags (trivium translate) and use trivium run"
            yield Problem(flag, str(lightrft[flag]), "PPOTrainerVL does not read it", do)
    if len(reward_models(lightrft, [])) + len(remote_urls(lightrft)) > 1:
        do = "build PPOTrainerVL in a script, with a reward_fn that combines them"
        yield Problem("reward_pretrain", "several rewards", "nothing combines them", do)


# --------------------------------------------------------------------------- models


def _lora(args: Namespace) -> dict[str, Any]:
    names = ("lora_rank", "lora_alpha", "target_modules", "load_in_4bit")
    return {name: getattr(args, name) for name in names} if args.lora_rank else {}


def _actor(lightrft: Settings, args: Namespace) -> ActorVL:
    actor = ActorVL(args.pretrain, bf16=args.bf16, temperature=args.temperature, seed=args.seed, **_lora(args))
    if freezes_vision(lightrft):
        freeze_vision(actor.model, "frozen")
    if args.gradient_checkpointing:
        actor.gradient_checkpointing_enable()
    return actor


def _critic(args: Namespace) -> CriticVL | None:
    """Builds the critic from `critic_pretrain`, else from the actor's model. Only the estimator gae has one."""
    if args.advantage_estimator != "gae":
        return None
    critic = get_vlm_for_sequence_regression(
        args.critic_pretrain or args.pretrain,
        "critic",
        bf16=args.bf16,
        seed=args.seed,
        value_head_prefix=args.value_head_prefix or "score",
    )
    if args.gradient_checkpointing:
        critic.gradient_checkpointing_enable()
    return critic


# --------------------------------------------------------------------------- data


class _Loaders:
    """This rank's loaders of prompts, supervised text and held-out prompts."""

    def __init__(self, lightrft: Settings, args: Namespace, strategy: Strategy, tokenizer: Any, processor: Any) -> None:
        ranks = strategy.ranks.data_size
        if args.rollout_batch_size % ranks:
            found = f"{ranks} ranks share it"
            raise ConfigError(f"rollout_batch_size {args.rollout_batch_size}", found, "make it a multiple of them")
        self._args, self._strategy = args, strategy
        self._share = args.rollout_batch_size // ranks
        about = (tokenizer, processor, args.prompt_max_len, strategy, args.input_template)
        rows = self._rows(args.prompt_data, args.prompt_data_probs, args.prompt_split, args.max_samples)
        if len(rows) < args.rollout_batch_size:
            found = f"prompt_data has {len(rows)}"
            do = "lower rollout_batch_size, or give more rows"
            raise ConfigError(f"a batch of {args.rollout_batch_size} prompts (rollout_batch_size)", found, do)
        prompts = PromptDatasetVL(rows, *about)
        self.prompts = self._loader(prompts, self._share, prompts.collate_fn, drop_last=True)
        sequences = len(rows) * args.n_samples_per_prompt
        self.updates_per_episode: int = sequences // args.train_batch_size * args.max_epochs
        self.evaluation: DataLoader[Any] | None = None
        if named := evaluated(lightrft):
            rows = self._rows(named, None, args.eval_split, args.max_eval_samples)
            held_out = PromptDatasetVL(rows, *about)
            self.evaluation = self._loader(held_out, self._share, held_out.collate_fn, drop_last=False)
        self.pretraining = self._supervised(tokenizer) if args.pretrain_data and args.ptx_coef else None

    def _rows(self, named: str, probabilities: object, split: str, most: int) -> Any:
        weights: Any = None if probabilities in (None, "1.0", 1.0) else probabilities
        return blending_datasets(named, weights, self._strategy, self._args.seed, int(most), train_split=split)

    def _supervised(self, tokenizer: Any) -> DataLoader[Any]:
        args = self._args
        rows = self._rows(args.pretrain_data, args.pretrain_data_probs, args.pretrain_split, args.max_samples)
        longest = args.prompt_max_len + args.generate_max_len
        texts = SFTDatasetVL(rows, tokenizer, None, longest, self._strategy, args.input_template)
        return self._loader(texts, args.micro_train_batch_size, texts.collate_fn, drop_last=True)

    def _loader(
        self, dataset: Any, batch: int, collate_fn: Callable[[Any], Any], *, drop_last: bool
    ) -> DataLoader[Any]:
        """Returns a loader with `batch` rows per rank. It shuffles if it drops the last partial batch."""
        return self._strategy.setup_dataloader(
            dataset, batch, shuffle=drop_last, collate_fn=collate_fn, drop_last=drop_last
        )
