"""Experiences: the batch of a train step as Trinity-RFT's engines read it, over the core's ragged arrays.

Legend: B sequences; P tokens of the longest prompt; R of the longest response; S = P + R.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

from trivium import types
from trivium.foundation.errors import DataError
from trivium.frontdoors.padding import response_start, side_by_side
from trivium.types import AnyArray, Batch

_OF_ALGORITHM = ("advantages", "returns")
"""Columns that a single experience carries in `extra`."""


@dataclass(frozen=True, slots=True)
class EID:
    """The id of an experience: its task and its rollout."""

    task: str
    """The id of the group: taskset, task and epoch."""
    run: int
    """The index of the rollout in its group."""

    @property
    def tid(self) -> str:
        return self.task

    @property
    def rid(self) -> str:
        return f"{self.task}/{self.run}"

    uid = rid


class Experience(types.Experience):
    """One experience, with the attributes that Trinity-RFT adds. In a sequence of L tokens, the R tokens from the first
    trained one on are the response; the tokens before are the prompt."""

    __slots__ = ()

    @classmethod
    def of(cls, experience: types.Experience, **columns: AnyArray) -> Experience:
        """Returns the experience with these columns, one number per token each."""
        values = {field.name: getattr(experience, field.name) for field in fields(experience)}
        return cls(**{**values, "extra": {**experience.extra, **columns}})

    @property
    def eid(self) -> EID:
        return EID(self.group_id, self.index)

    @property
    def prompt_length(self) -> int:
        return response_start(self)

    @property
    def action_mask(self) -> Tensor:
        """(R,) bool: true on the trained tokens."""
        return self._response(self.response_mask)

    @property
    def logprobs(self) -> Tensor:
        """(R,) float32: log-probabilities under the sampling distribution."""
        return self._response(self.rollout_log_prob)

    @property
    def advantages(self) -> Tensor | None:
        """(R,) float32; None if the estimator reads scores of a model, which the engine holds."""
        return self._response(self.extra["advantages"]) if "advantages" in self.extra else None

    @property
    def returns(self) -> Tensor | None:
        """(R,) float32; None if there are no advantages."""
        return self._response(self.extra["returns"]) if "returns" in self.extra else None

    def _response(self, array: AnyArray) -> Tensor:
        # A copy, because recorded arrays are read-only, and torch has no such tensors.
        return torch.from_numpy(array[self.prompt_length :].copy())


@dataclass(frozen=True)
class Experiences(Sequence[Experience]):
    """A batch of experiences. Prompts are padded on the left, responses on the right, to the longest one.

    As a sequence, it contains the `Experience`s, whose arrays are not padded.
    """

    batch: Batch
    """The experiences, and the columns computed for them."""
    pad_token_id: int = 0

    @classmethod
    def gather_experiences(cls, experiences: Sequence[types.Experience], pad_token_id: int = 0) -> Experiences:
        """Combines several experiences into one batch. Raises DataError for anything else."""
        return cls(batch_of(experiences), pad_token_id)

    # ------------------------------------------------------------------ tensors

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.batch)

    @property
    def prompt_length(self) -> int:
        """P."""
        return max(self._prompts, default=0)

    @cached_property
    def tokens(self) -> Tensor:
        """(B, S) int64."""
        return self._padded([e.tokens for e in self], torch.int64, self.pad_token_id)

    @cached_property
    def attention_masks(self) -> Tensor:
        """(B, S) bool: false on padding."""
        return self._padded([np.ones(len(e), np.bool_) for e in self], torch.bool)

    @cached_property
    def action_masks(self) -> Tensor:
        """(B, R) bool: true on the trained tokens."""
        return self._responses([e.response_mask for e in self], torch.bool)

    @cached_property
    def logprobs(self) -> Tensor:
        """(B, R) float32: log-probabilities under the sampling distribution."""
        return self._responses([e.rollout_log_prob for e in self], torch.float32)

    @cached_property
    def rewards(self) -> Tensor:
        """(B,) float32: the total reward of each rollout."""
        return torch.tensor([e.reward for e in self], dtype=torch.float32)

    @cached_property
    def advantages(self) -> Tensor | None:
        """(B, R) float32; None if the estimator reads scores of a model, which the engine holds."""
        return self._column("advantages")

    @cached_property
    def returns(self) -> Tensor | None:
        """(B, R) float32; None if there are no advantages."""
        return self._column("returns")

    # ------------------------------------------------------------------ ids

    @property
    def group_ids(self) -> list[str]:
        """The group id of each experience."""
        return [e.group_id for e in self]

    @property
    def eids(self) -> list[EID]:
        """The id of each experience."""
        return [EID(e.group_id, e.index) for e in self]

    # ------------------------------------------------------------------ the sequence

    def __len__(self) -> int:
        return len(self.batch)

    @overload
    def __getitem__(self, place: int) -> Experience: ...
    @overload
    def __getitem__(self, place: slice) -> Experiences: ...
    def __getitem__(self, place: int | slice) -> Experience | Experiences:
        if isinstance(place, slice):
            return Experiences(self.batch.select(range(len(self))[place]), self.pad_token_id)
        return self._members[place]

    def __iter__(self) -> Iterator[Experience]:
        return iter(self._members)

    @cached_property
    def _members(self) -> list[Experience]:
        columns = self.batch.columns
        return [
            Experience.of(e, **{name: columns[name][row] for name in _OF_ALGORITHM if name in columns})
            for row, e in enumerate(self.batch.experiences)
        ]

    # ------------------------------------------------------------------ padding

    @cached_property
    def _prompts(self) -> list[int]:
        return [response_start(e) for e in self.batch.experiences]

    def _padded(self, arrays: Sequence[AnyArray], dtype: torch.dtype, filler: int = 0) -> Tensor:
        return side_by_side(arrays, self._prompts, filler, dtype)

    def _responses(self, arrays: Sequence[AnyArray], dtype: torch.dtype) -> Tensor:
        return self._padded(arrays, dtype)[:, self.prompt_length :].clone()

    def _column(self, name: str) -> Tensor | None:
        arrays = self.batch.columns.get(name)
        return None if arrays is None else self._responses(arrays, torch.float32)


def batch_of(experiences: object) -> Batch:
    """Converts Experiences, or a list of Experience (also of Trivium's own type), to the core's batch. Raises DataError
    for anything else."""
    if isinstance(experiences, Experiences):
        return experiences.batch
    entries = experiences if isinstance(experiences, list | tuple) else (experiences,)
    rows = tuple(entry for entry in entries if isinstance(entry, types.Experience))
    if len(rows) < len(entries):
        wrong = next(type(entry).__name__ for entry in entries if not isinstance(entry, types.Experience))
        raise DataError(
            "Experiences, or a list of Experience",
            f"a {wrong}" + (" in a list" if entries is experiences else ""),
            "pass what the sample strategy returned, or Experiences.gather_experiences([...])",
        )
    columns = {name: tuple(e.extra[name] for e in rows) for name in _OF_ALGORITHM if all(name in e.extra for e in rows)}
    return Batch(rows, columns if rows else {})
