"""verl's `DataProto`: rows as tensors, as columns of objects, and information about all of them.

`data.batch["responses"]` is a tensor (B, ...), `data.non_tensor_batch["data_source"]` an array (B,) of objects or
numbers, `data.meta_info` a dict. Methods that return a DataProto share tensors and `meta_info` with the original.

Legend: B rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, Union, cast, overload

import numpy as np
import numpy.typing as npt

from trivium.errors import DataError
from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Rows = Union[slice, Sequence[int], Sequence[bool], npt.NDArray[Any], "Tensor"]
Columns = dict[str, npt.NDArray[Any]]

AUTO_PADDING = "_verl_auto_padding"
"""The key of `meta_info` that allows `chunk` to return chunks of different lengths."""


class RowsError(DataError, AssertionError):
    """Tensors, columns or information that do not fit together. verl raises AssertionError for them."""


class Tensors(dict[str, "Tensor"]):
    """Tensors by name that share their leading dimensions, with the methods of a TensorDict that verl's users call.

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

    def __reduce__(self) -> tuple[Any, ...]:
        return Tensors, (dict(self), tuple(self.batch_size))

    @property
    def device(self) -> torch.device | None:
        """The device of all tensors; None if they are on different devices."""
        devices = {tensor.device for tensor in self.values()}
        return devices.pop() if len(devices) == 1 else None

    def to(self, *args: Any, **kwargs: Any) -> Tensors:
        """Returns the tensors after `Tensor.to`."""
        return Tensors({name: tensor.to(*args, **kwargs) for name, tensor in self.items()}, self.batch_size)

    def cpu(self) -> Tensors:
        return self.to("cpu")

    def select(self, *names: str) -> Tensors:
        """Returns the tensors of these names."""
        return Tensors({name: self[name] for name in names}, self.batch_size)

    def exclude(self, *names: str) -> Tensors:
        """Returns the tensors of the other names."""
        return self.select(*(name for name in self if name not in names))

    def clone(self) -> Tensors:
        return Tensors({name: tensor.clone() for name, tensor in self.items()}, self.batch_size)

    def contiguous(self) -> Tensors:
        return Tensors({name: tensor.contiguous() for name, tensor in self.items()}, self.batch_size)

    def rename_key_(self, old: str | Sequence[str], new: str | Sequence[str]) -> Tensors:
        """Renames tensors in place."""
        names = dict(zip(_names(old), _names(new), strict=True))
        renamed = {names.get(name, name): tensor for name, tensor in self.items()}
        self.clear()
        self.update(renamed)
        return self


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
        given: Any = self.batch
        self.non_tensor_batch = self.non_tensor_batch or {}
        if given is None:
            given = Tensors({}, [next((len(column) for column in self.non_tensor_batch.values()), 0)])
        elif not isinstance(given, Tensors):
            rows = getattr(given, "batch_size", None)
            if rows is None:
                rows = [next((len(tensor) for tensor in given.values()), 0)]
            given = Tensors(dict(given.items()), rows)
        self.batch = given
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | npt.NDArray[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Builds rows of tensors and of columns, which become arrays of objects unless they are arrays.

        Raises RowsError unless all have the same number of rows, and for `num_batch_dims` other than 1.
        """
        if num_batch_dims != 1:
            raise RowsError("rows along one dimension", f"num_batch_dims {num_batch_dims}", "leave it at 1")
        tensors, columns = tensors or {}, {name: objects(column) for name, column in (non_tensors or {}).items()}
        rows = {name: len(column) for name, column in [*tensors.items(), *columns.items()]}
        if len(set(rows.values())) > 1:
            raise RowsError("tensors and columns with one entry per row", str(rows), "make them equally long")
        information = {**(meta_info or {}), **({AUTO_PADDING: True} if auto_padding else {})}
        return cls(Tensors(tensors, [next(iter(rows.values()), 0)]), columns, information)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | npt.NDArray[Any]],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Builds rows of the tensors and arrays that `collate_fn` returns. Raises DataError for other values."""
        other = {
            name: type(value).__name__
            for name, value in data.items()
            if not isinstance(value, (torch.Tensor, np.ndarray))
        }
        if other:
            raise DataError("tensors and NumPy arrays by name", f"{other}", "convert these to arrays of objects")
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        columns = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, columns, meta_info, auto_padding=auto_padding)

    def check_consistency(self) -> None:
        """Raises RowsError unless tensors have one batch dimension, and every column is an array with B entries."""
        if len(self.batch.batch_size) != 1:
            raise RowsError("rows along one dimension", f"the batch size {tuple(self.batch.batch_size)}", "fold them")
        for name, column in self.non_tensor_batch.items():
            if not isinstance(cast(object, column), np.ndarray) or len(column) != len(self):
                found = f"a {type(column).__name__} of {len(column)}"
                raise RowsError(f"the column {name!r} as an array of {len(self)} entries", found, "use from_dict")

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

    # ------------------------------------------------------------------ rows

    def select_idxs(self, idxs: Rows) -> Self:
        """Returns the rows of these indices, or of a mask."""
        return self[idxs]

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Returns the rows of `start:end:step`."""
        return self[slice(start, end, step)]

    def reorder(self, indices: Rows) -> None:
        """Reorders the rows in place."""
        ordered = self[indices]
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Returns every row `repeat_times` times: `a a b b` with `interleave`, else `a b a b`."""
        rows = np.arange(len(self))
        return self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]

    def sample_level_repeat(self, repeat_times: Sequence[int] | npt.NDArray[Any] | Tensor) -> Self:
        """Returns each row as many times as `repeat_times` (B,) says."""
        return self[np.repeat(np.arange(len(self)), np.asarray(repeat_times))]

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Returns `n_split` rows for each row: parts, along the second dimension, of the tensors and columns in
        `split_keys`, and copies of the others."""
        keys, rows, repeated = split_keys or (), len(self) * n_split, self.repeat(n_split)
        columns = {name: column for name, column in self.non_tensor_batch.items() if name in keys}
        nested = {name: np.array(column.tolist(), dtype=object) for name, column in columns.items()}
        split = type(self)(self.batch.select(*(name for name in self.batch if name in keys)), nested, self.meta_info)
        split = _reshaped(split, lambda shape: (rows, shape[1] // n_split, *shape[2:]), rows)
        tensors, columns = {**repeated.batch, **split.batch}, {**repeated.non_tensor_batch, **split.non_tensor_batch}
        return type(self)(Tensors(tensors, [rows]), columns, self.meta_info)

    def chunk(self, chunks: int) -> list[Self]:
        """Returns this number of consecutive parts of equal length.

        Raises RowsError if the rows cannot be divided equally, unless `auto_padding` was set: the last chunks are then
        shorter.
        """
        if len(self) % chunks and not self.is_padding_enabled():
            raise RowsError(f"{chunks} chunks of equal length", f"{len(self)} rows", "pad_dataproto_to_divisor first")
        length = max(1, -(-len(self) // chunks))
        return [self[start * length : (start + 1) * length] for start in range(chunks)]

    def split(self, split_size: int) -> list[Self]:
        """Returns consecutive parts of `split_size` rows. The last one may be shorter."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> Any:
        """Returns the rows of all parts in order. `meta_info` is merged; the metrics of all parts, `{name: value}` or a
        list of such mappings, become `{name: [values]}`.

        Raises RowsError for different names, and for different values under one key of `meta_info`.
        """
        first = data[0]
        for part in data:
            if part.batch.keys() != first.batch.keys() or part.non_tensor_batch.keys() != first.non_tensor_batch.keys():
                found = f"{[*first.batch, *first.non_tensor_batch]} and {[*part.batch, *part.non_tensor_batch]}"
                raise RowsError("parts with the same tensors and columns", found, "select the common ones")
        rows = sum(len(part) for part in data)
        tensors = Tensors({name: torch.cat([part.batch[name] for part in data]) for name in first.batch}, [rows])
        columns = {n: np.concatenate([part.non_tensor_batch[n] for part in data]) for n in first.non_tensor_batch}
        return type(first)(tensors, columns, _merged_information([part.meta_info for part in data]))

    def padding(self, padding_size: int, padding_candidate: Literal["first", "last", ""] = "") -> None:
        """Appends `padding_size` copies of the first row, or of the last one, in place."""
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self[[*range(len(self)), *[row] * padding_size]]
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def is_padding_enabled(self) -> bool:
        """Whether the rows may be cut into chunks of different lengths."""
        return bool(self.meta_info.get(AUTO_PADDING, False))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Yields mini-batches of every epoch, as a torch DataLoader with `dataloader_kwargs` cuts them (`shuffle=True`
        shuffles with `seed`). Raises RowsError unless `mini_batch_size` divides the rows."""
        if len(self) % mini_batch_size:
            raise RowsError(f"mini-batches of {mini_batch_size}", f"{len(self)} rows", "choose a divisor")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"batch_size": mini_batch_size, "generator": generator, **(dataloader_kwargs or {})}
        from torch.utils.data import DataLoader

        loader: Any = DataLoader(cast(Any, range(len(self))), collate_fn=self.select_idxs, **options)
        return (part for _ in range(epochs) for part in loader)

    @property
    def response_lengths(self) -> Tensor:
        """Number of tokens of each response without padding (B,)."""
        return self.batch["attention_mask"][:, self.batch["prompts"].shape[-1] :].sum(-1)

    # ------------------------------------------------------------------ columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Returns the rows with these tensors, columns and keys of `meta_info` (None: all). `deepcopy` copies columns
        and `meta_info`."""
        tensors = self.batch if batch_keys is None else self.batch.select(*batch_keys)
        columns, information = self.non_tensor_batch, self.meta_info
        if non_tensor_batch_keys is not None:
            columns = {name: column for name, column in columns.items() if name in non_tensor_batch_keys}
        if meta_info_keys is not None:
            information = {key: value for key, value in information.items() if key in meta_info_keys}
        if deepcopy:
            columns, information = copy.deepcopy(columns), copy.deepcopy(information)
        return type(self)(tensors, columns, information)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Removes tensors, columns and keys of `meta_info`, and returns them. Raises RowsError for a missing one."""
        given: list[tuple[dict[str, Any], Sequence[str]]] = [
            (self.batch, batch_keys or ()),
            (self.non_tensor_batch, non_tensor_batch_keys or ()),
            (self.meta_info, meta_info_keys or ()),
        ]
        missing = [key for values, keys in given for key in keys if key not in values]
        if missing:
            names = f"there are {', '.join([*self.batch, *self.non_tensor_batch, *self.meta_info])}"
            raise RowsError(f"pop {', '.join(missing)}", names, "correct the names")
        tensors, columns, information = ({key: values.pop(key) for key in keys} for values, keys in given)
        return type(self)(Tensors(tensors, [len(self)]), columns, information)

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Renames tensors in place, and returns the rows."""
        old, new = _names(old_keys), _names(new_keys)
        if len(old) != len(new):
            raise DataError("as many new names as old ones", f"{old} and {new}", "give one for each")
        self.batch.rename_key_(old, new)
        return self

    def union(self, other: DataProto) -> Self:
        """Adds the tensors, columns and information of the same rows in place, and returns the rows.

        Raises RowsError for another number of rows, and for different values under one name.
        """
        self.batch = union_tensor_dict(self.batch.select(*self.batch), other.batch)
        self.non_tensor_batch = _united(self.non_tensor_batch, other.non_tensor_batch, "tensor_dict")
        self.meta_info = _united(self.meta_info, other.meta_info, "meta_info")
        return self

    def to(self, device: str | torch.device) -> Self:
        """Moves the tensors to a device, and returns the rows."""
        self.batch = self.batch.to(device)
        return self


# --------------------------------------------------------------------------- functions of verl's module


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[Any, int]:
    """Returns (rows whose number `size_divisor` divides, how many were added). Rows are repeated from the first on."""
    if not len(data):
        return data, 0
    added = -len(data) % size_divisor
    return (data[[*range(len(data)), *(row % len(data) for row in range(added))]] if added else data), added


def unpad_dataproto(data: DataProto, pad_size: int) -> Any:
    """Returns the rows without the last `pad_size`."""
    return data[:-pad_size] if pad_size else data


def union_tensor_dict(tensor_dict1: Any, tensor_dict2: Any) -> Any:
    """Adds the tensors of the second to the first, and returns it. Both have a `batch_size`. Raises RowsError for
    another batch size, and for different values under one name."""
    if len(tensor_dict1) and len(tensor_dict2) and tensor_dict1.batch_size != tensor_dict2.batch_size:
        found = f"batch sizes {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise RowsError("tensors of the same rows", found, "union rows of one batch")
    united = _united(tensor_dict1, tensor_dict2, "tensor_dict")
    if not len(tensor_dict1):
        tensor_dict1.batch_size = tensor_dict2.batch_size
    for name, tensor in united.items():
        tensor_dict1[name] = tensor
    return tensor_dict1


def union_numpy_dict(tensor_dict1: Columns, tensor_dict2: Columns) -> Columns:
    """Adds the columns of the second to the first, and returns it. Raises RowsError for different values under one
    name."""
    tensor_dict1.update(_united(tensor_dict1, tensor_dict2, "tensor_dict"))
    return tensor_dict1


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Returns `new_batch_size` rows, each with the entries of equally many consecutive rows: (B, ...) becomes
    (new_batch_size, B / new_batch_size, ...)."""
    if len(data) % new_batch_size:
        raise RowsError(f"{new_batch_size} rows of equally many", f"{len(data)} rows", "choose a divisor")
    return _reshaped(data, lambda shape: (new_batch_size, -1, *shape[1:]), new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Returns a row for each entry of the first `batch_dims` dimensions: the inverse of `fold_batch_dim`."""
    shapes = [value.shape[:batch_dims] for value in (*data.batch.values(), *data.non_tensor_batch.values())]
    rows = int(np.prod(shapes[0])) if shapes else len(data)
    return _reshaped(data, lambda shape: (rows, *shape[batch_dims:]), rows)


def objects(column: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns an object array with one entry per row."""
    if isinstance(column, np.ndarray):
        return column
    result = np.empty(len(column), dtype=object)
    for row, value in enumerate(column):
        result[row] = value
    return result


def _reshaped(data: DataProto, shape: Any, rows: int) -> DataProto:
    tensors = {name: tensor.reshape(shape(tensor.shape)) for name, tensor in data.batch.items()}
    columns = {name: column.reshape(shape(column.shape)) for name, column in data.non_tensor_batch.items()}
    return type(data)(Tensors(tensors, [rows]), columns, data.meta_info)


def _selection(rows: Rows) -> slice | npt.NDArray[Any]:
    """Returns rows as an index of an array. An empty selection is one of integers: NumPy gives it no integer type."""
    if isinstance(rows, slice):
        return rows
    chosen = np.asarray(rows)
    return chosen if chosen.size else chosen.astype(np.int64)


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _united(one: Mapping[str, Any], two: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns the entries of both mappings. Raises RowsError for different values under one name."""
    for name in set(one.keys()) & set(two.keys()):  # iterating over a TensorDict yields its rows
        if not equal(one[name], two[name]):
            raise RowsError(
                f"{name!r} in both parts of a union with one value",
                f"`{name}` in {what}1 and {what}2 are not the same object, and their values differ",
                "rename one of the two, or leave it out (select, pop)",
            )
    return {**dict(one.items()), **dict(two.items())}


def _merged_information(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the `meta_info` of several parts."""
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            if key != "metrics":
                if key in merged and not equal(merged[key], value):
                    found = f"Conflicting values for meta_info key '{key}': {merged[key]!r:.60} and {value!r:.60}"
                    raise RowsError("parts of one batch with the same information", found, "give every part the same")
                merged[key] = value
                continue
            for row in value if isinstance(value, list) else [] if value is None else [value]:
                for name, number in row.items():
                    metrics.setdefault(name, []).append(number)
    return {**merged, "metrics": metrics} if metrics else merged


def equal(one: Any, two: Any, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two values are equal: tensors and arrays in shape, dtype and entries, mappings and sequences member by
    member. NaN equals NaN. Values that contain themselves are equal if they do so alike."""
    if one is two or (id(one), id(two)) in within:
        return True
    if type(one) is not type(two):
        return False
    within |= {(id(one), id(two))}
    if isinstance(one, torch.Tensor):
        same_kind = one.shape == two.shape and one.dtype == two.dtype and one.device == two.device
        return same_kind and bool(torch.allclose(one, two, 0.0, 0.0, equal_nan=True))
    if isinstance(one, np.ndarray):
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        if one.dtype != object:
            return bool(np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"))
        return all(equal(a, b, within) for a, b in zip(one.flat, two.flat, strict=True))
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(equal(one[key], two[key], within) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(equal(a, b, within) for a, b in zip(one, two, strict=True))
    if isinstance(one, float):
        return one == two or (one != one and two != two)
    return bool(one == two)
