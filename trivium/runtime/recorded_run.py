"""Reads a run directory: its config at any step, its stages, checkpoints and metrics. Changes no file.

`trivium.buffers.rollouts` reads rollouts and the columns that train steps computed; `trivium.buffers.step_log` reads
the log of each step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivium.buffers.step_log import StepRecord, read_steps
from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.config import RunConfig, build, load_config, read_yaml
from trivium.config.resume import as_begun
from trivium.errors import RunDirError
from trivium.metrics import depends_on_machine
from trivium.phases import verdict
from trivium.runtime.run_dir import recorded_changes
from trivium.runtime.stage_models import stage_ends, with_reward_models


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run directory."""

    path: Path
    config: RunConfig
    """The config of the newest session."""
    steps: Mapping[int, StepRecord]
    """The log of each step (`steps.jsonl`)."""
    changes: Sequence[Mapping[str, Any]]
    """The changes made with `--change`, in order (see `run_dir.recorded_changes`)."""
    store: CheckpointStore

    @classmethod
    def open(cls, path: Path) -> RecordedRun:
        """Opens a run directory. Raises RunDirError if it holds no run, ConfigError if its config cannot be read on
        this machine."""
        file = path / "config.yaml"
        if not file.is_file():
            found = "no config.yaml there" if path.is_dir() else "no such directory"
            raise RunDirError(f"the run in {path}", found, "name the directory of a run (run.dir)")
        config = as_begun(read_yaml(file), load_config(file, []))
        return cls(path, config, read_steps(path), recorded_changes(path), CheckpointStore(path / "checkpoints"))

    def stage_at(self, step: int) -> tuple[int, int]:
        """Returns (number, first version) of the stage of a train step. Raises RunDirError if no stage has this
        step."""
        first = 0
        stages = self.config.stage_configs()
        for number, stage in enumerate(stages):
            if first < step <= first + stage.schedule.steps:
                return number, first
            first += stage.schedule.steps
        raise RunDirError(f"step {step} of {self.path}", f"its config has steps 1 to {first}", "name one of these")

    def stage_config(self, step: int) -> RunConfig:
        """Returns the config of this train step: reverts later changes and fills in the models of earlier stages."""
        number, _ = self.stage_at(step)
        config = self.config.stage_configs()[number]
        prefix = f"stages[{number}]." if self.config.stages else ""
        values: dict[str, Any] = config.model_dump(mode="json")
        undone = False
        for row in reversed(self.changes):
            for where, (before, _) in row["changes"].items() if row["step"] >= step else ():
                if where.startswith(prefix):
                    _put(values, where.removeprefix(prefix), before)
                    undone = True
        config = RunConfig.model_validate(values) if undone else config
        return with_reward_models(config, self.config.stage_names, stage_ends(self.store), self.store)

    def model_dir(self, step: int) -> Path:
        """Returns the directory of the weights that the stage of a train step began with."""
        number, _ = self.stage_at(step)
        if number:
            ends = stage_ends(self.store)
            if len(ends) < number:
                raise RunDirError(
                    f"the weights that stage {number} of {self.path} began with",
                    f"checkpoints show the ends of {len(ends)} stage(s)",
                    "put the checkpoint of the end of the stage before it back",
                )
            return self.store.open(ends[number - 1]).path / "policy"
        return build("models", self.config.model, seed=self.config.run.seed).materialize(self.path / "model")

    def checkpoint_before(self, version: int, first_version: int) -> Checkpoint | None:
        """Returns the newest checkpoint of at most this version in the stage that began with `first_version`; None if
        there is none."""
        steps = [step for step in self.store.steps() if first_version < step <= version]
        return self.store.open(steps[-1]) if steps else None

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl, in order; a step may have several. Empty if there is no such file."""
        return rows_of(self.path)

    def metrics_of(self, step: int) -> dict[str, float]:
        """Returns the metrics of the train step, without those that depend on clock or machine; empty if it logged
        none."""
        row = next((row for row in self.rows() if row["step"] == step and "train/version" in row), {})
        return {key: value for key, value in row.items() if key != "step" and not depends_on_machine(key)}


def bound(rows: Iterable[Mapping[str, float]]) -> str:
    """Describes the phase that bounds a run with these rows of metrics, and its share of the time."""
    seconds, total = dict[str, float](), 0.0
    for row in rows:
        total += row.get("time/step", 0.0) + row.get("time/evaluate", 0.0)
        for key, value in row.items():
            if key.startswith("time/") and key not in ("time/step", "time/train"):
                seconds[key.removeprefix("time/")] = seconds.get(key.removeprefix("time/"), 0.0) + value
    return verdict(seconds, total)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl in a run directory, without reading its config."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: str) -> dict[str, Any] | None:
    """Parses one row; returns None for an incomplete last line of a run in progress."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _put(values: Any, where: str, value: object) -> None:
    """Sets the value at a path like `train.optimizer.lr` or `rewards[0].weight`."""
    *parents, last = re.findall(r"\[\d+\]|[^.\[]+", where)
    for part in parents:
        values = values[int(part[1:-1])] if part.startswith("[") else values[part]
    values[int(last[1:-1]) if last.startswith("[") else last] = value
