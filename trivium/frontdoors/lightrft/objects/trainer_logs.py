"""Logs a trainer's metrics to Weights & Biases, else TensorBoard, with the core's monitors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trivium.frontdoors.lightrft.arguments import option
from trivium.monitors.tensorboard import TensorBoardMonitor
from trivium.monitors.wandb import WandbMonitor
from trivium.protocols import Monitor

_WANDB = {"project": "wandb_project", "name": "wandb_run_name", "group": "wandb_group", "entity": "wandb_org"}
"""Option of the W&B monitor -> the attribute of `args`."""
_UNLOGGED = ("reward", "response_length", "total_length", "num_actions", "return")
"""Entries of a status that are already logged under `rollout/`."""


def row_of(status: Mapping[str, float]) -> dict[str, float]:
    """Returns a status with its names under `rollout/` and `train/`."""
    row: dict[str, float] = {}
    for name, value in status.items():
        if name.startswith("rollout_"):
            row[f"rollout/{name.removeprefix('rollout_')}"] = value
        elif name not in _UNLOGGED and not name.startswith("reward_metrics/"):
            row[f"train/{name}"] = value
    return row


class Logs:
    """Writes to the monitor that `args` selects. Only the first rank logs."""

    def __init__(self, args: Any, strategy: Any, step: int) -> None:
        self._monitor: Monitor | None = None
        if not strategy.is_rank_0():
            return
        key, directory = option(args, "use_wandb"), option(args, "use_tensorboard")
        if key:
            self._monitor = _wandb(args, key, step)
        elif directory:
            folder = Path(args.ckpt_path) if directory is True else Path(directory)
            self._monitor = TensorBoardMonitor(TensorBoardMonitor.Config(), run_dir=folder, resume_step=step)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Logs one row."""
        if self._monitor is not None:
            self._monitor.log(step, row)

    def close(self) -> None:
        """Closes the monitor."""
        if self._monitor is not None:
            self._monitor.close()


def _wandb(args: Any, key: Any, step: int) -> Monitor:
    """Opens the W&B run. If `key` is text other than `true` or `1`, it is the API key, as in the original."""
    if isinstance(key, str) and key.lower() not in ("true", "1"):
        os.environ.setdefault("WANDB_API_KEY", key)
    config = WandbMonitor.Config(**{name: option(args, flag) for name, flag in _WANDB.items()})
    folder = Path(args.ckpt_path)
    folder.mkdir(parents=True, exist_ok=True)
    return WandbMonitor(config, run_dir=folder, resume_step=step)
