"""Metrics of a step's rollouts: all groups, refused groups, rewards, and advantages of the trained tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

import numpy as np

from trivium.types import Batch, Group, Metrics, StopReason, Trajectory, sequences_of

_MEASURED = {f"perf/{name}" for name in ("engine_s", "rollout_s", "reward_s")}
"""The metrics that Trivium itself measures of a rollout."""


def describe(groups: Sequence[Group], trained_groups: Sequence[Group], refused_by: Mapping[str, int]) -> Metrics:
    """Metrics of all rollouts, refused groups included, because the trained groups alone would overstate the policy.

    `refused_by` counts the groups that each rule refused. Leaves out expert completions if the policy generated any
    rollouts.
    """
    failures = Counter(member.failure.side for group in groups for member in group.rollouts if member.failure)
    sampled = [group for group in groups if not group.expert] or groups
    members = [member for group in sampled for member in group.alive]
    return {
        "rollout/groups": len(groups),
        "rollout/refused": len(groups) - len(trained_groups),
        **{f"rollout/refused/{rule}": count for rule, count in refused_by.items()},
        "rollout/total": sum(len(group.rollouts) for group in groups),
        "rollout/failed": failures.total(),
        **{f"rollout/failed/{side}": count for side, count in failures.items()},
        "rollout/trajectories": sum(len(group.alive) for group in trained_groups),
        **_about(members),
        **_about_rewards(groups, trained_groups),
    }


def _about(members: Sequence[Trajectory]) -> Metrics:
    """Lengths, stop reasons and turns of rollouts; empty without any."""
    if not members:
        return {}
    tokens = [member.num_tokens for member in members]
    stops = [member.stop_reason for member in members]
    # The first turn's prompt is that of the task; the prompts of later turns contain completions as well.
    prompts = [len(member.turns[0].prompt_tokens) for member in members if member.turns] or [0]
    turns = [len(member.turns) for member in members]
    texts = Counter(member.completion.strip() for member in members)
    return {
        "rollout/empty": texts[""] / len(members),
        "rollout/most_common": max(texts.values()) / len(members),
        "rollout/response_tokens": fmean(tokens),
        "rollout/response_tokens_max": max(tokens),
        "rollout/response_tokens_min": min(tokens),
        "rollout/prompt_tokens": fmean(prompts),
        "rollout/prompt_tokens_max": max(prompts),
        "rollout/prompt_tokens_min": min(prompts),
        "rollout/truncated": stops.count(StopReason.LENGTH) / len(members),
        "rollout/aborted": fmean(not n or stop == StopReason.ABORT for n, stop in zip(tokens, stops, strict=True)),
        "rollout/turns": fmean(turns),
        "rollout/turns_max": max(turns),
        "rollout/turns_min": min(turns),
        **({"rollout/forked": fmean(_num_forks(member) for member in members)} if max(turns) > 1 else {}),
        **_workflow(members),
    }


def _workflow(members: Sequence[Trajectory]) -> Metrics:
    """Means of the metrics of workflows. Those of `_MEASURED` are logged under their own names, since they depend on
    the machine. All other names stay under `workflow/`: they cannot replace a metric of the step."""
    means = _means("", [member.metrics for member in members])
    return {key if key in _MEASURED else f"workflow/{key}": value for key, value in means.items()}


def _num_forks(member: Trajectory) -> int:
    return max(0, len(sequences_of(member.turns)) - 1)


def _about_rewards(groups: Sequence[Group], trained_groups: Sequence[Group]) -> Metrics:
    """Metrics of rewards; empty if no trajectory has a reward, as with supervised data."""
    judged = [[member.reward for member in group.alive if member.rewards] for group in groups]
    rewards = [reward for group in judged for reward in group]
    if not rewards:
        return {}
    comparable = [group for group in judged if len(group) > 1]
    trained = [member.reward for group in trained_groups for member in group.alive if member.rewards]
    greedy = [group.greedy.reward for group in groups if group.greedy is not None and group.greedy.failure is None]
    equal = {"reward/equal_groups": fmean(len(set(group)) == 1 for group in comparable)} if comparable else {}
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        **equal,
        **({"reward/trained_mean": fmean(trained)} if trained else {}),
        **({"reward/greedy": fmean(greedy)} if greedy else {}),
        **_means("reward/component/", [member.rewards for group in groups for member in group.alive]),
    }


def describe_tokens(batch: Batch) -> Metrics:
    """Advantages, returns and values of the policy's own trained tokens, for the columns that the batch has."""
    metrics: Metrics = {}
    if not len(batch):
        return metrics
    sampled = batch.flat("response_mask") & ~np.repeat(batch.experts, batch.lengths)
    for name, label in (("advantages", "advantage"), ("returns", "return"), ("values", "value")):
        numbers = (
            np.concatenate(batch.columns[name])[sampled].astype(np.float64) if name in batch.columns else sampled[:0]
        )
        if len(numbers):
            metrics[f"train/{label}_mean"] = float(numbers.mean())
            metrics[f"train/{label}_max"] = float(numbers.max())
            metrics[f"train/{label}_min"] = float(numbers.min())
    return metrics


def _means(prefix: str, rows: Sequence[Mapping[str, float]]) -> Metrics:
    """The mean of each name over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {prefix + name: fmean(row[name] for row in rows if name in row) for name in names}
