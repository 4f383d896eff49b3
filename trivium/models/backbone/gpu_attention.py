"""Attention of packed sequences on GPUs: kernels that read sequences of any lengths, without padding or masks.

Each segment of a pack attends to the tokens of its sequences up to itself. Nothing here runs torch's math kernel, whose
memory grows with the square of the length: a mask together with grouped heads would.

Legend: T tokens of the row, H query heads, K key-value heads, D head size, B segments, N rows of keys.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from trivium.models.backbone.prefixes import Segment
from trivium.models.placement import sent

Backend = Literal["varlen", "flash_attn", "efficient"]
"""`varlen` (torch.nn.attention.varlen) and `flash_attn` (the package) take sequences of any lengths; `efficient` dense
grids, without the math kernel."""
_LARGEST_HEAD = 256
_AMPERE = (8, 0)


def gpu_backend(
    dtype: torch.dtype, head_dim: int, value_dim: int, capability: tuple[int, int], *, varlen: bool, flash_attn: bool
) -> Backend:
    """What computes attention on a GPU of this capability, where torch has `varlen_attn`, and the package flash-attn is
    installed."""
    half = dtype in (torch.float16, torch.bfloat16)
    fits = head_dim == value_dim <= _LARGEST_HEAD and head_dim % 8 == 0 and capability >= _AMPERE
    if not (half and fits):
        return "efficient"
    return "varlen" if varlen else "flash_attn" if flash_attn else "efficient"


def backend_for(query: Tensor, value: Tensor) -> Backend:
    """What computes attention of these tokens, (T, H, D), here."""
    capability = torch.cuda.get_device_capability(query.device)
    varlen, flash_attn = _installed()
    return gpu_backend(query.dtype, query.shape[-1], value.shape[-1], capability, varlen=varlen, flash_attn=flash_attn)


@cache
def _installed() -> tuple[bool, bool]:
    """Whether there is torch's `varlen_attn` with what `varlen_kernel` needs, and the package flash-attn."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False, importlib.util.find_spec("flash_attn") is not None
    varlen = importlib.import_module("torch.nn.attention.varlen")
    complete = {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen.varlen_attn).parameters.keys()
    return complete, importlib.util.find_spec("flash_attn") is not None


class Runs(NamedTuple):
    """The queries and keys of each segment, as ranges of rows that lie end to end."""

    keys: Tensor | None
    """(N,) int64: the row of each key; None: the rows as they are."""
    query_bounds: Tensor
    """(B + 1,) int32: the queries of segment b are the rows bounds[b] to bounds[b + 1]."""
    key_bounds: Tensor
    longest_query: int
    longest_key: int


@lru_cache(maxsize=8)
def runs_of(segments: tuple[Segment, ...], device: torch.device) -> Runs:
    """What each segment of a pack attends to: its path, whose last tokens are its own."""
    sizes = np.array([segment.stop - segment.first for segment in segments])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    paths: list[npt.NDArray[np.int64]] = []
    for here, segment in enumerate(segments):
        own = np.arange(starts[here], starts[here + 1])
        paths.append(own if segment.parent < 0 else np.concatenate([paths[segment.parent], own]))
    lengths = np.array([len(path) for path in paths])

    def bounds(counts: npt.NDArray[np.int64]) -> Tensor:
        return sent(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), device)

    shared = any(segment.parent >= 0 for segment in segments)
    keys = sent(np.concatenate(paths), device) if shared else None
    return Runs(keys, bounds(sizes), bounds(lengths), int(sizes.max()), int(lengths.max()))


Kernel = Callable[[Tensor, Tensor, Tensor, Runs, float | None, int | None], Tensor]


def attend_in_runs(
    tokens: Sequence[Tensor], runs: Runs, scale: float | None, window: int | None, kernel: Kernel
) -> Tensor:
    """(T, H, D) of queries, (T, K, D) of keys and values -> (T, H, D). A query sees the last `window` tokens of its
    sequence, its own among them."""
    query, key, value = tokens
    if runs.keys is not None:
        key, value = key.index_select(0, runs.keys), value.index_select(0, runs.keys)
    return kernel(query, key, value, runs, scale, window)


def varlen_kernel(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float | None, window: int | None) -> Tensor:
    """That of torch."""
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    return varlen.varlen_attn(
        q,
        k,
        v,
        runs.query_bounds,
        runs.key_bounds,
        runs.longest_query,
        runs.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def flash_kernel(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float | None, window: int | None) -> Tensor:
    """That of the package flash-attn."""
    flash_attn: Any = importlib.import_module("flash_attn")
    return flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        runs.query_bounds,
        runs.key_bounds,
        runs.longest_query,
        runs.longest_key,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


KERNELS: dict[Backend, Kernel] = {"varlen": varlen_kernel, "flash_attn": flash_kernel}


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """(B, H, L, D) and (B, K, L, D) -> (B, H, L, D), causal without a mask. An error where only the math kernel could
    compute it: none of the others takes grouped heads, so each query head gets keys and values of its own."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x if groups == 1 else x.repeat_interleave(groups, dim=1) for x in (k, v))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)


def causal_attention(
    tokens: Sequence[Tensor], scale: float | None, window: int | None, kernel: Kernel | None
) -> Tensor:
    """(B, H, L, D) of queries, (B, K, L, D) of keys and values of B sequences -> (B, H, L, D). A query sees the last
    `window` tokens of its sequence, its own among them. Without a kernel, in a dense grid."""
    query, key, value = tokens
    batch, _, length, _ = query.shape
    if kernel is None:
        place = torch.arange(length, device=query.device)
        behind = place[:, None] - place
        seen = None if window is None or window >= length else (behind >= 0) & (behind < window)
        return dense_attention(query, key, value, seen, scale)
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in tokens)
    out = kernel(query, key, value, Runs(None, bounds, bounds, length, length), scale, window)
    return out.unflatten(0, (batch, length)).transpose(1, 2)
