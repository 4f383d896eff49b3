"""What a train engine keeps on disk: safetensors files of bounded size, each written by one of the ranks.

Which tensors make a file follows from their sizes alone, so the files are the same whatever number of ranks wrote them,
and any number of ranks reads them. A model's files are a plain Hugging Face directory.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trivium.errors import RoleFailed, RunDirError
from trivium.models.heads import VALUE_HEAD, LanguageModel, ValueModel
from trivium.models.lora import base_state, has_adapter, merged_tensor
from trivium.save_monitor import SaveStrategy
from trivium.sealing import write_aside
from trivium.training.fsdp import whole
from trivium.training.ranks import Ranks

SHARD_BYTES = 2**31
"""What one file holds at most, unless a single tensor is larger."""
MEET_S = 3600.0
"""How long the ranks wait for the slowest of them to write its files."""
_INDEX = "model.safetensors.index.json"
_BEAT_S, _SILENT_S, _LOOK_S = 0.5, 120.0, 0.05
"""How often a save in the background says that it goes on; how long it may be silent; how often somebody looks."""

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Saved:
    """Tensors that are saved together: `<stem>.safetensors`, or several numbered files where they are many."""

    stem: str
    """Path in the checkpoint, without the ending."""
    tensors: Named
    """By name; maybe this rank's parts of them."""
    model: PreTrainedModel | None = None
    """The model whose weights they are, if they are one's: its directory is one that transformers loads."""
    added: Callable[[Named, str], torch.Tensor] | None = None
    """What is saved of one of the tensors, whole, where that is more than the tensor."""
    single: bool = False
    """Whether whoever reads it expects one file, however large."""

    def gathered(self, name: str) -> torch.Tensor:
        """What is saved under a name. All ranks must ask for it."""
        return whole(self.tensors[name]) if self.added is None else self.added(self.tensors, name)

    def files(self, limit: int) -> list[tuple[str, list[str]]]:
        """(path, names of the tensors) of each file, in order."""
        parts: list[list[str]] = []
        size = 0
        # What transformers converts when it saves may be made of any number of tensors: none can be written apart.
        together = self.single or bool(getattr(self.model, "_weight_conversions", None))
        for name, tensor in self.tensors.items():
            if not parts or (size + tensor.nbytes > limit and not together):
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += tensor.nbytes
        if len(parts) < 2:
            return [(f"{self.stem}.safetensors", [*self.tensors])]
        return [(f"{self.stem}-{i:05d}-of-{len(parts):05d}.safetensors", part) for i, part in enumerate(parts, 1)]

    def converted(self, tensors: Named) -> dict[str, torch.Tensor]:
        """As they are called, and shaped, on disk."""
        if self.model is None:
            return dict(tensors)
        ignored = getattr(self.model, "_keys_to_ignore_on_save", None) or ()
        return revert_weight_conversion(self.model, {n: t for n, t in tensors.items() if n not in ignored})


@dataclass(frozen=True)
class Held:
    """A checkpoint in the memory of the ranks: this one holds the tensors of the files that it is to write."""

    ranks: Ranks
    turn: int
    """When this rank may write: beside those with the same number."""
    turns: int
    files: Mapping[str, tuple[Saved, Named]]
    """Path in the checkpoint -> what is written there."""
    models: Mapping[str, PreTrainedModel]
    """By path of their directories in the checkpoint."""
    finish: Callable[[Path], None]
    """Writes what else belongs to the checkpoint; the first rank calls it, last."""
    beside: bool
    """Whether it is written beside whatever else the ranks do."""

    def write(self, directory: Path) -> None:
        """Writes every file, the ranks in turns; on return all of them are there.

        All ranks must call it. Raises what went wrong here, and RunDirError where it did elsewhere.
        """
        for turn in range(self.turns):
            self._together(self._write_own if turn == self.turn else _nothing, directory)
        self._together(self._conclude if self.ranks.rank == 0 else _nothing, directory)

    def _write_own(self, directory: Path) -> None:
        for path, (saved, tensors) in self.files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            converted = {name: tensor.contiguous() for name, tensor in saved.converted(tensors).items()}
            save_file(converted, directory / path, {"format": "pt"})

    def _conclude(self, directory: Path) -> None:
        for path, model in self.models.items():
            _describe(model, directory / path)
        self.finish(directory)

    def _together(self, write: Callable[[Path], None], directory: Path) -> None:
        """One rank's failure is everybody's."""
        problem = ""
        try:
            write(directory)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            problems = self._all_said(problem)
        for rank, found in enumerate(problems):
            if found:
                raise RunDirError(f"rank {rank}'s part of {directory.name}", found, "mend the cause and run it again")

    def _all_said(self, problem: str) -> list[str]:
        """What each rank has to say, once all have come."""
        if self.ranks.size == 1:
            return []
        said: list[Any] = [None] * self.ranks.size
        dist.all_gather_object(said, problem, group=_groups()[self.beside])
        return said


def weights_of(model: LanguageModel | ValueModel, folder: str) -> list[Saved]:
    """The weights of a model, for a directory `folder` (`policy/`): the plain Hugging Face model, and the head of a
    critic or reward model beside it."""
    if isinstance(model, LanguageModel) and has_adapter(model.module):
        base = base_state(model.module)
        merging = partial(merged_tensor, model.module)
        return [Saved(f"{folder}model", {name: base[name] for name in model.names}, model.module, merging)]
    if isinstance(model, LanguageModel):
        state = model.module.state_dict()
        return [Saved(f"{folder}model", {name: state[name] for name in model.names}, model.module)]
    state = model.state_dict()
    inner, head = (
        {name.removeprefix(part): state[name] for name in model.names if name.startswith(part)}
        for part in ("module.", f"{VALUE_HEAD}.")
    )
    return [Saved(f"{folder}model", inner, model.module), Saved(f"{folder}{VALUE_HEAD}", head)]


def hold(
    saved: Sequence[Saved], ranks: Ranks, strategy: SaveStrategy, finish: Callable[[Path], None], *, copy: bool
) -> Held:
    """Gathers what is to be saved, once: file i in the memory of rank i mod size. All ranks must call it.

    With `copy` nothing of it is memory that training writes to. `finish`: see `Held`.
    """
    turn, turns = _turns(ranks, strategy)
    files: dict[str, tuple[Saved, Named]] = {}
    places = [(group, path, names) for group in saved for path, names in group.files(SHARD_BYTES)]
    for number, (group, path, names) in enumerate(places):
        mine, tensors = number % ranks.size == ranks.rank, dict[str, torch.Tensor]()
        for name in names:
            tensor = group.gathered(name)
            if mine:
                here = tensor.cpu()
                tensors[name] = here.clone() if copy and _same_memory(here, group.tensors[name]) else here
        if mine:
            files[path] = group, tensors
    models = {str(Path(group.stem).parent): group.model for group in saved if group.model is not None}
    return Held(ranks, turn, turns, files, models, finish, beside=copy)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    there = other.to_local() if isinstance(other, DTensor) else other
    return one.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()


def read(directory: Path, stem: str) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors that were saved under a stem, file by file. Raises RunDirError where there are none."""
    paths = [directory / f"{stem}.safetensors"]
    if not paths[0].is_file():
        paths = sorted(directory.glob(f"{stem}-*-of-*.safetensors"))
    if not paths:
        raise RunDirError(f"read {stem} from {directory}", "no such files", "resume with what was trained before")
    for path in paths:
        yield load_file(path)


def _describe(model: PreTrainedModel, folder: Path) -> None:
    """What transformers wants beside the weights: the model's config and, where they are several, which tensor is in
    which file."""
    model.save_pretrained(folder / "about", state_dict={})
    for path in (folder / "about").iterdir():
        if path.suffix == ".safetensors":
            path.unlink()
        else:
            path.replace(folder / path.name)
    (folder / "about").rmdir()
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    if shards:
        places: dict[str, str] = {}
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), shard.name)
        size = sum(shard.stat().st_size for shard in shards)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------- ranks


@cache
def _groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Where savers meet: those that the ranks wait for, and those beside training, which may be in a collective call
    of its own, or in another save, meanwhile."""
    waited_for, beside = (dist.new_group(backend="gloo", timeout=timedelta(seconds=MEET_S)) for _ in range(2))
    assert isinstance(waited_for, dist.ProcessGroup)
    assert isinstance(beside, dist.ProcessGroup)
    return waited_for, beside


@cache
def _hosts(size: int) -> tuple[str, ...]:
    """The machine of each rank."""
    hosts: list[Any] = [socket.gethostname()]
    if size > 1:
        hosts = [None] * size
        dist.all_gather_object(hosts, socket.gethostname(), group=_groups()[0])
    return tuple(hosts)


def _turns(ranks: Ranks, strategy: SaveStrategy) -> tuple[int, int]:
    """(the turn of this rank, how many turns there are): whoever shares one may write at the same time."""
    hosts = _hosts(ranks.size)
    match strategy:
        case SaveStrategy.UNRESTRICTED:
            return 0, 1
        case SaveStrategy.SINGLE_NODE:
            nodes = list(dict.fromkeys(hosts))
            return nodes.index(hosts[ranks.rank]), len(nodes)
        case SaveStrategy.SINGLE_PROCESS | SaveStrategy.SINGLE_THREAD:  # a rank writes in one thread
            return ranks.rank, ranks.size


def _nothing(directory: Path) -> None:
    del directory


# --------------------------------------------------------------------------- in the background


def begin_writing(held: Held, directory: Path, report: str) -> None:
    """Writes in a thread of this rank; the first rank's says in the file `report` of the directory how it fares
    (`wait_for`)."""
    directory.mkdir(parents=True, exist_ok=True)
    done: Future[None] = Future()

    def write() -> None:
        try:
            held.write(directory)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def tell() -> None:
        beats = 0
        while not done.done():
            write_aside(directory / report, json.dumps({"beats": (beats := beats + 1)}))
            _wait(done, _BEAT_S)
        error = done.exception()
        problem = "" if error is None else f"{type(error).__name__}: {error}"
        write_aside(directory / report, json.dumps({"done": True, "problem": problem}))

    threading.Thread(target=write, name="trivium-save", daemon=True).start()
    if held.ranks.rank == 0:
        threading.Thread(target=tell, name="trivium-save-report", daemon=True).start()


def wait_for(report: Path) -> None:
    """Returns once what `begin_writing` began is on disk. Raises RunDirError if it failed, RoleFailed if nothing is
    heard of it."""
    seen, last = "", time.monotonic()
    while True:
        said = report.read_text(encoding="utf-8") if report.is_file() else ""
        if said != seen:
            seen, last = said, time.monotonic()
        found = json.loads(said or "{}")
        if found.get("done"):
            report.unlink()
            if found["problem"]:
                raise RunDirError(f"write {report.parent.name}", found["problem"], "mend the cause and run it again")
            return
        if time.monotonic() - last > _SILENT_S:
            raise RoleFailed("trainer rank 0", f"its save was silent for {_SILENT_S:.0f} s")
        time.sleep(_LOOK_S)


def _wait(done: Future[None], seconds: float) -> None:
    """Until it is done, or so long."""
    ended = threading.Event()
    done.add_done_callback(lambda _: ended.set())
    ended.wait(seconds)
