"""`trivium eval`: evaluates one policy on a taskset, without training."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trivium.checkpoint.store import CheckpointStore
from trivium.config import RunConfig, build
from trivium.explorer import Explorer
from trivium.foundation.atomic import atomic_write, refuse_existing
from trivium.foundation.concurrency import usable_cores
from trivium.foundation.errors import ConfigError, DataError
from trivium.foundation.registry import resolve
from trivium.monitors.console import shown
from trivium.planning.plan import plan_run
from trivium.runtime.build import build_evaluator, build_explorer
from trivium.runtime.main_loop import run_in_loop
from trivium.runtime.row_lengths import left_out
from trivium.runtime.run_dir import as_saved
from trivium.runtime.stage import Stage
from trivium.runtime.stage_models import located_rewards, stage_ends
from trivium.tasks.rows import json_value
from trivium.training.device import machine
from trivium.types import REFERENCE_REWARDS, Group, Metrics, Task, capabilities_of

_log = logging.getLogger("trivium")
_SAVED = "saved.txt"
"""Hashes of the files that evaluations of the run wrote. Only such a file, unchanged, is replaced."""


def evaluate(config: RunConfig, step: int, save: Path | None = None, tasks: Path | None = None) -> Metrics:
    """Evaluates the policy of a checkpoint (0: the model before training) on `evaluation.taskset` of the last stage.

    `save` is a file for the rollouts without a failure, one JSON row each: id, prompt, completion, sample_index,
    stop_reason, reward (if there are rewards), and the task's columns. `tasks.kind: jsonl` and `buffer.kind: files`
    read it. `tasks` is a file for the tasks, one row each: their columns, and the rewards of these rollouts as
    `reference_rewards` (A*-PO).
    """
    last = config.stage_configs()[-1]
    if last.evaluation.taskset is None:
        raise ConfigError("evaluate a checkpoint", "evaluation.taskset is not set", "set evaluation.taskset")
    rewarded = bool(last.rewards) or capabilities_of(resolve("workflows", last.workflow.kind)).gives_rewards
    if tasks is not None and not rewarded:
        raise ConfigError("tasks with the rewards of their rollouts (--tasks)", "no rewards", "set rewards, or --save")
    _refuse_foreign(last, save, tasks)
    stage = stage_at(config, step)
    run_dir, store = stage.run_dir, CheckpointStore(stage.run_dir / "checkpoints")
    stage = stage.judged_by(located_rewards(stage.config.rewards, config.stage_names, stage_ends(store), store))
    last = stage.config
    with shown(run_dir):
        explorer = build_explorer(stage)
        explorer.must_judge = rewarded
        written = _evaluate(stage, explorer, rows=save is not None, tasks=tasks is not None)
        metrics, groups = run_in_loop(written, last.workflow.deadline_s)
    if save is not None:
        _write(run_dir, save, (row for group in groups for row in _rows(group)))
    if tasks is not None:
        _write(run_dir, tasks, map(_task_row, groups))
    return {**metrics, f"eval/{last.evaluation.taskset}/version": float(step)}  # a fresh engine counts from 0


def _refuse_foreign(config: RunConfig, save: Path | None, tasks: Path | None) -> None:
    """Raises ConfigError for a file to write that the evaluation reads, or that no evaluation of the run wrote."""
    saved = Path(config.run.dir) / _SAVED
    hashes = saved.read_text(encoding="utf-8").split() if saved.is_file() else []
    sources = [Path(path).resolve() for path in getattr(config.tasks[str(config.evaluation.taskset)], "paths", ())]
    for option, path in (("--save", save), ("--tasks", tasks)):
        if path is not None and path.resolve() in sources:
            raise ConfigError(f"{option} {path}", "the tasks are read from it", "name a new file")
        if path is not None:
            refuse_existing(path, option, is_own=lambda content: _hash(content) in hashes)
    if save is not None and tasks is not None and save.resolve() == tasks.resolve():
        raise ConfigError(f"--save and --tasks {save}", "both name one file", "name two")


def _write(run_dir: Path, path: Path, rows: Iterable[dict[str, Any]]) -> None:
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    # The hash first: a command that is killed in between leaves no file that the next one refuses as foreign.
    with (run_dir / _SAVED).open("a", encoding="utf-8") as file:
        file.write(_hash(content) + "\n")
    atomic_write(path, content)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def stage_at(config: RunConfig, step: int) -> Stage:
    """The last stage of a run with the policy of a checkpoint as its model (0: the model before training), for an
    engine that works alone. Raises ConfigError for an engine that does not sample from checkpoints, RunDirError for a
    step without a checkpoint."""
    config, run_dir = as_saved(config), Path(config.run.dir)
    alone = config.model_copy(update={"run": config.run.model_copy(update={"mode": "bench"})})  # nothing is trained
    config = config.model_copy(update={"engine": plan_run(alone, usable_cores(), machine()).config.engine})
    last = config.stage_configs()[-1]
    if step and not capabilities_of(resolve("engines", last.engine.kind)).adopts_weights:
        raise ConfigError(
            f"the policy of step {step} with engine.kind {last.engine.kind!r}",
            "it samples from its own policy, not from checkpoints",
            "use --step 0 for that policy, or engine.kind=torch for the checkpoint",
        )
    if step == 0:
        model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
    else:
        model_dir = CheckpointStore(run_dir / "checkpoints").open(step).path / "policy"
    return Stage(last, 0, step, True, run_dir, model_dir)


async def _evaluate(stage: Stage, explorer: Explorer, *, rows: bool, tasks: bool) -> tuple[Metrics, Sequence[Group]]:
    """The metrics and groups. `rows` and `tasks`: whether rows of the rollouts and of the tasks will be written; then
    raises DataError, before any rollout, for a task that a row cannot hold."""
    try:
        evaluator = build_evaluator(stage, explorer)
        for what, count in left_out(evaluator.tasks).items():
            _log.warning("tasks.%s: %d rows %s", evaluator.taskset, count, what)
        for index in range(len(evaluator.tasks)) if rows or tasks else ():
            _check_row(evaluator.tasks[index], media=not tasks)
        groups = await evaluator.rollouts(explorer.version)
    finally:
        await explorer.engine.close()
    return evaluator.measured(groups, explorer.version), groups


def _check_row(task: Task, media: bool) -> None:
    """Raises DataError for a task that a row of JSON cannot hold. `media`: whether rows leave out its media."""
    identity = str(task.columns.get("id", task.task_id))
    if identity != task.task_id:
        raise DataError(
            f"a row of task {task.task_id!r}",
            f"its column id is {identity!r}, and a row has the id of the task under this name",
            f"rename the column, or take the id from it (tasks.{task.taskset}.id=id) if each task has its own",
        )
    if not media and any(message.media for message in task.prompt):
        raise _no_row(task, "it has media")
    _columns(task)


def _columns(task: Task) -> dict[str, Any]:
    """The task's columns as JSON values."""
    return json_value(task.columns, f"task {task.task_id!r}")


def _task_row(group: Group) -> dict[str, Any]:
    """The task with the rewards of its rollouts. Raises DataError if all of them failed."""
    if not group.alive:
        raise _no_row(group.task, "all rollouts failed")
    rewards = [trajectory.reward for trajectory in group.alive]
    return {**_columns(group.task), "id": group.task.task_id, "prompt": _prompt(group), REFERENCE_REWARDS: rewards}


def _no_row(task: Task, found: str) -> DataError:
    do = f"leave the task out, or write its column {REFERENCE_REWARDS} yourself"
    return DataError(f"a row with the rewards of task {task.task_id!r}", found, do)


def _prompt(group: Group) -> list[dict[str, str]]:
    return [message.entry() for message in group.task.prompt]


def _rows(group: Group) -> Iterator[dict[str, Any]]:
    prompt, columns = _prompt(group), _columns(group.task)
    for trajectory in group.alive:
        row = {"id": group.task.task_id, "prompt": prompt, "completion": trajectory.completion}
        row |= {"sample_index": trajectory.index, "stop_reason": trajectory.stop_reason}
        yield {**columns, **row, **({"reward": trajectory.reward} if trajectory.rewards else {})}
