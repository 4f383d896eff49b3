"""Monitors with Trinity-RFT's methods: those of a run, and those that users write."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from trivium.config import Plugin
from trivium.foundation.errors import MissingPackage
from trivium.foundation.metrics import declare_missing
from trivium.frontdoors.plain_values import plain
from trivium.frontdoors.trinity.config.config_object import Config as TrinityShaped
from trivium.frontdoors.trinity.config.registries import MONITOR
from trivium.frontdoors.trinity.objects.run_parts import run_config_of
from trivium.protocols import Monitor
from trivium.runtime.build import build_monitor
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


def monitor_of_run(project: str, group: str, name: str, role: str, config: object) -> MonitorView:
    """Returns the monitors of a config. They log below its run directory."""
    del role  # explorer and trainer of a run have one monitor
    run_config = run_config_of({**plain(config), "project": project, "group": group, "name": name})
    run_dir = Path(run_config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    return MonitorView(build_monitor(run_config, run_dir, None))


class MonitorOfTrinity:
    """A monitor of the user in Trinity-RFT's form: a class with `log(data, step)`, `log_table(table_name,
    experiences_table, step)` and `close()`, made with project, group, name, role and config."""

    class Config(Plugin):
        kind: str = "trivium.frontdoors.trinity.monitor_views:MonitorOfTrinity"
        monitor: str
        """The path of the class, or a name that a module in `TRINITY_PLUGIN_DIRS` registers."""
        project: str = ""
        group: str = ""
        name: str = ""
        role: str = "trainer"
        monitor_args: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int) -> None:
        del resume_step  # the class appends
        names = config.model_dump(include={"project", "group", "name"})
        shaped = TrinityShaped.of(
            {
                **names,
                "checkpoint_job_dir": str(run_dir),
                "monitor": {"monitor_type": config.monitor, "monitor_args": config.monitor_args},
            }
        )
        self._monitor: Any = MONITOR.get(config.monitor)(**names, role=config.role, config=shaped)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._monitor.log(data=dict(metrics), step=step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise MissingPackage("pandas", "data", "tables of a monitor in Trinity-RFT's form") from error
        self._monitor.log_table(name, pandas.DataFrame(list(rows)), step)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None:
        self._monitor.close()


def prefix_metrics(src_metrics: Mapping[str, float], prefix: str, dst_metrics: Metrics | None = None) -> Metrics:
    """Returns `dst_metrics` with the metrics added under `prefix/`. A name that has the prefix keeps it once."""
    target: Metrics = {} if dst_metrics is None else dst_metrics
    target.update({n if n.startswith(f"{prefix}/") else f"{prefix}/{n}": v for n, v in src_metrics.items()})
    return target


def get_logger(name: str | None = None, level: int | None = None) -> logging.Logger:
    """Returns a logger whose messages go to the log of the run."""
    logger = logging.getLogger("trivium" if name in (None, "trivium") else f"trivium.{name}")
    if level is not None:
        logger.setLevel(level)
    return logger
