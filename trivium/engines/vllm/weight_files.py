"""Writes weights to files, for an engine whose model is in other processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from trivium.foundation.concurrency import ProcessLife
from trivium.foundation.errors import ConfigError, SyncError
from trivium.models.backbone.load import load_lm
from trivium.models.vision.encoder import decoder_of
from trivium.models.weights.lora import check_base, fingerprint, is_adapter, linear_layers, received_adapter
from trivium.models.weights.saved_tensors import SafetensorsFiles
from trivium.models.weights.section import ADAPTER_STEM
from trivium.models.weights.stream import BUCKET_BYTES, Named, drained, groups
from trivium.planning.memory_estimate import VERSIONS_IN_FILES
from trivium.protocols import DescribedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX = "trivium-vllm-"
"""Prefix of the directories of weights. The rest of the name identifies the process."""
_TIED = {"lm_head.weight"}
"""Tensors that may be tied to the token embeddings."""


def fast_directory(model_dir: Path, engines: int) -> Path:
    """The parent directory for weights: in memory if two versions fit for each of the `engines` engines of the machine,
    else the one for temporary files."""
    memory, size = Path("/dev/shm"), sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    fits = memory.is_dir() and shutil.disk_usage(memory).free // engines > VERSIONS_IN_FILES * size
    return memory if fits else Path(tempfile.gettempdir())


def own_directory(parent: Path) -> Path:
    """Makes a directory for this process. Removes those of processes that were killed."""
    for directory in parent.glob(f"{_PREFIX}*"):
        named = re.fullmatch(r"(\d+)-(\d*)-(.+)-\w+", directory.name.removeprefix(_PREFIX))
        if named is not None and not ProcessLife(named[3], int(named[1]), named[2])():
            shutil.rmtree(directory, ignore_errors=True)  # another engine may remove it at the same time
    life = ProcessLife.of(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{life.pid}-{life.started}-{life.host}-", dir=parent))


class WeightFiles:
    """Writes the weights of each version of a model into a directory: safetensors files with all weights, or a LoRA
    adapter in peft's format."""

    def __init__(self, model_dir: Path, adapter_rank: int | None = None) -> None:
        """`adapter_rank` is the largest rank of adapters; None: adapters are refused. Raises ConfigError for a model
        without safetensors files."""
        self._model_dir, self._rank, self._saved = model_dir, adapter_rank, _shapes(model_dir)
        self._base: PreTrainedModel | None = None
        """The model without its weights, built when its names are needed."""
        self._fingerprints: Mapping[str, int] = {}
        """The fingerprints of its weights, computed for the first adapter."""

    def adapted_layers(self) -> list[str]:
        """The last parts of the names of the layers that an adapter may change. The output layer is none of them."""
        base = self._empty()
        return linear_layers(decoder_of(base), base)

    def files(self, directory: Path | None) -> list[str]:
        """The weight files of a directory that `write` wrote; None: those of the model directory."""
        return [str(path) for path in sorted((directory or self._model_dir).glob("*.safetensors"))]

    def write(self, weights: DescribedWeights, path: Path) -> Path:
        """Writes the directory `path` while the weights arrive. Raises SyncError, and leaves no files, if the weights
        are neither all weights of the model nor an adapter of it."""
        write = self._write_adapter if is_adapter((spec.name, spec) for spec in weights.tensors) else self._write_all
        try:
            write(weights, path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return path

    def _write_all(self, weights: DescribedWeights, path: Path) -> None:
        """Writes all weights, a bucket in each file: only the tensors of one bucket are in memory. Copies tensors that
        share memory, which safetensors refuses."""
        shapes = {spec.name: spec.shape for spec in weights.tensors}
        if _unfit(shapes, self._saved) and (wrong := _unfit(shapes, self._renamed())):
            expected = self._saved.get(wrong[0], "nothing")
            raise SyncError(
                f"load weights into vLLM's model of {self._model_dir}",
                f"{len(wrong)} do not fit, first {wrong[0]}: {shapes.get(wrong[0], 'missing')} for {expected}",
                "publish the weights of this model, under the names of its files",
            )
        path.mkdir()
        for number, group in enumerate(groups(map(_on_cpu, weights), BUCKET_BYTES)):
            addresses, tensors = set[int](), dict[str, torch.Tensor]()
            for name, tensor in drained(group):
                tensors[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
                addresses.add(tensor.data_ptr())
            save_file(tensors, path / f"{number:05d}.safetensors")

    def _write_adapter(self, weights: DescribedWeights, path: Path) -> None:
        """Writes an adapter. Each layer's B is multiplied by its scale: the file has one rank and one alpha for all
        layers, and they are equal, so that vLLM scales by 1."""
        adapter = received_adapter({name: torch.as_tensor(value) for name, value in weights}, self._empty())
        rank = max(len(added.down) for added in adapter.values())
        if self._rank is None or rank > self._rank:
            reason = "it was started without" if self._rank is None else f"it was started for up to {self._rank}"
            do = "set engine.adapter_rank, or push all weights (train.lora.push: merged)"
            raise SyncError(f"a LoRA adapter of rank {rank} for vLLM", reason, do)
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

    def _renamed(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the names of tensors in the model; some families have older names in their files. Returns the
        shapes of the files if the model has other tensors than its files."""
        state = self._empty().state_dict()
        named = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in _TIED}
        saved = [shape for name, shape in self._saved.items() if name not in _TIED]
        return named if sorted(named.values()) == sorted(saved) else self._saved

    def _empty(self) -> PreTrainedModel:
        if self._base is None:
            self._base = load_lm(self._model_dir, dtype="auto", attention=None, empty=True)
        return self._base


def _on_cpu(named: tuple[str, Any]) -> Named:
    name, value = named
    return name, torch.as_tensor(value).detach().to("cpu").contiguous()


def _shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name in the model's safetensors files."""
    entries = SafetensorsFiles(sorted(model_dir.glob("*.safetensors"))).entries
    if not entries:
        raise ConfigError(f"vLLM with {model_dir}", "it holds no *.safetensors", "save the model with save_pretrained")
    return {name: entry.shape for name, entry in entries.items()}


def _unfit(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The names of weights that are missing, unknown or of another shape. vLLM itself ignores missing weights."""
    tied = _TIED - expected.keys()  # files name a tied table once
    wrong = (shapes.keys() ^ expected.keys()) - tied
    return sorted(wrong | {name for name in shapes.keys() & expected.keys() if shapes[name] != expected[name]})
