"""Builds models without memory for their weights, and fills them from files.

A sharded model is built, wrapped and sharded while it is empty (on torch's `meta` device). Each rank then allocates its
part of one parameter after another, and reads it from the files. A single process does the same with whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import nn

from trivium.foundation.errors import DataError
from trivium.models.weights.saved_tensors import Entry, SavedTensors, open_tensors, weight_files

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


def built_empty(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Calls `build` without allocating memory for parameters and buffers. The model is in eval mode."""
    try:
        from transformers.initialization import meta_device_safe_creation_ops as safe_operations
    except ImportError:  # an older transformers
        safe_operations = nullcontext
    with torch.device("meta"), safe_operations():
        return build().eval()


def base_name(name: str) -> str | None:
    """The name of a tensor in the model without an adapter. Returns None for a tensor of the adapter."""
    return None if ".lora_A." in name or ".lora_B." in name else name.replace(".base_layer.", ".")


@torch.no_grad()
def fill(
    module: PreTrainedModel, directory: Path, device: torch.device, weights_on: torch.device | None = None
) -> None:
    """Allocates the parameters and buffers of an empty model and reads their values from `directory`; of a sharded
    parameter, this rank's part. Parameters are on `weights_on` (default: `device`). All ranks that share the model call
    it together. An adapter stays empty.

    Raises DataError if the files lack a tensor, or have one of another shape or type.
    """
    shared = any(is_sharded(parameter) for parameter in module.parameters())
    source = open_tensors(weight_files(directory), device if shared else None)
    slots = _slots(module)
    for sources, converter in _plan(module, source.entries, slots):
        if converter is None:
            ((name, key),) = sources
            _read(slots[name], source, key, directory, device if slots[name].is_buffer else weights_on or device)
            continue
        for name, tensor in _converted(module, source, sources, converter, slots).items():
            if name in slots:
                _check_shape(slots[name], tensor.shape, f"the tensor made of {sources[0][1]} and others", directory)
                _place(slots[name], weights_on or device, rows_of(tensor))
    missing = sorted({slot.names[0] for slot in slots.values() if slot.tensor.is_meta and not slot.is_buffer})
    if missing:
        raise DataError(
            f"the weights of {type(module).__name__} in {directory}",
            f"no {missing[0]}" + (f" ({len(missing)} tensors are missing)" if len(missing) > 1 else ""),
            "save the model there in full (save_pretrained), or correct its config.json",
        )
    _compute_buffers(module, device)


def names_in_files(module: PreTrainedModel, entries: Mapping[str, Entry]) -> dict[str, str]:
    """The names in files of the tensors of an empty model, by their names in the model, without those that are made of
    other tensors."""
    plan = _plan(module, entries, _slots(module))
    return {name: key for sources, converter in plan if converter is None for name, key in sources}


# --------------------------------------------------------------------------- the empty tensors


@dataclass(slots=True)
class _Slot:
    """A parameter or a buffer, and the modules that hold it. Tied parameters are one slot."""

    tensor: torch.Tensor
    is_buffer: bool
    names: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    key: str = ""
    """The name in the files that it was read from."""


def _slots(module: nn.Module) -> dict[str, _Slot]:
    """The empty parameters and persistent buffers, by name."""
    slots, by_tensor = dict[str, _Slot](), dict[int, _Slot]()
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for attribute, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            name = base_name(f"{prefix}.{attribute}".removeprefix("."))
            if tensor is None or name is None or not tensor.is_meta or attribute in owner._non_persistent_buffers_set:
                continue
            slot = by_tensor.setdefault(id(tensor), _Slot(tensor, attribute in owner._buffers))
            slot.names.append(name)
            slot.owners.append((owner, attribute))
            slots[name] = slot
    return slots


CopyRows = Callable[[int, torch.Tensor], object]
"""Fills a contiguous tensor with the rows of another one, from the given row on."""
_Sources = list[tuple[str, str]]
"""(name in the model, name in the files) of each tensor."""


def _plan(
    module: PreTrainedModel, entries: Mapping[str, Entry], slots: Mapping[str, _Slot]
) -> Iterator[tuple[_Sources, WeightConverter | None]]:
    """Which tensors are read from which, by transformers' table of the names and shapes in files.

    The converters that were used are kept with the model, which is saved in the form of its files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping: list[Any] = get_model_conversion_mapping(module)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, names = module.base_model_prefix, cast(dict[str, Any], slots)
    plain, converted = list[_Sources](), dict[str, tuple[_Sources, WeightConverter]]()
    # Stacked experts get the order in which their tensors are added: 2 comes before 10.
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in slots and key in slots:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        if name not in slots:
            continue
        if pattern is None:
            plain.append([(name, key)])
            continue
        # A converter collects the tensors of one target, so each target has a copy.
        sources, converter = converted.setdefault(name, ([], deepcopy(by_pattern[pattern])))
        sources.append((name, key))
        converter.add_tensor(name, key, pattern, cast(Any, key))
    used: Any = [rule for rule in mapping if rule.was_used()]
    module._weight_conversions = used
    yield from ((sources, None) for sources in plain)
    yield from converted.values()


# --------------------------------------------------------------------------- reading


def _read(slot: _Slot, source: SavedTensors, key: str, directory: Path, device: torch.device) -> None:
    """Fills a slot from one tensor of the files."""
    _check_shape(slot, source.entries[key].shape, key, directory)
    if not slot.key:
        slot.key = key
        _place(slot, device, partial(source.copy_rows, key))
        return
    again = read_part(slot.tensor, partial(source.copy_rows, key), torch.empty_like(local_part(slot.tensor)))
    if not torch.equal(again, local_part(slot.tensor)):
        raise DataError(
            f"{slot.key} and {key} of {directory}, which the model's config ties to each other",
            "they have different values",
            "set tie_word_embeddings to false in its config.json",
        )


def _converted(
    module: PreTrainedModel,
    source: SavedTensors,
    sources: _Sources,
    converter: WeightConverter,
    slots: Mapping[str, _Slot],
) -> dict[str, torch.Tensor]:
    """The whole tensors that transformers converts several tensors of the files to."""
    name = sources[0][0]
    for keys in cast(dict[str, list[Any]], converter.collected_tensors).values():
        for place, key in enumerate(keys):
            keys[place] = whole = torch.empty(source.entries[key].shape, dtype=slots[name].tensor.dtype)
            source.copy_rows(key, 0, whole)
    tensors: Mapping[str, Any] = converter.convert(name, model=module, config=module.config)
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in tensors.items()}


def _place(slot: _Slot, device: torch.device, copy_rows: CopyRows) -> None:
    """Allocates a slot's tensor, or this rank's part of it, and fills it by `copy_rows`."""
    slot.tensor = allocated(slot.tensor, device, copy_rows, is_buffer=slot.is_buffer)
    for owner, attribute in slot.owners:
        tensors: dict[str, Any] = owner._buffers if slot.is_buffer else owner._parameters  # pyright: ignore[reportAssignmentType]
        tensors[attribute] = slot.tensor


def allocated(empty: torch.Tensor, device: torch.device, copy_rows: CopyRows, *, is_buffer: bool = False) -> Any:
    """A parameter (or buffer) like an empty one, sharded in the same way, with values from `copy_rows`."""
    part = read_part(empty, copy_rows, torch.empty_like(local_part(empty), device=device))
    value: Any = type(empty)(part, empty._spec, requires_grad=False) if is_sharded(empty) else part
    if not is_buffer:
        value = nn.Parameter(value, requires_grad=empty.requires_grad)
    value._is_hf_initialized = True  # else transformers initializes it
    return value


def read_like(source: SavedTensors, key: str, like: torch.Tensor, *, whole: bool = False) -> torch.Tensor:
    """Reads a tensor in its saved type to the device of `like`; sharded as `like` is, unless it is read `whole`."""
    entry = source.entries[key]
    assert isinstance(entry.dtype, torch.dtype), f"{key} of {entry.file} is {entry.dtype}"
    local, copy_rows = local_part(like.detach()), partial(source.copy_rows, key)
    if whole or not is_sharded(like):
        return read_part(None, copy_rows, torch.empty(entry.shape, dtype=entry.dtype, device=local.device))
    part = read_part(like, copy_rows, torch.empty(local.shape, dtype=entry.dtype, device=local.device))
    return type(like)(part, like._spec, requires_grad=False)  # pyright: ignore[reportArgumentType]


def _check_shape(slot: _Slot, shape: tuple[int, ...], key: str, directory: Path) -> None:
    if tuple(shape) != tuple(slot.tensor.shape):
        raise DataError(
            f"{slot.names[0]} {list(slot.tensor.shape)} in {directory}",
            f"{key} has the shape {list(shape)}",
            "use the config.json that belongs to these weights",
        )


def _compute_buffers(module: PreTrainedModel, device: torch.device) -> None:
    """Lets the model compute every buffer that no file has, for example the frequencies of rotary positions."""
    from transformers import PreTrainedModel

    models = {name: part for name, part in module.named_modules() if isinstance(part, PreTrainedModel)}
    for name, owner in module.named_modules():
        empty = [attribute for attribute, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        if not empty:
            continue
        for attribute in empty:  # `_init_weights` fills buffers in place, so they need memory first
            owner._buffers[attribute] = torch.full_like(cast(torch.Tensor, owner._buffers[attribute]), 0, device=device)
        above = max((path for path in models if not path or f"{name}.".startswith(f"{path}.")), key=len)
        models[above]._init_weights(owner)
        models[above]._init_weights(models[above])  # Falcon-H1 computes the buffers of its layers there


# --------------------------------------------------------------------------- sharded tensors


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds a part of the tensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_of(whole: torch.Tensor) -> CopyRows:
    """Fills from a tensor in memory."""
    return lambda start, into: into.copy_(whole[start:][: len(into)])


def read_part(tensor: torch.Tensor | None, copy_rows: CopyRows, into: torch.Tensor) -> torch.Tensor:
    """Fills `into`, which is contiguous, with this rank's part of a sharded tensor; with all rows of another one."""
    if tensor is None or not is_sharded(tensor):
        copy_rows(0, into)
        return into
    by_axis = [_own_indices(tensor, axis) for axis in range(tensor.dim())]
    first = int(by_axis[0][0]) if len(by_axis[0]) else 0
    rows = int(by_axis[0][-1]) + 1 - first if len(by_axis[0]) else 0
    # Whole rows that follow one another, as FSDP shards tensors, are read into their place without a buffer.
    if rows == len(by_axis[0]) and [*map(len, by_axis[1:])] == [*tensor.shape[1:]]:
        copy_rows(first, into)
        return into
    buffer = into.new_empty(rows, *tensor.shape[1:])
    copy_rows(first, buffer)
    for axis, indices in enumerate([by_axis[0] - first, *by_axis[1:]]):
        if len(indices) < buffer.shape[axis]:
            buffer = buffer.index_select(axis, indices.to(buffer.device))
    return into.copy_(buffer)


def _own_indices(tensor: DTensor, axis: int) -> torch.Tensor:
    """The indices of this rank's part on one axis of a sharded tensor, in ascending order."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def on_this_axis(placement: Placement) -> Placement:
        if isinstance(placement, _StridedShard) and placement.dim == axis:
            return _StridedShard(0, split_factor=placement.split_factor)
        return Shard(0) if placement.is_shard(axis) else Replicate()

    return _own_part(tensor.shape[axis], tensor.device_mesh, tuple(map(on_this_axis, tensor.placements)))


@cache
def _own_part(size: int, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's part of the numbers below `size`."""
    from torch.distributed.tensor import distribute_tensor

    # torch splits the numbers as it splits a tensor: uneven and strided parts follow rules of its own.
    numbers = torch.arange(size, device=mesh.device_type)
    return distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local().cpu()
