"""What each rank of a test of split layers does; forked processes import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from training_parts import Parts, Reinforce, SquaredError, make_batch
from transformers.distributed import tensor_parallel

from trivium.models.heads.vocabulary_part import VocabularyPart
from trivium.models.weights.filling import local_part
from trivium.training import optim
from trivium.training.batching import count
from trivium.training.distributed.ranks import ALONE, Ranks, join_ranks
from trivium.training.engine import TorchTrainEngine

BATCH = make_batch(advantages=0.5, returns=0.2)
LAYOUTS = {"tensor": {"tensor": 2}, "expert": {"expert": 2}, "both": {"tensor": 2, "expert": 2}}
_PPO = Parts((Reinforce(entropy_coef=0.2), SquaredError()))


@dataclass(frozen=True)
class Step:
    """One update of policy and critic."""

    norms: list[float]
    weights: dict[str, torch.Tensor]


def engine_of(directory: Path, ranks: Ranks = ALONE, **parallel: int) -> TorchTrainEngine:
    config: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_tokens_per_micro_batch": 30}
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate({**config, "parallel": parallel, "optimizer": {"lr": 0.1, "eps": 1.0}}),
        model_dir=directory / "model",
        algorithm=_PPO,
        temperature=0.8,
        max_response_length=32,
        total_steps=10,
        seed=0,
        threads=1,
        ranks=ranks,
    )
    engine.prepare()
    return engine


def step(engine: TorchTrainEngine) -> Step:
    rows = range(engine.ranks.data_rank, len(BATCH), engine.ranks.data_size)
    norms: list[float] = []
    for objective in _PPO.objectives:
        metrics = engine.update(objective.role, BATCH.select([*rows]), objective, count(BATCH, 32))
        norms += [value for key, value in metrics.items() if "grad_norm" in key]
    engine.version += 1
    return Step(norms, {name: tensor.clone() for name, tensor in engine.export_weights()})


def on_ranks(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """Steps by layout, `resumed` ones from the checkpoint of one process, faulty ones by fault, and the part of the
    parameters that this rank holds."""
    done: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        engine = engine_of(directory, join_ranks(**parallel), **parallel)
        parameters = [*engine._learners["policy"].model.parameters()]
        done[f"{name} part"] = sum(local_part(p).numel() for p in parameters) / sum(p.numel() for p in parameters)
        done[name] = step(engine)
        engine.save(directory / f"{size} {name}")
        engine.load(directory / "alone")
        done[f"{name} resumed"] = step(engine)
    for name, (owner, attribute, faulty) in FAULTS.items():
        right = vars(owner)[attribute]
        setattr(owner, attribute, faulty)
        try:
            done[name] = step(engine_of(directory, join_ranks(tensor=2), tensor=2))
        finally:
            setattr(owner, attribute, right)
    return done


def _unless_wide(part: VocabularyPart, values: torch.Tensor, right: Callable[..., Any] = VocabularyPart.sum) -> Any:
    return values if values.dim() == 2 and values.shape[1] > 1 else right(part, values)


class _NotReduced:
    @staticmethod
    def apply(values: torch.Tensor, group: object) -> torch.Tensor:
        return values


def _norm_of_ranks(optimizer: optim.Optimizer) -> torch.Tensor:
    squares = [local_part(p.grad).square().sum() for p in optimizer.parameters.values() if p.grad is not None]
    total = torch.stack(squares).sum()
    torch.distributed.all_reduce(total)
    return total.sqrt()


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "norms of heads get the gradient of a rank's own heads": (
        tensor_parallel.ReplicatedWithGradAllReduce,
        "install_forward",
        lambda style, module, mesh: module,
    ),
    "the head passes on the gradient of a rank's own tokens": (VocabularyPart, "sum", _unless_wide),
    "experts pass on the gradient of a rank's own columns": (tensor_parallel, "_AllReduceBackward", _NotReduced),
    "the gradient norm counts what ranks hold in common once for each": (optim.Optimizer, "_norm", _norm_of_ranks),
}
