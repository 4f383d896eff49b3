"""Tensors in files, read a range of rows at a time into memory of the caller.

A safetensors file is read, not mapped: pages of a mapped file count as memory of the process, and a rank that reads a
quarter of each tensor would hold that quarter twice. Files that torch.save wrote are unpickled as a whole: the first
rank opens them and sends each tensor to the others.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trivium.foundation.errors import DataError
from trivium.models.weights.stream import raw

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CHUNK = 16 * 2**20
"""Bytes that are read at once into a buffer, for a tensor of another type or on another device."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    """A type of torch, or the name in the file if `_TYPES` lacks it."""
    file: Path
    offset: int = 0
    """The place of its first byte in the file."""

    @property
    def row(self) -> int:
        """Elements of one row: one step along the first axis."""
        return math.prod(self.shape[1:])


class SavedTensors(Protocol):
    """Named tensors that can be read."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors by name."""
        ...

    def copy_rows(self, name: str, start: int, into: torch.Tensor) -> None:
        """Fills the contiguous tensor `into` with the rows of a tensor from `start` on, converted to the type and the
        device of `into`. Ranks that read together must all call it for the same tensors in the same order.

        Raises DataError if the file ends too early, or if only one of the types is a floating-point type.
        """
        ...


def layer_of(name: str) -> str:
    """The name of the layer that a tensor belongs to."""
    return name.rpartition(".")[0]


def weight_files(directory: Path, layers: Collection[str] | None = None) -> list[Path]:
    """The weight files of a Hugging Face directory. Raises DataError if one is missing.

    If an index names several files, `layers` selects those with tensors of these layers.
    """
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index, single = directory / f"{stem}.index.json", directory / stem
        if single.is_file():
            return [single]
        if index.is_file():
            file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            named = sorted(set(file_of.values()))
            missing = [name for name in named if not (directory / name).is_file()]
            if missing:
                raise DataError(
                    f"the weights of {directory}",
                    f"{index.name} names {missing[0]}, which is not there ({len(missing)} of {len(named)} files)",
                    "copy the directory again, in full",
                )
            chosen = {file for name, file in file_of.items() if layers is None or layer_of(name) in layers}
            return [directory / name for name in sorted(chosen)]
    raise DataError(
        f"the weights of {directory}",
        "no model.safetensors and no pytorch_model.bin, nor the index of either",
        "save the model there with save_pretrained",
    )


def open_tensors(paths: Sequence[Path], device: torch.device | None = None) -> SavedTensors:
    """The tensors of files of one kind. With a `device`, the ranks of the process group read together, and a tensor
    that one rank sends to the others passes through memory of this device."""
    if all(path.suffix == ".safetensors" for path in paths):
        return SafetensorsFiles(paths)
    return PickledFiles(paths, device)


def is_exact_in_bfloat16(directory: Path) -> bool:
    """Whether bfloat16 holds the weights of a Hugging Face directory exactly, by the first rows of each matrix. Raises
    DataError for files that cannot be read."""
    tensors = open_tensors(weight_files(directory))
    for name, entry in tensors.entries.items():
        if len(entry.shape) > 1 and isinstance(entry.dtype, torch.dtype) and entry.dtype.is_floating_point:
            some = torch.empty((min(entry.shape[0], 8), *entry.shape[1:]), dtype=entry.dtype)
            tensors.copy_rows(name, 0, some)
            if not torch.equal(some, some.to(torch.bfloat16).to(entry.dtype)):
                return False
    return True


class SafetensorsFiles:
    """The tensors of safetensors files. They stay open while this object exists: files that are removed meanwhile stay
    readable. Not thread-safe."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Reads the headers. Raises DataError for a damaged file."""
        opened = ExitStack()
        weakref.finalize(self, opened.close)
        # Without Python's buffer, bytes go from the file into the tensor's memory at once.
        self._files = {path: opened.enter_context(path.open("rb", buffering=0)) for path in paths}
        headers = [_header(path, file) for path, file in self._files.items()]
        self.entries: Mapping[str, Entry] = {name: entry for header in headers for name, entry in header.items()}

    def copy_rows(self, name: str, start: int, into: torch.Tensor) -> None:
        entry = self.entries[name]
        dtype = _checked_type(name, entry, into.dtype)
        flat = into.detach().view(-1)
        file = self._at(entry, start * entry.row * dtype.itemsize)
        if into.device.type == "cpu" and into.dtype == dtype:
            _read(file, entry, flat)
            return
        step = max(1, _CHUNK // dtype.itemsize)
        buffer = torch.empty(min(step, len(flat)), dtype=dtype)
        for first in range(0, len(flat), step):
            part = buffer[: len(flat) - first]
            _read(file, entry, part)
            flat[first : first + len(part)].copy_(part)

    def copy_bytes(self, name: str, into: torch.Tensor) -> None:
        """Fills a contiguous tensor on the CPU with the bytes of a tensor, whatever the type. Raises DataError if the
        file ends too early."""
        _read(self._at(self.entries[name]), self.entries[name], into.view(-1))

    def _at(self, entry: Entry, offset: int = 0) -> FileIO:
        file = self._files[entry.file]
        file.seek(entry.offset + offset)
        return file


def _read(file: FileIO, entry: Entry, into: torch.Tensor) -> None:
    """Fills a flat tensor with the next bytes of the file."""
    view = raw(into).numpy().data
    while len(view):
        count = file.readinto(view)
        if not count:
            raise _damaged(entry.file, f"it ends {len(view)} bytes too early")
        view = view[count:]  # an unbuffered read returns what the system gives, on Linux at most 2 GiB


class PickledFiles:
    """The tensors of files that torch.save wrote."""

    def __init__(self, paths: Sequence[Path], device: torch.device | None) -> None:
        self._paths, self._device = paths, device
        self._first = device is None or dist.get_rank() == 0
        headers: list[Any] = [None]  # only the first rank reads `_tensors`, which unpickles the files
        if self._first:
            headers = [{name: (tuple(t.shape), t.dtype, path) for name, (t, path) in self._tensors.items()}]
        if device is not None:
            dist.broadcast_object_list(headers, src=0)
        self.entries: Mapping[str, Entry] = {name: Entry(*entry) for name, entry in headers[0].items()}

    @cached_property
    def _tensors(self) -> dict[str, tuple[torch.Tensor, Path]]:
        from transformers.modeling_utils import load_state_dict

        return {name: (tensor, path) for path in self._paths for name, tensor in load_state_dict(path).items()}

    def copy_rows(self, name: str, start: int, into: torch.Tensor) -> None:
        entry = self.entries[name]
        dtype = _checked_type(name, entry, into.dtype)
        whole = self._tensors[name][0] if self._first else torch.empty(entry.shape, dtype=dtype, device=self._device)
        if self._device is not None:
            whole = whole.to(self._device).contiguous()
            dist.broadcast(whole, src=0)
        into.view(-1).copy_(whole.reshape(-1)[start * entry.row :][: into.numel()])


def _checked_type(name: str, entry: Entry, wanted: torch.dtype) -> torch.dtype:
    """The type that a tensor is saved in. Raises DataError as `SavedTensors.copy_rows`."""
    if isinstance(entry.dtype, torch.dtype) and entry.dtype.is_floating_point == wanted.is_floating_point:
        return entry.dtype
    raise DataError(
        f"{name} of {entry.file} as {wanted}",
        f"it is saved as {entry.dtype}",
        "save the model in float32, bfloat16 or float16; quantized files are not read",
    )


def _header(path: Path, file: FileIO) -> dict[str, Entry]:
    """The tensors of a safetensors file, from its beginning: the length of a JSON text, and that text."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= size - 8:
        raise _damaged(path, f"it declares a header of {length} bytes; the file has {size}")
    text = file.read(length)
    entries = dict[str, Entry]()
    try:
        for name, fields in json.loads(text).items():
            if name == "__metadata__":
                continue
            named, (first, last) = str(fields["dtype"]), fields["data_offsets"]
            dtype: torch.dtype | str = _TYPES.get(named, named)
            entry = entries[name] = Entry(tuple(fields["shape"]), dtype, path, 8 + length + first)
            if isinstance(dtype, torch.dtype) and math.prod(entry.shape) * dtype.itemsize != last - first:
                raise ValueError(f"{name} has {last - first} bytes")
            if 8 + length + last > size:
                raise ValueError(f"{name} lies beyond its end")
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"its header does not fit it: {type(error).__name__}: {error}") from error
    return entries


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"read {path}", reason, "copy the file again")
