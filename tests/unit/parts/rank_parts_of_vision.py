"""What each rank of a test of images does; forked processes import it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from training_parts import Parts, Reinforce, SquaredError

from trivium.models.heads.loss import LossDenominators
from trivium.training.batching import count
from trivium.training.distributed.ranks import join_ranks
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch

_ALL = Parts((Reinforce(), SquaredError()), frozenset({"old", "values"}))


def on_ranks(rank: int, size: int, directories: dict[str, Path], batches: dict[str, Batch]) -> dict[str, list[float]]:
    """Gradient norms by family and what is trained, of steps with one micro-batch a sequence; with `/sequence`, by
    ranks that share every sequence."""
    said: dict[str, list[float]] = {}
    for family, which in (("qwen3_vl", "trained"), ("qwen3_vl", "frozen"), ("llava", "projector")):
        rng = np.random.default_rng(0)
        batch = batches[family]
        columns = {name: [1 + rng.normal(size=len(e)) for e in batch.experiences] for name in ("advantages", "returns")}
        batch = batch.with_columns(**columns)
        totals = count(batch, 32)
        # The second rank has the text alone, the first all the images.
        share = batch if size == 1 else batch.select([[0, 2, 3], [1]][rank])
        said[f"{family}/{which}"] = _norms(directories[family], share, totals, which)
        if size > 1 and which == "trained":
            said[f"{family}/trained/sequence"] = _norms(directories[family], batch, totals, "trained", sequence=2)
    return said


def _norms(path: Path, share: Batch, totals: LossDenominators, which: str, sequence: int = 1) -> list[float]:
    config: dict[str, object] = {
        "device": "cpu",
        "dtype": "float64",
        "max_tokens_per_micro_batch": 1,
        "vision_tower": which,
    }
    config["gradient_checkpointing"] = which == "projector"
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate({**config, "optimizer": {"lr": 1e-2}, "sequence_parallel": sequence}),
        model_dir=path,
        algorithm=_ALL,  # pyright: ignore[reportArgumentType]
        temperature=0.8,
        max_response_length=32,
        total_steps=2,
        seed=0,
        threads=1,
        ranks=join_ranks(sequence=sequence),
    )
    engine.prepare()
    norms: list[float] = []
    for objective in _ALL.objectives if which == "trained" else _ALL.objectives[:1]:
        engine.score(share, "old" if objective.role == "policy" else "values")
        metrics = engine.update(objective.role, share, objective, totals)
        norms.append(next(value for key, value in metrics.items() if key.startswith("train/grad_norm/")))
    return norms
