"""What a plain function tells the policy as a tool: its name, its description, and the schema of its arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, create_model

from trivium.foundation.errors import ConfigError, text_of
from trivium.foundation.registry import resolve
from trivium.workflows.tools import Tool

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):\s*$")
_FIELD = re.compile(r"^:(?:param|type|returns?|rtype|raises)\b")
"""The first line of a section, and of a field in Sphinx's form: they end the description of the function."""


def function_of(path: str) -> Callable[..., Any]:
    """The function that a config names. Raises ConfigError for anything else."""
    function = resolve("tools", path)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"the function {path}", f"{function!r:.80}", "name a function")
    return function


def described_function(function: Callable[..., Any]) -> Tool:
    """The description of a function for the policy. Raises ConfigError for a parameter without a JSON form."""
    try:
        schema = arguments_of(function).model_json_schema()
    except PydanticUserError as error:
        raise _undescribed(function, str(error).partition("\n")[0]) from error
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    text = takewhile(lambda line: not _SECTION.match(line) and not _FIELD.match(line), lines)
    return Tool(_name(function), " ".join(" ".join(text).split()), _without_titles(schema))


def arguments_of(function: Callable[..., Any]) -> type[BaseModel]:
    """A model of the arguments of a function: a parameter without annotation is text."""
    fields, texts = dict[str, Any](), _parameter_texts(function)
    try:
        hints, signature = get_type_hints(function, include_extras=True), inspect.signature(function)
    except Exception as error:  # evaluating annotations runs code of the user
        raise _undescribed(function, f"{type(error).__name__}: {text_of(error)}") from error
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _undescribed(function, f"the parameter {parameter}")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, str), Field(default, description=texts.get(name)))
    try:
        return create_model(_name(function), __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, NameError) as error:
        raise _undescribed(function, str(error).partition("\n")[0]) from error


def _undescribed(function: Callable[..., Any], found: str) -> ConfigError:
    types = "str, int, float, bool, list, dict, Literal, models"
    do = f"name a function whose parameters have names and types of JSON values that exist at run time ({types})"
    return ConfigError(f"the tool {_name(function)}, which a model calls with JSON", found, do)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _parameter_texts(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring writes about each parameter, in Google's form or as `:param name: text`."""
    texts, section, name = dict[str, str](), "", ""
    for line in inspect.cleandoc(function.__doc__ or "").splitlines():
        if header := _SECTION.match(line):
            section, name = header.group(1), ""
        elif field := re.match(r"^:param (?:[\w\[\], ]+ )?(\w+):\s*(.*)$", line):
            texts[field.group(1)] = field.group(2)
        elif section in ("Args", "Arguments", "Parameters") and line.startswith("  "):
            if entry := re.match(r"^ {2,4}(\w+)(?: *\([^)]*\))?:\s*(.*)$", line):
                name = entry.group(1)
                texts[name] = entry.group(2)
            elif name:
                texts[name] += f" {line.strip()}"
    return {name: text.strip() for name, text in texts.items() if text.strip()}


def _without_titles(schema: Any) -> Any:
    """The schema without the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [_without_titles(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(subschema) for name, subschema in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else value
        if key in ("default", "const", "enum", "examples")  # values of the user, not schemas
        else _without_titles(value)
        for key, value in schema.items()
        if key not in ("title", "additionalProperties")
    }
