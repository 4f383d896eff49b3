"""Hints about an unknown key: the nearest key of the section, or the key for another trainer's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from trivium.config.merging import is_mapping
from trivium.foundation.registry import suggest

_OTHER_TRAINERS = "trivium.keys_of_other_trainers"
"""The entry points by which front doors declare the config keys of their originals."""
_SHOWN = 3
"""Number of another trainer's keys that one hint explains."""


@cache
def keys_of_other_trainers() -> Mapping[str, str]:
    """Common keys of other trainers' configs (their last part, or last two) -> the key here. Each front door declares
    those of its original (pyproject.toml)."""
    keys: dict[str, str] = {}
    for declared in entry_points(group=_OTHER_TRAINERS):
        keys |= declared.load()
    return keys


def hint(where: str, value: object, valid_keys: Mapping[str, Any]) -> str:
    """What to write instead of the unknown key at `where` (dotted), which holds `value`."""
    foreign = list(_foreign(where, value))[:_SHOWN]
    if foreign:
        return "; ".join(f"{theirs} is {ours} here" for theirs, ours in foreign)
    return (
        suggest(where.rpartition(".")[2], valid_keys)
        if valid_keys
        else "leave the key out: Trivium has no such setting"
    )


def _foreign(where: str, value: object) -> Iterator[tuple[str, str]]:
    """(another trainer's key, ours) for the key, or for the keys inside its value."""
    parts, keys = where.split("."), keys_of_other_trainers()
    for name in (".".join(parts[-2:]), parts[-1]):
        if name in keys and not (is_mapping(value) and any(True for _ in _inside(where, value))):
            yield name, keys[name]
            return
    if is_mapping(value):
        yield from _inside(where, value)


def _inside(where: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        yield from _foreign(f"{where}.{key}", value)


def hint_for_option(option: str, root: type[BaseModel]) -> str:
    """What to write for a command-line option that names a config value: `--steps 3` is `schedule.steps=3`."""
    name, _, value = option.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or "..."
    if theirs := keys_of_other_trainers().get(name):
        return f"{name} is {theirs} here; values are written section.field={value}"
    matches = [path for path in _fields(root, "") if path == name or path.endswith(f".{name}")]
    if matches:
        return "write " + " or ".join(f"{path}={value}" for path in matches[:_SHOWN])
    return f"values are written section.field={value}, without dashes; --help lists the options"


def _fields(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Dotted paths of the fields of plain sections."""
    for name, field in section.model_fields.items():
        inner = _model_in(field.annotation)
        yield f"{prefix}{name}"
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def section_at(owner: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel] | None:
    """The section class that a location points into, through optional sections, lists and mappings."""
    annotation: Any = owner
    for part in loc:
        section = _model_in(annotation)
        if section is not None:
            field = section.model_fields.get(str(part))
            annotation = None if field is None else field.annotation
        else:
            annotation = _item_of(annotation)
    return _model_in(annotation)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section class of an annotation that is one, or an optional one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return next((model for part in parts if (model := _model_in(part)) is not None), None)


def _item_of(annotation: Any) -> Any:
    """The annotation of the items of a list or a mapping."""
    parts = [part for part in get_args(annotation) if part not in (Ellipsis, type(None))]
    return parts[-1] if parts else None
