"""Sequence parallelism: each rank of a group computes a slice of the tokens of one pack.

All layers except attention process tokens independently; attention processes heads independently. Around attention, an
all-to-all exchanges slices of the tokens for shares of the heads (Jacobs et al. 2023, "DeepSpeed Ulysses"). The outputs
are gathered, and every rank computes the same loss. A rank propagates only the gradient of its own slice into the
model, so the gradient of a parameter is the sum over the ranks.

Legend: S ranks of the group, T tokens of the pack, n tokens of a slice, P >= n rows of a slice with padding,
N requested tokens, M of them on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trivium.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The processes that share every pack, and the rank of this process."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of T tokens: rank r has tokens r n to (r + 1) n - 1, in the first of its P rows."""

    num_tokens: int
    rank: int
    size: int
    multiple: int
    """P is a multiple of this."""

    @property
    def tokens(self) -> int:
        """n."""
        return -(-self.num_tokens // self.size)

    @property
    def rows(self) -> int:
        """P."""
        return -(-self.tokens // self.multiple) * self.multiple

    def mine(self, values: torch.Tensor) -> torch.Tensor:
        """(..., T) -> (..., P): the slice of this rank, padded with zeros that are not read."""
        part = values[..., self.rank * self.tokens : (self.rank + 1) * self.tokens]
        return torch.nn.functional.pad(part, (0, self.rows - part.shape[-1]))

    def place(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of tokens in the concatenation of the S slices of P rows."""
        return tokens // self.tokens * self.rows + tokens % self.tokens


@dataclass(frozen=True, slots=True)
class LocalStates:
    """The requested hidden states that this rank holds: M of N."""

    values: torch.Tensor
    """(M, width)."""
    mine: torch.Tensor | slice
    """The index of these states among the N."""
    counts: tuple[int, ...] = ()
    """The number of the N states on each rank."""
    order: torch.Tensor | None = None
    """(N,) int64: the place of each of the N states in the concatenation of the ranks' states."""
    sequence: SequenceGroup | None = None
    """None: this process holds all N states."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(M, ...), one value for each state -> (N, ...) in the requested order, on every rank. Differentiable."""
        if self.sequence is None or self.order is None:
            return values
        return cast(torch.Tensor, _Gather.apply(values, self.counts, self.sequence)).index_select(0, self.order)


def local_states(hidden: torch.Tensor, rows: torch.Tensor, slices: Slices, sequence: SequenceGroup) -> LocalStates:
    """Selects the states of those tokens `rows` (N,) of the pack that are in `hidden` (P, width), this rank's slice."""
    owner = rows // slices.tokens
    together = owner.argsort(stable=True)
    counts = tuple(owner.bincount(minlength=sequence.size).tolist())
    first = sum(counts[: sequence.rank])
    mine = together[first : first + counts[sequence.rank]]
    states = hidden.index_select(0, rows[mine] - sequence.rank * slices.tokens)
    return LocalStates(states, mine, counts, together.argsort(), sequence)


def heads_apart(parts: Sequence[torch.Tensor], sequence: SequenceGroup) -> list[torch.Tensor]:
    """Each (P, heads, width), this rank's tokens -> (S P, heads / S, width), all tokens of this rank's heads.

    Key-value heads are repeated until S divides their number. S must divide the number of query heads.
    """
    widths: list[tuple[int, int]] = []
    sent: list[torch.Tensor] = []
    for part in parts:
        part = part.repeat_interleave(sequence.size // gcd(part.shape[1], sequence.size), dim=1)
        widths.append((part.shape[1] // sequence.size, part.shape[2]))
        sent.append(part.unflatten(1, (sequence.size, -1)).flatten(2))
    received = _exchange(torch.cat(sent, 2).transpose(0, 1), sequence).flatten(0, 1)  # queries, keys, values at once
    cut = received.split([heads * width for heads, width in widths], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(cut, widths, strict=True)]


def heads_together(part: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
    """The inverse of `heads_apart`: (S P, heads / S, width) -> (P, heads, width)."""
    return _exchange(part.unflatten(0, (sequence.size, -1)), sequence).transpose(0, 1).flatten(1, 2)


def check_heads(name: str, heads: int, size: int) -> None:
    """Raises ConfigError if the number of ranks does not divide the number of attention heads."""
    if heads % size:
        raise ConfigError(
            f"train.sequence_parallel {size} for {name}",
            f"its {heads} attention heads do not divide by it",
            f"choose a divisor of {heads}: {_divisors(heads)}",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _exchange(blocks: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
    """(S, ...): block s goes to rank s; returns every rank's block for this rank."""
    return cast(torch.Tensor, _Exchange.apply(blocks, sequence))


class _ExchangeContext(Protocol):
    sequence: SequenceGroup


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ExchangeContext, blocks: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
        ctx.sequence = sequence
        return _all_to_all(blocks, sequence)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: _ExchangeContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return _all_to_all(grad_outputs[0], ctx.sequence), None  # an exchange is its own inverse


class _GatherContext(Protocol):
    rows: slice
    """The rows of this rank among those of all ranks."""


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _GatherContext, values: torch.Tensor, counts: tuple[int, ...], sequence: SequenceGroup
    ) -> torch.Tensor:
        first = sum(counts[: sequence.rank])
        ctx.rows = slice(first, first + len(values))
        everything = values.new_empty(sum(counts), *values.shape[1:])
        copies = torch.cat([values] * sequence.size)  # shares differ in length, which an all-gather does not allow
        dist.all_to_all_single(everything, copies, list(counts), [len(values)] * sequence.size, group=sequence.group)
        return everything

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (the decorator hides the first parameter)
        ctx: _GatherContext, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return grad_outputs[0][ctx.rows], None, None


def _all_to_all(blocks: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
    # torch.distributed refuses tensors that are not contiguous; `heads_apart` passes a transposed one.
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=sequence.group)
    return received
