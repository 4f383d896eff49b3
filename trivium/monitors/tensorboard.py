"""TensorBoard event files under `<run directory>/tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trivium.config import Plugin
from trivium.foundation.errors import MissingPackage


class TensorBoardMonitor:
    """One scalar per metric. Event files cannot be truncated, so a resumed run marks the steps to discard."""

    class Config(Plugin):
        kind: str = "tensorboard"

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise MissingPackage("tensorboard", "tensorboard", "log to TensorBoard") from error
        # TensorBoard discards events of earlier sessions from this step on.
        first_step = resume_step + 1 if resume_step else 0
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs the rows as indented JSON text."""
        self._writer.add_text(name, "\n".join("    " + json.dumps(dict(row), ensure_ascii=False) for row in rows), step)

    def state(self) -> dict[str, Any]:
        """Returns an empty state: the next start purges the steps after the resumed one."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing: the constructor purges the later steps."""

    def close(self) -> None:
        self._writer.close()
