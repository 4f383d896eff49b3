"""What each rank of a test of loading does; forked processes import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from sync_parts import memory_rise
from training_parts import Parts, Reinforce, make_batch

from trivium.engines.vllm import weight_files
from trivium.foundation.errors import DataError
from trivium.models.weights.filling import local_part
from trivium.models.weights.section import LoraConfig
from trivium.models.weights.stream import Described
from trivium.training.distributed.ranks import Ranks, join_ranks
from trivium.training.engine import TorchTrainEngine
from trivium.types import Batch

BUCKET = 2**23
"""Bytes of a file for vLLM here."""


def engine_of(directory: Path, ranks: Ranks, **config: Any) -> TorchTrainEngine:
    engine = TorchTrainEngine(
        TorchTrainEngine.Config.model_validate({"device": "cpu", **config}),
        model_dir=directory,
        algorithm=Parts((Reinforce(),)),
        temperature=1.0,
        max_response_length=32,
        total_steps=10,
        seed=0,
        threads=1,
        ranks=ranks,
    )
    engine.prepare()
    return engine


def on_rank(
    rank: int, size: int, large: Path, fitting: dict[str, Path], damaged: dict[str, Path], adapter: LoraConfig
) -> dict[str, Any]:
    """What the tests look at, of one rank."""
    ranks, batch = join_ranks(), make_batch().select([rank])
    models = {
        name: _opened(path, batch, ranks, adapter if name == "adapter" else None) for name, path in fitting.items()
    }
    return {
        "models": models,
        "peak": _peak(large, ranks),
        "refused": {name: _error(path, ranks) for name, path in damaged.items()},
    }


def _opened(directory: Path, batch: Batch, ranks: Ranks, adapter: LoraConfig | None) -> Any:
    """A model's whole weights, and its log-probabilities."""
    engine = engine_of(directory, ranks, lora=adapter)
    exported = {key: tensor.clone() for key, tensor in engine.export_weights()}
    return exported, engine.score(batch, "log_prob")


def _error(directory: Path, ranks: Ranks) -> str:
    try:
        engine_of(directory, ranks)
    except DataError as error:
        return str(error)
    return ""


def _peak(large: Path, ranks: Ranks) -> dict[str, int]:
    """Bytes that opening a model adds at its peak, that it keeps, and that its largest tensor has; and those that
    writing its weights for vLLM adds on this rank, which the first one does."""
    rise = memory_rise()
    engine = engine_of(large, ranks)
    parameters = [*engine._learners["policy"].model.module.parameters()]
    peak, rise = rise(), memory_rise()
    weights = cast(Described, engine.offered_weights())
    if ranks.rank == 0:
        weight_files.BUCKET_BYTES = BUCKET
        files = weight_files.WeightFiles(large)
        written = files.files(files.write(weights, large.with_name("for-vllm")))
    else:
        written = [name for name, _ in weights]
    return {
        "peak": peak,
        "kept": sum(local_part(each).nbytes for each in parameters),
        "largest": max(each.numel() * each.itemsize for each in parameters),
        "written": rise(),
        "files": len(written),
    }
