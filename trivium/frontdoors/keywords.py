"""The keyword arguments that a user's function accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name, or accepts any keyword."""
    return bool(accepted(function, {name: None}))


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}
