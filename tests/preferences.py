"""Objectives over pairs, as a config would build them, on rows of numbers: golden values and oracles ask these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from algebra import section
from torch import Tensor
from torch.nn.functional import pad

from trivium.algorithms import PreferenceObjective, ScoreObjective
from trivium.algorithms.metadata import PairLossMetadata, ScoreLossMetadata, resolve_function
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.training.batching import count
from trivium.types import Batch, Experience


def preference(kind: str, **options: Any) -> PreferenceObjective:
    """The objective of a config with this loss over preferences."""
    return PreferenceObjective(
        *resolve_function("pair_losses", section("pair_losses", kind, **options), PairLossMetadata)
    )


def scoring(kind: str, **options: Any) -> ScoreObjective:
    """The objective of a config with this loss of a reward model."""
    return ScoreObjective(
        *resolve_function("score_losses", section("score_losses", kind, **options), ScoreLossMetadata)
    )


def interleaved(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(2P, 1): one token per row, chosen, rejected, chosen, ..."""
    return torch.stack([chosen, rejected], 1).reshape(-1, 1)


def on_rows(
    objective: PreferenceObjective | ScoreObjective,
    numbers: Tensor,
    mask: Tensor,
    reference: Tensor | None = None,
    *,
    parts: Sequence[Sequence[int]] | None = None,
    padding: int = 0,
    dp_size: int = 1,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of a mini-batch of rows, (B, L) each, done in `parts` (lists of rows; None: all at once).

    `numbers` are log-probabilities for a policy, scores for a reward model. Sequences get a first token of context and
    `padding` columns on the right.
    """
    mask, numbers = pad(mask.bool(), (1, 0)), pad(numbers, (1, 0))
    columns = {} if reference is None else {"ref_log_prob": pad(reference, (1, 0))}
    batch = _batch(mask.shape, mask.numpy().tobytes()).with_columns(
        log_prob=list(numbers.detach().numpy()), **{name: list(column.numpy()) for name, column in columns.items()}
    )
    batch = objective.select(batch, 0)
    for name in set(batch.columns) - {"log_prob"}:
        columns[name] = torch.stack([torch.from_numpy(row.copy()) for row in batch.columns[name]]).to(numbers.dtype)
    totals = count(batch, mask.shape[1])
    totals = LossDenominators(totals.tokens, totals.sequences, mask.shape[1], pairs=totals.pairs, dp_size=dp_size)
    losses, sums = [], {}
    for rows in parts if parts is not None else [range(len(mask))]:

        def cut(tensor: Tensor, rows: Sequence[int] = rows) -> Tensor:
            return pad(tensor[list(rows)], (0, padding))

        said = {"values" if objective.head == "score" else "log_prob": cut(numbers)}
        version = torch.zeros(cut(mask).shape, dtype=torch.int32)
        wanted = {name: cut(columns[name]) for name in sorted(objective.needs)}
        done = objective.loss(LossInputs(cut(mask), version, wanted, **said), totals)
        losses.append(done.loss)
        for key, value in done.sums.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    means = {key: value / max(totals.tokens, 1) for key, value in sums.items()}
    return torch.stack(losses).sum(), objective.derived(means)


@cache
def _batch(shape: tuple[int, int], mask: bytes) -> Batch:
    """Rows of these masks, made once for each: numerical derivatives ask for the same rows thousands of times."""
    nothing = np.zeros(shape[1])
    return Batch(
        tuple(
            Experience(nothing, row, nothing, nothing, f"pair-{number // 2}", number)
            for number, row in enumerate(np.frombuffer(mask, bool).reshape(shape))
        )
    )
