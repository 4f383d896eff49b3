"""What there is to train with: memory of the host and of each GPU, and how many ranks."""

from __future__ import annotations

import torch

from trivium.config import RunConfig
from trivium.config.memory_estimate import Machine, host_memory
from trivium.errors import ConfigError
from trivium.training.ranks import launched_ranks


def machine() -> Machine:
    """The machine that this process runs on, within the limits of its control group."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return Machine(host_memory(), tuple(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus))


def training_ranks(config: RunConfig) -> int:
    """Processes that train together: those of torchrun, or the actors that the config asks Ray for."""
    return config.cluster.ranks if config.cluster.kind == "ray" else launched_ranks()


def device_of(name: str) -> torch.device:
    """The device that `train.device` means here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"train.device {name!r}", "no GPU that torch can use", "say cpu or auto")
    return device
