"""Inputs and outputs of policy losses, gates and selections.

Legend: B sequences, L tokens, K candidates per token. A log-ratio is clamped to +-20 nats before it is exponentiated,
so no input gives an infinite loss or gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from trivium.foundation.errors import DataError
from trivium.models.late import torch
from trivium.types import EXPERT_VERSION

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this many nats before they are exponentiated."""


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """The inputs of a policy loss; every tensor is (B, L) and zero outside the mask."""

    log_prob: Tensor
    """With gradient: log-probability of the token under the current weights."""
    response_mask: Tensor
    """Bool."""
    columns: Mapping[str, Tensor]
    """Every column that the function declares: (B, L), `teacher_top` and `student_top` (B, L, K, 2)."""
    expert: Tensor
    """Bool: trained tokens that no policy of this run sampled."""
    entropy: Tensor | None = None
    """In nats, of the distribution the token was drawn from; with gradient if an entropy term needs it."""
    step: int = 0
    """The train step being taken, counted from 0 within the stage."""
    candidate_log_prob: Tensor | None = None
    """(B, L, K) with gradient: log-probabilities of the candidates in `teacher_top` or `student_top`; those of both, in
    this order, for a loss that needs both; None if not needed."""

    @property
    def advantages(self) -> Tensor:
        return self._column("advantages")

    @property
    def old_log_prob(self) -> Tensor:
        return self._column("old_log_prob")

    def _column(self, name: str) -> Tensor:
        if name not in self.columns:
            raise DataError(f"the column {name!r}", "the function does not declare it", "list it under `needs`")
        return self.columns[name]

    @property
    def log_ratio(self) -> Tensor:
        """log(current / old), clamped; beyond +-20 nats its gradient is zero."""
        return bounded_log_ratio(self.log_prob, self.old_log_prob)

    @property
    def sampled(self) -> Tensor:
        """(B, L) bool: trained tokens that a policy of this run sampled."""
        return self.response_mask & ~self.expert

    def detached(self) -> PolicyInputs:
        """The same without gradient."""
        entropy, candidates = (None if t is None else t.detach() for t in (self.entropy, self.candidate_log_prob))
        return replace(self, log_prob=self.log_prob.detach(), entropy=entropy, candidate_log_prob=candidates)


@dataclass(frozen=True, slots=True)
class PerToken:
    """A loss for each token."""

    loss: Tensor
    """(B, L), to be minimised; values outside the mask are ignored."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    """Declared metric key -> (B, L), logged as the mean over trained tokens."""


def check_per_token(values: object, like: Tensor, what: str) -> Tensor:
    """The values, a tensor with the shape (B, L) of `like`. Raises DataError for anything else, naming `what`."""
    if isinstance(values, torch.Tensor) and values.shape == like.shape:
        return values
    received = f"a tensor {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
    raise DataError(
        f"a number for each token, {tuple(like.shape)}, from {what}",
        received,
        "return a tensor of the shape of x.log_prob: the objective averages, not the function",
    )


def policy_inputs(log_prob: Tensor, response_mask: Tensor, **columns: Tensor) -> PolicyInputs:
    """Inputs for a direct call, (B, L) each. Zeroes values outside the mask; no token is an expert's."""
    mask = response_mask.bool()
    masked_columns = {name: zero_outside(values, mask) for name, values in columns.items()}
    return PolicyInputs(zero_outside(log_prob, mask), mask, masked_columns, torch.zeros_like(mask))


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """The values with zeros outside the mask (B, L); no NaN leaks, neither forward nor backward."""
    trailing = (1,) * (values.dim() - mask.dim())
    return torch.where(mask.view(*mask.shape, *trailing), values, torch.zeros_like(values))


def bounded_log_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """log(current / old) of each token, clamped to +-20 nats; beyond that its gradient is zero."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def expert_rows(policy_version: Tensor, mask: Tensor) -> Tensor:
    """(B, L) bool: the trained tokens of rows in which an expert wrote any of them."""
    return ((policy_version == EXPERT_VERSION) & mask).any(-1, keepdim=True) & mask


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1): the mean of each row over its mask; 0 for an empty row."""
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
