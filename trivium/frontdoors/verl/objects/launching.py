"""What verl's launch scripts call around the trainer: files, classes by path, devices, Ray's environment."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

from trivium.foundation.errors import DataError
from trivium.foundation.registry import resolve
from trivium.frontdoors.verl.rewards.reward_loading import address

is_cuda_available = torch.cuda.is_available()


def copy_to_local(src: str, cache_dir: str | None = None, use_shm: bool = False, **options: Any) -> str:
    """Returns a path with `~` expanded. Raises DataError for a remote path, which is not copied."""
    del cache_dir, use_shm, options
    if "://" in src:
        raise DataError(f"the local files of {src}", "remote paths are not copied", "copy the files to a local folder")
    return str(Path(expanduser(src))) if src.startswith(("~", "/", ".")) else src


def load_extern_object(module_path: str, object_name: str) -> Any:
    """Returns an object of a file or of a package (`pkg://package.module`) by its name."""
    return resolve("tasks", address(expanduser(module_path), object_name))


load_extern_type = load_extern_object


def auto_set_device(config: Any) -> None:
    """Does nothing: `trainer.device` selects the GPU if there is one."""


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """Returns an empty environment for `ray.init`: workers set what they need themselves."""
    return {}
