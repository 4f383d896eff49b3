"""Resolves `auto` on this machine (device, dtype, precision of the output layer), and moves data to devices.

Reading a config needs the former: on a machine without a GPU it does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy.typing as npt

from trivium.foundation.errors import ConfigError, Problem
from trivium.models.late import torch
from trivium.models.precision import precision_of

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_DRIVERS = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")
"""The files in /dev of the drivers of GPUs: NVIDIA's (also on Jetson), AMD's, Windows' for Linux."""


class _ModelSection(Protocol):
    """A config section with the device and the dtype of a model."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = ...) -> Self: ...


class _HeadSection(_ModelSection, Protocol):
    @property
    def head_precision(self) -> str: ...


S = TypeVar("S", bound=_ModelSection)


def has_gpu() -> bool:
    """Whether torch finds a usable GPU. Without the device file of a driver, there is none, and torch is not imported
    to find that out."""
    if "torch" not in sys.modules and sys.platform == "linux" and not any(map(_exists, _DRIVERS)):
        return False
    return torch.cuda.is_available()


def _exists(pattern: str) -> bool:
    return any(Path("/dev").glob(pattern))


def device_of(name: str, key: str = "train.device") -> torch.device:
    """The device that a config's `key` names on this machine. Raises ConfigError without a usable GPU."""
    if name == "auto":
        return torch.device("cuda" if has_gpu() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not has_gpu():
        raise ConfigError(f"{key} {name!r}", "torch finds no usable GPU", "set cpu or auto")
    return device


def dtype_of(name: str, device: str) -> str:
    """Resolves a config's `dtype` for a device: `auto` is bfloat16 on a GPU that supports it, else float32."""
    if name != "auto":
        return name
    halved = device.startswith("cuda") and has_gpu() and torch.cuda.is_bf16_supported()
    return "bfloat16" if halved else "float32"


def resolve_auto(section: S) -> S:
    """A copy of a config section with every `auto` of `device`, `dtype` and `head_precision` resolved for this machine;
    explicit values stay as they are, unchecked."""
    device = ("cuda" if has_gpu() else "cpu") if section.device == "auto" else section.device
    resolved = {"device": device, "dtype": dtype_of(section.dtype, device)}
    if getattr(section, "head_precision", None) == "auto":
        resolved["head_precision"] = precision_of("auto", device, resolved["dtype"], "")
    return section.model_copy(update=resolved)


def head_precision_problems(section: _HeadSection, where: str) -> Iterator[Problem]:
    """Reports a `head_precision` that this machine does not support. Reports nothing for a GPU on a machine without
    one: a missing device is a problem of its own."""
    resolved, key = resolve_auto(section), f"{where}.head_precision"
    if resolved.device.startswith("cuda") and not has_gpu():
        return
    try:
        precision_of(resolved.head_precision, resolved.device, resolved.dtype, key)
    except ConfigError as error:
        yield Problem(key, error.asked, error.found, error.do)


def use_deterministic_kernels(key: str) -> None:
    """Makes GPU operations of this process deterministic; they raise RuntimeError if torch has no deterministic kernel.
    Raises ConfigError, which names the config's `key`, if cuBLAS may have started without the workspace it needs."""
    if _CUBLAS not in os.environ and _has_used_gpu():
        raise ConfigError(
            key,
            f"{_CUBLAS} is not set, and this process uses a GPU already",
            f"set {_CUBLAS}=:4096:8 in the environment of the run",
        )
    os.environ.setdefault(_CUBLAS, ":4096:8")  # cuBLAS reads it once, when it starts
    torch.use_deterministic_algorithms(True)
    # A benchmark may choose another algorithm in each process.
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def _has_used_gpu() -> bool:
    """Whether this process has had a tensor on a GPU. To ask torch about a GPU initializes CUDA, but not cuBLAS."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return any(torch.cuda.memory_stats(gpu).get("allocation.all.allocated", 0) for gpu in gpus)


def sent(values: npt.NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies an array or a host tensor to a device. The copy is from pinned memory, so the host does not wait for
    earlier operations of the GPU."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def narrowed(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Converts a floating-point tensor to the type of this name if that takes less memory."""
    wanted: torch.dtype = getattr(torch, dtype) if dtype else tensor.dtype
    return tensor.to(wanted) if tensor.is_floating_point() and wanted.itemsize < tensor.itemsize else tensor
