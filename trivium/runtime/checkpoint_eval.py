"""`trivium eval`: evaluates one policy on a taskset, without training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trivium.checkpoint.atomic import atomic_write
from trivium.checkpoint.store import CheckpointStore
from trivium.config import RunConfig, build
from trivium.config.plan import with_choices
from trivium.errors import ConfigError, DataError
from trivium.explorer import Explorer
from trivium.monitors.console import shown
from trivium.registry import resolve
from trivium.runtime.build import build_evaluator, build_explorer
from trivium.runtime.main_loop import run_in_loop
from trivium.runtime.run_dir import as_saved
from trivium.runtime.stage import Stage
from trivium.runtime.stage_models import stage_ends, with_reward_models
from trivium.tasks.rows import json_value
from trivium.training.device import machine
from trivium.types import REFERENCE_REWARDS, Group, Metrics, Task, capabilities_of


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
    stage = stage_at(config, step)
    run_dir, store = stage.run_dir, CheckpointStore(stage.run_dir / "checkpoints")
    last = with_reward_models(stage.config, config.stage_names, stage_ends(store), store)
    stage = replace(stage, config=last)
    with shown(run_dir):
        explorer = build_explorer(stage)
        explorer.must_judge = rewarded
        written = _evaluate(stage, explorer, rows=save is not None, tasks=tasks is not None)
        metrics, groups = run_in_loop(written, last.workflow.deadline_s)
    if save is not None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for group in groups for row in _rows(group)]
        atomic_write(save, "".join(lines))
    if tasks is not None:
        atomic_write(tasks, "".join(json.dumps(_task_row(group), ensure_ascii=False) + "\n" for group in groups))
    return {**metrics, f"eval/{last.evaluation.taskset}/version": float(step)}  # a fresh engine counts from 0


def stage_at(config: RunConfig, step: int) -> Stage:
    """The last stage of a run with the policy of a checkpoint as its model (0: the model before training), for an
    engine that works alone. Raises ConfigError for an engine that does not sample from checkpoints, RunDirError for a
    step without a checkpoint."""
    config, run_dir = as_saved(config), Path(config.run.dir)
    alone = config.model_copy(update={"run": config.run.model_copy(update={"mode": "bench"})})  # nothing is trained
    config = config.model_copy(update={"engine": with_choices(alone, machine()).engine})
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
