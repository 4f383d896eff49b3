"""Checkpoints of a train engine: safetensors files of bounded size, each written by one of the ranks.

Only the sizes of the tensors determine the files, so they do not depend on the number of ranks, and any number of
ranks can read them. The files of a model are a plain Hugging Face directory.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from trivium.foundation.atomic import MANIFEST, atomic_write, make_unless_staged
from trivium.foundation.errors import RoleFailed, RunDirError
from trivium.models.heads.trained_models import LanguageModel, ValueModel
from trivium.models.heads.value_head import VALUE_HEAD
from trivium.models.placement import narrowed
from trivium.models.weights.filling import local_part
from trivium.models.weights.lora import base_state, has_adapter, merged_dtype, merged_state, merged_tensor
from trivium.models.weights.saved_tensors import SafetensorsFiles
from trivium.models.weights.stream import type_name
from trivium.protocols import TensorSpec
from trivium.training.distributed.fsdp import full_tensor
from trivium.training.distributed.ranks import GLOO, Ranks
from trivium.types import SaveStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 2**31
"""The largest size of a file, unless a single tensor is larger."""
DEADLINE_S = 3600.0
"""The longest time that the ranks wait for each other to write their files."""
_INDEX = "model.safetensors.index.json"
# Files of a model directory that are not copied into a checkpoint: those that the checkpoint has in its own version,
# and the weights of before training in other formats.
_WRITTEN_BY_US = ("*.safetensors", "*.safetensors.index.json", "config.json")
_OTHER_WEIGHTS = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf")
_BEAT_S, _SILENT_S, _POLL_S = 0.5, 120.0, 0.05
"""The interval of progress reports of a background save; the longest silence; the interval of reading reports."""

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TensorFile:
    """Tensors that are saved together: `<stem>.safetensors`, or several numbered files if they are large."""

    stem: str
    """Path in the checkpoint, without the suffix."""
    tensors: Named
    """The tensors by name; sharded in a sharded model."""
    model: PreTrainedModel | None = None
    """The model of these weights, if any. transformers can load its directory."""
    gather: Callable[[Named, str], torch.Tensor] | None = None
    """Computes the full tensor of a name, if it is not simply the unsharded tensor."""
    single: bool = False
    """Whether readers expect a single file, whatever its size."""

    def gathered(self, name: str) -> torch.Tensor:
        """The full tensor of a name. All ranks must call it."""
        return full_tensor(self.tensors[name]) if self.gather is None else self.gather(self.tensors, name)

    def files(self, limit: int) -> list[tuple[str, list[str]]]:
        """(path, names of the tensors) of each file, in order."""
        parts: list[list[str]] = []
        size = 0
        # transformers may convert several tensors together when it saves: they stay in one file.
        in_one_file = self.single or bool(getattr(self.model, "_weight_conversions", None))
        for name, tensor in self.tensors.items():
            if not parts or (size + tensor.nbytes > limit and not in_one_file):
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += tensor.nbytes
        if len(parts) < 2:
            return [(f"{self.stem}.safetensors", [*self.tensors])]
        return [(f"{self.stem}-{i:05d}-of-{len(parts):05d}.safetensors", part) for i, part in enumerate(parts, 1)]

    def converted(self, tensors: Named) -> dict[str, torch.Tensor]:
        """The tensors with their names and shapes on disk."""
        from transformers.core_model_loading import revert_weight_conversion

        if self.model is None:
            return dict(tensors)
        ignored = getattr(self.model, "_keys_to_ignore_on_save", None) or ()
        return revert_weight_conversion(self.model, {n: t for n, t in tensors.items() if n not in ignored})


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint in the memory of the ranks. This rank has the tensors of the files that it writes."""

    ranks: Ranks
    turn: int
    """The turn of this rank. Ranks with the same turn write at the same time."""
    turns: int
    files: Mapping[str, tuple[TensorFile, Named]]
    """The tensors of this rank's files, by path in the checkpoint."""
    models: Mapping[str, PreTrainedModel]
    """Models by the path of their directories in the checkpoint."""
    finish: Callable[[Path], None]
    """Writes the other files of the checkpoint. The first rank calls it last."""
    in_background: bool
    """Whether the ranks train while it is written."""

    def write(self, directory: Path) -> None:
        """Writes the files, the ranks in turns. On return, the files of all ranks are written.

        All ranks must call it. Raises this rank's own error, or RunDirError if another rank failed.
        """
        make_unless_staged(directory)
        for turn in range(self.turns):
            self._on_all_ranks(self._write_own if turn == self.turn else None, directory)
        self._on_all_ranks(self._conclude if self.ranks.rank == 0 else None, directory)

    def _write_own(self, directory: Path) -> None:
        for path, (file, tensors) in self.files.items():
            (directory / path).parent.mkdir(exist_ok=True)
            converted = {name: tensor.contiguous() for name, tensor in file.converted(tensors).items()}
            save_file(converted, directory / path, {"format": "pt"})

    def _conclude(self, directory: Path) -> None:
        for path, model in self.models.items():
            _describe(model, directory / path)
        self.finish(directory)

    def _on_all_ranks(self, write: Callable[[Path], None] | None, directory: Path) -> None:
        """Writes, and waits for all ranks. If one fails, all raise."""
        problem = ""
        try:
            if write is not None:
                write(directory)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            # Also after an error: the other ranks wait for what this one reports.
            problems = self._all_gather(problem)
        for rank, problem in enumerate(problems):
            if problem:
                raise RunDirError(f"rank {rank}'s part of {directory.name}", problem, "fix the cause and run it again")

    def _all_gather(self, problem: str) -> list[str]:
        """Each rank's problem."""
        if self.ranks.size == 1:
            return []
        problems: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(problems, problem, group=_groups()[self.in_background])  # [foreground, background]
        return problems


def full_weights(model: LanguageModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's parameters and persistent buffers by Hugging Face name, with an adapter merged. See
    `TrainEngine.export_weights`."""
    if has_adapter(model.module):
        yield from merged_state(model.module, model.names)
        return
    state = model.module.state_dict()
    for name in model.names:
        yield name, full_tensor(state[name])


def full_specs(model: LanguageModel, engine_dtype: str) -> tuple[TensorSpec, ...]:
    """The specs of `full_weights`, narrowed to `engine_dtype`."""
    base = base_state(model.module)
    types = {name: torch.empty(0, dtype=merged_dtype(model.module, base, name)) for name in model.names}
    narrow = {name: type_name(narrowed(example, engine_dtype).dtype) for name, example in types.items()}
    return tuple(TensorSpec(name, narrow[name], tuple(base[name].shape)) for name in model.names)


def weight_files(model: LanguageModel | ValueModel, folder: str) -> list[TensorFile]:
    """The weights of a model for the directory `folder` (`policy/`): a plain Hugging Face model, and the head of a
    critic or reward model beside it."""
    if isinstance(model, LanguageModel) and has_adapter(model.module):
        base = base_state(model.module)
        merging = partial(merged_tensor, model.module)
        return [TensorFile(f"{folder}model", {name: base[name] for name in model.names}, model.module, merging)]
    if isinstance(model, LanguageModel):
        state = model.module.state_dict()
        return [TensorFile(f"{folder}model", {name: state[name] for name in model.names}, model.module)]
    adapted = has_adapter(model.module)
    state = {**model.state_dict(), **{f"module.{name}": base for name, base in base_state(model.module).items()}}
    inner, head = (
        {name.removeprefix(part): state[name] for name in model.names if name.startswith(part)}
        for part in ("module.", f"{VALUE_HEAD}.")
    )
    merging = partial(merged_tensor, model.module) if adapted else None
    return [TensorFile(f"{folder}model", inner, model.module, merging), TensorFile(f"{folder}{VALUE_HEAD}", head)]


def take_snapshot(
    tensor_files: Sequence[TensorFile],
    ranks: Ranks,
    strategy: SaveStrategy,
    finish: Callable[[Path], None],
    *,
    copy: bool,
) -> Snapshot:
    """Gathers the tensors of a checkpoint, those of file i on rank i mod size. All ranks must call it.

    With `copy`, tensors share no memory with the training state. `finish`: see `Snapshot`.
    """
    turn, turns = _turns(ranks, strategy)
    files: dict[str, tuple[TensorFile, Named]] = {}
    parts = [(file, path, names) for file in tensor_files for path, names in file.files(SHARD_BYTES)]
    for number, (file, path, names) in enumerate(parts):
        is_own, tensors = number % ranks.size == ranks.rank, dict[str, torch.Tensor]()
        for name in names:
            # Also those that other ranks write: a gather is a collective call.
            tensor = file.gathered(name)
            if is_own:
                on_cpu = tensor.cpu()
                tensors[name] = on_cpu.clone() if copy and _shares_memory(on_cpu, file.tensors[name]) else on_cpu
        if is_own:
            files[path] = file, tensors
    models = {str(Path(file.stem).parent): file.model for file in tensor_files if file.model is not None}
    return Snapshot(ranks, turn, turns, files, models, finish, in_background=copy)


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor uses the memory of another one, or of this rank's part of it."""
    local = local_part(other)
    return one.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def read_tensors(directory: Path, stem: str) -> SafetensorsFiles:
    """The tensors saved under a stem. Raises RunDirError if there are none."""
    paths = [directory / f"{stem}.safetensors"]
    if not paths[0].is_file():
        paths = sorted(directory.glob(f"{stem}-*-of-*.safetensors"))
    if not paths:
        raise RunDirError(
            f"read {stem} from {directory}", "no such files", "resume with the models that were trained before"
        )
    return SafetensorsFiles(paths)


def copy_companions(model_dir: Path, directory: Path) -> None:
    """Copies the files of a model that training does not change: tokenizer, template, license."""
    skip = {path for pattern in (*_WRITTEN_BY_US, *_OTHER_WEIGHTS, MANIFEST) for path in model_dir.glob(pattern)}
    for file in model_dir.iterdir():
        if file.is_file() and file not in skip:
            shutil.copyfile(file, directory / file.name)


def _describe(model: PreTrainedModel, folder: Path) -> None:
    """Writes the model's config and, for several weight files, their index, as transformers expects them."""
    # Without weights, which the ranks have written. The separate folder keeps this call from replacing their files.
    model.save_pretrained(folder / "about", state_dict={})
    for path in (folder / "about").iterdir():
        if path.suffix == ".safetensors":
            path.unlink()
        else:
            path.replace(folder / path.name)
    (folder / "about").rmdir()
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if shards:
        file_of: dict[str, str] = {}
        for shard in shards:
            file_of |= dict.fromkeys(SafetensorsFiles([shard]).entries, shard.name)
        size = sum(shard.stat().st_size for shard in shards)
        index = {"metadata": {"total_size": size}, "weight_map": file_of}
        (folder / _INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------- ranks


@cache
def _groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Process groups for saves that training waits for, and for background saves. A background save runs beside
    collective calls of training and other saves."""
    foreground, background = (dist.new_group(backend=GLOO, timeout=timedelta(seconds=DEADLINE_S)) for _ in range(2))
    assert isinstance(foreground, dist.ProcessGroup)
    assert isinstance(background, dist.ProcessGroup)
    return foreground, background


@cache
def _hosts(size: int) -> tuple[str, ...]:
    """The host name of each rank."""
    hosts: list[Any] = [socket.gethostname()]
    if size > 1:
        hosts = [None] * size
        dist.all_gather_object(hosts, socket.gethostname(), group=_groups()[0])
    return tuple(hosts)


def _turns(ranks: Ranks, strategy: SaveStrategy) -> tuple[int, int]:
    """(the turn of this rank, the number of turns). Ranks of one turn write at the same time."""
    hosts = _hosts(ranks.size)
    match strategy:
        case SaveStrategy.UNRESTRICTED:
            return 0, 1
        case SaveStrategy.SINGLE_NODE:
            nodes = list(dict.fromkeys(hosts))
            return nodes.index(hosts[ranks.rank]), len(nodes)
        case SaveStrategy.SINGLE_PROCESS | SaveStrategy.SINGLE_THREAD:  # a rank writes in one thread
            return ranks.rank, ranks.size


# --------------------------------------------------------------------------- in the background


def write_in_background(snapshot: Snapshot, directory: Path, report: str) -> None:
    """Writes a snapshot in a thread. The first rank reports progress in the file `report` of the directory, which
    `wait_until_written` reads."""
    make_unless_staged(directory)
    result: Future[None] = Future()

    def write() -> None:
        try:
            snapshot.write(directory)
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    def report_progress() -> None:
        beats = 0
        while not result.done():
            atomic_write(directory / report, json.dumps({"beats": (beats := beats + 1)}))
            wait([result], _BEAT_S)
        error = result.exception()
        problem = "" if error is None else f"{type(error).__name__}: {error}"
        atomic_write(directory / report, json.dumps({"done": True, "problem": problem}))

    threading.Thread(target=write, name="trivium-save", daemon=True).start()
    if snapshot.ranks.rank == 0:
        threading.Thread(target=report_progress, name="trivium-save-report", daemon=True).start()


def wait_until_written(report: Path) -> None:
    """Waits until `write_in_background` has finished. Raises RunDirError if it failed, RoleFailed if it reports no
    progress."""
    last_text, last_change = "", time.monotonic()
    while True:
        text = report.read_text(encoding="utf-8") if report.is_file() else ""
        if text != last_text:
            last_text, last_change = text, time.monotonic()
        progress = json.loads(text or "{}")
        if progress.get("done"):
            report.unlink()
            if progress["problem"]:
                raise RunDirError(f"write {report.parent.name}", progress["problem"], "fix the cause and run it again")
            return
        if time.monotonic() - last_change > _SILENT_S:
            raise RoleFailed("trainer rank 0", f"its save made no progress for {_SILENT_S:.0f} s")
        time.sleep(_POLL_S)
