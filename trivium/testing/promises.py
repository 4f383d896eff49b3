"""Helpers of the contracts: report a broken promise, compare tensors."""

from __future__ import annotations

import torch


def require(holds: bool, promise: str) -> None:
    """Raises AssertionError with the promise that was not kept."""
    if not holds:
        raise AssertionError(promise)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b) if tensor.numel()]
    return not raw or torch.equal(*raw)
