"""What each rank of a test of LightRFT's strategies does; forked processes import it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from training_parts import Reinforce, SquaredError
from transformers import AutoModelForCausalLM, get_scheduler

from trivium.foundation.errors import ConfigError
from trivium.frontdoors.lightrft import ActorVL, CriticVL, get_strategy
from trivium.frontdoors.lightrft.objects.checkpoints import load, save
from trivium.frontdoors.lightrft.objects.trainer_engine import Trained, TrainerEngine
from trivium.types import Batch

PROMPT = torch.tensor([[0, 5, 6], [7, 8, 9]])
STEPS = 3


def whole(actor: ActorVL) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.export_weights()}


def on_ranks(rank: int, size: int, path: Path, folder: Path, batch: Batch, first: int = 0) -> dict[str, Any]:
    """Trains policy and critic for some steps of a share of the batch each, with checkpoints of both, from the
    checkpoint of step `first` where that is not 0. What is told is whole, or of all ranks."""
    strategy = get_strategy(Namespace(seed=3, max_norm=1.0))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    actor, average, critic = ActorVL(model), ActorVL(path), CriticVL(path, seed=4)
    average.model.double()
    before = torch.optim.AdamW(actor.parameters(), lr=0.01)  # built before the model is sharded
    scheduler = get_scheduler("linear", before, num_warmup_steps=1, num_training_steps=6)
    shared = CriticVL(actor)
    actor, before, scheduler = strategy.prepare((actor, before, scheduler))
    try:
        strategy.prepare_model(shared, is_training=True)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    critic = strategy.prepare_model(critic, is_training=True)
    actor.gradient_checkpointing_enable()
    after = strategy.create_optimizer(critic, lr=0.01)
    average = strategy.prepare(average)
    how = {"max_norm": 1.0, "max_response_length": 32, "train_sequences": 1 + rank, "score_sequences": 8}
    trained = {"policy": Trained(actor, before, scheduler), "critic": Trained(critic, after)}
    engine = TrainerEngine(strategy, trained, average=average, **how)
    if first:
        assert load(engine, folder, first, ranks=strategy.ranks) == {"consumed_samples": first}
    share = batch if size == 1 else batch.select([row for row in range(len(batch)) if row % size == rank])
    metrics: list[dict[str, float]] = []
    for step in range(first + 1, STEPS + 1):
        metrics.append(engine.update("policy", share, Reinforce()))
        metrics[-1] |= engine.update("critic", share, SquaredError())
        strategy.moving_average(actor, average, 0.9)
        save(engine, folder, step, {"consumed_samples": step}, keep=2, ranks=strategy.ranks)
    strategy.save_model(actor, None, folder / "hf")
    strategy.save_model(critic, None, folder / "hf_critic")
    sequences, attention, _ = actor.generate(PROMPT, do_sample=False, max_new_tokens=4, eos_token_id=2)
    with torch.no_grad():
        log_prob = actor(sequences, 4, attention)
        value = critic(sequences, 4, attention)
    actor.close()
    return {
        "refused": refused,
        "metrics": metrics,
        "weights": whole(actor),
        "average": whole(average),
        "sequences": sequences,
        "log_prob": log_prob,
        "value": value,
        "sum": strategy.all_reduce({"a": rank + 1, "b": torch.tensor([1.0, rank])}, "sum"),
        "mean": strategy.all_reduce(float(rank), "mean"),
        "max": strategy.all_reduce(rank, "max"),
        "gathered": strategy.all_gather(torch.tensor([rank])),
    }
