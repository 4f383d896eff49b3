"""MLflow: a tracking server, or a database file in the run directory."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from trivium.config import Plugin
from trivium.foundation.errors import MissingPackage
from trivium.monitors.identity import failing, remembered, settings_of

_REFUSED = re.compile(r"[^\w\-. /]", re.ASCII)
"""A character that MLflow refuses in names."""
_MOST_PARAMS, _LONGEST_PARAM = 100, 6000
"""Limits of MLflow: parameters of one request, characters of one value."""


def mlflow_name(key: str) -> str:
    """Converts a metric key to a valid MLflow name: `@` becomes `_at_` (`pass@4` is `pass_at_4`), any other refused
    character becomes its code point (`+` is `_x2b_`)."""
    return _REFUSED.sub(lambda match: f"_x{ord(match[0]):x}_", key.replace("@", "_at_"))


class MlflowMonitor:
    """One MLflow run per run directory; a resumed run continues it.

    MLflow cannot remove values: those that a killed session logged after its last checkpoint stay, and a repeated step
    has both values, the later one last. Tables are artifacts, one file per step.
    """

    class Config(Plugin):
        kind: str = "mlflow"
        tracking_uri: str | None = None
        """Where runs are: `http://host:5000`, `sqlite:///file.db`, ...; unset means `mlflow.db` in the run directory,
        shown by `mlflow ui --backend-store-uri sqlite:///runs/run/mlflow.db`."""
        experiment: str = "trivium"
        """The MLflow experiment."""
        name: str = ""
        """Name of the run; empty means the last part of `run.dir`."""
        tags: dict[str, str] = Field(default={})
        """Tags of the run."""

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise MissingPackage("mlflow-skinny", "mlflow", "log to MLflow") from error
        here = run_dir.resolve()
        self._client = MlflowClient(tracking_uri=config.tracking_uri or f"sqlite:///{here / 'mlflow.db'}")
        self._metric, self._param = Metric, Param
        # A tracking server decides itself where artifacts are stored.
        artifacts = None if config.tracking_uri else (here / "mlflow-artifacts").as_uri()
        self._run_id = remembered(run_dir / "mlflow-run-id", resume_step, lambda: self._begin(config, here, artifacts))
        # The previous session of a resumed run has set a final status.
        self._client.update_run(self._run_id, status="RUNNING")

    def _begin(self, config: Config, run_dir: Path, artifacts: str | None) -> str:
        """Begins a run in MLflow, with the config as its parameters. Returns its id."""
        existing = self._client.get_experiment_by_name(config.experiment)
        experiment = (
            existing.experiment_id if existing else self._client.create_experiment(config.experiment, artifacts)
        )
        run = self._client.create_run(experiment, run_name=config.name or run_dir.name, tags=dict(config.tags))
        params = [
            self._param(mlflow_name(key), str(value)[:_LONGEST_PARAM]) for key, value in settings_of(run_dir).items()
        ]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[first : first + _MOST_PARAMS])
        return run.info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        row = [self._metric(mlflow_name(key), value, now_ms, step) for key, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=row)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table as `tables/<name>/step-000010.json`, in the form of MLflow's own tables."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]}
        self._client.log_dict(self._run_id, table, f"tables/{mlflow_name(name)}/step-{step:06d}.json")

    def keep_file(self, path: Path) -> None:
        """Logs the file as an artifact."""
        self._client.log_artifact(self._run_id, str(path))

    def state(self) -> dict[str, Any]:
        """Returns an empty state: MLflow cannot remove values, and the run directory stores the run's id."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing: MLflow cannot remove values."""

    def close(self) -> None:
        """Ends the session; marks it as failed if an error ends the run."""
        self._client.set_terminated(self._run_id, "FAILED" if failing() else "FINISHED")
