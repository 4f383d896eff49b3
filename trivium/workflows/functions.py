"""Plain functions as tools: their description for the policy, and their calls."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from trivium.concurrency import Threads, usable_cores
from trivium.errors import ConfigError, RewardError, RolloutError, text_of
from trivium.processes.isolated import isolated_function
from trivium.processes.user_calls import UserCall
from trivium.registry import resolve
from trivium.workflows.tools import Tool, ToolError

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Examples?|Notes?):\s*$")
_FIELD = re.compile(r"^:(?:param|type|returns?|rtype|raises)\b")
"""The first line of a section, and of a field in Sphinx's form: they end the description of the function."""


class FunctionTool:
    """A plain or `async` function as a tool. Its signature and its docstring describe it.

    With `workers` the function runs in processes of its own, otherwise in `threads`. The arguments of a call are
    checked against the annotations, and the function receives JSON values.
    """

    def __init__(self, path: str, threads: Threads, deadline_s: float, workers: int = 0) -> None:
        function = function_of(path)
        self.tool = described_function(function)
        self._arguments = _arguments_of(function)
        label = f"the tool {self.tool.name}"
        called: Callable[..., Any] = function
        if workers:
            called = isolated_function("tools", path, label, workers, deadline_s)  # its processes keep the deadline
        self._call = UserCall(called, threads, None if workers else deadline_s, label=label, limit=usable_cores())

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """The result as text. Raises ToolError for invalid arguments, and for an error or a missed deadline of the
        function; RolloutError if no thread is free."""
        try:
            given = self._arguments.model_validate(arguments).model_dump(mode="json", include=set(arguments))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ToolError(f"invalid arguments: {'; '.join(problems)}") from error
        result = await self._call(**given)
        if isinstance(result, RewardError):
            raise ToolError(result.found) from result  # the error of a function in another process
        if type(result) is RolloutError:
            raise result
        if isinstance(result, BaseException):
            raise ToolError(f"{type(result).__name__}: {text_of(result)}") from result
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def function_of(path: str) -> Callable[..., Any]:
    """The function that a config names. Raises ConfigError for anything else."""
    function = resolve("tools", path)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"the function {path}", f"{function!r:.80}", "name a function")
    return function


def described_function(function: Callable[..., Any]) -> Tool:
    """The description of a function for the policy. Raises ConfigError for a parameter without a JSON form."""
    try:
        schema = _arguments_of(function).model_json_schema()
    except PydanticUserError as error:
        raise _undescribed(function, str(error).partition("\n")[0]) from error
    lines = inspect.cleandoc(function.__doc__ or "").splitlines()
    text = takewhile(lambda line: not _SECTION.match(line) and not _FIELD.match(line), lines)
    return Tool(_name(function), " ".join(" ".join(text).split()), _without_titles(schema))


def _arguments_of(function: Callable[..., Any]) -> type[BaseModel]:
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
        return [_without_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(each) for name, each in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else value
        if key in ("default", "const", "enum", "examples")  # values of the user, not schemas
        else _without_titles(value)
        for key, value in schema.items()
        if key not in ("title", "additionalProperties")
    }
