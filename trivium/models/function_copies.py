"""Copies of transformers' functions that call other functions.

Layers of transformers find rotations, convolutions and scans by name among the globals of their module, and take no
argument for them. To replace one there would change every model of the process, so a layer gets a copy of its forward
function with globals of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any


def functions_called(function: FunctionType, names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """The functions of its module that a function calls by one of these names. A name that stands for None, an optional
    kernel that is not installed, is left out."""
    functions = {name: function.__globals__.get(name) for name in names if name in function.__code__.co_names}
    return {name: called for name, called in functions.items() if called is not None}


def calling(function: FunctionType, replacements: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """A copy of a function that calls the replacements where it calls functions of these names."""
    names = {**function.__globals__, **replacements}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__  # the constructor takes none
    return copy
