"""Splits values with rows into shares of equal length, and joins the shares again without loss.

Values with rows are batches (experiences), lists, tuples, arrays and tensors (leading axis), mappings of such values,
and objects with `__len__`, `select_idxs(rows)` or `select(rows)`, and `concat(parts)`, such as a DataProto. Other
values go to all ranks whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np

from trivium.errors import DataError
from trivium.metrics import aggregate
from trivium.types import Batch

if TYPE_CHECKING:
    import torch


class _Joinable(Protocol):
    """A user's type whose values have rows."""

    def __len__(self) -> int: ...
    def select(self, rows: list[int], /) -> object: ...
    @classmethod
    def concat(cls, parts: list[Any], /) -> object: ...


@dataclass(frozen=True)
class Piece:
    """One share of a value, or a worker's result for a share.

    All shares have the same number of rows. `padding` is the number of rows, over all shares, that repeat earlier rows
    at the end of the last shares.
    """

    value: Any
    rows: int
    """Number of rows of the input share."""
    padding: int = 0

    def made(self, value: object) -> Piece:
        """Returns a worker's result for this share."""
        return Piece(value, self.rows, self.padding)

    def passed_on(self) -> Piece:
        """Returns the result as a share of the next call. Raises DataError for a result without rows."""
        number = num_rows(self.value)
        if number is None:
            raise _rowless(self.value)
        return Piece(self.value, number, self.padding * self._factor(number))

    def _factor(self, number: int) -> int:
        """Returns the number of result rows per input row."""
        if not self.padding:
            return 1
        factor, rest = divmod(number, self.rows)
        if rest:
            raise DataError(
                f"results without the {self.padding} rows of padding",
                f"{number} rows for {self.rows}",
                "return the same number of rows for each input row, or pass rows whose number the data ranks divide",
            )
        return factor


def num_rows(value: object) -> int | None:
    """Returns the number of rows of a value, or None for a value without rows."""
    if isinstance(value, Mapping):
        return common_rows(value)
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return value.shape[0] if value.ndim else None
    return len(value) if isinstance(value, Batch | list | tuple) or _is_joinable(value) else None


def common_rows(values: Mapping[Any, Any]) -> int | None:
    """Returns the number of rows of the values that have rows. Raises DataError if the values disagree."""
    counts = {name: rows for name, value in values.items() if (rows := num_rows(value)) is not None}
    if len(set(counts.values())) > 1:
        raise DataError(
            "values that are split alike",
            ", ".join(f"{name} has {rows} rows" for name, rows in counts.items()),
            "give all of them the same number of rows (lists and tuples have rows, too: wrap a value that every rank "
            "needs whole in another object)",
        )
    return next(iter(counts.values()), None)


def take(value: object, rows: Sequence[int]) -> object:
    """Returns the given rows of a value in order. Returns a value without rows unchanged."""
    if num_rows(value) is None:
        return value
    if isinstance(value, Mapping):
        return {name: take(each, rows) for name, each in value.items()}
    if isinstance(value, Batch):
        return replace(value.select(rows), metrics=value.metrics)
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(value[row] for row in rows)
    if isinstance(value, np.ndarray) or _is_tensor(value):
        # Consecutive rows are taken as a view, because sending them to the worker copies them.
        return value[rows.start : rows.stop] if isinstance(rows, range) and rows.step == 1 else value[list(rows)]
    if not _is_joinable(value):
        return value
    return getattr(value, "select_idxs", value.select)(list(rows))


def split(value: object, parts: int) -> list[Piece]:
    """Returns consecutive shares of equal length, padded with the first rows. Raises DataError for unequal lengths."""
    return [share(value, part, parts) for part in range(parts)]


def share(value: object, part: int, parts: int) -> Piece:
    """Returns share `part` of the `parts` shares of `split`."""
    number = num_rows(value)
    if number is None:
        raise _rowless(value)
    length = -(-number // parts)
    first, last = part * length, (part + 1) * length
    rows = range(first, last) if last <= number else [row % number for row in range(first, last)]
    return Piece(take(value, rows), length, length * parts - number)


def gathered(pieces: Sequence[Piece]) -> object:
    """Joins the workers' results for the shares of one call in order, without the results of padding."""
    whole = join([piece.value for piece in pieces])
    if whole is None or not pieces[0].padding:
        return whole
    factors = {piece._factor(num_rows(piece.value) or 0) for piece in pieces}
    if len(factors) > 1:
        raise DataError(
            f"results without the {pieces[0].padding} rows of padding",
            f"{sorted(factors)} rows for each input row, depending on the rank",
            "return the same number of rows on every rank",
        )
    return take(whole, range((num_rows(whole) or 0) - pieces[0].padding * factors.pop()))


def listed(pieces: Sequence[Piece]) -> list[Any]:
    """Returns the workers' results for the shares of one call as a list."""
    return [piece.value for piece in pieces]


def join(parts: Sequence[Any]) -> object:
    """Concatenates values with rows. Raises DataError for values that cannot be joined."""
    first = parts[0]
    if all(part is None for part in parts):
        return None
    if any(num_rows(part) is None for part in parts) or len({_kind(part) for part in parts}) > 1:
        raise _rowless(next((part for part in parts if num_rows(part) is None), first))
    if isinstance(first, Mapping):
        return {name: _join_named(name, [part[name] for part in parts]) for name in _same_names(parts)}
    if isinstance(first, Batch):
        return replace(
            first,
            experiences=tuple(e for part in parts for e in part.experiences),
            columns={
                name: tuple(array for part in parts for array in part.columns[name])
                for name in _same_names([part.columns for part in parts])
            },
            metrics=first.metrics if all(part.metrics == first.metrics for part in parts) else _metrics(parts),
        )
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if _is_tensor(first):
        return sys.modules["torch"].cat(list(parts))
    if isinstance(first, list | tuple):
        return (list if isinstance(first, list) else tuple)(row for part in parts for row in part)
    return type(first).concat(list(parts))


def _join_named(name: object, values: Sequence[Any]) -> object:
    """Joins values with rows. A value without rows must be equal in every part."""
    if all(num_rows(value) is not None for value in values):
        return join(values)
    if all(num_rows(value) is None and value == values[0] for value in values):
        return values[0]
    raise DataError(
        f"the {name!r} of all ranks as one", f"{values}", "return rows, or use Dispatch.DP_COMPUTE_METRIC for numbers"
    )


def _metrics(parts: Iterable[Batch]) -> Mapping[str, float]:
    return aggregate(part.metrics for part in parts)


def _same_names(mappings: Sequence[Mapping[Any, Any]]) -> list[Any]:
    names = [list(mapping) for mapping in mappings]
    if any(set(each) != set(names[0]) for each in names):
        raise DataError("results of all ranks as one", f"their names differ: {names}", "return the same names")
    return names[0]


def _rowless(value: object) -> DataError:
    return DataError(
        "results of all ranks as one",
        f"a {type(value).__name__} has no rows",
        "return rows, or use Dispatch.DP_COMPUTE_METRIC to get one value per data rank",
    )


def _kind(value: object) -> str:
    return "mapping" if isinstance(value, Mapping) else type(value).__name__


def _is_joinable(value: object) -> TypeGuard[_Joinable]:
    return hasattr(type(value), "concat")


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    loaded = sys.modules.get("torch")  # no value is a tensor unless torch is imported
    return loaded is not None and isinstance(value, loaded.Tensor)
