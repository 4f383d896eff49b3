"""The output layer, and the part of its vocabulary that a rank computes if ranks split it (tensor parallelism).

Each rank reduces its logits to a few numbers for each token. A sum over the ranks then gives those of the whole
vocabulary, so no rank holds a row of all logits.

Legend: N tokens, V tokens of the part, M targets of one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from trivium.models.weights.filling import is_sharded

_CACHED_ROWS = 32
"""Rows of logits that are normalised together on a CPU. 8 to 64 take the same time. All 256 rows of a chunk, 50 MB for
49,152 tokens, are read from memory by each operation: then the output layer takes 1.6 of the time."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The tokens from `first` on, as many as the output layer of this rank has."""

    first: int = 0
    group: dist.ProcessGroup | None = None
    """The ranks with the other parts; None if this is the whole vocabulary."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all parts, on every rank, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def softmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, probabilities), (N, V) each, of this part's tokens among those of all parts. Overwrites
        the logits."""
        if self.group is not None:
            norm = torch.logsumexp(logits, dim=1)
            # The exponential of a log-norm may overflow float32, that of a difference from the largest cannot.
            largest = norm.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
            log_p = logits.sub_((largest + self.sum((norm - largest).exp()).log())[:, None])
            return log_p, log_p.exp()
        # One pass over memory on a CPU. The kernel of a GPU is not known to permit that it overwrites its input.
        into = logits if logits.device.type == "cpu" else None
        log_p = torch.log_softmax(logits, 1, out=into)
        p = log_p.exp()
        # That function adds small exponentials to a large sum: of 49,152 tokens, its result is up to 4e-6 too high.
        return log_p.sub_(p.sum(1, keepdim=True).log()), p

    def blocks(self, logits: torch.Tensor) -> Iterator[slice]:
        """Slices of the rows of logits (N, V): on a CPU so few that they stay in the cache between operations."""
        step = _CACHED_ROWS if self.group is None and logits.device.type == "cpu" else max(1, len(logits))
        return (slice(first, min(first + step, len(logits))) for first in range(0, len(logits), step))

    def own(self, ids: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The places of token ids in this part of `size` tokens, and which of them are in it (None: all). The place of
        another one is 0."""
        if self.group is None:
            return ids, None
        # gather and scatter, which get the places, refuse indices outside the part.
        inside = (ids >= self.first) & (ids < self.first + size)
        return (ids - self.first).where(inside, 0), inside

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(N, K) of each part -> those of all parts side by side, on every rank."""
        if self.group is None:
            return values
        parts = [torch.empty_like(values) for _ in range(self.group.size())]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.cat(parts, 1)


WHOLE = VocabularyPart()


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The logits (hidden @ weight.T + bias) / temperature, or this rank's part of them."""

    weight: torch.Tensor
    """(V, H) in float32 or float64, the type of the arithmetic."""
    bias: torch.Tensor | None = None
    """(V,)"""
    temperature: float = 1.0
    precision: str = "float32"
    """Of products (`trivium.models.precision`)."""
    part: VocabularyPart = WHOLE
    """The tokens that `weight` and `bias` belong to."""

    @classmethod
    def of(cls, layer: nn.Linear, dtype: torch.dtype, temperature: float, precision: str) -> Self:
        """That of a model, in `dtype`."""
        weight, bias, part = layer.weight, layer.bias, WHOLE
        if is_sharded(weight):
            mesh = weight.device_mesh
            local = weight.to_local()
            part = VocabularyPart(mesh.get_local_rank() * len(local), mesh.get_group())
            weight, bias = local, bias.to_local() if is_sharded(bias) else bias
        return cls(weight.to(dtype), None if bias is None else bias.to(dtype), temperature, precision, part)
