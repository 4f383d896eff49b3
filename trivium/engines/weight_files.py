"""Weights as files, for an engine whose model is in other processes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trivium.errors import ConfigError, SyncError


def fast_directory(model_dir: Path) -> Path | None:
    """Where weights lie on their way: in memory where two versions fit; None: the system's own choice."""
    memory, size = Path("/dev/shm"), sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 3 * size else None


def tensors_in(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the model's safetensors files."""
    shapes = dict[str, tuple[int, ...]]()
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise ConfigError(f"vLLM with {model_dir}", "it holds no *.safetensors", "save the model with save_pretrained")
    return shapes


def check_names(named: Sequence[tuple[str, Any]], expected: Mapping[str, tuple[int, ...]], model_dir: Path) -> None:
    """Raises SyncError unless the weights are those of the model. vLLM itself passes over what it is not given."""
    given = {name: tuple(value.shape) for name, value in named}
    tied = {"lm_head.weight"} - expected.keys()  # files name a tied table once
    wrong = [*((given.keys() ^ expected.keys()) - tied)]
    wrong += [name for name in given.keys() & expected.keys() if given[name] != expected[name]]
    if wrong:
        name = min(wrong)
        raise SyncError(
            f"load weights into vLLM's model of {model_dir}",
            f"{len(wrong)} do not fit, first {name}: {given.get(name, 'missing')} for {expected.get(name, 'nothing')}",
            "publish the weights of this model, under the names of its files",
        )


def write_weights(named: Sequence[tuple[str, Any]], path: Path) -> None:
    """A safetensors file, whole or not at all; tensors that share memory are copied."""
    seen, tensors = set[int](), dict[str, torch.Tensor]()
    for name, value in named:
        tensor = torch.as_tensor(value).detach().to("cpu").contiguous()
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    save_file(tensors, path)
