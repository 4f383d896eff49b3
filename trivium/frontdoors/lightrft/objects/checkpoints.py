"""Checkpoints of a trainer, and model directories: the core's snapshots, which do not depend on the number of ranks.

A checkpoint `step-000N` has the files of the train engine, and `state.json` with the client state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trivium.checkpoint.store import CHECKPOINT, CheckpointStore
from trivium.foundation.atomic import commit, discard_incomplete, folder_name, staging_directory
from trivium.foundation.errors import DataError, RunDirError
from trivium.models.heads.trained_models import LanguageModel, ValueModel
from trivium.models.weights.filling import local_part, read_part
from trivium.models.weights.lora import adapter_parameters, has_adapter
from trivium.protocols import TrainEngine
from trivium.training.distributed.ranks import Ranks
from trivium.training.snapshot import read_tensors, take_snapshot, weight_files
from trivium.types import SaveStrategy

_CLIENT = "client_state"
_STATE = "state.json"
T = TypeVar("T")


def network_of(model: LanguageModel | ValueModel) -> nn.Module:
    """Returns the module whose parameters an optimizer has: those of a value model include its head."""
    return model if isinstance(model, ValueModel) else model.module


def trained_tensors(model: LanguageModel | ValueModel) -> dict[str, Tensor]:
    """Returns the tensors to save, possibly sharded: all weights; only adapter and head if the model has an adapter."""
    if not has_adapter(model.module):
        state = network_of(model).state_dict()
        return {name: state[name] for name in model.names}
    head = model.state_dict() if isinstance(model, ValueModel) else {}
    heads = {name: head[name] for name in head if name.startswith("value_head.")}
    return {**adapter_parameters(model.module), **heads}


@torch.no_grad()
def read_into(tensors: Mapping[str, Tensor], directory: Path, stem: str) -> None:
    """Copies the tensors that were saved under a stem into these. Raises RunDirError if they are of another model."""
    source = read_tensors(directory, stem)
    for name, entry in source.entries.items():
        if name not in tensors or tuple(tensors[name].shape) != entry.shape:
            raise RunDirError(f"{stem} of {directory}", f"{name} does not fit the model", "resume with the same model")
        read_part(tensors[name], partial(source.copy_rows, name), local_part(tensors[name]))
    missing = sorted(tensors.keys() - source.entries.keys())
    if missing:
        raise RunDirError(f"{stem} of {directory}", f"no {missing[0]} there", "resume with the same model")


def save(
    engine: TrainEngine, directory: Path, step: int, client_state: Mapping[str, Any], *, keep: int, ranks: Ranks
) -> None:
    """Writes the checkpoint of a step, then removes all but the newest `keep`. All ranks must call it.

    Raises DataError for a state that is not valid JSON.
    """
    final, state = directory / folder_name(CHECKPOINT, step), plain_json({_CLIENT: dict(client_state)})
    staging = Path(ranks_agree(ranks, lambda: str(staging_directory(final))))
    engine.save(staging)

    def conclude() -> None:
        (staging / _STATE).write_text(json.dumps(state, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        # The new checkpoint is complete before an old one goes. LightRFT deletes first: with max_ckpt_num 1, a crash
        # while it saves leaves none.
        commit(staging, final, step)
        CheckpointStore(directory, keep=keep).prune()

    ranks_agree(ranks, conclude)


def refuse_newer(directory: Path, step: int, *, ranks: Ranks) -> None:
    """Raises RunDirError if the directory has checkpoints of later steps than this one: with them, `save` would remove
    the new checkpoints instead of those. All ranks must call it."""

    def check() -> None:
        newer = [saved for saved in CheckpointStore(directory).steps() if saved > step]
        if newer:
            raise RunDirError(
                f"save checkpoints behind step {step} in {directory}",
                f"it has later ones, of steps {newer}",
                "name another ckpt_path, move these away, or continue from the newest with load_checkpoint",
            )

    ranks_agree(ranks, check)


def load(engine: TrainEngine, directory: Path, consumed_samples: int, *, ranks: Ranks) -> dict[str, Any]:
    """Loads the newest checkpoint, or the newest with this number of consumed prompts. Returns its client state, {}
    without such a checkpoint. All ranks must call it.

    Raises RunDirError if the checkpoint is damaged, or of another model.
    """

    def newest() -> tuple[str, dict[str, Any]] | None:
        discard_incomplete(directory, CHECKPOINT)  # left by a killed process
        store = CheckpointStore(directory)
        for step in reversed(store.steps()):
            checkpoint = store.open(step)
            state = checkpoint.state.get(_CLIENT)
            if not isinstance(state, dict):
                raise RunDirError(
                    f"the client state of {checkpoint.path}",
                    f"{_STATE} has none",
                    "name the folder of a trainer's checkpoints",
                )
            if consumed_samples in (0, state.get("consumed_samples")):
                return str(checkpoint.path), state
        return None

    chosen = ranks_agree(ranks, newest)
    if chosen is None:
        return {}
    path, state = chosen
    engine.load(Path(path))
    return state


def save_model(
    model: LanguageModel | ValueModel, directory: Path, ranks: Ranks, companions: Callable[[Path], None]
) -> None:
    """Writes a directory that transformers can load, with the adapter merged.

    Other files in the directory stay. `companions` writes further files, such as the tokenizer. All ranks must call it.
    """
    staging = Path(ranks_agree(ranks, lambda: str(staging_directory(directory))))
    # No copy: it is written before training continues.
    take_snapshot(weight_files(model, ""), ranks, SaveStrategy.UNRESTRICTED, companions, copy=False).write(staging)

    def move() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        new = {path.name for path in staging.iterdir()}
        for path in sorted(staging.iterdir()):
            os.replace(path, directory / path.name)
        # transformers prefers model.safetensors to an index of shards, so a file of the model before would win.
        for stale in directory.glob("model*.safetensors*"):
            if stale.name not in new:
                stale.unlink()
        shutil.rmtree(staging)

    ranks_agree(ranks, move)


def ranks_agree(ranks: Ranks, act: Callable[[], T]) -> T:
    """Runs `act` on the first rank. Returns its result, or raises its error, on every rank."""
    result: list[Any] = [None, None]
    if ranks.rank == 0:
        try:
            result[0] = act()
        except Exception as error:
            if ranks.size == 1:
                raise
            # Before the error is raised: the other ranks wait for this broadcast. It carries text, because not every
            # exception can be pickled.
            torch.distributed.broadcast_object_list([None, f"{type(error).__name__}: {error}"], src=0)
            raise
    if ranks.size > 1:
        torch.distributed.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise RunDirError("what the first rank does for all", str(result[1]), "fix the cause and run it again")
    return result[0]


def plain_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state as it will be read again. Raises DataError if it is not valid JSON."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(
            "a scheduler and a client state that a checkpoint can hold", str(error), "keep to JSON values"
        ) from error
