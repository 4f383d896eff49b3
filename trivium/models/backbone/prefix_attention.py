"""Attention over a tree of tokens: each token attends to its own segment, causally, and to all segments before it.

All continuations of a segment attend to it in one call: they are neighbouring rows of the pack, so no key is copied for
each sequence. The parts of a token's attention are combined by the logarithms of their normalisers. With the combined
normalisers, each part has the gradient of a separate attention (Dao et al. 2022, "FlashAttention"; Liu et al. 2023,
"Ring Attention").

Legend: T tokens, H query heads, K key-value heads, D head size, B segments, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, cast

import torch
from torch.autograd.function import once_differentiable

from trivium.models.backbone.dense_attention import for_each_head
from trivium.models.cpu.linear import AutogradContext

_CHUNK = 2**24
"""The most scores in memory, if torch has no kernel that returns the normaliser."""
_UNSEEN = -1e30
"""The score of a masked key. It is finite, so that a block whose keys are all masked for a query gets no weight."""


@dataclass(frozen=True, slots=True)
class Trunk:
    """A segment with continuations, as rows of the pack: the segment is `first` to `behind - 1`, its continuations are
    `behind` to `stop - 1`."""

    first: int
    behind: int
    stop: int
    reach: int
    """The largest distance of a query in the continuations from the first key, in tokens of a sequence."""


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Which rows of a pack attend to which."""

    grids: tuple[tuple[int, int], ...]
    """(segments, padded length) of the dense grids in which each segment attends to itself."""
    masks: tuple[torch.Tensor | None, ...]
    """(segments, length, length) bool of each grid: whether a cell attends to another. None: to all cells before it."""
    spread: torch.Tensor
    """(S,) int64: the row in each cell of the grids. Padding repeats the last token of the segment."""
    collect: torch.Tensor
    """(T,) int64: a cell of each row."""
    positions: torch.Tensor
    """(T,) int64: the place of each token in its sequences."""
    trunks: tuple[Trunk, ...]
    copies: bool
    """Whether a row has several cells."""

    @property
    def is_tree(self) -> bool:
        """Whether attention needs more than causal grids."""
        return bool(self.trunks) or any(mask is not None for mask in self.masks)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: TreeRows,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, H, D), (T, K, D), (T, K, D) -> (T, H, D). A query attends to the last `window` tokens, itself included, and
    to the sink of its head, `sinks` (H,): a logit whose value is zero."""
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    return cast(torch.Tensor, _TreeAttention.apply(query, key, value, rows, scale, window, sinks))


class _Context(AutogradContext, Protocol):
    rows: TreeRows
    scale: float
    window: int | None
    saved_tensors: tuple[Any, ...]
    """The last one, the sinks, may be None."""


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: TreeRows,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.rows, ctx.scale, ctx.window = rows, scale, window
        keys, values = (for_each_head(x, query.shape[1]) for x in (key, value))
        blocks = _own_blocks(rows, scale, window, query)
        grids = zip(blocks, *(_grids(rows, x.index_select(0, rows.spread)) for x in (query, keys, values)), strict=True)
        self_attention = [block.attend(q, k, v) for block, q, k, v in grids]
        output, log_norm = _from_grids(rows, self_attention)
        for trunk in rows.trunks:
            before, behind = slice(trunk.first, trunk.behind), slice(trunk.behind, trunk.stop)
            block = _block_behind(trunk, rows.positions, scale, window, query)
            its_output, its_norm = block.attend(query[None, behind], keys[None, before], values[None, before])
            # exp(a) / (exp(a) + exp(b)) as the sigmoid of a - b, which does not overflow.
            weight = torch.sigmoid(its_norm[0] - log_norm[behind])
            output[behind].lerp_(its_output[0], weight[..., None].to(output.dtype))
            log_norm[behind] = torch.logaddexp(log_norm[behind], its_norm[0])
        if sinks is not None:  # one more part, with the value zero
            output = output * torch.sigmoid(log_norm - sinks)[..., None].to(output.dtype)
            log_norm = torch.logaddexp(log_norm, sinks.to(log_norm.dtype).expand_as(log_norm))
        ctx.save_for_backward(query, key, value, output, log_norm, sinks)
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: _Context, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_norm, sinks = ctx.saved_tensors
        rows, scale, window, grad = ctx.rows, ctx.scale, ctx.window, grad_outputs[0]
        keys, values = (for_each_head(x, query.shape[1]) for x in (key, value))
        cells = [x.index_select(0, rows.spread) for x in (query, keys, values, output, log_norm)]
        # Only one cell of each row gets the gradient: the outputs of padding and of further copies are not used.
        cells.append(grad.new_zeros(len(rows.spread), *grad.shape[1:]).index_copy_(0, rows.collect, grad))
        blocks = _own_blocks(rows, scale, window, query)
        grids = zip(blocks, *(_grids(rows, x) for x in cells), strict=True)
        gradients = [block.gradients(*parts) for block, *parts in grids]
        of_query, of_keys, of_values = _from_grids(rows, gradients)
        if rows.copies:  # the gradients of all copies of a key add up; only one copy was a query
            of_keys, of_values = (
                torch.zeros_like(into).index_add_(
                    0, rows.spread, torch.cat([grid[place].flatten(0, 1) for grid in gradients])
                )
                for place, into in ((1, of_keys), (2, of_values))
            )
        for trunk in rows.trunks:
            before, behind = slice(trunk.first, trunk.behind), slice(trunk.behind, trunk.stop)
            block = _block_behind(trunk, rows.positions, scale, window, query)
            parts = (query[None, behind], keys[None, before], values[None, before])
            q, k, v = block.gradients(*parts, output[None, behind], log_norm[None, behind], grad[None, behind])
            of_query[behind] += q[0]
            of_keys[before] += k[0]
            of_values[before] += v[0]
        of_key, of_value = (_summed(x, key.shape[1]) for x in (of_keys, of_values))
        of_sinks: torch.Tensor | None = None
        if sinks is not None:
            of_sinks = -((sinks - log_norm).exp() * (grad * output).sum(-1)).sum(0).to(sinks.dtype)
        return of_query, of_key, of_value, None, None, None, of_sinks


def _summed(x: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient of `for_each_head`: (T, H, D) -> (T, K, D). torch's `sum` over such a short axis is several times
    slower."""
    return reduce(torch.add, x.unflatten(1, (heads, -1)).unbind(2))


def _grids(rows: TreeRows, cells: torch.Tensor) -> list[torch.Tensor]:
    """(S, ...) values of the cells -> (B, L, ...) of each grid."""
    parts = cells.split([count * length for count, length in rows.grids])
    return [part.unflatten(0, shape) for part, shape in zip(parts, rows.grids, strict=True)]


def _from_grids(rows: TreeRows, blocks: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The way back: of each grid some tensors (B, L, ...) -> these tensors (T, ...)."""
    parts = zip(*blocks, strict=True)
    return [torch.cat([x.flatten(0, 1) for x in part]).index_select(0, rows.collect) for part in parts]


def _own_blocks(rows: TreeRows, scale: float, window: int | None, like: torch.Tensor) -> list[_Block]:
    """Of segments with themselves, for each grid."""
    blocks: list[_Block] = []
    offset = 0
    for (count, length), mask in zip(rows.grids, rows.masks, strict=True):
        cells = rows.spread[offset : offset + count * length].unflatten(0, (count, length))
        offset += count * length
        near = window is None or length <= window
        if mask is None and near:
            blocks.append(_Block(scale, causal=True))
            continue
        mask = torch.ones(length, length, dtype=torch.bool, device=like.device).tril() if mask is None else mask
        if not near:
            positions = rows.positions[cells]
            mask = mask & (positions[:, :, None] - positions[:, None, :] < cast(int, window))
        blocks.append(_Block(scale, causal=False, mask=_as_scores(mask, like)[:, None]))
    return blocks


def _block_behind(
    trunk: Trunk, positions: torch.Tensor, scale: float, window: int | None, like: torch.Tensor
) -> _Block:
    """The attention of the continuations of a trunk to the trunk."""
    if window is None or trunk.reach < window:
        return _Block(scale, causal=False)
    distance = positions[trunk.behind : trunk.stop, None] - positions[trunk.first : trunk.behind]
    return _Block(scale, causal=False, mask=_as_scores(distance < window, like))


def _as_scores(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The additive mask of a boolean one."""
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, _UNSEEN)


@dataclass(frozen=True, slots=True)
class _Block:
    """Attention of queries (B, L, H, D) to keys (B, S, H, D)."""

    scale: float
    causal: bool
    """L equals S, and a query attends to no later key."""
    mask: torch.Tensor | None = None
    """(L, S) or (B, 1, L, S), added to the scores."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(output (B, L, H, D), logarithm of the sum of exponentials (B, L, H))."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if _has_kernel(q, v):
            output, log_norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, self.causal, attn_mask=self.mask, scale=self.scale
            )
            return output.transpose(1, 2), log_norm.transpose(1, 2)
        outputs: list[torch.Tensor] = []
        log_norms: list[torch.Tensor] = []
        for _, scores in self._scores(q, k):
            log_norms.append(scores.logsumexp(-1))
            outputs.append((scores - log_norms[-1][..., None]).exp_().to(v.dtype) @ v)
        return torch.cat(outputs, 2).transpose(1, 2), torch.cat(log_norms, 2).transpose(1, 2)

    def gradients(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        log_norm: torch.Tensor,
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of queries, keys and values. This block is a part of an attention with `output`, `log_norm` and
        the gradient `grad` of its output."""
        q, k, v, output, log_norm, grad = (x.transpose(1, 2) for x in (q, k, v, output, log_norm, grad))
        if _has_kernel(q, v):
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, output, log_norm, 0.0, self.causal, attn_mask=self.mask, scale=self.scale
            )
            of_query, of_key, of_value = (x.transpose(1, 2) for x in gradients)
            return of_query, of_key, of_value
        of_query, of_key, of_value = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, scores in self._scores(q, k):
            weights = (scores - log_norm[:, :, queries, None]).exp_().to(v.dtype)
            g = grad[:, :, queries]
            delta = (g * output[:, :, queries]).sum(-1, keepdim=True)
            of_scores = (g @ v.transpose(2, 3) - delta).mul_(weights).mul_(self.scale)
            of_query[:, :, queries] = of_scores @ k
            of_key += of_scores.transpose(2, 3) @ q[:, :, queries]
            of_value += weights.transpose(2, 3) @ g
        return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields (a slice of the queries, its scores (B, H, l, S)), in float32 or wider."""
        length, keys = q.shape[2], k.shape[2]
        size = max(1, _CHUNK // (q.shape[0] * q.shape[1] * keys))
        wide = torch.promote_types(q.dtype, torch.float32)
        for first in range(0, length, size):
            queries = slice(first, min(first + size, length))
            scores = (q[:, :, queries] @ k.transpose(2, 3)).to(wide).mul_(self.scale)
            if self.causal:
                index = torch.arange(keys, device=q.device)
                scores.masked_fill_(index > index[queries, None], _UNSEEN)
            yield queries, scores if self.mask is None else scores.add_(self.mask[..., queries, :])


def _has_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch has a kernel that returns the normaliser, and a backward one that accepts it."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]
