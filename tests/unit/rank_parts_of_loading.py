"""What each rank of a test of loading does; forked processes import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training_parts import Parts, Reinforce, make_batch

from trivium.models.filling import local_part
from trivium.models.lora import LoraConfig
from trivium.training.engine import TorchTrainEngine
from trivium.training.ranks import Ranks, join_ranks


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


def opened(rank: int, size: int, directories: dict[str, Path], adapter: LoraConfig | None) -> dict[str, Any]:
    """The whole weights of each model, and its log-probabilities."""
    batch, results = make_batch(), dict[str, Any]()
    for name, directory in directories.items():
        engine = engine_of(directory, join_ranks(), lora=None if name != "adapter" else adapter)
        exported = {key: tensor.clone() for key, tensor in engine.export_weights()}
        results[name] = exported, engine.score(batch.select([rank]), "log_prob")
    return results


def refused(rank: int, size: int, directories: dict[str, Path]) -> dict[str, str]:
    """The error of each."""
    errors = dict[str, str]()
    for name, directory in directories.items():
        try:
            engine_of(directory, join_ranks())
        except Exception as error:
            errors[name] = f"{type(error).__name__}\n{error}"
    return errors


def peak(rank: int, size: int, small: Path, large: Path) -> dict[str, int]:
    """Bytes that opening a model adds at its peak, that it keeps, and that its largest tensor has."""
    ranks = join_ranks()
    engine_of(small, ranks)  # imports what it takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _status("VmRSS")
    module = engine_of(large, ranks)._learners["policy"].model.module
    parameters = [*module.parameters()]
    return {
        "peak": _status("VmHWM") - before,
        "kept": sum(local_part(each).nbytes for each in parameters),
        "largest": max(each.numel() * each.itemsize for each in parameters),
        "torch": torch.get_num_threads(),
    }


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
