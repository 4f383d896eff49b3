"""Tools and interactions in verl's form: the classes that users derive from, and their YAML files.

A tool file lists `{class_name, config, tool_schema}` under `tools`; an interaction file lists `{name, class_name,
config}` under `interaction`. `class_name` is `package.module.Class`, `package.module:Class` or `file.py:Class`.
"""

from __future__ import annotations

import inspect
import json
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from trivium.config import read_yaml
from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import resolve
from trivium.workflows.function_schemas import described_function

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "is_verl_tool"
"""The attribute that `function_tool` sets."""


class _Open(BaseModel):
    """Keeps keys that the class does not declare: users write further ones into their schemas."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Open):
    """A parameter of a tool."""

    type: Any = None
    """None for a parameter of several types, whose schema has `anyOf`."""
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Open):
    """The parameters of a tool."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Open):
    """The name, description and parameters of a tool."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_Open):
    """A tool as OpenAI's clients describe it."""

    type: str = "function"
    function: OpenAIFunctionSchema


@dataclass
class ToolResponse:
    """What a tool returns to the policy. Images and videos are refused."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """A tool: `create` begins an instance for a rollout, `execute` runs a call, `release` ends the instance."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Returns the description for the policy."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begins an instance. Returns its id and a first response."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Runs a call. Returns (response, reward of the call, metrics)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Returns the reward of the instance at the end of the rollout."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Ends an instance."""


class BaseInteraction:
    """A simulated user, who answers the completions."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins an instance for a rollout. Returns its id."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answers the last completion. Returns (whether the rollout ends, answer, score of the turn, information)."""
        raise NotImplementedError

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Returns a score of the instance."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Ends an instance."""


def function_tool(function: Function) -> Function:
    """Marks a function as a tool, for `multi_turn.function_tool_path`."""
    setattr(function, _MARK, True)
    return function


class ToolOfFunction(BaseTool):
    """A plain or `async` function as a tool, described by its signature and its docstring."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ConfigError for a parameter that JSON cannot represent."""
        self.function = function
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(described_function(function).described))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Calls the function with the parameters."""
        result = self.function(**parameters)
        result = await result if inspect.isawaitable(result) else result
        return ToolResponse(text=result if isinstance(result, str) else json.dumps(result)), 0.0, {}


@lru_cache(maxsize=64)
def load_tools(file: str) -> dict[str, Any]:
    """Returns the tools of a YAML file by name. Raises ConfigError for a tool that cannot be built."""
    tools: dict[str, Any] = {}
    for entry in _entries(file, "tools"):
        # All rollouts share the objects of a file: a tool tells them apart by the id of the instance.
        config = dict(entry.get("config") or {})
        if config.get("type", "native") != "native":
            raise ConfigError(
                f"a tool of type {config['type']} in {file}",
                "only native tools are built: classes of this process",
                "write a class whose `execute` asks that server",
            )
        schema = entry.get("tool_schema")
        parsed = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        tool = _class(entry, file)(config=config, tool_schema=parsed)
        described = parsed or tool.get_openai_tool_schema()
        tools[described.function.name] = tool
    return tools


@lru_cache(maxsize=64)
def load_functions(file: str) -> dict[str, Any]:
    """Returns the functions of a Python file as tools by name: those with `@function_tool`, else all public ones."""
    # `resolve` imports the file and returns the module's name.
    module = sys.modules[resolve("environments", f"{file.removeprefix('file://')}:__name__")]
    functions = [value for value in vars(module).values() if inspect.isfunction(value)]
    chosen = [function for function in functions if getattr(function, _MARK, False)] or [
        function
        for function in functions
        if function.__module__ == module.__name__ and not function.__name__.startswith("_")
    ]
    if not chosen:
        raise ConfigError(f"the tools of {file}", "it defines no function", "write a function for each tool")
    return {function.__name__: ToolOfFunction(function) for function in chosen}


@lru_cache(maxsize=64)
def load_interactions(file: str) -> dict[str, Any]:
    """Returns the interactions of a YAML file by name. Raises ConfigError for one that cannot be built."""
    interactions: dict[str, Any] = {}
    for entry in _entries(file, "interaction"):
        cls = _class(entry, file)
        name = entry.get("name") or cls.__name__.removesuffix("Interaction").lower()
        interactions[name] = cls(config={**(entry.get("config") or {}), "name": name})
    return interactions


def _entries(file: str, section: str) -> list[Mapping[str, Any]]:
    """Returns the list under a section of a YAML file."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"the file {file}", "no such file", "give a path that exists on this machine")
    entries = read_yaml(path).get(section)
    if not isinstance(entries, list):
        raise ConfigError(f"a list `{section}` in {file}", f"{type(entries).__name__}", f"write {section}: [...]")
    return entries


def _class(entry: Mapping[str, Any], file: str) -> type[Any]:
    """Returns the class that an entry names."""
    name = str(entry.get("class_name") or "")
    if not name:
        raise ConfigError(f"class_name of each entry of {file}", "none", "name the class: package.module.Class")
    address = name if ":" in name else ":".join(name.rsplit(".", 1))
    return resolve("environments", address)
