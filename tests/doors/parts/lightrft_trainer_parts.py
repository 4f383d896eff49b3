"""A tiny actor, its trainer and recorded rollouts, for the tests of LightRFT's trainer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from trivium.frontdoors.lightrft.objects.models.actor import ActorVL
from trivium.frontdoors.lightrft.objects.models.critic import CriticVL
from trivium.frontdoors.lightrft.objects.models.experience import ExperienceVL
from trivium.frontdoors.lightrft.objects.strategy import Strategy, get_strategy
from trivium.frontdoors.lightrft.objects.trainer import PPOTrainerVL
from trivium.loops import train_step
from trivium.text import hf_tokenizer
from trivium.text.tiny import TinyModel
from trivium.types import Group, Message, StopReason, Task, Trajectory, Turn

torch.set_num_threads(1)

PROMPTS, SAMPLES = 4, 4
DIGITS = "0123456789"


def tiny_model(directory: Path) -> Path:
    """A random model that reads and writes digits."""
    sizes = TinyModel.Config(alphabet=DIGITS, layers=1, hidden=16, heads=2, mlp=16, max_position=32)
    return TinyModel(sizes, seed=0).materialize(directory)


def make_args(folder: Path, **changes: Any) -> Namespace:
    """What `fit` reads."""
    known: dict[str, Any] = {
        "num_episodes": 1,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": SAMPLES,
        "train_batch_size": PROMPTS * SAMPLES,
        "advantage_estimator": "group_norm",
        "logging_steps": 1,
        "eval_steps": -1,
        "save_steps": -1,
        "ckpt_path": str(folder),
    }
    return Namespace(**{**known, **changes})


def parity(_models: Any, _labels: Any, queries: Sequence[str], refs: Sequence[str], _map: Any) -> Any:
    """1 for a completion that begins with an even digit, else 0."""
    first = [query.split("<|assistant|>")[1][:1] for query in queries]
    rewards = torch.tensor([float(digit in "02468" and digit != "") for digit in first])
    return rewards, {"accuracy_reward": rewards}


def make_trainer(
    model: Path | torch.nn.Module,
    args: Namespace,
    *,
    cls: type[PPOTrainerVL] = PPOTrainerVL,
    lr: float = 1e-2,
    reference: bool = False,
    critic: bool = False,
    ema: bool = False,
    directory: Path | None = None,
    strategy: Strategy | None = None,
    critic_and_optimizer: tuple[torch.nn.Module, torch.optim.Optimizer] | None = None,
    **further: Any,
) -> PPOTrainerVL:
    """A trainer of the model; `directory` has its tokenizer, where the model is given."""
    strategy = strategy or get_strategy(args)
    models = {"actor": ActorVL(model)}
    source = directory or model
    assert isinstance(source, Path)
    double = isinstance(model, torch.nn.Module) and model.dtype == torch.float64
    other = (lambda: load_double(source)) if double else (lambda: source)
    if reference:
        models["reference"] = ActorVL(other())
    if ema:
        models["ema"] = ActorVL(other())
    judge = CriticVL(other()) if critic else None
    optimizers = [None if each is None else strategy.create_optimizer(each, lr=lr) for each in (models["actor"], judge)]
    prepared = strategy.prepare((models["actor"], optimizers[0], None), (judge, optimizers[1], None))
    if critic_and_optimizer is not None:
        prepared[1], optimizers[1] = critic_and_optimizer[:1], critic_and_optimizer[1]
    reference_model, ema_model = models.get("reference"), models.get("ema")
    if reference_model is not None:
        reference_model = strategy.prepare(reference_model)
    given: dict[str, Any] = {"max_new_tokens": 2, "prompt_max_len": 16, "reward_fn": parity, **further}
    return cls(
        strategy,
        prepared[0][0],
        prepared[1][0],
        None,
        reference_model,
        ema_model,
        optimizers[0],
        optimizers[1],
        None,
        None,
        tokenizer=hf_tokenizer(str(source)),
        **given,
    )


def load_double(directory: Path) -> torch.nn.Module:
    """The model in float64."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


def prompts(count: int = 8) -> list[tuple[Any, ...]]:
    """Rows (prompt, images, reference, label)."""
    return [(f"<|user|>{number}<|end|><|assistant|>", None, str(number), "rule") for number in range(count)]


def collate(rows: list[tuple[Any, ...]]) -> tuple[list[Any], ...]:
    return tuple(list(column) for column in zip(*rows, strict=True))


def loader(count: int = 8, batch_size: int = PROMPTS, *, shuffle: bool = True) -> DataLoader[Any]:
    """Prompts as a user's script loads them."""
    return DataLoader(prompts(count), batch_size=batch_size, shuffle=shuffle, collate_fn=collate)  # pyright: ignore


def recorded(seed: int = 0, members: int = SAMPLES) -> list[Group]:
    """Groups of random completions with rewards, as an engine would have sampled them."""
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    for number in range(PROMPTS):
        prompt = rng.integers(5, 15, 3 + number % 2)
        trajectories: list[Trajectory] = []
        for index in range(members):
            tokens = rng.integers(5, 15, rng.integers(2, 6))
            log_prob = -rng.random(len(tokens)) - 1
            turn = Turn(prompt, tokens, log_prob, np.zeros(len(tokens)), StopReason.EOS, "text")
            trajectories.append(Trajectory(index, (turn,), {"reward": float(rng.normal())}))
        task = Task(str(number), (Message("user", "prompt"),))
        groups.append(Group(number, task, tuple(trajectories)))
    return groups


def experiences_of(trainer: PPOTrainerVL, groups: Sequence[Group], size: int) -> list[ExperienceVL]:
    """The experiences that a step of `fit` makes of these groups."""
    made: list[ExperienceVL] = []
    algorithm = trainer.step_algorithm(
        lambda batch: made.extend(trainer.experience_maker.experiences(batch, groups, size))
    )
    train_step(trainer.engine, groups, algorithm)
    return made


def fill(trainer: PPOTrainerVL, groups: Sequence[Group]) -> None:
    """The replay buffer gets these groups, as `fit` fills it."""
    for experience in experiences_of(trainer, groups, trainer.micro_rollout_batch_size):
        trainer.replay_buffer.append(experience)


def filled(model: Path | torch.nn.Module, args: Namespace, **further: Any) -> PPOTrainerVL:
    """A trainer whose replay buffer has the recorded groups. The arguments are those of `make_trainer`."""
    trainer = make_trainer(model, args, **further)
    fill(trainer, recorded())
    return trainer


def weights(trainer: PPOTrainerVL) -> dict[str, torch.Tensor]:
    """Copies of the actor's weights."""
    return {name: tensor.clone() for name, tensor in trainer.actor.export_weights()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights."""
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)
