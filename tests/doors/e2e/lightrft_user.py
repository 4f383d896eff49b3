"""A script of a LightRFT user with the objects of LightRFT's `train_colocate.py`, and with data loaders of its own."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

# from lightrft.models.actor_language import ActorLanguage
# from lightrft.models.actor_vl import ActorVL
# from lightrft.models import get_vlm_for_sequence_regression
# from lightrft.strategy import get_strategy
# from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainerVL
from trivium.frontdoors.lightrft import (
    ActorLanguage,
    ActorVL,
    SPMDPPOTrainerVL,
    get_strategy,
    get_vlm_for_sequence_regression,
)
from trivium.text import hf_processor, hf_tokenizer

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
RECIPE = {"gsm8k_rule": [("gsm8k_rule", None, 1.0)], "geo3k_rule": [("geo3k_rule", None, 1.0)]}
NUMBERS: dict[str, float | int] = {
    "save_steps": -1,
    "eval_steps": -1,
    "logging_steps": 1,
    "max_ckpt_num": 3,
    "num_episodes": 1,
    "max_epochs": 1,
    "rollout_batch_size": 512,
    "micro_rollout_batch_size": 8,
    "train_batch_size": 128,
    "micro_train_batch_size": 4,
    "n_samples_per_prompt": 1,
    "prompt_max_len": 1024,
    "generate_max_len": 1024,
    "max_samples": 1_000_000,
    "max_eval_samples": 500,
    "seed": 42,
    "local_rank": -1,
    "zero_stage": 2,
    "lora_rank": 0,
    "lora_alpha": 16,
    "limit_mm_image_per_prompt": -1,
    "freezing_actor_steps": -1,
    "num_trajectories_to_save": 10,
    "zpg": 1,
    "max_norm": 1.0,
    "l2": 0.0,
    "ptx_coef": 0.05,
    "eps_clip": 0.2,
    "value_clip": 0.2,
    "lambd": 0.95,
    "gamma": 1.0,
    "top_p": 1.0,
    "temperature": 1.0,
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "lr_warmup_ratio": 0.03,
    "init_kl_coef": 0.01,
    "reward_clip": 0.0,
    "advantage_clip": 0.0,
    "lora_dropout": 0.0,
    "overlong_buffer_len": 1024,
    "overlong_buffer_penalty_factor": 1.0,
    "high_entropy_token_ratio": 0.0,
    "engine_tp_size": 1,
    "engine_mem_util": 0.5,
}
SWITCHES = (
    *("text_only", "save_hf_ckpt", "disable_ds_ckpt", "save_trajectories", "print_replay_buffer_stats", "bf16"),
    *("load_checkpoint", "dynamic_sampling", "overlong_buffer", "use_gspo", "freeze_prefix", "enable_ema"),
    *("normalize_reward_for_critic", "save_value_network", "reward_running_norm", "advantages_norm", "adam_offload"),
    *("gradient_checkpointing", "gradient_checkpointing_use_reentrant", "actor_init_on_gpu", "flash_attn"),
    *("disable_fast_tokenizer", "disable_logprobs_flashattn", "meta_init", "use_kl_loss", "load_in_4bit"),
    *("apply_chat_template", "use_cpg_loss", "use_ms", "packing_samples", "fsdp", "use_mp_opt", "fsdp_cpu_offload"),
    *("rm_use_engine", "mixed_mm_data", "fused_linear_logprob", "enable_engine_sleep"),
)
TEXTS: dict[str, str | None] = {
    "engine_type": "vllm",
    "save_path": "./ckpt",
    "ckpt_path": "./ckpt/checkpoints_ppo",
    "kl_estimator": "k1",
    "advantage_estimator": "gae",
    "loss_agg_mode": "seq-mean-token-mean",
    "value_head_prefix": "score",
    "pretrain": None,
    "reward_pretrain": None,
    "critic_pretrain": None,
    "prompt_data": None,
    "eval_data": None,
    "prompt_data_probs": "1.0",
    "prompt_split": "train",
    "eval_split": "test",
    "pretrain_data": None,
    "pretrain_data_probs": "1.0",
    "pretrain_split": "train",
    "input_key": "input",
    "images_key": "image",
    "reference_key": "reference",
    "label_key": "label",
    "input_template": None,
    "system_prompt": None,
    "use_wandb": None,
    "wandb_project": "project",
    "wandb_run_name": "run",
    "use_tensorboard": None,
}


def train(args: argparse.Namespace) -> SPMDPPOTrainerVL:
    strategy = get_strategy(args)
    lora = {name: getattr(args, name) for name in ("lora_rank", "lora_alpha", "target_modules", "lora_dropout")}
    opened: dict[str, Any] = {
        "use_flash_attention_2": args.flash_attn,
        "bf16": args.bf16,
        "load_in_4bit": args.load_in_4bit,
    }
    kernels: dict[str, Any] = {
        "packing_samples": args.packing_samples,
        "fused_linear_logprob": args.fused_linear_logprob,
    }
    kind = ActorLanguage if args.text_only else ActorVL
    actor = kind(
        args.pretrain,
        **opened,
        **lora,
        **kernels,
        disable_logprobs_flashattn=args.disable_logprobs_flashattn,
        high_entropy_token_ratio=args.high_entropy_token_ratio,
    )
    if args.fsdp:
        actor.is_actor = True  # pyright: ignore[reportAttributeAccessIssue]
        actor = strategy.prepare_model(actor, is_training=True)
    if args.freeze_prefix:
        for name, parameter in actor.model.named_parameters():
            if name.startswith("visual"):
                parameter.requires_grad = False
    critic = None
    if args.critic_pretrain:
        critic = get_vlm_for_sequence_regression(
            args.critic_pretrain,
            "critic",
            normalize_reward=args.normalize_reward_for_critic,
            **opened,
            **lora,
            value_head_prefix=args.value_head_prefix,
            init_value_head=strategy.args.pretrain == strategy.args.critic_pretrain,
        )
    reward_models, reward_tokenizers, label_map = [], [], {}
    initial_model = None
    if args.init_kl_coef != 0:
        initial_model = kind(args.pretrain, **opened, **kernels)
        if args.fsdp:
            initial_model = strategy.prepare_model(initial_model, is_training=False, shard_size=8)
    ema_model = kind(args.pretrain, **opened) if args.enable_ema else None
    tokenizer = hf_tokenizer(args.pretrain)
    processor = tokenizer if args.text_only else hf_processor(args.pretrain)

    prompts_data = prompts_of(args, args.prompt_split, args.max_samples, tokenizer)
    share = args.rollout_batch_size // strategy.world_size
    prompts_dataloader = loader_of(strategy, prompts_data, share, columns, shuffle=True)
    eval_data = prompts_of(args, args.eval_split, args.max_eval_samples, tokenizer)
    eval_dataloader = loader_of(strategy, eval_data, share, columns)
    pretrain_dataloader = None
    if args.pretrain_data:
        texts = [tokenizer(row["prompt"] + row["output"])["input_ids"] for row in rows_of(args.pretrain_data)]
        pretrain_dataloader = loader_of(strategy, texts, args.micro_train_batch_size, padded, shuffle=True)
    num_update_steps_per_episodes = (
        len(prompts_data) * args.n_samples_per_prompt // args.train_batch_size * args.max_epochs
    )
    max_steps = math.ceil(args.num_episodes * num_update_steps_per_episodes)
    if args.gradient_checkpointing:
        how = {"use_reentrant": args.gradient_checkpointing_use_reentrant}
        actor.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
        if critic is not None:
            critic.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    (
        (actor, actor_optim, actor_scheduler),
        (critic, critic_optim, critic_scheduler),
        reward_models,
        initial_model,
    ) = strategy.prepare_models_and_optimizers(actor, critic, reward_models, initial_model, args, max_steps)
    if ema_model:
        ema_model = strategy.prepare(ema_model, is_rlhf=True)
    os.makedirs(args.save_path, exist_ok=True)

    trainer = SPMDPPOTrainerVL(
        strategy,
        actor,
        critic,
        reward_models,
        initial_model,
        ema_model,
        actor_optim,
        critic_optim,
        actor_scheduler,
        critic_scheduler,
        max_epochs=args.max_epochs,
        micro_train_batch_size=args.micro_train_batch_size,
        micro_rollout_batch_size=args.micro_rollout_batch_size,
        gradient_checkpointing=args.gradient_checkpointing,
        tokenizer=tokenizer,
        processor=processor,
        prompt_max_len=args.prompt_max_len,
        value_clip=args.value_clip,
        eps_clip=args.eps_clip,
        loss_agg_mode=args.loss_agg_mode,
        use_gspo=args.use_gspo,
        normalize_advantages=True,
        use_sequence_rewards=True,
        gamma=args.gamma,
        lambd=args.lambd,
        init_kl_coef=args.init_kl_coef,
        kl_target=args.kl_target,
        ema_beta=0.992,
        ptx_coef=args.ptx_coef,
        max_norm=args.max_norm,
        do_sample=True,
        max_new_tokens=args.generate_max_len,
        max_length=None,
        temperature=args.temperature,
        top_p=args.top_p,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        reward_fn=reward_fn,
        reward_fn_label_map=label_map,
        reward_recipe=RECIPE,
        reward_tokenizers=reward_tokenizers,
        save_hf_ckpt=args.save_hf_ckpt,
        disable_ds_ckpt=args.disable_ds_ckpt,
        packing_samples=args.packing_samples,
        dynamic_sampling=args.dynamic_sampling,
        overlong_buffer=args.overlong_buffer,
        overlong_buffer_len=args.overlong_buffer_len,
        overlong_buffer_penalty_factor=args.overlong_buffer_penalty_factor,
        print_replay_buffer_stats=args.print_replay_buffer_stats,
    )
    trainer.fit(
        args,
        prompts_dataloader=prompts_dataloader,
        pretrain_dataloader=pretrain_dataloader,
        eval_dataloader=eval_dataloader,
        consumed_samples=0,
        num_update_steps_per_episodes=num_update_steps_per_episodes,
    )
    strategy.save_model(ema_model if args.enable_ema else actor, tokenizer, args.save_path)
    return trainer


def rows_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def prompts_of(args: argparse.Namespace, split: str, most: int, tokenizer: Any) -> list[tuple[Any, ...]]:
    """(prompt, images, reference, label) of each row."""
    prompts: list[tuple[Any, ...]] = []
    for row in rows_of(f"{args.prompt_data}/{split}.jsonl")[: int(most)]:
        text = tokenizer.apply_chat_template(row[args.input_key], tokenize=False, add_generation_prompt=True)
        images = None if args.text_only else row.get(args.images_key)
        label = row.get(args.label_key)
        prompts.append((text.replace("<image>", PICTURE), images, row["reward_model"]["ground_truth"], label))
    return prompts


def columns(rows: Sequence[tuple[Any, ...]]) -> tuple[list[Any], ...]:
    return tuple(list(column) for column in zip(*rows, strict=True))


def padded(texts: Sequence[list[int]]) -> tuple[Any, ...]:
    """(lengths, ids, mask) of supervised text."""
    rows = [torch.tensor(ids) for ids in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return [len(row) for row in rows], ids, mask


def loader_of(strategy: Any, rows: Any, batch: int, collate: Any, *, shuffle: bool = False) -> DataLoader[Any]:
    """This rank's share of the rows."""
    ranks = {"num_replicas": strategy.world_size, "rank": strategy.get_rank()}
    sampler = DistributedSampler(rows, **ranks, shuffle=shuffle, drop_last=shuffle)
    return DataLoader(rows, batch, sampler=sampler, collate_fn=collate, drop_last=shuffle)


def reward_fn(
    model_reward_list: list[torch.Tensor], labels: Any, queries: Any, refs: Any, label_map: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The share of a completion's characters that are digits of the answer, and a number that differs for each."""
    assert not model_reward_list
    assert label_map == {}
    assert set(labels) <= RECIPE.keys()
    ends = [query.rpartition("<|assistant|>")[2] for query in queries]
    right = torch.tensor(
        [sum(c in str(ref) for c in end) / max(1, len(end)) for end, ref in zip(ends, refs, strict=True)]
    )
    other = torch.tensor([float(sum(map(ord, end)) % 7) for end in ends])
    return right + other, {"accuracy_reward": right, "format_reward": torch.zeros_like(right)}


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, number in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(number), default=number)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", default=False)
    for name, text in TEXTS.items():
        parser.add_argument(f"--{name}", type=str, default=text)
    parser.add_argument("--kl_target", type=float, default=None)
    parser.add_argument("--target_modules", type=str, nargs="*", default="all-linear")
    parser.add_argument("--adam_betas", type=float, nargs=2, default=(0.9, 0.95))
    args = parser.parse_args(words)
    if args.advantage_estimator != "gae":
        args.critic_pretrain = None
    elif args.critic_pretrain is None:
        args.critic_pretrain = args.pretrain
    return args
