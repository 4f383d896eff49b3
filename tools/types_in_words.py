"""Types and limits of a config's fields, in words."""

from __future__ import annotations

import types
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trivium.config import Plugin

LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def type_of(field: FieldInfo) -> str:
    """What a field may hold."""
    limits = [f"{sign} {getattr(m, word)}" for m in field.metadata for word, sign in LIMITS.items() if hasattr(m, word)]
    return ", ".join([_type(field.annotation), *limits])


def _type(annotation: Any) -> str:
    """A type in words."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inside[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(kind) for kind in inside)
    if origin in (tuple, list):
        return f"list of {_type(inside[0])}"
    if origin is dict:
        return f"mapping to {_type(inside[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section with `kind`" if issubclass(annotation, Plugin) else "section"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "any value"}
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))
