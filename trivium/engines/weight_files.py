"""Weights as files, for an engine whose model is in other processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trivium.concurrency import ProcessLife
from trivium.errors import ConfigError, SyncError
from trivium.models.backbone.load import load_lm
from trivium.models.weights.lora import ADAPTER_STEM, check_base, fingerprint, is_adapter, received_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Named = Sequence[tuple[str, Any]]
_PREFIX = "trivium-vllm-"
"""Of the directories of weights; their process is a part of their name."""
_TIED = {"lm_head.weight"}
"""What may be the same tensor as the table of tokens."""


def fast_directory(model_dir: Path) -> Path:
    """Where weights lie on their way: in memory where two versions fit, else where temporary files do."""
    memory, size = Path("/dev/shm"), sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 3 * size
    return memory if fits else Path(tempfile.gettempdir())


def own_directory(parent: Path) -> Path:
    """A new directory of this process. Those of processes that were killed are removed."""
    for left in parent.glob(f"{_PREFIX}*"):
        named = re.fullmatch(r"(\d+)-(\d*)-(.+)-\w+", left.name.removeprefix(_PREFIX))
        if named is not None and not ProcessLife(named[3], int(named[1]), named[2])():
            shutil.rmtree(left, ignore_errors=True)  # another engine may remove it, too
    life = ProcessLife.of(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{life.pid}-{life.started}-{life.host}-", dir=parent))


class WeightFiles:
    """The weights of each version of a model: all of them in a safetensors file, or a LoRA adapter in a directory as
    peft writes it."""

    def __init__(self, model_dir: Path, adapter_rank: int | None = None) -> None:
        """`adapter_rank` is the largest of adapters; None: none are taken. Raises ConfigError for a model without
        safetensors files."""
        self._model_dir, self._rank, self._saved = model_dir, adapter_rank, _shapes(model_dir)
        self._base: PreTrainedModel | None = None
        """The model without its weights, once its names were asked for."""
        self._fingerprints: Mapping[str, int] = {}
        """Of its weights, once there was an adapter."""

    def own(self) -> list[str]:
        """The files with the weights that the model was saved with."""
        return [str(path) for path in sorted(self._model_dir.glob("*.safetensors"))]

    def write(self, named: Named, path: Path) -> Path:
        """Writes a file or directory of that name. Raises SyncError, and writes nothing, unless the weights are those
        of the model, or an adapter of it."""
        return self._write_adapter(named, path) if is_adapter(named) else self._write_all(named, path)

    def remove(self, path: Path) -> None:
        """Removes what was written."""
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _write_all(self, named: Named, path: Path) -> Path:
        """Tensors that share memory are copied."""
        given = {name: tuple(value.shape) for name, value in named}
        if _unfit(given, self._saved) and (wrong := _unfit(given, self._renamed())):
            expected = self._saved.get(wrong[0], "nothing")
            raise SyncError(
                f"load weights into vLLM's model of {self._model_dir}",
                f"{len(wrong)} do not fit, first {wrong[0]}: {given.get(wrong[0], 'missing')} for {expected}",
                "publish the weights of this model, under the names of its files",
            )
        seen, tensors = set[int](), dict[str, torch.Tensor]()
        for name, value in named:
            tensor = torch.as_tensor(value).detach().to("cpu").contiguous()
            tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
        save_file(tensors, path)
        return path

    def _write_adapter(self, named: Named, path: Path) -> Path:
        """Each layer's scale becomes a part of its B."""
        adapter = received_adapter({name: torch.as_tensor(value) for name, value in named}, self._empty())
        rank = max(len(added.down) for added in adapter.values())
        if self._rank is None or rank > self._rank:
            found = "it was started without" if self._rank is None else f"it was started for up to {self._rank}"
            do = "set engine.adapter_rank, or push all weights (train.lora.push: merged)"
            raise SyncError(f"a LoRA adapter of rank {rank} for vLLM", found, do)
        if not self._fingerprints:
            state = load_lm(self._model_dir, dtype="auto", attention=None).state_dict()
            self._fingerprints = {name: fingerprint(weight) for name, weight in state.items()}
        check_base(adapter, self._fingerprints.__getitem__)
        tensors = dict[str, torch.Tensor]()
        for name, added in adapter.items():
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = added.down.detach().cpu().contiguous()
            tensors[f"{layer}.lora_B.weight"] = (added.scale * added.up.detach()).cpu().contiguous()
        layers = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in adapter})
        path.mkdir()
        save_file(tensors, path / f"{ADAPTER_STEM}.safetensors")
        described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
        (path / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
        return path

    def _renamed(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the names that the tensors have in the model, of which some families' files have older ones. Those
        in the files where a model holds other tensors than its files."""
        state = self._empty().state_dict()
        named = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in _TIED}
        saved = [shape for name, shape in self._saved.items() if name not in _TIED]
        return named if sorted(named.values()) == sorted(saved) else self._saved

    def _empty(self) -> PreTrainedModel:
        if self._base is None:
            self._base = load_lm(self._model_dir, dtype="auto", attention=None, empty=True)
        return self._base


def _shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the model's safetensors files."""
    shapes = dict[str, tuple[int, ...]]()
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise ConfigError(f"vLLM with {model_dir}", "it holds no *.safetensors", "save the model with save_pretrained")
    return shapes


def _unfit(given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The weights that are not those of the model, by name. vLLM itself passes over what it is not given."""
    tied = _TIED - expected.keys()  # files name a tied table once
    wrong = (given.keys() ^ expected.keys()) - tied
    return sorted(wrong | {name for name in given.keys() & expected.keys() if given[name] != expected[name]})
