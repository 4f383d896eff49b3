"""Where models compute on this machine, and in which type of numbers, where a config leaves it open (`auto`)."""

from __future__ import annotations

import os

import torch

from trivium.errors import ConfigError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def device_of(name: str, key: str = "train.device") -> torch.device:
    """The device that a config's `key` means here. Raises ConfigError for a GPU that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{key} {name!r}", "no GPU that torch can use", "say cpu or auto")
    return device


def dtype_of(name: str, device: str) -> str:
    """The type that a config's `dtype` means on a device here: `auto` is bfloat16 on a GPU that computes in it, else
    float32."""
    if name != "auto":
        return name
    halved = device.startswith("cuda") and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return "bfloat16" if halved else "float32"


def use_deterministic_kernels(key: str) -> None:
    """From now on, GPU operations of this process give equal bits for equal inputs, or raise RuntimeError where torch
    has no kernel that does. Raises ConfigError, which names the config's `key`, where cuBLAS may have started without
    the workspace that it takes."""
    if torch.cuda.is_initialized() and _CUBLAS not in os.environ:
        raise ConfigError(
            key,
            f"{_CUBLAS} is not set, and this process uses a GPU already",
            f"set {_CUBLAS}=:4096:8 in the environment of the run",
        )
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def narrowed(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """A tensor in the type of this name, where that takes less memory."""
    wanted: torch.dtype = getattr(torch, dtype) if dtype else tensor.dtype
    return tensor.to(wanted) if tensor.is_floating_point() and wanted.itemsize < tensor.itemsize else tensor
