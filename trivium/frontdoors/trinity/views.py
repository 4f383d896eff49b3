"""Adapts the monitor and the sample strategy of a run to Trinity-RFT's methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trivium.frontdoors.trinity.core_trainer import CoreTrainer
from trivium.frontdoors.trinity.experiences import Experiences
from trivium.metrics import declare_missing
from trivium.protocols import Monitor
from trivium.types import Metrics


@dataclass(frozen=True)
class MonitorView:
    """The monitors of a run."""

    monitors: Monitor

    def log(self, data: Mapping[str, float], step: int, commit: bool = False) -> None:
        """Logs a row of metrics; declares undeclared ones."""
        del commit  # every row is written at once
        declare_missing(data, "a number that user code logged")
        self.monitors.log(step, data)

    def log_table(self, table_name: str, experiences_table: Any, step: int) -> None:
        """Logs a table: a DataFrame, or a list of rows."""
        to_dict = getattr(experiences_table, "to_dict", None)
        rows = list(experiences_table) if to_dict is None else to_dict("records")
        self.monitors.table(step, table_name, rows)

    def close(self) -> None:
        self.monitors.close()


@dataclass(frozen=True)
class SampleStrategyView:
    """The sample strategy of a run."""

    trainer: CoreTrainer

    async def sample(self, step: int) -> tuple[Experiences, Metrics, list[dict[str, Any]]]:
        """Waits for the groups of a train step. Returns (experiences, metrics, rollouts to show).

        Raises StopAsyncIteration at the end of the data.
        """
        return await self.trainer.sample(step - 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer.strategy, name)
