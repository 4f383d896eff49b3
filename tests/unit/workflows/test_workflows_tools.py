"""Functions as tools: what the policy is told, which calls run, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from failing import check_error, refused
from pydantic import BaseModel
from workflow_parts import TOKENIZER, policy, shown, workflow

from trivium.config import RunConfig, plugin
from trivium.foundation.errors import ConfigError, RolloutError
from trivium.foundation.registry import resolve
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TEMPLATE, tiny_tokenizer
from trivium.text.tools import TOOLS
from trivium.types import Message, Task
from trivium.workflows.episodes import EnvironmentFailure
from trivium.workflows.function_schemas import described_function

TASK = Task("t", (Message("user", "sum?"),))


def add(a: int, b: int = 1, kind: Literal["sum", "difference"] = "sum") -> int:
    """Adds two
    numbers.

    Args:
        a (int): the first
            number
        b: the second

    Returns:
        The sum.
    """
    return a + b if kind == "sum" else a - b


async def look(word: str) -> dict[str, str]:
    """Looks up a word."""
    await asyncio.sleep(0)
    if word == "none":
        raise KeyError("no such word")
    return {"word": word, "in": f"process {os.getpid()}"}


class Box(BaseModel):
    width: int
    height: int = 2


def area(box: Box, scale: int = 1) -> int:
    """Computes an area."""
    return box["width"] * box["height"] * scale  # type: ignore[index]


def hang(seconds: float) -> str:
    time.sleep(seconds)
    return "late"


OTHER, OVER = threading.Event(), threading.Event()


def hang_until_it_is_over() -> str:
    OVER.wait(120)
    return "late"


def wait_for_the_other() -> str:
    assert OTHER.wait(120)
    return "waited"


def let_the_other_end() -> str:
    OTHER.set()
    return "ended"


def crash() -> None:
    os._exit(3)


def positional(*words: str) -> str:
    return " ".join(words)


def unheard(thing: asyncio.Event) -> str:
    return str(thing)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tools(*names: str, **fields: Any) -> Any:
    return workflow("tools", tools=[f"{__file__}:{name}" for name in names], **fields)


async def results(tooled: Any, *completions: str, task: Task = TASK) -> tuple[list[str], Any]:
    """The results of the tools that the policy saw, in order, and the policy."""
    player = policy(*completions)
    assert await tooled.run(task, player) is None
    return [text.partition("<|end|>")[0] for text in shown(player)[-1].split("<|tool|>")[1:]], player


def test_the_signature_and_the_docstring_describe_a_function() -> None:
    tool = described_function(add)
    assert (tool.name, tool.description) == ("add", "Adds two numbers.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "the first number"},
            "b": {"type": "integer", "default": 1, "description": "the second"},
            "kind": {"type": "string", "enum": ["sum", "difference"], "default": "sum"},
        },
        "required": ["a"],
    }


def no_blank_line(a: dict[str, str] = {"title": "x"}) -> str:  # noqa: B006
    """Looks it up.
    Args:
        a: words
    """
    return str(a)


def paragraphs(a: str) -> str:
    """Searches.

    Only three hits
    are returned.

    :param a: words
    """
    return a


def test_the_description_ends_at_the_first_section() -> None:
    tool = described_function(no_blank_line)
    assert tool.description == "Looks it up."
    assert tool.parameters["properties"]["a"]["default"] == {"title": "x"}
    assert described_function(paragraphs).description == "Searches. Only three hits are returned."


async def test_a_call_in_a_reasoning_block_that_the_prompt_opens_is_no_call() -> None:
    tokenizer = tiny_tokenizer("bytes", template=TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}")
    thought = call("add", a=7)
    player = policy(f"{thought}</think>{call('add', a=2, b=3)}", thought, "7", renderer=ChatRenderer(tokenizer))
    assert await tools("add").run(TASK, player) is None
    assert [text.partition("<|end|>")[0] for text in shown(player)[-1].split("<|tool|>")[1:]] == ["5"]
    assert player.metrics == {"env_done": 1.0, "tool_calls": 1.0, "tool_errors": 0.0}
    _, other = await results(tools("add"), thought, "7")  # the same completion after a prompt that opens nothing
    assert other.metrics["tool_calls"] == 1


async def test_calls_run_side_by_side_and_their_results_come_in_order() -> None:
    both = call("wait_for_the_other") + call("let_the_other_end")
    found, player = await results(
        tools("wait_for_the_other", "let_the_other_end", "add"), both, call("add", a=2, b=3), "5"
    )
    assert found == ["waited", "ended", "5"]
    assert player.metrics == {"env_done": 1.0, "tool_calls": 3.0, "tool_errors": 0.0}
    assert player.turns[-1].text == "5"


@pytest.mark.parametrize(
    ("completion", "error"),
    [
        (call("look", word="none"), "KeyError: 'no such word'"),
        (call("add"), "invalid arguments: a: Field required"),
        (call("add", a="x"), "invalid arguments: a: Input should be a valid integer"),
        (call("add", a=1, c=2), "invalid arguments: c: Extra inputs are not permitted"),
    ],
)
async def test_an_error_of_a_tool_is_its_result(completion: str, error: str) -> None:
    (found,), player = await results(tools("look", "add"), completion, "ok")
    assert found.startswith(f"error: {error}")
    assert player.metrics["tool_errors"] == 1


@pytest.fixture
def over() -> Iterator[None]:
    """Ends the calls that hang when the test ends."""
    it_is_over = resolve("tools", f"{__file__}:OVER")
    it_is_over.clear()
    yield
    it_is_over.set()


@pytest.mark.usefixtures("over")
async def test_a_late_tool_is_an_error_for_the_policy_and_in_a_process_so_is_a_crash(tmp_path: Path) -> None:
    late = call("hang", seconds=60)
    hung = call("hang_until_it_is_over")
    (found,), _ = await results(tools("hang_until_it_is_over", call_deadline_s=0.2), hung, "ok")
    assert found == "error: TimeoutError: no answer within 0.2 s"
    file = tmp_path / "apart.py"  # the processes import it; this module would take each of them seconds
    file.write_text("import asyncio, os, time\n\n" + "\n".join(map(inspect.getsource, (hang, crash, look))))
    named = [f"{file}:{name}" for name in ("hang", "crash", "look")]
    apart = workflow("tools", tools=named, workers=1, call_deadline_s=3.0)  # of which their start takes nothing
    found, _ = await results(apart, call("look", word="w"), late + call("crash"), "ok")
    looked = json.loads(found[0])
    assert looked["word"] == "w"
    assert looked["in"] != f"process {os.getpid()}"  # whole: one number may lie in another
    assert "no answer within 3 s" in found[1]
    assert "ended with code 3" in found[2]


async def test_a_model_among_the_arguments_has_its_defaults() -> None:
    found, _ = await results(tools("area"), call("area", box={"width": 3}), "ok")
    assert found == ["6"]


async def test_calls_beyond_the_limit_get_an_error_and_one_more_completion() -> None:
    adds = call("add", a=1)
    found, player = await results(tools("add", max_calls=2), adds, adds + adds, adds, "unreached")
    assert found == ["2", "2", "error: the limit of 2 calls is reached"]
    assert len(player.turns) == 3
    assert player.metrics["tool_calls"] == 3


async def test_a_row_chooses_among_the_tools_and_a_long_result_is_cut() -> None:
    some = Task("t", TASK.prompt, {"tools": ["look"]})
    tooled = tools("add", "look", max_result_chars=4)
    player = policy(call("look", word="w"), call("add", a=1), "ok")
    await tooled.run(some, player)
    first = shown(player)[0]
    assert "look" in first
    assert "Adds two" not in first
    assert '<|tool|>{"wo... (' in shown(player)[1]
    assert "<|tool|>erro... (" in shown(player)[2], "a call of a tool that the row did not choose gets an error"
    for columns, prompt in (({"tools": ["lock"]}, TASK.prompt), ({}, (Message(TOOLS, "[]"), *TASK.prompt))):
        with pytest.raises(EnvironmentFailure) as caught:
            await tooled.run(Task("t", prompt, columns), policy("a"))
        assert caught.value.__cause__ is not None


@pytest.mark.usefixtures("over")
async def test_a_call_that_no_thread_could_begin_fails_the_rollout() -> None:
    """The policy is not told that a tool failed which never ran."""
    both = call("hang_until_it_is_over") * 2
    with pytest.raises(RolloutError) as caught:
        await tools("hang_until_it_is_over", threads=1, call_deadline_s=0.2).run(TASK, policy(both, "a"))
    assert "no answer" not in str(caught.value)
    check_error(caught.value.__cause__, RolloutError, "hang_until_it_is_over", "0.2 s")


@pytest.mark.parametrize(
    ("completion", "wrong"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 2}', "cannot be read"),
        ('<tool_call>{"name": "add", "arguments": {"a": 2</tool_call>', "JSON"),
        ('<tool_call>{"name": "add", "arguments": [2]}</tool_call>', "object"),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call> It is 3.', "text follows"),
        ("<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>", "cannot be read"),
        (call("subtract", a=2), "'subtract'"),
    ],
)
async def test_a_call_that_is_none_gets_an_error_and_counts(completion: str, wrong: str) -> None:
    (found, again), player = await results(tools("add", "look"), completion, call("add", a=2), "3")
    assert found.startswith("error: ")
    assert wrong in found
    assert "add, look" in found
    assert again == "3"
    assert player.metrics == {"env_done": 1.0, "tool_calls": 2.0, "tool_errors": 1.0}


async def test_a_policy_that_only_writes_broken_calls_ends() -> None:
    found, player = await results(tools("add", max_calls=2), *["<tool_call>{"] * 4)
    assert len(found) == 2
    assert (len(player.turns), player.metrics["tool_errors"]) == (3, 2)


async def test_one_unknown_tool_among_calls_gets_an_error_of_its_own() -> None:
    found, player = await results(tools("add"), call("add", a=2) + call("subtract", a=2), "3")
    assert found[0] == "3"
    assert found[1].startswith("error: ")
    assert player.metrics["tool_errors"] == 1


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": {}', ', "arguments": "{}"'])
async def test_a_tool_without_parameters_is_called(arguments: str) -> None:
    written = f'<tool_call>{{"name": "let_the_other_end"{arguments}}}</tool_call>'
    found, _ = await results(tools("let_the_other_end"), written, "ok")
    assert found == ["ended"]


def repeat(text: str, times: int = 1) -> str:
    return text * times


async def test_a_text_that_looks_like_a_number_stays_a_text() -> None:
    arguments = "<parameter=text>12</parameter><parameter=times>2</parameter>"
    written = f"<tool_call><function=repeat>{arguments}</function></tool_call>"
    player = policy(written, "ok", renderer=ChatRenderer(TOKENIZER, tool_calls="xml"))
    await tools("repeat").run(TASK, player)
    assert "<|tool|>1212<|end|>" in shown(player)[1]


async def test_a_template_whose_calls_nobody_reads_fails_the_rollout() -> None:
    calls = "{% for c in message.tool_calls %}CALL {{ c.function }}{% endfor %}"
    source = TEMPLATE + f"{{% for message in messages %}}{calls}{{% endfor %}}"
    player = policy("CALL add", renderer=ChatRenderer(tiny_tokenizer("bytes", template=source)))
    with refused(EnvironmentFailure, "model.tool_calls", "CALL"):
        await tools("add").run(TASK, player)


async def test_calls_are_read_in_the_format_of_the_model() -> None:
    llama, mistral = (ChatRenderer(TOKENIZER, tool_calls=name) for name in ("llama3", "mistral"))
    written = json.dumps({"name": "add", "parameters": {"a": 2}})
    for renderer, completion, num_calls in [(llama, written, 1), (llama, call("add", a=2), 0), (mistral, written, 0)]:
        player = policy(completion, "3", renderer=renderer)
        await tools("add").run(TASK, player)
        assert (player.metrics["tool_calls"], len(player.turns)) == (num_calls, 1 + num_calls)


def annotated(thing: Absent) -> str:  # noqa: F821
    return str(thing)


class Callable:
    def __call__(self, a: int) -> int:
        return a


instance, part = Callable(), functools.partial(add, 1)
UNDESCRIBED = ("positional", "add", "unheard", "TASK", "annotated", "instance", "part", "add")
"""All but the first `add`."""


def test_a_function_that_cannot_be_described_is_found_before_the_run() -> None:
    config = plugin("workflows")({"kind": "tools", "tools": [f"{__file__}:{name}" for name in UNDESCRIBED]})
    problems = list(config.problems(RunConfig.model_construct(), "workflow"))
    assert [problem.where for problem in problems] == [
        f"workflow.tools[{n}]" for n in range(len(UNDESCRIBED)) if n != 1
    ]
    with refused(ConfigError, "add, add"):
        tools("add", "add")
