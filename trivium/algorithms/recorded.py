"""Columns that an estimator may ask for and that nobody scores: they are read off the experiences.

Legend: B sequences, L tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from trivium.algorithms.groups import column, numbered, padded, token_uniforms
from trivium.errors import DataError
from trivium.types import AnyArray, Batch, Experience, TurnSpan


def estimator_column(batch: Batch, name: str, seed: int) -> Tensor:
    """A column of the batch, or one that its experiences tell, as a tensor (B, L); `seed` is the run's.

    Raises DataError where nobody computed it.
    """
    return _RECORDED[name](batch, seed) if name in _RECORDED else column(batch, name)


def _turn(batch: Batch, seed: int) -> Tensor:
    """Which turn of its trajectory sampled the token; -1 elsewhere."""
    del seed
    return _by_span(batch, [[span.number for span in e.turns] for e in batch.experiences])


def _turn_state(batch: Batch, seed: int) -> Tensor:
    """Equal for turns of one task that were played in the same state; -1 where no state is known."""
    del seed
    names = [(e.group_id, span.state) for e in batch.experiences for span in e.turns]
    ids = iter(numbered(names).tolist())
    return _by_span(batch, [[_known(next(ids), span) for span in e.turns] for e in batch.experiences])


def _known(number: int, span: TurnSpan) -> int:
    return number if span.state else -1


def _turn_reward(batch: Batch, seed: int) -> Tensor:
    """What the environment paid for a turn, on its last trained token."""
    del seed
    rows: list[AnyArray] = []
    for e in batch.experiences:
        row = np.zeros(len(e), np.float64)
        for span, trained in _trained_spans(e):
            row[trained[-1]] = span.reward
        rows.append(row)
    return padded(rows)


def _greedy_reward(batch: Batch, seed: int) -> Tensor:
    """The reward of the task's greedy reply, on every token."""
    del seed
    for e in batch.experiences:
        if e.greedy_reward is None:
            raise DataError(
                f"the reward of a greedy reply to task {e.group_id!r}", "none was played",
                "let the explorer play one (the algorithm's greedy_baseline), or use another estimator",
            )  # fmt: skip
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
