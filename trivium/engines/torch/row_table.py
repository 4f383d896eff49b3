"""What a batch knows of each of its rows, as columns of numbers: a step reads and writes all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trivium.types import Sampling

Rows = npt.NDArray[np.int64] | Sequence[int] | slice | int


class RowTable:
    """`size` rows, all of them free. Free rows are computed like the others, in the cheapest state."""

    def __init__(self, size: int, tokens: int = 64) -> None:
        """`tokens` is the length of completions that there is room for at first."""
        self.occupied = np.zeros(size, np.bool_)
        self.scanned = np.zeros(size, np.bool_)
        """Whether the text is searched for stop strings."""
        self.keeps = np.zeros(size, np.bool_)
        """Whether the tokens that a token was sampled among are recorded."""
        self.streams = np.zeros(size, np.bool_)
        self.next = np.zeros(size, np.int64)
        """The token that the next step reads."""
        self.position = np.zeros(size, np.int64)
        """Where its keys and values are written."""
        self.ahead = np.zeros(size, np.int64)
        """How far positions of later tokens are ahead of their place: images have fewer positions than tokens."""
        self.count = np.zeros(size, np.int64)
        """Tokens of the completion so far."""
        self.limit = np.zeros(size, np.int64)
        self.digest = np.zeros(size, np.uint64)
        """What its random numbers are derived from."""
        self.temperature = np.ones(size, np.float32)
        self.top_p = np.ones(size, np.float32)
        self.top_k = np.zeros(size, np.int64)
        self.min_p = np.zeros(size, np.float32)
        self.min_new = np.zeros(size, np.int64)
        self.tokens = np.zeros((size, tokens), np.int32)
        self.log_prob = np.zeros((size, tokens), np.float32)
        self.version = np.zeros((size, tokens), np.int32)

    def assign(self, row: int, sampling: Sampling, **values: Any) -> None:
        """Occupies a row for a completion without tokens. `values` are those of further columns."""
        self.occupied[row], self.count[row] = True, 0
        self.temperature[row], self.min_new[row] = sampling.temperature, sampling.min_new_tokens
        self.top_p[row], self.top_k[row], self.min_p[row] = sampling.top_p, sampling.top_k, sampling.min_p
        for name, value in values.items():
            getattr(self, name)[row] = value

    def free(self, rows: Rows) -> None:
        """Makes rows free."""
        for column in (self.occupied, self.scanned, self.keeps, self.streams):
            column[rows] = False
        for column in (self.next, self.position, self.ahead, self.count, self.min_new):
            column[rows] = 0
        self.temperature[rows], self.top_p[rows], self.top_k[rows], self.min_p[rows] = 1, 1, 0, 0

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies rows to other rows."""
        for column in vars(self).values():
            column[target] = column[source]

    def append(
        self,
        rows: npt.NDArray[np.int64],
        sampled: npt.NDArray[np.int64],
        log_prob: npt.NDArray[np.float32],
        version: int,
    ) -> None:
        """Adds a token to each of these rows."""
        count = self.count[rows]
        if (width := int(count.max()) + 1) > self.tokens.shape[1]:
            more = ((0, 0), (0, max(width, 2 * self.tokens.shape[1]) - self.tokens.shape[1]))
            self.tokens, self.log_prob = np.pad(self.tokens, more), np.pad(self.log_prob, more)
            self.version = np.pad(self.version, more)
        self.tokens[rows, count], self.log_prob[rows, count], self.version[rows, count] = sampled, log_prob, version
        self.next[rows], self.count[rows] = sampled, count + 1
