"""Values that have rows: cut into shares of equal length, and put together again exactly.

Rows have a batch (its experiences), a list, a tuple, an array or tensor (its leading axis), a mapping of such values,
and anything with `__len__`, `select(rows)` and a class method `concat(parts)`. Everything else is one value for all.
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
    """One share of something, or what a worker made of it.

    Shares have equally many rows: at the end of the last ones, `padding` rows (of all shares together) repeat earlier
    ones.
    """

    value: Any
    rows: int
    """Of the share that went in."""
    padding: int = 0

    def made(self, value: object) -> Piece:
        """What a worker made of this share."""
        return Piece(value, self.rows, self.padding)

    def passed_on(self) -> Piece:
        """The same as a share of the next call. Raises DataError where it has no rows."""
        number = num_rows(self.value)
        if number is None:
            raise _rowless(self.value)
        return Piece(self.value, number, self.padding * self._factor(number))

    def _factor(self, number: int) -> int:
        """How many rows came of each."""
        if not self.padding:
            return 1
        factor, rest = divmod(number, self.rows)
        if rest:
            raise DataError(
                f"results without the {self.padding} rows of padding",
                f"{number} rows came of {self.rows}",
                "return as many rows for each that is given, or batches that the data ranks divide",
            )
        return factor


def num_rows(value: object) -> int | None:
    """How many rows a value has; None where it has none."""
    if isinstance(value, Mapping):
        return common_rows(value)
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return value.shape[0] if value.ndim else None
    return len(value) if isinstance(value, Batch | list | tuple) or _is_joinable(value) else None


def common_rows(values: Mapping[Any, Any]) -> int | None:
    """The number of rows, which all named values that have rows must agree on; else raises DataError."""
    counts = {name: rows for name, value in values.items() if (rows := num_rows(value)) is not None}
    if len(set(counts.values())) > 1:
        raise DataError(
            "values that are split alike",
            ", ".join(f"{name} has {rows} rows" for name, rows in counts.items()),
            "give all of them as many rows (lists and tuples have rows too: put what every rank is to have whole into "
            "an object without)",
        )
    return next(iter(counts.values()), None)


def take(value: object, rows: Sequence[int]) -> object:
    """These rows of a value, in this order; a value without rows whole."""
    if num_rows(value) is None:
        return value
    if isinstance(value, Mapping):
        return {name: take(each, rows) for name, each in value.items()}
    if isinstance(value, Batch):
        return replace(value.select(rows), metrics=value.metrics)
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(value[row] for row in rows)
    if isinstance(value, np.ndarray) or _is_tensor(value):
        # A view, where the rows lie together: it is copied on its way to the worker anyway.
        return value[rows.start : rows.stop] if isinstance(rows, range) and rows.step == 1 else value[list(rows)]
    return value.select(list(rows)) if _is_joinable(value) else value


def split(value: object, parts: int) -> list[Piece]:
    """Consecutive shares of equal length, padded with rows from the beginning. Raises DataError for unequal lengths."""
    return [share(value, part, parts) for part in range(parts)]


def share(value: object, part: int, parts: int) -> Piece:
    """One of the shares that `split` makes."""
    number = num_rows(value)
    if number is None:
        raise _rowless(value)
    length = -(-number // parts)
    first, last = part * length, (part + 1) * length
    rows = range(first, last) if last <= number else [row % number for row in range(first, last)]
    return Piece(take(value, rows), length, length * parts - number)


def gathered(pieces: Sequence[Piece]) -> object:
    """What workers made of the shares of one call, in order, without what they made of padding."""
    whole = join([piece.value for piece in pieces])
    if whole is None or not pieces[0].padding:
        return whole
    factors = {piece._factor(num_rows(piece.value) or 0) for piece in pieces}
    if len(factors) > 1:
        raise DataError(
            f"results without the {pieces[0].padding} rows of padding",
            f"{sorted(factors)} rows came of each, depending on the rank",
            "return as many rows on every rank",
        )
    return take(whole, range((num_rows(whole) or 0) - pieces[0].padding * factors.pop()))


def listed(pieces: Sequence[Piece]) -> list[Any]:
    """What workers made of the shares of one call, one by one."""
    return [piece.value for piece in pieces]


def join(parts: Sequence[Any]) -> object:
    """Values with rows, one after the other. Raises DataError for values that cannot be joined."""
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
    """Rows are joined; what has none must be the same in every part."""
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
        f"a {type(value).__name__} has no rows to put one after the other",
        "return rows, or use Dispatch.DP_COMPUTE_METRIC to get one value per data rank",
    )


def _kind(value: object) -> str:
    return "mapping" if isinstance(value, Mapping) else type(value).__name__


def _is_joinable(value: object) -> TypeGuard[_Joinable]:
    return hasattr(type(value), "concat")


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    loaded = sys.modules.get("torch")  # where nothing has imported it, nothing is a tensor
    return loaded is not None and isinstance(value, loaded.Tensor)
