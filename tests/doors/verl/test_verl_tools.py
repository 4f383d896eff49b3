"""verl's tools and interactions as an environment: a user's classes, their files, and the limits of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.failing import refused
from trivium.config import build, plugin
from trivium.engines.scripted import ScriptedEngine
from trivium.foundation.errors import ConfigError
from trivium.foundation.randomness import SampleKey
from trivium.frontdoors.verl.objects.tool_classes import ToolOfFunction, load_functions, load_interactions, load_tools
from trivium.policy import Policy
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Message, Request, Sampling, Task
from trivium.workflows.episodes import EnvironmentFailure

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}<assistant>"
RENDERER = ChatRenderer(tiny_tokenizer(max_length=4096, template=TEMPLATE))

CLASSES = '''
from trivium.frontdoors.verl import BaseInteraction, BaseTool, ToolResponse, function_tool

EVENTS = []

class Adder(BaseTool):
    async def create(self, instance_id=None, start=0, **kwargs):
        EVENTS.append(("create", start, kwargs["create_kwargs"]))
        self.total = start
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["n"] < 0:
            raise ValueError("only sums")
        self.total += parameters["n"]
        return ToolResponse(text=self.config["mark"] * parameters["n"] or "none"), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.total)

    async def release(self, instance_id, **kwargs):
        EVENTS.append(("release", self.total))

class Painter(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="see", **{parameters["kind"]: ["pixels"]}), 0.0, {}

class Old:
    """A tool of an earlier version: no base class, text instead of a response, an id instead of a pair."""

    def __init__(self, config, tool_schema):
        self.tool_schema = tool_schema

    def create(self, instance_id):
        return instance_id

    def execute(self, instance_id, parameters):
        return "old", None, {}

    def calc_reward(self, instance_id):
        return 0.0

    def release(self, instance_id):
        EVENTS.append("old")

class Teacher(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        self.truth = kwargs["ground_truth"]
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == self.truth
        return right, "again", 1.0 if right else 0.0, {}

    async def finalize_interaction(self, instance_id=None, **kwargs):
        EVENTS.append("finalized")

@function_tool
def double(n: int) -> int:
    """Twice a number."""
    return 2 * n

def helper(text):
    return text
'''


def tool_of(name: str, cls: str, **more: Any) -> dict[str, Any]:
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": "adds",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
    return {"class_name": cls, "config": {"type": "native", "mark": "x"}, "tool_schema": schema, **more}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files of tools and interactions, and the Python file with their classes."""
    own = tmp_path / "own.py"
    own.write_text(CLASSES, encoding="utf-8")
    tools = [tool_of("add", f"{own}:Adder"), tool_of("old", f"{own}:Old"), tool_of("paint", f"{own}:Painter")]
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": tools}), encoding="utf-8")
    interaction = [{"name": "teacher", "class_name": f"{own}:Teacher", "config": {}}]
    (tmp_path / "interactions.yaml").write_text(yaml.safe_dump({"interaction": interaction}), encoding="utf-8")
    return {
        "tools": str(tmp_path / "tools.yaml"),
        "interactions": str(tmp_path / "interactions.yaml"),
        "functions": str(own),
    }


def events(files: dict[str, str]) -> list[Any]:
    (tool,) = (tool for name, tool in load_functions(files["functions"]).items() if name == "double")
    return tool.function.__globals__["EVENTS"]


def says(request: Request, version: int) -> str:
    """The script of the engine: the task id holds the completions, one per call."""
    return request.key.task_id.split("|")[int(request.key.path[-1])]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def rollout(*texts: str, extra: dict[str, Any] | None = None, max_turns: int = 8, **args: Any) -> Any:
    """Rolls out a task with these completions. Returns (policy, what it saw in its last turn, reward)."""
    engine = ScriptedEngine(
        ScriptedEngine.Config(script=f"{__file__}:says"),
        eos_token_ids=RENDERER.eos_token_ids,
        decode=RENDERER.decode,
        encode=lambda text: tiny_tokenizer().encode(text),
    )
    key = SampleKey(0, "train", "train", "|".join(texts))
    policy = Policy(engine, RENDERER, Sampling(200), key, 4096)
    environment = "trivium.frontdoors.verl.tool_environment:ToolEnvironment"
    section = {
        "kind": "multi_turn",
        "environment": environment,
        "environment_args": args,
        "max_turns": max_turns,
    }
    workflow = build("workflows", plugin("workflows")(section))
    task = Task("t", (Message("user", "sums"),), {"extra_info": extra or {}})
    earned = await workflow.run(task, policy)
    last = policy.turns[-1]
    return policy, tiny_tokenizer().decode(last.prompt_tokens.tolist()), earned["environment"]


async def test_a_tool_is_created_executed_and_released(files: dict[str, str]) -> None:
    extra = {"tools_kwargs": {"add": {"create_kwargs": {"start": 2}}}}
    policy, seen, reward = await rollout(call("add", n=3), "done", extra=extra, tools=files["tools"])
    assert '"name": "add"' in seen
    assert "<tool>xxx<|end|><assistant>" in seen
    assert len(policy.turns) == 2
    assert (policy.metrics["env_done"], reward) == (1.0, 0.0)
    assert events(files) == [("create", 2, {"start": 2}), ("release", 5)]


async def test_rewards_of_tools_count_where_that_is_asked_for(files: dict[str, str]) -> None:
    *_, reward = await rollout(call("add", n=3), call("add", n=1), "done", tools=files["tools"], tool_rewards=True)
    assert reward == 0.5 + 0.5 + 4.0


async def test_an_error_of_a_tool_is_its_response(files: dict[str, str]) -> None:
    _, seen, _ = await rollout(call("add", n=-1), "done", tools=files["tools"])
    assert "<tool>Error when executing tool: only sums<|end|>" in seen


@pytest.mark.parametrize("kind", ["image", "video"])
async def test_a_response_with_images_fails_the_rollout(files: dict[str, str], kind: str) -> None:
    with refused(EnvironmentFailure, "paint", "ToolEnvironment.step"):
        await rollout(call("paint", kind=kind), "done", tools=files["tools"])


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "xxxx...(truncated)"), ("right", "(truncated)...xxxx"), ("middle", "xx...(truncated)...xx")],
)
async def test_a_long_response_is_cut(files: dict[str, str], side: str, expected: str) -> None:
    limit = {"max_tool_response_length": 4, "tool_response_truncate_side": side}
    _, seen, _ = await rollout(call("add", n=9), "done", tools=files["tools"], **limit)
    assert f"<tool>{expected}<|end|>" in seen


@pytest.mark.parametrize(
    ("limits", "turns"),
    [({"max_assistant_turns": 2}, 2), ({"max_user_turns": 1}, 2), ({"max_user_turns": 2}, 3), ({}, 4)],
)
async def test_limits_of_turns_end_a_rollout(files: dict[str, str], limits: dict[str, Any], turns: int) -> None:
    policy, *_ = await rollout(*3 * [call("add", n=1)], "done", tools=files["tools"], **limits)
    assert len(policy.turns) == turns
    assert policy.metrics["env_done"] == 1.0
    assert events(files)[-1] == ("release", turns - 1)


async def test_tools_are_released_where_the_workflow_ends_the_rollout(files: dict[str, str]) -> None:
    policy, *_ = await rollout(*3 * [call("add", n=1)], tools=files["tools"], max_turns=2)
    assert policy.metrics["env_done"] == 0.0
    assert events(files)[-1] == ("release", 2)


@pytest.mark.parametrize(("parallel", "responses"), [(1, 1), (2, 2)])
async def test_calls_beyond_the_limit_of_a_turn_are_left_out(
    files: dict[str, str], parallel: int, responses: int
) -> None:
    both = call("add", n=1) + call("old", n=1)
    _, seen, _ = await rollout(both, "done", tools=files["tools"], max_parallel_calls=parallel)
    assert seen.count("<tool>") == responses


async def test_functions_are_tools(files: dict[str, str]) -> None:
    _, seen, _ = await rollout(call("double", n=4), "done", functions=files["functions"])
    for expected in ("Twice a number.", '"integer"', "<tool>8<|end|>"):
        assert expected in seen
    assert list(load_functions(files["functions"])) == ["double"], "the others are not marked"


def test_annotations_describe_the_parameters_of_a_function() -> None:
    def search(query: str, limit: int | None = None, other=None) -> str:
        return query

    described = ToolOfFunction(search).tool_schema.model_dump(exclude_none=True)["function"]["parameters"]
    assert described["required"] == ["query"]
    assert described["properties"] == {
        "query": {"type": "string"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "other": {"type": "string"},
    }


def test_an_annotation_without_a_json_schema_is_named() -> None:
    def ask(engine: ScriptedEngine) -> str:
        return str(engine)

    with refused(ConfigError, "ask", "ScriptedEngine"):
        ToolOfFunction(ask)


async def test_an_interaction_answers_until_it_ends(files: dict[str, str]) -> None:
    extra = {"interaction_kwargs": {"name": "teacher", "ground_truth": "7"}}
    policy, seen, reward = await rollout("5", "7", extra=extra, interactions=files["interactions"], tool_rewards=True)
    assert seen.endswith("<assistant>5<|end|><user>again<|end|><assistant>")
    assert (len(policy.turns), reward) == (2, 1.0)
    assert events(files) == ["finalized"]
    with refused(EnvironmentFailure, "extra_info.interaction_kwargs.name", "'nobody'"):
        await rollout("5", extra={"interaction_kwargs": {"name": "nobody"}}, interactions=files["interactions"])


def test_what_cannot_be_built_is_named(tmp_path: Path) -> None:
    def written(section: str, entry: dict[str, Any]) -> str:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.yaml"
        file.write_text(yaml.safe_dump({section: [entry]}), encoding="utf-8")
        return str(file)

    with refused(ConfigError, "mcp"):
        load_tools(written("tools", tool_of("a", "m.C") | {"config": {"type": "mcp"}}))
    with refused(ConfigError, "'nowhere'"):
        load_tools(written("tools", tool_of("a", "nowhere.tools.Tool")))
    with refused(ConfigError, "`interaction`"):
        load_interactions(written("tools", {}))
    with refused(ConfigError, "absent.yaml"):
        load_tools(str(tmp_path / "absent.yaml"))
