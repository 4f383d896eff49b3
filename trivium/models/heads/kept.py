"""The candidate set of each sampled token, if sampling excluded tokens (top-p, top-k, a minimum length).

Log-probabilities over the candidates are those of the distribution that was sampled from. The engine records the set:
the trainer's logits would exclude other tokens after an update or with other arithmetic.

Legend: N tokens, V vocabulary, S numbers of all sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trivium.foundation.errors import DataError
from trivium.models.heads.vocabulary_part import WHOLE, VocabularyPart
from trivium.models.placement import sent
from trivium.types import BoolArray, Experience


@dataclass(frozen=True, slots=True)
class KeptSets:
    """For each of N tokens, in the form of `EXTRAS`, the ids that were kept or the ids that were excluded."""

    counts: torch.Tensor
    """(N,) int64: the number of kept ids; if negative, of excluded ids; 0 if all were kept."""
    ids: torch.Tensor
    """(S,) int64: the ids of all tokens, one token after another."""
    stops: torch.Tensor
    """(N,) int64 on the CPU: the end of each token's ids in `ids`."""

    def select(self, rows: torch.Tensor | slice) -> KeptSets:
        """The sets of some of the tokens. A slice selects all of them."""
        if isinstance(rows, slice):
            return self
        lengths = self.counts.abs()
        owners = torch.arange(len(lengths), device=lengths.device)[rows]
        starts = (lengths.cumsum(0) - lengths)[owners]
        sizes = lengths[owners]
        inside = torch.arange(int(sizes.sum()), device=sizes.device) - (sizes.cumsum(0) - sizes).repeat_interleave(
            sizes
        )
        return KeptSets(self.counts[owners], self.ids[starts.repeat_interleave(sizes) + inside], sizes.cumsum(0).cpu())

    def left_out(self, rows: slice, size: int, part: VocabularyPart = WHOLE) -> torch.Tensor:
        """(rows, V) bool: the excluded ones of the `size` tokens of a part of the vocabulary."""
        counts = self.counts[rows]
        first = 0 if rows.start == 0 else int(self.stops[rows.start - 1])
        ids = self.ids[first : int(self.stops[rows.stop - 1])]
        tokens = torch.arange(len(counts), device=counts.device)
        # Without `output_size`, torch waits for the GPU to learn the sum of the counts.
        owners = tokens.repeat_interleave(counts.abs(), output_size=len(ids))
        places, inside = part.own(ids, size)
        if inside is not None:
            owners, places = owners[inside], places[inside]
        hidden = (counts > 0)[:, None].repeat(1, size)
        hidden[owners, places] = (counts <= 0)[owners]
        return hidden


def kept_sets(
    experiences: Sequence[Experience], device: torch.device | str, masks: Sequence[BoolArray] | None = None
) -> KeptSets | None:
    """The sets of the trained tokens of experiences (or of those in `masks`), one after another. Returns None if no set
    was recorded.

    Raises DataError for a token that is not in its own set.
    """
    if not any("kept_count" in e.extra for e in experiences):
        return None
    counts: list[npt.NDArray[np.int64]] = []
    ids: list[npt.NDArray[np.int64]] = []
    for e, mask in zip(experiences, masks or [e.response_mask for e in experiences], strict=True):
        every = e.extra.get("kept_count", np.zeros(len(e))).astype(np.int64)
        numbers = e.extra.get("kept", np.zeros(0)).astype(np.int64)
        here = np.repeat(mask, np.abs(every))
        is_sampled = np.repeat(e.tokens, np.abs(every)) == numbers
        listed = np.bincount(np.repeat(np.arange(len(e)), np.abs(every))[is_sampled], minlength=len(e))
        wrong = mask & (listed != (every > 0))
        if wrong.any():
            raise DataError(
                "sampled tokens that are among the kept ones",
                f"{int(wrong.sum())} tokens of group {e.group_id!r} are not in the kept set of their position",
                "record, for each sampled token, the ids that its own position kept",
            )
        counts.append(every[mask])
        ids.append(numbers[here])
    signed, device = np.concatenate(counts), torch.device(device)
    stops = torch.from_numpy(np.abs(signed).cumsum())
    return KeptSets(sent(signed, device), sent(np.concatenate(ids), device), stops)
