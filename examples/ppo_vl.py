"""PPO of a vision-language model with LightRFT's objects: strategy, actor, critic, reward function, data loaders.

    python examples/ppo_vl.py --dir runs/ppo_vl

A tiny model from random weights learns to name the color of a shape, by its first letter: about two minutes on two CPU
cores, offline.
Killed and started again, it continues from its last checkpoint. Under `torchrun --nproc-per-node 2` the same script
trains on two ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_scheduler

from trivium.api import DrawnTasks, TinyVisionModel
from trivium.frontdoors.lightrft import ActorVL, CriticVL, PPOTrainerVL, Strategy, get_strategy
from trivium.text import hf_processor, hf_tokenizer

PROMPT = "<|user|><|vision_start|><|image_pad|><|vision_end|>color?<|end|><|assistant|>"
Row = tuple[str, bytes, str, str]


def options() -> argparse.Namespace:
    """The attributes of `args` that matter here, with `--dir` for all that is written."""
    parser = argparse.ArgumentParser(description="PPO of a tiny vision-language model")
    parser.add_argument("--dir", type=Path, default=Path("runs/ppo_vl"))
    parser.add_argument("--num_episodes", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=960, help="pictures to train on")
    parser.add_argument("--held_out", type=int, default=120, help="pictures to evaluate on")
    parser.add_argument("--rollout_batch_size", type=int, default=32)
    parser.add_argument("--n_samples_per_prompt", type=int, default=4)
    parser.add_argument("--train_batch_size", type=int, default=64)
    parser.add_argument("--advantage_estimator", default="gae")
    parser.add_argument("--kl_estimator", default="k3")
    parser.add_argument("--eval_steps", type=int, default=10)
    parser.add_argument("--save_steps", type=int, default=10)
    parser.add_argument("--logging_steps", type=int, default=1)
    parser.add_argument("--max_ckpt_num", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.ckpt_path, args.load_checkpoint = str(args.dir / "checkpoints"), True
    return args


def tiny_model(directory: Path) -> Path:
    """A random vision-language model with its tokenizer and processor."""
    model = TinyVisionModel.Config(
        alphabet="rgbywclo? ",
        layers=2,
        hidden=32,
        heads=2,
        mlp=64,
        max_position=32,
        vision_layers=1,
        vision_hidden=32,
        vision_heads=2,
    )
    return TinyVisionModel(model, seed=0).materialize(directory)


def pictures(count: int, part: str) -> list[Row]:
    """Rows (prompt, image, reference, label)."""
    config = DrawnTasks.Config.model_validate(
        {"kind": "drawings", "questions": ["color"], "count": count, "part": part}
    )
    tasks = DrawnTasks(config, name=part, seed=0)
    return [
        (PROMPT, task.prompt[0].media[0].data, task.columns["answer"][0], "color")
        for task in map(tasks.__getitem__, range(count))
    ]


def columns(rows: Sequence[Row]) -> tuple[list[Any], ...]:
    """A batch: prompts, images, references, labels."""
    return tuple(list(column) for column in zip(*rows, strict=True))


def loader(strategy: Strategy, rows: Sequence[Row], batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
    """This rank's share of the rows. A loader that shuffles drops what is less than a batch."""
    sampler = DistributedSampler(
        rows,  # pyright: ignore[reportArgumentType]
        num_replicas=strategy.world_size,
        rank=strategy.get_rank(),
        shuffle=shuffle,
        drop_last=shuffle,
    )
    return DataLoader(rows, batch_size, sampler=sampler, collate_fn=columns, drop_last=shuffle)  # pyright: ignore


def reward_fn(
    model_reward_list: list[torch.Tensor],
    labels: list[str],
    queries: list[str],
    refs: list[str],
    label_map: dict[str, int] | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """1 for the right letter, and 0.1 for the first letter of any color."""
    answers = [query.split("<|assistant|>")[-1][:1] for query in queries]
    right = torch.tensor([float(answer == ref) for answer, ref in zip(answers, refs, strict=True)])
    color = torch.tensor([float(answer != "" and answer in "rgbyw") for answer in answers])
    return 0.9 * right + 0.1 * color, {"accuracy_reward": right, "format_reward": color}


class Trainer(PPOTrainerVL):
    """Prints a line for each step."""

    def ppo_train(self, global_steps: int = 0) -> dict[str, float]:
        status = super().ppo_train(global_steps)
        numbers = "  ".join(f"{name} {status[name]:.3f}" for name in ("step_reward_mean", "policy_loss", "critic_loss"))
        self.strategy.print(f"step {global_steps:3}  {numbers}")
        return status


def build(args: argparse.Namespace, strategy: Strategy, model: Path, tokenizer: Any) -> Trainer:
    """The trainer and everything it is made of."""
    actor, critic, reference = ActorVL(model), CriticVL(model), ActorVL(model)
    actor_optim = strategy.create_optimizer(actor, lr=3e-3, betas=(0.9, 0.98))
    critic_optim = strategy.create_optimizer(critic, lr=3e-3, betas=(0.9, 0.98))
    actor_scheduler, critic_scheduler = (
        get_scheduler("constant_with_warmup", each, num_warmup_steps=5) for each in (actor_optim, critic_optim)
    )
    strategy.prepare((actor, actor_optim, actor_scheduler), (critic, critic_optim, critic_scheduler), reference)
    return Trainer(
        strategy,
        actor,
        critic,
        None,
        reference,
        None,
        actor_optim,
        critic_optim,
        actor_scheduler,
        critic_scheduler,
        init_kl_coef=1e-3,
        micro_train_batch_size=64,
        micro_rollout_batch_size=64,
        tokenizer=tokenizer,
        processor=hf_processor(model),
        prompt_max_len=48,
        reward_fn=reward_fn,
        do_sample=True,
        max_new_tokens=1,
    )


def main() -> None:
    """Trains, and says how many pictures of the held-out ones it names right."""
    args = options()
    torch.set_num_threads(1)
    model = tiny_model(args.dir / "model")
    strategy = get_strategy(args)
    trainer = build(args, strategy, model, hf_tokenizer(model))
    share = args.rollout_batch_size // strategy.world_size
    train = loader(strategy, pictures(args.prompts, "train"), share, shuffle=True)
    held_out = loader(strategy, pictures(args.held_out, "holdout"), 40, shuffle=False)
    trainer.fit(args, train, None, held_out, num_update_steps_per_episodes=len(train))
    result = trainer.evaluate(held_out, 0)
    strategy.print(f"held out: right {result['accuracy_reward_mean']:.2f} of {result['num_samples']:.0f}")
    trainer.close()


if __name__ == "__main__":
    main()
