"""Reads the directory of a finished or running run: its config at any step, stages, metrics, rollouts, checkpoints and
end. Changes no file.

    run = RecordedRun.open(Path("runs/sums"))
    print(run.config.algorithm.kind, run.rows()[-1], run.verdict)
    print([run.groups.group(place).task.task_id for place in run.groups.of_step(12)], run.advantages(12))
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trivium.buffers.step_log import STEPS, StepRecord
from trivium.buffers.step_tokens import MASK, TOKENS, Columns, kept_means, kept_values, tokens_file
from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.config import RunConfig, build, load_config
from trivium.config.saved import config_file
from trivium.foundation.errors import RunDirError, TriviumError
from trivium.foundation.metrics import depends_on_machine
from trivium.inspection.changing_files import MetricRows, Row, cached_while_unchanged, json_value
from trivium.inspection.rollouts import Member, Place, RecordedGroups, Rollout, step_records, taken_groups
from trivium.monitors.verdict import verdict
from trivium.runtime.build import algorithm_of
from trivium.runtime.logs import BEGINS, ENDED
from trivium.runtime.run_dir import recorded_changes
from trivium.runtime.stage_models import located_rewards, stage_ends
from trivium.types import Group, Trajectory

_log = logging.getLogger("trivium")
_LOG_BYTES = 65536
"""Bytes read from the end of log.txt."""
_BETWEEN_STEPS = ("evaluate", "sync", "checkpoint")
"""The phases of the trainer that `time/step` does not contain."""
Estimates = Mapping[Member, tuple[Columns, ...]]
"""The advantages and the mask of trained tokens of each of a rollout's sequences."""


class RecordedRun:
    """The contents of a run directory. Every property reads its file again if the file has changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricRows(path / "metrics.jsonl")
        self.groups = RecordedGroups(path)
        self.store = CheckpointStore(path / "checkpoints")

    @classmethod
    def open(cls, path: Path) -> RecordedRun:
        """Opens a run directory. Raises RunDirError if it holds no run, ConfigError if its config cannot be read on
        this machine."""
        run = cls(path)
        _config(run.config_file)
        return run

    # ----------------------------------------------------------------------- config and stages

    @property
    def config(self) -> RunConfig:
        """The config of the newest session; raises the errors of `open`."""
        return _config(self.config_file)

    @property
    def config_file(self) -> Path:
        """The file of the config. Raises RunDirError if the directory holds no run."""
        file = config_file(self.path)
        if not file.is_file():
            found = "no config.yaml there" if self.path.is_dir() else "no such directory"
            raise RunDirError(f"the run in {self.path}", found, "name the directory of a run (run.dir)")
        return file

    @property
    def stage_bounds(self) -> list[int]:
        """The version that each stage begins with, and the version that the last one ends with."""
        return self.config.stage_bounds

    def stage_at(self, step: int) -> tuple[int, int]:
        """Returns (number, first version) of the stage of a train step. Raises RunDirError if no stage has this
        step."""
        bounds = self.stage_bounds
        if not 0 < step <= bounds[-1]:
            found = f"its config has steps 1 to {bounds[-1]}"
            raise RunDirError(f"step {step} of {self.path}", found, "name one of these")
        number = bisect_left(bounds, step) - 1
        return number, bounds[number]

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
        rewards = located_rewards(config.rewards, self.config.stage_names, stage_ends(self.store), self.store)
        return config.model_copy(update={"rewards": rewards})

    @property
    def changes(self) -> Sequence[Mapping[str, Any]]:
        """The changes made with `--change`, in order (see `run_dir.recorded_changes`)."""
        return recorded_changes(self.path)

    # ----------------------------------------------------------------------- steps and weights

    @property
    def steps(self) -> Mapping[int, StepRecord]:
        """The log of each step (`steps.jsonl`)."""
        return step_records(self.path)

    def record(self, step: int) -> StepRecord:
        """Returns the record of a train step; empty if it has none."""
        return self.steps.get(step, StepRecord(step))

    def model_dir(self, step: int) -> Path:
        """Returns the directory of the weights that the stage of a train step began with."""
        number, _ = self.stage_at(step)
        if number:
            ends = stage_ends(self.store)
            if len(ends) < number:
                raise RunDirError(
                    f"the initial weights of stage {number} of {self.path}",
                    f"checkpoints show the ends of {len(ends)} stage(s)",
                    "restore the checkpoint of the end of the previous stage",
                )
            return self.store.open(ends[number - 1]).path / "policy"
        return self.base_model()

    def base_model(self) -> Path:
        """Returns the directory of the model that the run began with."""
        return build("models", self.config.model, seed=self.config.run.seed).materialize(self.path / "model")

    def checkpoint_before(self, version: int, first_version: int) -> Checkpoint | None:
        """Returns the newest checkpoint of at most this version in the stage that began with `first_version`; None if
        there is none."""
        steps = [step for step in self.store.steps() if first_version < step <= version]
        return self.store.open(steps[-1]) if steps else None

    # ----------------------------------------------------------------------- rollouts

    def advantages(self, step: int) -> Mapping[Member, float]:
        """Returns the mean advantage of each rollout that a train step trained on. Empty if the run did not keep the
        advantages and the rewards do not determine them."""
        kept_advantages = kept_means(self.path, step, "advantages")
        return kept_advantages or {member: _mean(parts) for member, parts in _estimated(self.path, step).items()}

    def rollout(self, place: Place, group: Group, trajectory: Trajectory, step: int | None = None) -> Rollout:
        """Returns a rollout of a group with the values that a train step computed for it. With None, or a step that did
        not take the group, uses every step that took it."""
        steps = place.takers if step is None or step not in place.takers else (step,)
        values_by_step: dict[int, tuple[Columns, ...]] = {}
        for taker in () if trajectory is group.greedy else steps:
            estimated = _estimated(self.path, taker).get((group.slot, group.attempt, trajectory.index), ())
            values_by_step[taker] = kept_values(self.path, taker, group, trajectory.index) or estimated
        return Rollout(place.stage, place.planned_step, group, trajectory, values_by_step, place.takers)

    # ----------------------------------------------------------------------- metrics and end

    def rows(self) -> list[Row]:
        """Returns the rows of metrics.jsonl (`MetricRows.refresh`)."""
        return self.metrics.refresh()

    def metrics_of(self, step: int) -> dict[str, float]:
        """Returns the metrics of the train step, without those that depend on clock or machine; empty if it logged
        none."""
        row = next((row for row in self.rows() if row["step"] == step and "train/version" in row), {})
        return {key: value for key, value in row.items() if key != "step" and not depends_on_machine(key)}

    @property
    def last_step(self) -> int:
        """The last step that logged metrics; 0 if none did."""
        return max((int(row["step"]) for row in self.rows()), default=0)

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of a finished run; empty before."""
        return (json_value((self.path / "summary.json").read_bytes()) if self.finished else None) or {}

    @property
    def verdict(self) -> str:
        """The bottleneck of the run in one line: from its summary or, before it is finished, from its metrics."""
        return str(self.summary.get("verdict") or self.bound())

    def bound(self) -> str:
        """Describes the phase that bounds the steps with metrics, and its share of their time."""
        seconds, total = dict[str, float](), 0.0
        for row in self.rows():
            total += sum(row.get(f"time/{name}", 0.0) for name in ("step", *_BETWEEN_STEPS))
            for key, value in row.items():
                if key.startswith("time/") and key not in ("time/step", "time/train"):
                    seconds[key.removeprefix("time/")] = seconds.get(key.removeprefix("time/"), 0.0) + value
        try:
            config = self.config
        except TriviumError:  # the run's own code is not on this machine
            config = None
        return verdict(seconds, total, config)

    @property
    def error(self) -> str:
        """The error that ended the newest session, in one line; empty if no error ended it."""
        log = self.path / "log.txt"
        if not log.is_file():
            return ""
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        ended, started = (
            max((n for n, line in enumerate(lines) if text in line), default=-1) for text in (ENDED, BEGINS)
        )
        return lines[ended].partition(ENDED)[2] if ended > started else ""


@cached_while_unchanged(STEPS, TOKENS, maxsize=4)
def _estimated(run_dir: Path, step: int) -> Estimates:
    """Estimates the advantages of a step with the run's own algorithm, from the rewards. Empty if the step kept its
    own, or the estimator needs more: scores of a model, state from earlier steps, or groups that are not recorded."""
    if tokens_file(run_dir, step).is_file():
        return {}
    run = RecordedRun(run_dir)
    places = [place for place in run.groups.of_step(step) if step in place.takers]
    try:
        algorithm = algorithm_of(run.stage_config(step))
        derived = algorithm.estimator is not None and not algorithm.advantage_needs and not algorithm.state()
        if not derived or len(places) < sum(group.slot >= 0 for group in taken_groups(run_dir, step)):
            return {}
        groups, _ = algorithm.filter([run.groups.group(place) for place in places])
        batch, _ = algorithm.advantages(algorithm.batch(groups))
    except TriviumError as error:  # the run's own code is not on this machine, or it refuses these groups
        _log.warning("no advantages of step %d: %s", step, error)
        return {}
    by_id = {group.group_id: (group.slot, group.attempt) for group in groups}
    estimates = defaultdict[Member, tuple[Columns, ...]](tuple)
    for experience, values in zip(batch.experiences, batch.columns["advantages"], strict=True):
        member = (*by_id[experience.group_id], experience.index)
        estimates[member] += ({"advantages": values, MASK: experience.response_mask},)
    return dict(estimates)


def _mean(parts: Sequence[Columns]) -> float:
    """Returns the mean advantage over the trained tokens of a rollout's sequences."""
    trained = np.concatenate([columns["advantages"][columns[MASK]] for columns in parts])
    return float(trained.sum(dtype=np.float64)) / max(1, len(trained))


@cached_while_unchanged()
def _config(file: Path) -> RunConfig:
    return load_config(file, [])


def _put(values: Any, where: str, value: object) -> None:
    """Sets the value at a path like `train.optimizer.lr` or `rewards[0].weight`."""
    *parents, last = re.findall(r"\[\d+\]|[^.\[]+", where)
    for part in parents:
        values = values[int(part[1:-1])] if part.startswith("[") else values[part]
    values[int(last[1:-1]) if last.startswith("[") else last] = value
