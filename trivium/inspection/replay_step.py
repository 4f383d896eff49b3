"""`trivium replay`: recomputes a recorded rollout, or a whole train step, from weights and random keys. Reports a
difference under the first of these stages that has one:

    weights    of the versions that sampled the rollouts, compared with the hash that the run recorded
    tokens     the rollouts, sampled again
    log-probs  of their tokens, by the engine
    reward     each component
    advantage  and every other kept number for a token that the step computed before its first update
    loss       and every other metric of the update, including the gradient norm
    update     the weights after the step
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file

from trivium.buffers.step_tokens import kept_columns, tokens_file
from trivium.explorer import Explorer
from trivium.foundation.concurrency import gather_or_cancel
from trivium.foundation.errors import RunDirError
from trivium.inspection.replay_compare import (
    Comparison,
    StageComparison,
    StageName,
    compare_metrics,
    compare_rewards,
    compare_rollout,
    lines_of,
    title_of,
)
from trivium.inspection.replay_stage import (
    EngineOfVersions,
    ReplayedTrainer,
    engines_of,
    inexact_because,
    remote_rewards,
    replayed_stage,
)
from trivium.inspection.run import RecordedRun
from trivium.loops import prepare_mini_batch
from trivium.protocols import RolloutEngine
from trivium.rewards.judge import Judge
from trivium.runtime.build import build_explorer
from trivium.runtime.main_loop import run_in_loop
from trivium.runtime.stage import Stage
from trivium.schedule import Assignment, Schedule
from trivium.training.engine import TorchTrainEngine
from trivium.types import SERVED, AnyArray, Batch, Group, Metrics, Trajectory, capabilities_of

_OWN = ("train/loss/", "train/grad_norm/")


@dataclass
class StepReplay:
    """The result of a replay of a train step, or of one of its tasks."""

    step: int
    about: str
    comparison: Comparison
    rollouts: int = 0
    """Number of rollouts sampled again."""
    chosen_metrics: dict[str, Metrics] = field(default_factory=dict[str, Metrics])
    """Objective -> loss and gradient norm over the replayed rollouts alone."""

    @property
    def ok(self) -> bool:
        """Whether all values are equal."""
        return self.comparison.first is None

    @property
    def text(self) -> str:
        """Formats the result as text."""
        lines = [f"replay of {self.about}"]
        inexact = self.comparison.inexact
        lines += [f"  need not be equal bit for bit: {reason}" for reason in inexact]
        lines += lines_of(self.comparison)
        for role, metrics in self.chosen_metrics.items():
            figures = [f"{key} {value:.6g}" for key, value in metrics.items() if key.startswith(_OWN)]
            lines.append(f"  {role} over these rollouts alone: {', '.join(figures)}")
        first = self.comparison.first
        return "\n".join([*lines, "everything compared is equal" if first is None else _first(first)])


def _first(stage: StageComparison) -> str:
    return f"the first difference is of the stage {stage.name}: {stage.differences[0]}"


def replay(
    run_dir: Path, step: int, *, task: str | None = None, update: bool = False, ask_servers: bool = False
) -> StepReplay:
    """Replays the rollouts of a train step (with `task`, those of this task) and the step itself. With `update`, also
    compares the weights after it. Includes rewards that a server computes only with `ask_servers`.

    Raises RunDirError, with the missing parts, for a step whose record is incomplete.
    """
    run = RecordedRun.open(run_dir)
    with tempfile.TemporaryDirectory(prefix="trivium-replay-") as scratch:
        left_out = [] if ask_servers else remote_rewards(run.stage_config(step))
        stage = replayed_stage(run, step, Path(scratch), left_out)
        return run_in_loop(_replay(run, stage, step, task, update, left_out), stage.config.workflow.deadline_s)


async def _replay(
    run: RecordedRun, stage: Stage, step: int, task: str | None, update: bool, left_out: Sequence[str]
) -> StepReplay:
    """`replay`, within an event loop."""
    comparison = Comparison(inexact_because(run, step, stage))
    trainer = ReplayedTrainer(run, stage)
    groups = trainer.fresh_groups(step) if trainer.explored else []
    chosen = [group for group in groups if task in (None, group.task.task_id)]
    if task is not None and not chosen:
        task_ids = ", ".join(dict.fromkeys(group.task.task_id for group in groups[:8]))
        raise RunDirError(
            f"task {task!r} in train step {step}", f"its tasks are {task_ids or 'none'}", "name one of its tasks"
        )
    sampled = [group for group in chosen if group.task.taskset != SERVED]
    versions = {version for group in sampled for version in _versions(group)}
    base = run.checkpoint_before(min(versions | {step - 1}), stage.first_version)
    began = stage.first_version if base is None else base.step
    _refuse_changes_between(run, began, step)
    repeated_steps = f", {step - 1 - began} train step(s) repeated" if step - 1 > began else ""
    about = f"train step {step} of {run.path}" + (f", task {task}" if task is not None else "")
    result = StepReplay(step, f"{about}; weights of version {began}{repeated_steps}", comparison)
    try:
        await trainer.begin(base)
        weights = await trainer.go_to(step - 1, versions)
        for version in trainer.hashes:
            _compare_hash(comparison, "weights", run, trainer, version)
        if sampled:
            await _replay_rollouts(result, stage, trainer, weights, sampled, left_out)
        else:
            comparison.note("tokens", "agents brought these tasks" if chosen else "the step took no group of explorers")
        await _replay_step(result, run, trainer, chosen, whole=task is None)
        if update:
            _compare_update(comparison, run, trainer)
        else:
            comparison.note("update", "--update compares the weights after the step")
        return result
    finally:
        trainer.close()


def _versions(group: Group) -> set[int]:
    """Returns the versions that sampled the tokens of a group; for a group without tokens, the version of its lease."""
    return {int(v) for turn in group.turns() for v in np.unique(turn.policy_version)} or {group.version}


def _refuse_changes_between(run: RecordedRun, began: int, step: int) -> None:
    between = [row["step"] for row in run.changes if began < row["step"] < step]
    if between:
        raise RunDirError(
            f"the weights before train step {step}",
            f"the config was changed after step {between[-1]}, and the newest checkpoint before that is {began}",
            f"keep the checkpoint of step {between[-1]} (checkpoint.keep), or replay a step before it",
        )


# --------------------------------------------------------------------------- rollouts


async def _replay_rollouts(
    result: StepReplay,
    stage: Stage,
    trainer: ReplayedTrainer,
    weights: Mapping[int, Sequence[tuple[str, torch.Tensor]]],
    groups: Sequence[Group],
    left_out: Sequence[str],
) -> None:
    """Samples the groups again and compares the rollouts."""
    comparison = result.comparison
    engine = await engines_of(stage, weights, groups)
    explorer = build_explorer(stage, "replay", cast(RolloutEngine, engine))
    explorer.must_judge = explorer.must_judge and not left_out
    comparison.inexact = [*comparison.inexact, *_inexact_engine(stage, engine)]
    for label in left_out:
        comparison.note("reward", f"{label} asks a server, so it is computed again only with --ask-servers")
    try:
        replayed = await gather_or_cancel(_rolled_out(explorer, trainer.schedule, group) for group in groups)
        for group, again in zip(groups, replayed, strict=True):
            result.rollouts += len(group.rollouts)
            for old, new in zip(group.rollouts, again.rollouts, strict=True):
                title = title_of(group, old)
                if any(len(np.unique(turn.policy_version)) > 1 for turn in old.turns):
                    comparison.note("tokens", f"{title} was sampled while weights changed (sync.in_flight)")
                elif compare_rollout(comparison, title, old, new, left_out):
                    continue
                await _judge_recorded(comparison, explorer, group, old, left_out)
    finally:
        await engine.close()


def _inexact_engine(stage: Stage, engine: EngineOfVersions) -> list[str]:
    can, kind = engine.capabilities, stage.config.engine.kind
    keys = [] if can.exact_sampling else [f"engine.kind {kind} does not sample by the keys that are recorded"]
    company = "log-probabilities depend on what shares a batch (engine.batch_invariant is off)"
    return keys + ([] if can.batch_invariant else [company])


async def _rolled_out(explorer: Explorer, schedule: Schedule, group: Group) -> Group:
    """Samples the group again with the keys of its slot and applies the experience pipeline."""
    at = Assignment(group.slot, group.task, group.epoch)
    keys = [schedule.key(at, rollout.index) for rollout in group.trajectories]
    greedy = None if group.greedy is None else schedule.key(at, group.greedy.index)
    slot, epoch, attempt = group.slot, group.epoch, group.attempt
    return explorer.refined(
        await explorer.rollout(group.task, keys, slot=slot, epoch=epoch, attempt=attempt, greedy=greedy)
    )


async def _judge_recorded(
    comparison: Comparison, explorer: Explorer, group: Group, rollout: Trajectory, left_out: Sequence[str]
) -> None:
    """Compares the rewards of a rollout whose tokens differ when sampled again, if they can be computed from its text
    alone."""
    title = title_of(group, rollout)
    if capabilities_of(explorer.workflow).gives_rewards or explorer.operators or rollout.failure is not None:
        comparison.note("reward", f"{title}: its rewards belong to a rollout that differs from the recorded one")
        return
    comparing = cast(Judge, explorer.judge).comparing
    if comparing:
        comparison.note("reward", f"{title}: rewards that compare a group are left out")
    (judged,) = await explorer.judge_rollouts(group.task, [replace(rollout, rewards={})])
    compare_rewards(comparison, title, rollout, judged, [*left_out, *comparing])


# --------------------------------------------------------------------------- the train step


async def _replay_step(
    result: StepReplay, run: RecordedRun, trainer: ReplayedTrainer, chosen: Sequence[Group], *, whole: bool
) -> None:
    """Takes the step on the recorded rollouts and compares its results. Reports the loss of the `chosen` groups; with
    `whole`, of the whole batch."""
    comparison, step, ids = result.comparison, result.step, {group.group_id for group in chosen}

    def measure(batch: Batch) -> None:
        rows = [row for row, experience in enumerate(batch.experiences) if whole or experience.group_id in ids]
        result.chosen_metrics = _metrics_of(trainer, batch.select(rows)) if rows else {}
        if comparison.inexact:
            _score_recorded(comparison, trainer, batch, rows)

    metrics, batch = await trainer.step(measure)
    _compare_columns(comparison, run, step, batch, chosen)
    recorded = run.metrics_of(step)
    compare_metrics(comparison, recorded, metrics)
    if not recorded:
        comparison.note("loss", "metrics.jsonl has no row of this step: `monitors` needs kind jsonl")


def _metrics_of(trainer: ReplayedTrainer, batch: Batch) -> dict[str, Metrics]:
    engine = trainer.trainer.engine
    if not isinstance(engine, TorchTrainEngine):
        return {}
    return {
        objective.role: engine.measure(
            objective.role, prepare_mini_batch(engine, batch, objective, 0), objective, gradient=True
        )
        for objective in engine.algorithm.objectives_at(engine.version)
    }


def _score_recorded(comparison: Comparison, trainer: ReplayedTrainer, batch: Batch, rows: Sequence[int]) -> None:
    """Compares the trainer's log-probabilities of the recorded tokens if sampling again may give other tokens."""
    fresh = [row for row in rows if (batch.experiences[row].policy_version.max(initial=-1)) == trainer.version]
    part = batch.select(fresh)
    for experience, scores in zip(part.experiences, trainer.trainer.engine.score(part, "old"), strict=True):
        mask = experience.response_mask & (experience.policy_version == trainer.version)
        title = f"{experience.group_id}, rollout {experience.index + 1}, by the trainer, token"
        comparison.arrays("log-probs", title, experience.rollout_log_prob[mask], np.asarray(scores)[mask])


def _compare_columns(
    comparison: Comparison, run: RecordedRun, step: int, batch: Batch, chosen: Sequence[Group]
) -> None:
    """Compares the per-token values that the run kept."""
    rows: dict[tuple[str, int], list[int]] = {}
    for row, experience in enumerate(batch.experiences):
        rows.setdefault((experience.group_id, experience.index), []).append(row)
    for group in chosen:
        for rollout in group.trajectories:
            places = rows.get((group.group_id, rollout.index), [])
            kept_values = kept_columns(run.path, step, group, rollout.index)
            for row, columns in zip(places, kept_values, strict=False):
                computed: dict[str, AnyArray] = {name: arrays[row] for name, arrays in batch.columns.items()}
                computed["response_mask"] = batch.experiences[row].response_mask
                for name, array in columns.items():
                    title = f"{title_of(group, rollout)}, {name}, token"
                    comparison.arrays("advantage", title, array, computed.get(name, array[:0]))
    if not tokens_file(run.path, step).is_file():
        comparison.note("advantage", "values of single tokens were not kept: set run.keep: tokens")


# --------------------------------------------------------------------------- weights


def _compare_hash(
    comparison: Comparison, stage: StageName, run: RecordedRun, trainer: ReplayedTrainer, version: int
) -> bool:
    """Compares the hash of a version with the recorded one; returns whether one was recorded."""
    noted = run.record(version).weights
    if noted and comparison.inexact and noted != trainer.hashes[version]:
        comparison.note(stage, f"the weights of version {version} differ from the run's")
    elif noted:
        comparison.values(stage, f"the hash of the weights of version {version}", noted, trainer.hashes[version])
    return bool(noted)


def _compare_update(comparison: Comparison, run: RecordedRun, trainer: ReplayedTrainer) -> None:
    """Compares the weights after the step with their recorded hash, and with a checkpoint if there is one."""
    version = trainer.version
    noted = _compare_hash(comparison, "update", run, trainer, version)
    if version not in run.store.steps():
        if not noted:
            comparison.note("update", f"the run recorded no hash of version {version}, and has no checkpoint of it")
        return
    weights = dict(trainer.channel.collect(version))
    for file in sorted((run.store.open(version).path / "policy").glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name in weights:
                title = f"{name} in the checkpoint, at"
                offered = weights[name].double()
                comparison.arrays("update", title, tensor.to(weights[name].dtype).double().numpy(), offered.numpy())
