"""Attention of sequences of one padded length, in training and in engines, by the kernels of torch.

Legend: B sequences, L queries, S keys, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """(B, H, L, D) and (B, K, S, D) -> (B, H, L, D), causal without a mask."""
    if not q.is_cuda:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    # On a GPU torch would select its math kernel for a mask together with grouped heads; the memory of that kernel
    # grows with the square of the length. The others do not support grouped heads, so keys and values are repeated.
    k, v = (for_each_head(x, q.shape[1]) for x in (k, v))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)


def for_each_head(x: Tensor, heads: int) -> Tensor:
    """(B, K, ...) -> (B, H, ...): for each of the query heads its keys or values."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(L, L) bool mask of causal attention with a sliding window; None if the window covers the length."""
    if window is None or length <= window:
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)
