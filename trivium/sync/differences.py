"""The difference between two versions of a tensor: the elements whose bits changed.

The weights of bfloat16 have 8 bits of precision. With the learning rates of RL, a step changes most of the float32
weights of the trainer by less than that, so few elements of the rounded weights differ.
"""

from __future__ import annotations

from typing import NamedTuple

from trivium.models.late import torch
from trivium.models.weights.stream import raw

_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""A type of whole numbers by its size: NaN and -0.0 are compared by their bits."""
_SKIP = 255
"""A gap of this size is followed by another one, without an element between them."""


class TensorDifference(NamedTuple):
    """The elements of a tensor of N elements that changed, in logical order."""

    gaps: torch.Tensor
    """uint8. The number of unchanged elements before each changed one; 255 adds 255 to the next number."""
    values: torch.Tensor
    """The new elements, in the type of the tensor."""

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes


def difference(old: torch.Tensor, new: torch.Tensor) -> TensorDifference | None:
    """The difference from `old` to `new`, on the CPU. Returns None if type or shape differ, or if the difference takes
    at least half as many bytes as the tensor."""
    if old.dtype != new.dtype or old.shape != new.shape:
        return None
    bits = _bits(new)
    changed = _bits(old) != bits
    # `nonzero` takes 8 bytes for each changed element, and `sum` for each element.
    if 2 * int(changed.count_nonzero()) * (1 + new.itemsize) >= new.nbytes:
        return None
    places = changed.nonzero().flatten()
    unchanged = places.diff(prepend=places.new_tensor([-1])) - 1
    skips = unchanged // _SKIP
    ends = (skips + 1).cumsum(0) - 1
    gaps = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), _SKIP, dtype=torch.uint8)
    gaps[ends] = (unchanged % _SKIP).to(torch.uint8)
    return TensorDifference(gaps, bits[places].view(new.dtype))


def patched(old: torch.Tensor, change: TensorDifference) -> torch.Tensor:
    """The new tensor, a copy of its own. Raises ValueError if the difference is not one of a tensor of this size."""
    new = old.clone(memory_format=torch.contiguous_format)
    ends = (change.gaps != _SKIP).nonzero().flatten()
    places = change.gaps.long().cumsum(0)[ends] + torch.arange(len(ends))
    if len(ends) != len(change.values) or (len(ends) and int(places[-1]) >= new.numel()):
        raise ValueError(f"{len(ends)} places and {len(change.values)} values for a tensor of {new.numel()} elements")
    if len(ends):
        _bits(new)[places] = _bits(change.values)
    return new


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as whole numbers, (N,); no copy."""
    return raw(tensor).view(getattr(torch, _BITS[tensor.itemsize]))
