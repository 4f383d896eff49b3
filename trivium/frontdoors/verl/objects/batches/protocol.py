"""verl's `DataProto`: rows as tensors, as columns of objects, and information about all of them.

`data.batch["responses"]` is a tensor (B, ...), `data.non_tensor_batch["data_source"]` an array (B,) of objects or
numbers, `data.meta_info` a dict. Methods that return a DataProto share tensors and `meta_info` with the original.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, Union, cast, overload

import numpy as np
import numpy.typing as npt

from trivium.foundation.errors import DataError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Rows = Union[slice, Sequence[int], Sequence[bool], npt.NDArray[Any], "Tensor"]
Columns = dict[str, npt.NDArray[Any]]


class RowsError(DataError, AssertionError):
    """Tensors, columns or information that do not fit together. verl raises AssertionError for them."""


class Tensors(dict[str, "Tensor"]):
    """Tensors by name that share their leading dimensions, and may be taken row by row.

    Raises RowsError for a tensor with other leading dimensions.
    """

    def __init__(self, tensors: Mapping[str, Tensor], batch_size: Sequence[int]) -> None:
        self.batch_size = torch.Size(batch_size)
        super().__init__()
        for name, tensor in tensors.items():
            self[name] = tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        if tensor.shape[: len(self.batch_size)] != self.batch_size:
            raise RowsError(
                f"a tensor {name!r} with the batch size {tuple(self.batch_size)}",
                f"a tensor {tuple(tensor.shape)}",
                "give one entry per row",
            )
        super().__setitem__(name, tensor)

    @overload
    def __getitem__(self, name: str, /) -> Tensor: ...

    @overload
    def __getitem__(self, name: Rows | int, /) -> Tensors: ...

    def __getitem__(self, name: str | Rows | int, /) -> Tensor | Tensors:
        """Returns a tensor by its name, or these rows of every tensor."""
        if isinstance(name, str):
            return super().__getitem__(name)
        if isinstance(name, int):
            row = range(self.batch_size[0])[name]
            return Tensors({key: tensor[row] for key, tensor in self.items()}, self.batch_size[1:])
        chosen = np.arange(self.batch_size[0])[_selection(name)]
        index = torch.from_numpy(chosen)
        shape = (len(chosen), *self.batch_size[1:])
        return Tensors({key: tensor[index.to(tensor.device)] for key, tensor in self.items()}, shape)

    # pickle builds a subclass of dict without arguments, and fills it item by item.
    def __reduce__(self) -> tuple[Any, ...]:
        return Tensors, (dict(self), tuple(self.batch_size))


_NONE = cast(Tensors, None)


@dataclass(slots=True)
class DataProtoItem:
    """One row: tensors without the batch dimension, and one object per column."""

    batch: Tensors
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass
class DataProto:
    """B rows. Raises RowsError unless all tensors and columns have B entries."""

    batch: Tensors = _NONE
    """The tensors. A mapping such as a TensorDict is copied; None stands for no tensors."""
    non_tensor_batch: Columns = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors: Any = self.batch
        self.non_tensor_batch = self.non_tensor_batch or {}
        if tensors is None:
            tensors = Tensors({}, [next((len(column) for column in self.non_tensor_batch.values()), 0)])
        elif not isinstance(tensors, Tensors):
            rows = getattr(tensors, "batch_size", None)
            if rows is None:
                rows = [next((len(tensor) for tensor in tensors.values()), 0)]
            tensors = Tensors(dict(tensors.items()), rows)
        self.batch = tensors
        if len(tensors.batch_size) != 1:
            raise RowsError("rows along one dimension", f"the batch size {tuple(tensors.batch_size)}", "flatten them")
        for name, column in self.non_tensor_batch.items():
            if not isinstance(cast(object, column), np.ndarray) or len(column) != len(self):
                cause = f"a {type(column).__name__} of {len(column)}"
                raise RowsError(f"the column {name!r} as an array of {len(self)} entries", cause, "use from_dict")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | npt.NDArray[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Builds rows of tensors and of columns, which become arrays of objects unless they are arrays.

        Raises RowsError unless all have the same number of rows.
        """
        tensors, columns = tensors or {}, {name: objects(column) for name, column in (non_tensors or {}).items()}
        rows = {name: len(column) for name, column in [*tensors.items(), *columns.items()]}
        if len(set(rows.values())) > 1:
            raise RowsError("tensors and columns with one entry per row", str(rows), "make them equally long")
        return cls(Tensors(tensors, [next(iter(rows.values()), 0)]), columns, dict(meta_info or {}))

    def __len__(self) -> int:
        return self.batch.batch_size[0]

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    @overload
    def __getitem__(self, rows: int | np.integer[Any]) -> DataProtoItem: ...

    @overload
    def __getitem__(self, rows: Rows) -> Self: ...

    def __getitem__(self, rows: int | np.integer[Any] | Rows) -> DataProtoItem | Self:
        """Returns a `DataProtoItem` for an integer, rows for a slice, integers or a mask."""
        if isinstance(rows, int | np.integer):
            row = range(len(self))[int(rows)]  # IndexError beyond the last
            columns = {name: column[row] for name, column in self.non_tensor_batch.items()}
            return DataProtoItem(self.batch[row], columns, self.meta_info)
        if not isinstance(rows, slice | list | tuple | range | np.ndarray | torch.Tensor):
            raise TypeError(f"rows are chosen by integers, slices, lists, arrays and tensors, not {type(rows)}")
        chosen = np.arange(len(self))[_selection(rows)]
        columns = {name: column[chosen] for name, column in self.non_tensor_batch.items()}
        return type(self)(self.batch[chosen], columns, self.meta_info)

    def reorder(self, indices: Rows) -> None:
        """Reorders the rows in place."""
        ordered = self[indices]
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    @property
    def response_lengths(self) -> Tensor:
        """Number of tokens of each response without padding (B,)."""
        return self.batch["attention_mask"][:, self.batch["prompts"].shape[-1] :].sum(-1)


def as_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Converts rows to columns: a value per row for each name, None if a row lacks the name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def objects(column: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns an object array with one entry per row."""
    if isinstance(column, np.ndarray):
        return column
    # `np.array` would make lists of equal length a table of two dimensions.
    result = np.empty(len(column), dtype=object)
    for row, value in enumerate(column):
        result[row] = value
    return result


def _selection(rows: Rows) -> slice | npt.NDArray[Any]:
    """Returns rows as an index of an array. An empty selection is one of integers: NumPy gives it no integer type."""
    if isinstance(rows, slice):
        return rows
    chosen = np.asarray(rows)
    return chosen if chosen.size else chosen.astype(np.int64)
