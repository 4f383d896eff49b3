"""Checkpoints of a role, and model directories. Checkpoint writes are atomic; files do not depend on the rank count.

`<directory>/<tag>/` holds `weights.safetensors` (or several numbered files), `optimizer`, `ema`, and `state.json` with
the scheduler, the optimizer's settings and the client state. `manifest.json` has the checkpoint's number and file
hashes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from trivium.checkpoint.atomic import MANIFEST, commit, discard, manifest_files, staging_directory, verify_files
from trivium.errors import DataError, RunDirError
from trivium.models.heads.trained_models import LanguageModel, ValueModel
from trivium.models.weights.filling import local_part, read_part
from trivium.models.weights.lora import adapter_parameters, has_adapter
from trivium.training.distributed.ranks import Ranks
from trivium.training.optim import Optimizer
from trivium.training.snapshot import TensorFile, read_tensors, take_snapshot, weight_files
from trivium.types import SaveStrategy

_STATE = "state.json"
_GIB = 2**30
T = TypeVar("T")


class Stateful(Protocol):
    """The state interface of a torch scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass
class Role:
    """The objects that a checkpoint saves and restores."""

    model: LanguageModel | ValueModel
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    ema: LanguageModel | ValueModel | None = None
    client_state: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def named(self) -> Optimizer | None:
        """The optimizer with its state by parameter name."""
        return None if self.optimizer is None else Optimizer(network_of(self.model), self.optimizer)


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


def save(
    role: Role, directory: Path, tag: str, ranks: Ranks, *, max_num: int | None = 3, max_mem: float | None = None
) -> Path:
    """Writes a checkpoint, then removes all but the newest `max_num`, and the oldest beyond a total of `max_mem` GiB.

    None disables a limit. All ranks must call it. Raises DataError for a state that is not valid JSON.
    """
    state = _state_of(role)
    optimizer = role.named
    files = [TensorFile("weights", trained_tensors(role.model))]
    files += [] if optimizer is None else [TensorFile("optimizer", optimizer.state())]
    files += [] if role.ema is None else [TensorFile("ema", trained_tensors(role.ema))]

    def finish(path: Path) -> None:
        (path / _STATE).write_text(json.dumps(state, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def begin() -> str:
        for unfinished in directory.glob(".*.writing"):  # left by a killed process
            shutil.rmtree(unfinished)
        return str(staging_directory(directory / tag))

    staging = Path(ranks_agree(ranks, begin))
    take_snapshot(files, ranks, SaveStrategy.UNRESTRICTED, finish, copy=False).write(staging)

    def conclude() -> None:
        present = checkpoints(directory)
        commit(staging, directory / tag, 1 + max(present.values(), default=0))
        prune(directory, max_num, max_mem)

    ranks_agree(ranks, conclude)
    return directory / tag


def load(role: Role, directory: Path, tag: str | None, ranks: Ranks) -> tuple[Path, dict[str, Any]]:
    """Loads the checkpoint of a tag, or the newest, into the role. Returns its path and the client state.

    All ranks must call it. Raises RunDirError if the checkpoint is missing, damaged, or of a different model.
    """
    path = Path(ranks_agree(ranks, lambda: str(_verified(directory, tag))))
    _copy(path, "weights", trained_tensors(role.model))
    if role.ema is not None:
        _copy(path, "ema", trained_tensors(role.ema))
    state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    optimizer = role.named
    if optimizer is not None:
        if state["groups"] is None:
            raise RunDirError(f"the optimizer of {path}", "it was saved without one", "load the model alone")
        optimizer.restore(read_tensors(path, "optimizer"))
        assert role.optimizer is not None
        own = role.optimizer.param_groups
        if len(own) != len(state["groups"]):
            raise RunDirError(f"the optimizer of {path}", "it had other groups of parameters", "build it as it was")
        for group, saved in zip(own, state["groups"], strict=True):
            group.update(saved)
    if role.scheduler is not None and state["scheduler"] is not None:
        role.scheduler.load_state_dict(state["scheduler"])
    return path, state["client_state"]


def checkpoints(directory: Path) -> dict[str, int]:
    """Returns tag -> number of the complete checkpoints in a directory, oldest first."""
    numbers: dict[str, int] = {}
    for manifest in directory.glob(f"*/{MANIFEST}"):
        manifest_files(manifest.parent)
        numbers[manifest.parent.name] = int(json.loads(manifest.read_text(encoding="utf-8"))["step"])
    return dict(sorted(numbers.items(), key=lambda item: item[1]))


def prune(directory: Path, max_num: int | None, max_mem: float | None) -> None:
    """Removes the oldest checkpoints beyond the limits. Always keeps the newest."""
    present = [*checkpoints(directory)]
    sizes = {tag: sum(int(e["bytes"]) for e in manifest_files(directory / tag).values()) for tag in present}
    while len(present) > 1:
        too_many = max_num is not None and len(present) > max_num
        too_large = max_mem is not None and sum(sizes[tag] for tag in present) > max_mem * _GIB
        if not (too_many or too_large):
            return
        discard(directory / present.pop(0))


def save_model(
    model: LanguageModel | ValueModel, directory: Path, ranks: Ranks, companions: Callable[[Path], None]
) -> None:
    """Writes a directory that transformers can load, with the adapter merged.

    Other files in the directory stay. `companions` writes further files, such as the tokenizer. All ranks must call it.
    """
    staging = Path(ranks_agree(ranks, lambda: str(staging_directory(directory))))
    take_snapshot(weight_files(model, ""), ranks, SaveStrategy.UNRESTRICTED, companions, copy=False).write(staging)

    def move() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        new = {path.name for path in staging.iterdir()}
        for path in sorted(staging.iterdir()):
            os.replace(path, directory / path.name)
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
            result[1] = error
            torch.distributed.broadcast_object_list([None, f"{type(error).__name__}: {error}"], src=0)
            raise
    if ranks.size > 1:
        torch.distributed.broadcast_object_list(result, src=0)
    if result[1] is not None:
        raise RunDirError("what the first rank does for all", str(result[1]), "fix the cause and run it again")
    return result[0]


def _verified(directory: Path, tag: str | None) -> Path:
    present = checkpoints(directory)
    if not present or (tag is not None and tag not in present):
        raise RunDirError(
            f"the checkpoint {tag or ''} of {directory}".replace("  ", " "),
            f"complete ones: {', '.join(present) or 'none'}",
            "name one of them, or start without load_checkpoint",
        )
    chosen = tag or [*present][-1]
    verify_files(directory / chosen, present[chosen])
    return directory / chosen


def _state_of(role: Role) -> dict[str, Any]:
    groups = None
    if role.optimizer is not None:
        groups = [{k: v for k, v in g.items() if _plain(v)} for g in role.optimizer.param_groups]
    scheduler = None if role.scheduler is None else role.scheduler.state_dict()
    state = {"groups": groups, "scheduler": scheduler, "client_state": role.client_state}
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(
            "a scheduler and a client state that a checkpoint can hold", str(error), "keep to JSON values"
        ) from error


def _plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(each) for each in value)  # pyright: ignore[reportUnknownVariableType]
    return value is None or isinstance(value, bool | int | float | str)


@torch.no_grad()
def _copy(path: Path, stem: str, own: Mapping[str, Tensor]) -> None:
    """Copies the saved tensors into the model's tensors."""
    source = read_tensors(path, stem)
    for name, entry in source.entries.items():
        if name not in own or tuple(own[name].shape) != entry.shape:
            raise RunDirError(f"{stem} of {path}", f"{name} does not fit the model", "resume with the same model")
        read_part(own[name], partial(source.copy_rows, name), local_part(own[name]))
    missing = sorted(own.keys() - source.entries.keys())
    if missing:
        raise RunDirError(f"{stem} of {path}", f"no {missing[0]} there", "resume with the same model")
