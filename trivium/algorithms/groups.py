"""From groups to a batch: who is trained on, what is said about them, and their arrays.

Legend: B sequences, L tokens of the longest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from statistics import fmean, pstdev

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trivium.algorithms.advantages.inputs import AdvantageInputs
from trivium.algorithms.shaping import ShapingInputs
from trivium.errors import DataError
from trivium.randomness import stream, uniforms
from trivium.types import AnyArray, Batch, Experience, Group, Metrics, StopReason, Trajectory, experiences_of


def batch_of(groups: Sequence[Group]) -> Batch:
    """The experiences of the groups' living members, in order."""
    return Batch(tuple(e for group in groups for member in group.alive for e in experiences_of(group, member)))


def pair_of(group: Group) -> tuple[Trajectory, Trajectory] | None:
    """(the best, the worst) living member that said something, of equals the first; None where none is better."""
    said = [member for member in group.alive if member.turns]
    best, worst = (pick(said, key=lambda member: member.reward, default=None) for pick in (max, min))
    return (best, worst) if best and worst and best.reward > worst.reward else None


def batch_of_pairs(groups: Sequence[Group]) -> Batch:
    """Two rows for each group that has a pair: the chosen one, the rejected one.

    Raises DataError for a trajectory whose turns rewrote history: it is more than one sequence, and a reply has one
    probability only as a single one.
    """
    pairs = [(group, pair) for group in groups if (pair := pair_of(group))]
    return Batch(tuple(_single(group, member) for group, pair in pairs for member in pair))


def _single(group: Group, member: Trajectory) -> Experience:
    experiences = experiences_of(group, member)
    if len(experiences) != 1:
        raise DataError(
            "a pair of two sequences",
            f"trajectory {member.index} of group {group.group_id!r} is {len(experiences)}: a turn rewrote its history",
            "use a workflow whose turns extend one another, or an algorithm without pairs",
        )
    return experiences[0]


def describe(groups: Sequence[Group], kept: Sequence[Group], refused_by: Mapping[str, int]) -> Metrics:
    """What was played, refused groups included: what is trained on alone would look better than the policy is.

    `refused_by` says how many groups each rule refused. Beside what was played, an expert's replies are not described.
    """
    failures = Counter(member.failure.side for group in groups for member in group.played if member.failure)
    played = [group for group in groups if not group.expert] or groups
    members = [member for group in played for member in group.alive]
    return {
        "rollout/groups": len(groups),
        "rollout/refused": len(groups) - len(kept),
        **{f"rollout/refused/{rule}": count for rule, count in refused_by.items()},
        "rollout/failed": failures.total(),
        **{f"rollout/failed/{side}": count for side, count in failures.items()},
        "rollout/trajectories": sum(len(group.alive) for group in kept),
        **_about(members),
        **_about_rewards(groups, kept),
    }


def _about(members: Sequence[Trajectory]) -> Metrics:
    if not members:
        return {}
    tokens = [member.num_tokens for member in members]
    # Of several turns, the first one's prompt is what the task asked; later ones hold replies as well.
    prompts = [len(member.turns[0].prompt_tokens) for member in members if member.turns] or [0]
    turns = [len(member.turns) for member in members]
    return {
        "rollout/response_tokens": fmean(tokens),
        "rollout/response_tokens_max": max(tokens),
        "rollout/response_tokens_min": min(tokens),
        "rollout/prompt_tokens": fmean(prompts),
        "rollout/prompt_tokens_max": max(prompts),
        "rollout/prompt_tokens_min": min(prompts),
        "rollout/truncated": fmean(member.stop_reason == StopReason.LENGTH for member in members),
        "rollout/aborted": fmean(not member.num_tokens or member.stop_reason == StopReason.ABORT for member in members),
        "rollout/turns": fmean(turns),
        "rollout/turns_max": max(turns),
        "rollout/turns_min": min(turns),
        **_means("workflow/", [member.metrics for member in members]),
    }


def _about_rewards(groups: Sequence[Group], kept: Sequence[Group]) -> Metrics:
    """Nothing where nobody was rewarded, as with supervised data."""
    judged = [[member.reward for member in group.alive if member.rewards] for group in groups]
    rewards = [reward for group in judged for reward in group]
    if not rewards:
        return {}
    comparable = [group for group in judged if len(group) > 1]
    trained = [member.reward for group in kept for member in group.alive if member.rewards]
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
    """What the policy's own tokens that are trained on are said to be worth, by the columns that there are."""
    metrics: Metrics = {}
    for name, label in (("advantages", "advantage"), ("returns", "return"), ("values", "value")):
        rows = zip(batch.columns.get(name, ()), batch.experiences, strict=False)
        chosen = [np.asarray(row, np.float64)[e.response_mask] for row, e in rows if not e.expert]
        numbers = np.concatenate(chosen) if chosen else np.empty(0)
        if len(numbers):
            metrics[f"train/{label}_mean"] = float(numbers.mean())
            metrics[f"train/{label}_max"] = float(numbers.max())
            metrics[f"train/{label}_min"] = float(numbers.min())
    return metrics


def _means(prefix: str, rows: Sequence[Mapping[str, float]]) -> Metrics:
    """The mean of each name over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {prefix + name: fmean(row[name] for row in rows if name in row) for name in names}


def padded(arrays: Sequence[AnyArray]) -> Tensor:
    """Arrays with a ragged leading axis as one tensor (B, L, ...), zeros on the right."""
    length = max((len(array) for array in arrays), default=0)
    dtype, trailing = (arrays[0].dtype, arrays[0].shape[1:]) if arrays else (np.dtype(np.float32), ())
    result = np.zeros((len(arrays), length, *trailing), dtype)
    for row, array in zip(result, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(result)  # pyright: ignore[reportUnknownMemberType]


def ragged(values: Tensor, batch: Batch) -> list[AnyArray]:
    """The inverse of `padded` for the experiences of a batch."""
    return [row[: len(e)].numpy() for row, e in zip(values, batch.experiences, strict=True)]


def column(batch: Batch, name: str) -> Tensor:
    """A column of the batch as a tensor (B, L); raises DataError where nobody computed it."""
    if name not in batch.columns:
        raise DataError(
            f"the column {name!r} of a batch",
            f"only {', '.join(sorted(batch.columns)) or 'none'}",
            "let the train engine score the batch with everything in algorithm.needs before asking for advantages",
        )
    return padded(batch.columns[name])


def token_uniforms(batch: Batch, *address: int | str) -> Tensor:
    """(B, L) float64 in [0, 1): a number for each token that depends on the address and on which token it is, and on
    nothing else in the batch."""
    part: Counter[tuple[str, int]] = Counter()
    rows: list[AnyArray] = []
    for e in batch.experiences:
        digest = np.uint64(stream(*address, e.group_id, e.index, part[e.group_id, e.index]))
        part[e.group_id, e.index] += 1
        rows.append(uniforms(digest, np.arange(len(e))))
    return padded(rows)


def advantage_inputs(batch: Batch) -> AdvantageInputs:
    """Each trajectory's reward on the last trained token of each of its rows, and who belongs together."""
    mask = padded([e.response_mask for e in batch.experiences]).bool()
    scores = np.zeros(tuple(mask.shape), np.float32)
    for row, e in zip(scores, batch.experiences, strict=True):
        trained = np.flatnonzero(e.response_mask)
        if len(trained):
            row[trained[-1]] = e.reward
    group = numbered([e.group_id for e in batch.experiences])
    trajectory = numbered([(e.group_id, e.index) for e in batch.experiences])
    return AdvantageInputs(
        torch.from_numpy(scores),  # pyright: ignore[reportUnknownMemberType]
        mask, torch.from_numpy(group), torch.from_numpy(trajectory),  # pyright: ignore[reportUnknownMemberType]
        components=_components(batch), reward=torch.tensor([e.reward for e in batch.experiences], dtype=torch.float64),
    )  # fmt: skip


def _components(batch: Batch) -> dict[str, Tensor]:
    """Each component of the rewards (B,) by name; NaN where a trajectory has no such component."""
    names = dict.fromkeys(name for e in batch.experiences for name in e.rewards)
    return {
        name: torch.tensor([e.rewards.get(name, nan) for e in batch.experiences], dtype=torch.float64) for name in names
    }


def rewarded(x: AdvantageInputs, rewards: Tensor) -> AdvantageInputs:
    """The inputs with these rewards (B,) in the place of the trajectories' own."""
    place = torch.arange(x.response_mask.shape[1])
    last = torch.where(x.response_mask, place, -1).amax(-1, keepdim=True)
    placed = torch.where(place == last, rewards.unsqueeze(-1), 0.0)
    return replace(x, token_level_rewards=placed.to(x.token_level_rewards.dtype), reward=rewards)


def shaping_inputs(batch: Batch, x: AdvantageInputs, max_new_tokens: int) -> ShapingInputs:
    """What is said about the trajectories (T,) of a batch with at least one, numbered as in `x.trajectory`."""
    of_row, total = x.trajectory, int(x.trajectory.max()) + 1
    rewards = torch.tensor([e.reward for e in batch.experiences], dtype=torch.float64)
    lengths = torch.tensor([e.num_response_tokens for e in batch.experiences])
    return ShapingInputs(
        reward=rewards.new_zeros(total).scatter(0, of_row, rewards),
        length=lengths.new_zeros(total).index_add(0, of_row, lengths),
        truncated=torch.zeros(total, dtype=torch.bool).scatter(0, of_row, torch.tensor(truncated_rows(batch))),
        group=x.group.new_zeros(total).scatter(0, of_row, x.group),
        max_new_tokens=max_new_tokens,
    )


def truncated_rows(batch: Batch) -> list[bool]:
    """Whether a length limit cut the last turn of the trajectory that a row belongs to."""
    how = {(e.group_id, e.index): e.stop_reason for e in batch.experiences}  # of several rows the last one says it
    return [how[e.group_id, e.index] == StopReason.LENGTH for e in batch.experiences]


def numbered(names: Sequence[object]) -> npt.NDArray[np.int64]:
    """0, 1, ... in order of first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
