"""Attention of packed sequences on GPUs, by kernels that accept sequences of any lengths without padding or masks.

Each segment of a pack attends to itself and to the segments before it.

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

from trivium.models.backbone.dense_attention import dense_attention, window_mask
from trivium.models.backbone.prefixes import Segment
from trivium.models.placement import sent

Backend = Literal["varlen", "flash_attn", "efficient"]
"""`varlen` (torch.nn.attention.varlen) and `flash_attn` (the package) accept sequences of any lengths; `efficient`
accepts dense grids."""
_LARGEST_HEAD, _AMPERE = 256, (8, 0)
"""The limits of the kernels of FlashAttention 2, which both are."""


def gpu_backend(
    dtype: torch.dtype, head_dim: int, value_dim: int, capability: tuple[int, int], *, varlen: bool, flash_attn: bool
) -> Backend:
    """The backend for a GPU of this capability. `varlen`: torch has `varlen_attn`; `flash_attn`: the package is
    installed."""
    half = dtype in (torch.float16, torch.bfloat16)
    fits = head_dim == value_dim <= _LARGEST_HEAD and head_dim % 8 == 0 and capability >= _AMPERE
    if not (half and fits):
        return "efficient"
    return "varlen" if varlen else "flash_attn" if flash_attn else "efficient"


def backend_for(query: Tensor, value: Tensor) -> Backend:
    """The backend for tokens (T, H, D) on this machine."""
    capability = torch.cuda.get_device_capability(query.device)
    varlen, flash_attn = _installed()
    return gpu_backend(query.dtype, query.shape[-1], value.shape[-1], capability, varlen=varlen, flash_attn=flash_attn)


@cache
def _installed() -> tuple[bool, bool]:
    """(torch has `varlen_attn` with the parameters of `varlen_kernel`, the package flash-attn is installed)."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False, importlib.util.find_spec("flash_attn") is not None
    varlen = importlib.import_module("torch.nn.attention.varlen")
    # Older versions of torch have the function, but not these parameters.
    complete = {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen.varlen_attn).parameters.keys()
    return complete, importlib.util.find_spec("flash_attn") is not None


class Runs(NamedTuple):
    """The queries and keys of each segment, as consecutive ranges of rows."""

    keys: Tensor | None
    """(N,) int64: the row of each key; None: keys are in the order of the rows."""
    query_bounds: Tensor
    """(B + 1,) int32: the queries of segment b are the rows bounds[b] to bounds[b + 1] - 1."""
    key_bounds: Tensor
    longest_query: int
    longest_key: int


@lru_cache(maxsize=8)  # every layer asks for the runs of the same pack
def runs_of(segments: tuple[Segment, ...], device: torch.device) -> Runs:
    """The queries and keys of the segments of a pack. The keys of a segment are its path, which ends with itself."""
    sizes = np.array([segment.stop - segment.first for segment in segments])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    paths: list[npt.NDArray[np.int64]] = []
    for here, segment in enumerate(segments):
        rows = np.arange(starts[here], starts[here + 1])
        paths.append(rows if segment.parent < 0 else np.concatenate([paths[segment.parent], rows]))
    lengths = np.array([len(path) for path in paths])

    def bounds(counts: npt.NDArray[np.int64]) -> Tensor:
        return sent(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), device)  # the type that kernels read

    shared = any(segment.parent >= 0 for segment in segments)
    keys = sent(np.concatenate(paths), device) if shared else None
    return Runs(keys, bounds(sizes), bounds(lengths), int(sizes.max()), int(lengths.max()))


Kernel = Callable[[Tensor, Tensor, Tensor, Runs, float | None, int | None], Tensor]


def attend_in_runs(
    tokens: Sequence[Tensor], runs: Runs, scale: float | None, window: int | None, kernel: Kernel
) -> Tensor:
    """(T, H, D) queries, (T, K, D) keys and values -> (T, H, D). A query attends to the last `window` tokens of its
    sequence, itself included."""
    query, key, value = tokens
    if runs.keys is not None:
        key, value = key.index_select(0, runs.keys), value.index_select(0, runs.keys)
    return kernel(query, key, value, runs, scale, window)


def varlen_kernel(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float | None, window: int | None) -> Tensor:
    """The kernel of torch."""
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
        # (keys to the left, keys to the right): none to the right is causal, and the kernel does not count the query.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def flash_kernel(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float | None, window: int | None) -> Tensor:
    """The kernel of the package flash-attn."""
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
        # Its backward pass otherwise adds gradients of queries in the order in which blocks end.
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


KERNELS: dict[Backend, Kernel] = {"varlen": varlen_kernel, "flash_attn": flash_kernel}


def causal_attention(
    tokens: Sequence[Tensor], scale: float | None, window: int | None, kernel: Kernel | None
) -> Tensor:
    """(B, H, L, D) queries, (B, K, L, D) keys and values of B sequences -> (B, H, L, D). A query attends to the last
    `window` tokens of its sequence, itself included. Without a kernel, computes a dense grid."""
    query, key, value = tokens
    batch, _, length, _ = query.shape
    if kernel is None:
        return dense_attention(query, key, value, window_mask(length, window, query.device), scale)
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in tokens)
    out = kernel(query, key, value, Runs(None, bounds, bounds, length, length), scale, window)
    return out.unflatten(0, (batch, length)).transpose(1, 2)
