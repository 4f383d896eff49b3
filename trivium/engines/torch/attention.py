"""Attention over key-value rows of different lengths, registered with transformers.

Legend: B rows, H query heads, K key-value heads, L queries, S keys (padded), D head size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.engines.torch.kv_cache import Bags
from trivium.models.backbone.dense_attention import dense_attention
from trivium.models.backbone.gpu_attention import KERNELS, backend_for, causal_attention

EXACT = "trivium_exact"
"""Batched matrix products and softmax. The bits do not depend on B or on padding of S by further pages."""
FAST = "trivium_fast"
"""scaled_dot_product_attention if the model allows it. The bits depend on the other rows of the batch."""
_SUM = 0
"""The mode of `torch.embedding_bag` that adds the rows of a bag."""
_PIECE = 512
"""Number of queries whose scores are in memory at once."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    fast: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Queries [B, H, L, D], keys and values [B, K, S, D] -> [B, L, H, D].

    `attention_mask` is additive, [B or 1, 1, L, S]. Without one, attention is causal over the first L keys. `s_aux` are
    attention sinks, one logit for each head.

    `fast` uses scaled_dot_product_attention on the CPU: the same numbers up to rounding. It has no effect with
    soft-capping or sinks; nor on a GPU with a mask, where the math kernel would copy keys and values for each query
    head.
    """
    batch, heads, length, size = query.shape
    plain = softcap is None and s_aux is None
    if attention_mask is None:
        key, value = key[:, :, :length], value[:, :, :length]
        if not plain:
            return _in_pieces(module, query, key, value, scaling, sliding_window, softcap, s_aux), None
        kernel = KERNELS.get(backend_for(query, value)) if query.is_cuda else None
        out = causal_attention((query, key, value), scaling, sliding_window, kernel)
        return out.transpose(1, 2).contiguous(), None
    mask = _windowed(attention_mask, sliding_window)
    if fast and plain and not query.is_cuda:
        return dense_attention(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None
    scale = float(size**-0.5 if scaling is None else scaling)
    if size % 16:
        # For rows that are not aligned to a vector the matrix product uses other code.
        query, key = (F.pad(x, (0, -size % 16)) for x in (query, key))
    groups = batch * key.shape[1]
    scores = _products(query.reshape(groups, -1, query.shape[-1]), key.flatten(0, 1).transpose(1, 2))
    scores = scores.view(batch, heads, length, -1)
    if softcap is None:
        scores = torch.add(mask, scores, alpha=scale, out=scores)
    else:
        scores = torch.tanh(scores.mul_(scale / softcap)).mul_(softcap).add_(mask)
    weights, width = _softmax(scores, s_aux).to(value.dtype), value.shape[-1]
    if length == 1 and weights.dtype == torch.float32 and not query.is_cuda:  # a decode step (see `weighted`)
        value = value if _in_order(value) else value.contiguous()
        return weighted(weights, _table(value), _bags(mask, value, heads)).view(batch, 1, heads, -1), None
    if width % 16:
        value = F.pad(value, (0, -width % 16))
    out = torch.bmm(weights.view(groups, -1, weights.shape[-1]), value.flatten(0, 1))[..., :width]
    return out.reshape(batch, heads, length, width).transpose(1, 2).contiguous(), None


def _in_order(values: Tensor) -> bool:
    """Whether the rows of values [B, K, S, D] begin at multiples of D numbers, as `weighted` requires."""
    size = values.shape[-1]
    return values.stride()[2:] == (size, 1) and all(step % size == 0 for step in values.stride()[:2])


def _bags(mask: Tensor, values: Tensor, heads: int) -> Bags:
    """The places that query heads attend to in the `_table` of values [B, K, S, D], from their mask."""
    batch, key_heads, width, size = values.shape
    # A masked key has the weight 0. Its place is that of the first key, which is read anyway.
    keys = torch.arange(width).masked_fill(mask[:, :, 0] < 0, 0)
    head = torch.arange(heads) // (heads // key_heads) * (values.stride(1) // size)
    first = torch.arange(batch)[:, None] * (values.stride(0) // size) + head
    return Bags.of(first[..., None] + keys)


def _table(values: Tensor) -> Tensor:
    """All rows of D numbers from the first to the last one of values [B, K, S, D], which are `_in_order`."""
    size = values.shape[-1]
    last = sum((n - 1) * step for n, step in zip(values.shape, values.stride(), strict=True))
    return values.as_strided((last // size + 1, size), (size, 1))


def attend_last(query: Tensor, keys: Tensor, table: Tensor, mask: Tensor, bags: Bags, scaling: float) -> Tensor:
    """`attend` of one query of each row [B, H, D] on the CPU, in few operations and with the same bits, for float32 and
    D a multiple of 16. Returns [B, H, D]. `keys` and `table` are those of `StepRows.append`."""
    batch, heads, size = query.shape
    scores = torch.bmm(query.reshape(len(keys), -1, size), keys).view(batch, heads, -1)
    weights = torch.add(mask, scores, alpha=scaling, out=scores).softmax(-1)
    return weighted(weights, table, bags).view(query.shape)


def weighted(weights: Tensor, table: Tensor, bags: Bags) -> Tensor:
    """Weighted sums [N, D] of rows of a table [..., D], a bag of S rows for each; N * S weights.

    This is an embedding lookup: torch adds row after row, each sum separately, at memory speed. Batched products take
    up to twice as long for few queries, and with 4 queries and some hundred keys their bits depend on S.
    """
    # The function of torch.nn.functional checks its arguments for as long as a small sum takes.
    return torch.embedding_bag(table, bags.places, bags.starts, False, _SUM, False, weights.view(-1))[0]


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """[N, Q, D] @ [N, D, S]. On a GPU, products of bfloat16 are returned in float32."""
    if queries.is_cuda and queries.dtype != torch.float32:
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    return torch.bmm(queries, keys)


def _in_pieces(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention [B, L, H, D] with soft-capping or sinks, `_PIECE` queries at a time to bound the memory."""
    length, outputs = query.shape[2], list[Tensor]()
    for start in range(0, length, _PIECE):
        end = min(start + _PIECE, length)
        place = torch.arange(end, device=query.device)
        hidden = place > place[start:, None]
        mask = torch.where(hidden, -torch.inf, 0.0)[None, None].to(query.dtype)
        parts = query[:, :, start:end], key[:, :, :end], value[:, :, :end]
        outputs.append(attend(module, *parts, mask, scaling, window, softcap, sinks)[0])
    return torch.cat(outputs, 1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The weights of the keys in float32, or in float64 for scores in float64. A sink takes part in the sum and has no
    value, so its weight is removed."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=wide)
    # The sink comes first, so that padding at the end does not change its place.
    first = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([first, scores], dim=-1).softmax(-1, dtype=wide)[..., 1:].contiguous()


def _windowed(mask: Tensor, window: int | None) -> Tensor:
    """Restricts a mask to the `window` newest keys of each query."""
    size = mask.shape[-1]
    if window is None or size <= window:
        return mask
    newest = (mask == 0).sum(-1, keepdim=True) - 1  # a query sees the first keys, so their number gives the last
    return mask.masked_fill(torch.arange(size, device=mask.device) <= newest - window, -torch.inf)


def registered(*, exact: bool) -> str:
    """Registers this attention with transformers. Returns its name."""
    from transformers import AttentionInterface

    name = EXACT if exact else FAST
    AttentionInterface.register(name, partial(attend, fast=not exact))
    return name
