"""Key-value caches of prompts and of decoding rows, with the `update` method that transformers calls.

Legend: B prompts of one padded length, R rows, K key-value heads, S positions, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trivium.models.placement import sent

PAGE = 32
"""Positions are padded to multiples of this: further pages of masked keys do not change any bit of attention."""


def pages(length: int) -> int:
    """The length, rounded up to whole pages."""
    return -(-length // PAGE) * PAGE


class PromptCache:
    """The cache of prompts of one padded length. Row b is prompt b, position 0 its first token."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Per layer, keys and values [B, K, S, D]."""
        self.start = 0
        """Position of the first token of the chunk being read."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Stores the chunk's keys and values [B, K, chunk, D]; returns all up to the end of the chunk, padded to
        pages."""
        if layer == len(self.layers):
            self.layers.append((self._empty(keys), self._empty(values)))
        end = self.start + keys.shape[2]
        for stored, new in zip(self.layers[layer], (keys, values), strict=True):
            stored[:, :, self.start : end] = new
        kept_keys, kept_values = self.layers[layer]
        return kept_keys[:, :, : pages(end)], kept_values[:, :, : pages(end)]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.start

    @property
    def count(self) -> int:
        """B."""
        return len(self.layers[0][0])

    def begin(self, start: int, end: int) -> None:
        """Call this before the chunk of the tokens `start` to `end - 1`."""
        del end
        self.start = start

    def row(self, index: int) -> PromptCache:
        """A copy of one prompt."""
        alone = PromptCache(self.length)
        alone.start = self.start
        alone.layers = [
            (keys[index : index + 1].clone(), values[index : index + 1].clone()) for keys, values in self.layers
        ]
        return alone

    def _empty(self, like: Tensor) -> Tensor:
        batch, heads, _, size = like.shape
        # Not empty memory, which may hold NaN: its product with the weight 0 of a masked key is NaN.
        return like.new_zeros(batch, heads, pages(self.length), size)


class Bags(NamedTuple):
    """Places in a table, a bag of equal size for each sum (`trivium.engines.torch.attention.weighted`)."""

    places: Tensor
    """The places of all bags, one after the other."""
    starts: Tensor
    """Where each bag begins in `places`."""

    @classmethod
    def of(cls, places: Tensor) -> Bags:
        """A bag for each row of `places` [..., S]."""
        starts = torch.arange(0, places.numel(), places.shape[-1], dtype=places.dtype)
        return cls(places.view(-1), starts)


class RowCache:
    """The cache of the rows that decode together, with spare positions. It grows by copying one layer at a time to
    larger tensors, so that only one layer is in memory twice.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Per layer, keys and values [R, K, S, D]; unused positions are zero or stale, never NaN."""
        self.rows = self.length = 0
        self.longest = 0
        """The most positions that any row may reach; 0 if unknown."""
        self.moves = 0
        """How often the tensors were replaced by larger ones."""
        self._used = (0, 0)
        """Rows and positions in use."""
        self._slots: list[tuple[Tensor, Tensor]] = []

    def reserve(self, rows: int, length: int, like: PromptCache | None = None) -> None:
        """Allocates at least this many rows and positions; `like` gives the shapes the first time."""
        if not self.layers and like is not None:
            self.layers = [(k[:0], v[:0]) for k, v in like.layers]
        used_rows, used_length = self._used = max(self._used[0], rows), max(self._used[1], length)
        if used_rows > self.rows or used_length > self.length:
            step = max(8, 1 << max(0, used_rows.bit_length() - 4))
            self._resize(-(-used_rows // step) * step, self._grown(used_length))

    def place(self, prompts: PromptCache, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Copies prompt `sources[i]` into row `rows[i]`."""
        self.reserve(max(rows) + 1, prompts.length, prompts)
        source, row = self._sent(sources), self._sent(rows)
        for layer, new in zip(self.layers, prompts.layers, strict=True):
            for to, of in zip(layer, new, strict=True):
                to[row, :, : prompts.length] = of[:, :, : prompts.length][source]

    def move(self, sources: Sequence[int], rows: Sequence[int], length: int) -> None:
        """Copies the first `length` positions of rows `sources` over rows `rows`."""
        source, row = self._sent(sources), self._sent(rows)
        for layer in self.layers:
            for tensor in layer:
                tensor[row, :, :length] = tensor[source, :, :length]

    def begin(self, positions: Tensor, width: int) -> StepRows:
        """A decode step: row r writes at positions[r] and sees the first `width` positions, whole pages."""
        self._used = 0, 0  # rows and positions of completions that ended need no room in the next, larger cache
        self.reserve(len(positions), width)
        return StepRows(self.layers, self._slots, slice(0, len(positions)), positions, width)

    def _sent(self, numbers: Sequence[int]) -> Tensor:
        return sent(np.array(numbers), self._device)

    @property
    def _device(self) -> torch.device:
        return self.layers[0][0].device

    def _grown(self, length: int) -> int:
        """The new number of positions if `length` are needed: more than that, up to `longest`. On a GPU `longest` at
        once: memory freed by smaller tensors would stay fragmented."""
        wanted = self.longest if self._device.type == "cuda" else 2 * self.length if length > self.length else length
        return pages(max(length, min(wanted, self.longest)))

    def _resize(self, rows: int, length: int) -> None:
        self._slots = []  # views would keep the old tensors alive
        for layer, (keys, values) in enumerate(self.layers):
            self.layers[layer] = _resized(keys, rows, length), _resized(values, rows, length)
        self.rows, self.length = rows, length
        self.moves += 1
        self._slots = [(k.flatten(0, 2), v.flatten(0, 2)) for k, v in self.layers]


class StepRows:
    """A slice of the rows in one decode step."""

    def __init__(
        self,
        layers: list[tuple[Tensor, Tensor]],
        slots: list[tuple[Tensor, Tensor]],
        rows: slice,
        positions: Tensor,
        width: int,
    ) -> None:
        """Selects `rows` of `layers`, keys and values [all rows, K, S, D], and of the flattened `slots` [all rows * K *
        S, D]. The rows write at `positions` and see the first `width` positions."""
        self._layers, self._slots, self._rows, self.positions, self._width = layers, slots, rows, positions, width
        self._index: dict[int, Tensor] = {}
        self._bags: Bags | None = None
        self._masks: dict[int, Tensor] = {}

    def part(self, rows: slice) -> StepRows:
        """A slice of these rows."""
        first = self._rows.start
        whole = slice(first + rows.start, first + rows.stop)
        return StepRows(self._layers, self._slots, whole, self.positions[rows], self._width)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Writes one new position per row, keys and values [R, K, 1, D]; returns all that the rows attend to, [R, K, S,
        D]."""
        self._write(keys, values, layer)
        kept_keys, kept_values = self._layers[layer]
        return kept_keys[self._rows, :, : self._width], kept_values[self._rows, :, : self._width]

    def append(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """As `update` for keys and values [R, K, D], in few operations: returns the keys [R * K, D, width], and the
        values of all rows of the cache [all rows * K * S, D], which `bags` selects from."""
        self._write(keys, values, layer)
        cached_keys, (_, table) = self._layers[layer][0], self._slots[layer]
        _, heads, length, size = cached_keys.shape
        number, first = len(self.positions) * heads, self._rows.start * heads * length * size
        # One view of rows and heads together, which the batched product reads without a copy.
        return cached_keys.as_strided((number, size, self._width), (length * size, 1, size), first), table

    def bags(self, heads: int) -> Bags:
        """The values that the query heads of each row attend to, in the table of `append`. Masked positions have the
        place of position 0, which is read anyway. Computed once per step."""
        if self._bags is None:
            cached_keys = self._layers[0][0]
            _, key_heads, length, size = cached_keys.shape
            kind = torch.int32 if cached_keys.numel() // size < 2**31 else torch.int64
            places = torch.arange(self._width, dtype=kind)
            places = places.masked_fill(places > self.positions[:, None], 0)
            head = torch.arange(heads, dtype=kind) // (heads // key_heads)
            first = (self._number[:, None].to(kind) * key_heads + head) * length
            self._bags = Bags.of(first[..., None] + places[:, None])
        return self._bags

    def mask(self, window: int | None) -> Tensor:
        """[R, 1, width]: 0 for the positions that a row sees, -inf for others. `window`: it sees at most so many, the
        newest ones. Computed once per step."""
        window = self._width if window is None else min(window, self._width)
        if window not in self._masks:
            places, last = torch.arange(self._width), self.positions[:, None, None]
            hidden = places > last
            if window < self._width:
                hidden |= places <= last - window
            self._masks[window] = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self._masks[window]

    @property
    def _number(self) -> Tensor:
        """The row of the cache that each row writes to."""
        return torch.arange(self._rows.start, self._rows.stop, device=self.positions.device)

    def _write(self, keys: Tensor, values: Tensor, layer: int) -> None:
        """Writes one new position per row."""
        for slots, new in zip(self._slots[layer], (keys, values), strict=True):
            slots.index_copy_(0, self._slot(new.shape[1]), new.reshape(-1, new.shape[-1]))

    def get_seq_length(self, layer: int = 0) -> int:
        del layer
        return self._width

    def _slot(self, heads: int) -> Tensor:
        """Index in the flattened cache that each (row, head) writes to; computed once per step."""
        if heads not in self._index:
            device = self.positions.device
            length = self._layers[0][0].shape[2]
            slots = (self._number[:, None] * heads + torch.arange(heads, device=device)) * length
            self._index[heads] = (slots + self.positions[:, None]).flatten()
        return self._index[heads]


def _resized(tensor: Tensor, rows: int, length: int) -> Tensor:
    """The first rows and positions of a tensor [R, K, S, D], zero beyond."""
    old_rows, heads, old_length, size = tensor.shape
    if (rows, length) == (old_rows, old_length):
        return tensor
    result = tensor.new_zeros(rows, heads, length, size)
    same_rows, same = min(rows, old_rows), min(length, old_length)
    result[:same_rows, :, :same] = tensor[:same_rows, :, :same]
    return result
