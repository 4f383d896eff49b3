"""The help of config fields: the string under each, read from the source of its class.

pydantic's `use_attribute_docstrings` gives the same strings. To find the source of each class it searches every loaded
module, which takes longer than the rest of reading a config.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
import textwrap
from itertools import pairwise, takewhile


def field_help(owner: type) -> dict[str, str]:
    """Field -> the string under it, for the fields of the class whose statement is being executed.

    Empty if the class has no source: it was made by a call, or typed into an interpreter.
    """
    lines = _class_statement(owner)
    try:
        statement = ast.parse(textwrap.dedent("".join(lines))).body[:1]
    except SyntaxError:  # a string in it continues left of the class
        return {}
    body = statement[0].body if statement and isinstance(statement[0], ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _class_statement(owner: type) -> list[str]:
    """The lines of the class statement that makes `owner`; a frame of its module is executing it."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_globals.get("__name__") == owner.__module__:
            lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[frame.f_lineno - 1 :]
            if lines and (head := re.match(rf"(\s*)class {owner.__name__}\b", lines[0])):
                inside = re.compile(rf"{head[1]}[\s)]|\s*(#|$)")
                return [lines[0], *takewhile(inside.match, lines[1:])]
        frame = frame.f_back
    return []
