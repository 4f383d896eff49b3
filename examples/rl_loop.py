"""GRPO in one page: the loop of Trivium without its config, buffers and processes.

    python examples/rl_loop.py

A random tiny transformer learns to answer a digit with the next one ("3" -> "4"), from nothing but a reward: about a
minute on one CPU core, offline. Every step rolls out groups of completions with the current policy, rewards them,
trains on them (`loops.train_step`: filter, advantages, updates), and publishes the new weights to the rollout engine.
`trivium run` is this loop with the two halves apart: `loops.explore_loop`, `loops.train_loop`, `loops.follow_weights`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from trivium.algorithms import build_algorithm, presets
from trivium.api import (
    ChatRenderer,
    Group,
    MemoryChannel,
    Message,
    Policy,
    SampleKey,
    Sampling,
    Task,
    TinyModel,
    TorchEngine,
    TorchTrainEngine,
    Trajectory,
    train_step,
)
from trivium.text import hf_tokenizer

DIGITS = "0123456789"
TASKS = [Task(digit, (Message("user", digit),), {"answer": str((int(digit) + 1) % 10)}) for digit in DIGITS]
GROUP_SIZE = 16
SAMPLING = Sampling(max_new_tokens=2)


def reward(completion: str, answer: str) -> float:
    """1 for the answer, 0.1 for any other single digit, else 0."""
    return 1.0 if completion == answer else 0.1 * (len(completion) == 1 and completion in DIGITS)


def rollout_engine(model_dir: Path, renderer: ChatRenderer) -> TorchEngine:
    """Samples completions; requests that come together are batched."""
    config = TorchEngine.Config(max_rows=len(TASKS) * GROUP_SIZE)
    eos = renderer.eos_token_ids
    return TorchEngine(config, model_dir=model_dir, eos_token_ids=eos, decode=renderer.decode, threads=1)


def train_engine(model_dir: Path, steps: int) -> TorchTrainEngine:
    """Holds the policy that is trained, and its optimizer."""
    config = TorchTrainEngine.Config.model_validate(
        {"device": "cpu", "optimizer": {"lr": 3e-3, "schedule": "constant"}}
    )
    engine = TorchTrainEngine(
        config,
        model_dir=model_dir,
        algorithm=build_algorithm(presets.GRPO.configure({"kind": "grpo", "entropy": {"coef": 0.03}})),
        temperature=SAMPLING.temperature,
        max_response_length=SAMPLING.max_new_tokens,
        total_steps=steps,
        seed=0,
        threads=1,
    )
    engine.prepare()
    return engine


async def rollout(engine: TorchEngine, renderer: ChatRenderer, task: Task, version: int) -> Group:
    """One group: several completions of a task, each with its reward. The key makes a completion repeatable."""

    async def trajectory(index: int) -> Trajectory:
        key = SampleKey(0, "train", task.taskset, task.task_id, version, index)
        turn = await Policy(engine, renderer, SAMPLING, key, engine.max_context).generate(task.prompt)
        return Trajectory(index, (turn,), {"answer": reward(turn.text, task.columns["answer"])})

    members = await asyncio.gather(*(trajectory(index) for index in range(GROUP_SIZE)))
    return Group(version * len(TASKS) + TASKS.index(task), task, tuple(members), version=version)


async def train(steps: int, directory: Path) -> list[float]:
    """Trains a new model for so many steps; returns the mean reward of each."""
    model = TinyModel.Config(alphabet=DIGITS, layers=2, hidden=64, heads=2, mlp=64, max_position=32)
    model_dir = TinyModel(model, seed=0).materialize(directory / "model")
    renderer = ChatRenderer(hf_tokenizer(str(model_dir)))
    trainer, engine = train_engine(model_dir, steps), rollout_engine(model_dir, renderer)
    channel, rewards = MemoryChannel(keep=1), list[float]()
    try:
        for step in range(steps):
            groups = await asyncio.gather(*(rollout(engine, renderer, task, step) for task in TASKS))
            metrics = train_step(trainer, groups, trainer.algorithm)
            channel.offer(trainer.version, trainer.export_weights())
            await engine.load(trainer.version, channel.collect(trainer.version))
            rewards.append(metrics["reward/mean"])
            if step % 10 == 0 or step == steps - 1:
                print(f"step {step:3}  reward {rewards[-1]:.2f}  entropy {metrics['train/entropy']:.2f}")
    finally:
        await engine.close()
        trainer.close()
    return rewards


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(train(steps=80, directory=Path(folder)))
