"""Choosing tokens of a mini-batch in a way that does not depend on the order of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor


def first(candidates: Tensor, count: int, *keys: Tensor) -> Tensor:
    """The `count` candidates with the smallest first key; among equals the second decides, and so on.

    All tensors have one shape, `candidates` and the result are bool.
    """
    order = candidates.flatten().nonzero().squeeze(-1)
    # Stable sorts, the first key last: among equals, each keeps the order of the keys after it.
    for key in reversed(keys):
        order = order[key.flatten()[order].argsort(stable=True)]
    chosen = torch.zeros(candidates.numel(), dtype=torch.bool, device=candidates.device)
    chosen[order[:count]] = True
    return chosen.view_as(candidates)
