"""The tokens that a token was sampled among, where sampling left out others (top-p, top-k, a minimum length).

Log-probabilities over the same tokens are those of the distribution that was sampled from. The set is recorded and not
computed again: after an update, or in another arithmetic, the trainer's own logits would leave out others.

Legend: N tokens, V vocabulary, S numbers of all sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trivium.errors import DataError
from trivium.models.placement import sent
from trivium.types import Experience


@dataclass(frozen=True, slots=True)
class KeptSets:
    """Of each of N tokens, as `EXTRAS` has them: what it was sampled among, or what was left out."""

    counts: torch.Tensor
    """(N,) int64: so many ids that were kept; negative: so many that were left out; 0: all were kept."""
    ids: torch.Tensor
    """(S,) int64: those of one token after those of another."""
    stops: torch.Tensor
    """(N,) int64 on the CPU: where those of each token end."""

    def select(self, rows: torch.Tensor | slice) -> KeptSets:
        """Those of some of the tokens; a slice takes all."""
        if isinstance(rows, slice):
            return self
        lengths = self.counts.abs()
        owners = torch.arange(len(lengths), device=lengths.device)[rows]
        starts = (lengths.cumsum(0) - lengths)[owners]
        taken = lengths[owners]
        inside = torch.arange(int(taken.sum()), device=taken.device) - (taken.cumsum(0) - taken).repeat_interleave(
            taken
        )
        return KeptSets(self.counts[owners], self.ids[starts.repeat_interleave(taken) + inside], taken.cumsum(0).cpu())

    def left_out(self, rows: slice, size: int) -> torch.Tensor:
        """(rows, V) bool: the tokens of a vocabulary of that size which were not kept."""
        counts = self.counts[rows]
        first = 0 if rows.start == 0 else int(self.stops[rows.start - 1])
        ids = self.ids[first : int(self.stops[rows.stop - 1])]
        own = torch.arange(len(counts), device=counts.device)
        owners = own.repeat_interleave(counts.abs(), output_size=len(ids))  # which a GPU need not be asked for
        hidden = (counts > 0)[:, None].repeat(1, size)
        hidden[owners, ids] = (counts <= 0)[owners]
        return hidden


def kept_sets(experiences: Sequence[Experience], device: torch.device | str) -> KeptSets | None:
    """The sets of the trained tokens of some experiences, one after another; None where none was recorded.

    Raises DataError for a token that is not in its own set.
    """
    if not any("kept_count" in e.extra for e in experiences):
        return None
    counts: list[npt.NDArray[np.int64]] = []
    ids: list[npt.NDArray[np.int64]] = []
    for e in experiences:
        every = e.extra.get("kept_count", np.zeros(len(e))).astype(np.int64)
        numbers = e.extra.get("kept", np.zeros(0)).astype(np.int64)
        here = np.repeat(e.response_mask, np.abs(every))
        own = np.repeat(e.tokens, np.abs(every)) == numbers
        listed = np.bincount(np.repeat(np.arange(len(e)), np.abs(every))[own], minlength=len(e))
        wrong = e.response_mask & (listed != (every > 0))
        if wrong.any():
            raise DataError(
                "tokens that were sampled among those that were kept",
                f"{int(wrong.sum())} tokens of group {e.group_id!r} are not among theirs",
                "record, for each sampled token, the ids that its own position kept",
            )
        counts.append(every[e.response_mask])
        ids.append(numbers[here])
    signed, device = np.concatenate(counts), torch.device(device)
    stops = torch.from_numpy(np.abs(signed).cumsum())
    return KeptSets(sent(signed, device), sent(np.concatenate(ids), device), stops)
