"""Computes the inputs of advantage estimators and reward shapings from the experiences of a batch.

Legend: B sequences, L tokens of the longest one, T trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from trivium.algorithms.batches import column, numbered, padded, token_uniforms
from trivium.algorithms.estimators.base import AdvantageInputs
from trivium.algorithms.shaping import ShapingInputs
from trivium.foundation.errors import DataError
from trivium.models.late import torch
from trivium.types import AnyArray, Batch, Experience, StopReason, TurnSpan

if TYPE_CHECKING:
    from torch import Tensor


def advantage_inputs(batch: Batch) -> AdvantageInputs:
    """Each trajectory's reward on the last trained token of its rows, and the group and trajectory of each row."""
    mask = padded([e.response_mask for e in batch.experiences]).bool()
    rewards = torch.tensor([e.reward for e in batch.experiences], dtype=torch.float64)
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    scores = torch.where(last, rewards[:, None].float(), 0.0)
    group = numbered([(e.group_id, e.participant) for e in batch.experiences])
    trajectory = numbered([(e.group_id, e.index, e.participant) for e in batch.experiences])
    return AdvantageInputs(
        scores,
        mask,
        torch.from_numpy(group),  # pyright: ignore[reportUnknownMemberType]
        torch.from_numpy(trajectory),  # pyright: ignore[reportUnknownMemberType]
        components=_components(batch),
        reward=rewards,
        reference_rewards=_reference_rewards(batch),
    )


def _reference_rewards(batch: Batch) -> Tensor | None:
    """(B, N): the rewards of the reference policy's samples, NaN after the last; None if no row has any."""
    most = max((len(e.reference_rewards) for e in batch.experiences), default=0)
    rows = [[*e.reference_rewards, *[nan] * (most - len(e.reference_rewards))] for e in batch.experiences]
    return torch.tensor(rows, dtype=torch.float64) if most else None


def _components(batch: Batch) -> dict[str, Tensor]:
    """Each component of the rewards (B,) by name; NaN if a trajectory lacks the component."""
    names = dict.fromkeys(name for e in batch.experiences for name in e.rewards)
    return {
        name: torch.tensor([e.rewards.get(name, nan) for e in batch.experiences], dtype=torch.float64) for name in names
    }


def rewarded(x: AdvantageInputs, rewards: Tensor) -> AdvantageInputs:
    """The inputs with these rewards (B,) instead of the trajectories' own."""
    place = torch.arange(x.response_mask.shape[1])
    last = torch.where(x.response_mask, place, -1).amax(-1, keepdim=True)
    placed = torch.where(place == last, rewards.unsqueeze(-1), 0.0)
    return replace(x, token_level_rewards=placed.to(x.token_level_rewards.dtype), reward=rewards)


def shaping_inputs(batch: Batch, x: AdvantageInputs, max_new_tokens: int) -> ShapingInputs:
    """The shaping inputs (T,) of a batch with at least one trajectory, numbered as in `x.trajectory`."""
    of_row, total = x.trajectory, int(x.trajectory.max()) + 1
    rewards = torch.tensor([e.reward for e in batch.experiences], dtype=torch.float64)
    lengths = torch.tensor([e.num_response_tokens for e in batch.experiences])
    turns = [[int(e.response_mask[turn.start : turn.stop].sum()) for turn in e.turns] for e in batch.experiences]
    longest = torch.tensor(
        [max(turn_lengths, default=int(length)) for turn_lengths, length in zip(turns, lengths, strict=True)]
    )
    participants = {int(number): e.participant for number, e in zip(of_row, batch.experiences, strict=True)}
    return ShapingInputs(
        reward=rewards.new_zeros(total).scatter(0, of_row, rewards),
        length=lengths.new_zeros(total).index_add(0, of_row, lengths),
        truncated=torch.zeros(total, dtype=torch.bool).scatter(0, of_row, torch.tensor(truncated_rows(batch))),
        group=x.group.new_zeros(total).scatter(0, of_row, x.group),
        participants=tuple(participants[number] for number in range(total)),
        max_new_tokens=max_new_tokens,
        longest_turn=lengths.new_zeros(total).scatter_reduce(0, of_row, longest, "amax"),
    )


def truncated_rows(batch: Batch) -> list[bool]:
    """Whether a length limit cut the last turn of the trajectory that a row belongs to."""
    stop_reasons = {(e.group_id, e.index): e.stop_reason for e in batch.experiences}  # the last row has the final one
    return [stop_reasons[e.group_id, e.index] == StopReason.LENGTH for e in batch.experiences]


def estimator_column(batch: Batch, name: str, seed: int) -> Tensor:
    """A column of the batch, or one computed from its experiences, as a tensor (B, L); `seed` is the run's.

    Raises DataError if it is missing.
    """
    return _RECORDED[name](batch, seed) if name in _RECORDED else column(batch, name)


def _turn(batch: Batch, seed: int) -> Tensor:
    """The number of the turn that sampled the token; -1 elsewhere."""
    del seed
    return _by_span(batch, [[span.number for span in e.turns] for e in batch.experiences])


def _turn_state(batch: Batch, seed: int) -> Tensor:
    """A number that is equal for turns of one task sampled in the same state; -1 if the state is unknown."""
    del seed
    names = [(e.group_id, span.state) for e in batch.experiences for span in e.turns]
    ids = iter(numbered(names).tolist())
    return _by_span(batch, [[_known(next(ids), span) for span in e.turns] for e in batch.experiences])


def _known(number: int, span: TurnSpan) -> int:
    return number if span.state else -1


def _turn_reward(batch: Batch, seed: int) -> Tensor:
    """The environment's reward for a turn, on its last trained token."""
    del seed
    rows: list[AnyArray] = []
    for e in batch.experiences:
        row = np.zeros(len(e), np.float64)
        for span, trained in _trained_spans(e):
            row[trained[-1]] = span.reward
        rows.append(row)
    return padded(rows)


def _greedy_reward(batch: Batch, seed: int) -> Tensor:
    """The reward of the task's greedy completion, on every token."""
    del seed
    for e in batch.experiences:
        if e.greedy_reward is None:
            raise DataError(
                f"the reward of a greedy completion to task {e.group_id!r}",
                "the group has none",
                "let the explorer add one (the algorithm's greedy_baseline), or use another estimator",
            )
    return padded([np.full(len(e), e.greedy_reward, np.float64) for e in batch.experiences])


def _rollout_log_prob(batch: Batch, seed: int) -> Tensor:
    del seed
    return padded([e.rollout_log_prob for e in batch.experiences])


def _uniform(batch: Batch, seed: int) -> Tensor:
    return token_uniforms(batch, seed, "advantage")


_RECORDED: Mapping[str, Callable[[Batch, int], Tensor]] = {
    "turn": _turn,
    "turn_state": _turn_state,
    "turn_reward": _turn_reward,
    "greedy_reward": _greedy_reward,
    "rollout_log_prob": _rollout_log_prob,
    "uniform": _uniform,
}


def _by_span(batch: Batch, numbers: list[list[int]]) -> Tensor:
    """(B, L) int64: a number for each span of each experience, on the span's trained tokens; -1 elsewhere."""
    length = max((len(e) for e in batch.experiences), default=0)
    result = torch.full((len(batch), length), -1, dtype=torch.int64)
    for row, e, of_span in zip(result, batch.experiences, numbers, strict=True):
        for span, number in zip(e.turns, of_span, strict=True):
            place = slice(span.start, span.stop)
            row[place][torch.from_numpy(e.response_mask[place].copy())] = number  # pyright: ignore[reportUnknownMemberType]
    return result


def _trained_spans(e: Experience) -> Iterator[tuple[TurnSpan, AnyArray]]:
    """The spans with a trained token, and where those tokens are."""
    for span in e.turns:
        trained = span.start + np.flatnonzero(e.response_mask[span.start : span.stop])
        if len(trained):
            yield span, trained
