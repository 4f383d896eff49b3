"""The losses, metrics and per-token columns of one optimizer step, summed over its micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from trivium.models.heads.loss import LossDenominators, LossOutputs
from trivium.training.distributed.ranks import Ranks
from trivium.types import AnyArray, Batch, Metrics


class Tally:
    """Sums the losses and metrics of micro-batches on the device, until the last one is done."""

    def __init__(self, keeps_tokens: bool = False) -> None:
        self._keeps_tokens = keeps_tokens
        self._tokens: list[tuple[Sequence[int], Mapping[str, torch.Tensor]]] = []
        self._loss: list[torch.Tensor] = []
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._maxima: dict[str, list[torch.Tensor]] = {}

    def add(self, outputs: LossOutputs, entropy: torch.Tensor | None, rows: Sequence[int] = ()) -> None:
        self._loss.append(outputs.loss.detach())
        if self._keeps_tokens:
            self._tokens.append((rows, outputs.tokens))
        if entropy is not None:
            self._sums.setdefault("train/entropy", []).append(entropy.detach().sum())
        for tally, values in ((self._sums, outputs.sums), (self._maxima, outputs.maxima)):
            for key, value in values.items():
                tally.setdefault(key, []).append(value.detach())

    def tokens(self, batch: Batch) -> dict[str, list[AnyArray]]:
        """The per-token columns of the losses for the batch, leading axis L."""
        columns: dict[str, list[AnyArray | None]] = {}
        lengths = batch.lengths
        for rows, values in self._tokens:
            for name, grid in values.items():
                numbers = grid.float().cpu().numpy()
                numbers.setflags(write=False)  # `with_columns` copies arrays that are writable
                column = columns.setdefault(name, [None] * len(batch))
                for row, of_row in zip(rows, numbers, strict=True):
                    column[row] = of_row[: lengths[row]]
        return {
            name: [
                np.full(length, np.nan, np.float32) if array is None else array
                for length, array in zip(lengths, column, strict=True)
            ]
            for name, column in columns.items()
        }

    def not_finite(self) -> str:
        """Names the losses and sums that are not finite; empty if all are finite."""
        losses = sum(not loss.isfinite() for loss in self._loss)
        sums = [key for key, values in self._sums.items() if not all(value.isfinite() for value in values)]
        also = f", and {', '.join(sums)}" if sums else ""
        return f"the loss of {losses} of {len(self._loss)} micro-batches is not finite{also}" if losses else ""

    def metrics(self, name: str, totals: LossDenominators, ranks: Ranks) -> Metrics:
        """Sums and maxima over all micro-batches of all ranks; a rank may have had none."""
        loss = {f"train/loss/{name}": float(torch.stack(self._loss).sum())} if self._loss else {}
        sums = {key: float(torch.stack(values).sum()) for key, values in self._sums.items()}
        maxima = {key: float(torch.stack(values).max()) for key, values in self._maxima.items()}
        losses, all_sums, all_maxima = zip(*ranks.all_gather((loss, sums, maxima)), strict=True)
        return {
            **_merged(losses, sum),
            **{key: value / totals.tokens for key, value in _merged(all_sums, sum).items()},
            **_merged(all_maxima, max),
        }


def _merged(by_rank: Sequence[Mapping[str, float]], merge: Callable[[Iterable[float]], float]) -> Metrics:
    """One number per key that any rank has."""
    keys = dict.fromkeys(key for row in by_rank for key in row)
    return {key: merge([row[key] for row in by_rank if key in row]) for key in keys}
