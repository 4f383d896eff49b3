"""Pads the sequences of a batch as the originals do: prompts on the left, responses on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trivium.models.late import torch
from trivium.types import AnyArray

if TYPE_CHECKING:
    from torch import Tensor


def side_by_side(
    arrays: Sequence[AnyArray],
    starts: Sequence[int],
    filler: float,
    dtype: torch.dtype | None = None,
    widths: tuple[int, int] = (0, 0),
) -> Tensor:
    """Returns (B, P + R, ...): each array (L, ...) with its response, which begins at its start, from column P on.

    P is the largest start and R the longest response, at least `widths`. Without `dtype`, it is that of the arrays.
    """
    before = max([widths[0], *starts])
    after = max([widths[1], *(len(array) - start for array, start in zip(arrays, starts, strict=True))])
    # Copies, because recorded arrays are read-only, and torch has no such tensors.
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    further = tensors[0].shape[1:] if tensors else ()
    dtype = tensors[0].dtype if tensors and dtype is None else dtype
    table = torch.full((len(arrays), before + after, *further), filler, dtype=dtype)
    for row, tensor, start in zip(table, tensors, starts, strict=True):
        row[before - start : before - start + len(tensor)] = tensor
    return table
