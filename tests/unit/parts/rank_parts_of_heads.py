"""What each rank of a test of heads does; forked processes import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from algebra import section
from training_parts import Parts, make_batch

from trivium.algorithms.losses.value_loss import SharedObjective, ValueObjective
from trivium.algorithms.metadata import PolicyLossMetadata, ScoreLossMetadata, resolve_function
from trivium.algorithms.objective import PolicyObjective
from trivium.algorithms.preference.objective import ScoreObjective
from trivium.training.batching import count
from trivium.training.distributed.ranks import join_ranks
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch

CLIP, COEF, AGGREGATE = 0.3, 0.7, "token-mean"
COLUMNS = ("advantages", "old_log_prob", "returns", "values")


def algorithm(trunk: str = "shared") -> Any:
    policy = PolicyObjective(
        *resolve_function("policy_losses", section("policy_losses", "ppo"), PolicyLossMetadata), aggregate=AGGREGATE
    )
    value = ValueObjective(CLIP, AGGREGATE)
    objectives = (value, policy) if trunk == "own" else (SharedObjective(policy, value, COEF),)
    return Parts(objectives, frozenset({"values"}))


def batch_for(engine: TorchTrainEngine) -> Batch:
    """Sequences with the columns that the objectives read; ratios and values on both sides of their clips."""
    batch = make_batch(masked=(2,))
    rng = np.random.default_rng(1)
    names = ("advantages", "returns", "old", "values")
    noise = {name: [rng.normal(size=len(e)) for e in batch.experiences] for name in names}
    old = [row + 0.3 * own for row, own in zip(engine.score(batch, "log_prob"), noise.pop("old"), strict=True)]
    return batch.with_columns(old_log_prob=old, **noise)


def trained(engine: TorchTrainEngine, share: Batch, whole: Batch | None = None) -> dict[str, torch.Tensor]:
    """Weights, head and metrics after two steps."""
    objective = engine.algorithm.objectives[0]
    totals = count(whole or share, 32)
    metrics = {}
    for _ in range(2):
        engine.score(share, "values")
        metrics = engine.update("policy", share, objective, totals)
    done = dict(engine.export_weights())
    model: Any = engine._learners["policy"].model
    for name, tensor in model.value_head.state_dict().items():
        done[f"value_head.{name}"] = getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
    return done | {key: torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()}


def scored(engine: TorchTrainEngine, share: Batch, whole: Batch | None = None) -> dict[str, torch.Tensor]:
    """Weights and metrics of a reward model after two steps."""
    objective = engine.algorithm.objectives[0]
    metrics = {}
    for _ in range(2):
        metrics = engine.update("reward", share, objective, count(whole or share, 32))
    state = engine._learners["reward"].model.state_dict()
    whole_tensors = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in state.items()}
    return whole_tensors | {key: torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()}


def on_ranks(rank: int, size: int, directory: Path, batch: Batch) -> dict[str, dict[str, torch.Tensor]]:
    shares = [[0, 1, 2, 3, 4], [5]], [[0, 1, 2, 3], [4, 5]]
    return {
        "critic": trained(_engine(directory, algorithm()), batch.select(shares[0][rank]), batch),
        "reward model": scored(_engine(directory, scorer()), make_batch().select(shares[1][rank]), make_batch()),
    }


def _engine(directory: Path, parts: Any) -> TorchTrainEngine:
    config: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_tokens_per_micro_batch": 1}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate({**config, "optimizer": {"lr": 1e-2}}),
        model_dir=directory,
        algorithm=parts,
        temperature=0.8,
        max_response_length=32,
        total_steps=10,
        seed=0,
        threads=1,
        ranks=join_ranks(),
    )
    engine.prepare()
    return engine


def scorer() -> Any:
    """A reward model with a learned scale."""
    options = section("score_losses", "hps", scale=10.0, learned=True)
    return Parts((ScoreObjective(*resolve_function("score_losses", options, ScoreLossMetadata), 10.0),))
