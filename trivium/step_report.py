"""What a train step reports: its row of metrics, and the table of its rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from trivium.explorer import described_failure

if TYPE_CHECKING:
    from trivium.types import Group, Metrics


def step_row(
    metrics: Mapping[str, float], seconds_by_phase: Mapping[str, float], fresh: Sequence[Group], seconds: float
) -> Metrics:
    """The row of a train step: its metrics, its wall time by phase and its rates. `fresh` are the groups that were
    rolled out for it, without replayed and expert groups; `seconds` is its whole wall time."""
    num_tokens = sum(trajectory.num_tokens for group in fresh for trajectory in group.rollouts)
    return {
        **metrics,
        **{f"time/{name}": spent for name, spent in seconds_by_phase.items()},
        "time/step": seconds,
        "perf/idle": seconds_by_phase.get("wait", 0.0) / max(seconds, 1e-9),
        "perf/rollout_tokens_per_second": num_tokens / max(seconds, 1e-9),
    }


def staleness(fresh: Sequence[Group], version: int) -> Metrics:
    """How many versions the weights that sampled the groups are behind `version`: mean and maximum."""
    ages = [version - group.oldest_version for group in fresh if not group.expert] or [0]
    return {"rollout/staleness": sum(ages) / len(ages), "rollout/staleness_max": max(ages)}


def origin(groups: Sequence[Group]) -> Metrics:
    """How many tasks and which policy versions a step's groups come from."""
    versions = [group.oldest_version for group in groups if not group.expert]
    statistics = (("mean", fmean), ("min", min), ("max", max)) if versions else ()
    of_versions = {f"sample/model_version/{name}": statistic(versions) for name, statistic in statistics}
    return {"sample/task_count": len({(g.task.taskset, g.task.task_id) for g in groups}), **of_versions}


def examples_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The best and the worst rollout of a step, and one that failed, as rows of a table."""
    rollouts = [(trajectory.reward, group, trajectory) for group in groups for trajectory in group.alive]
    chosen = [pick(rollouts, key=lambda row: row[0]) for pick in (max, min) if rollouts]
    failed = (
        (0.0, group, rollout) for group in groups for rollout in group.trajectories if rollout.failure is not None
    )
    # By identity: if only one rollout succeeded, it is both the best and the worst.
    extremes = {id(row[2]): row for row in (*chosen, *islice(failed, 1))}
    return [
        {
            "task": group.task.task_id,
            "prompt": "\n".join(message.content for message in group.task.prompt),
            "reply": trajectory.completion,
            "reward": reward,
            **trajectory.rewards,
            "version": group.oldest_version,
            "tokens": trajectory.num_tokens,
            **(
                {} if trajectory.failure is None else {"reward": None, "failure": described_failure(trajectory.failure)}
            ),
        }
        for reward, group, trajectory in extremes.values()
    ]
