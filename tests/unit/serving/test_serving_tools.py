"""Tools and streams as the real `openai` client sends them, and the end of a served run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from failing import refused
from openai import AsyncOpenAI, InternalServerError, pydantic_function_tool
from pydantic import BaseModel

from tests.serving import NAME, RENDERER, Served, served
from trivium.foundation.errors import DataError
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TEMPLATE, tiny_tokenizer
from trivium.text.tool_formats import HERMES
from trivium.text.tools import TOOLS, described, split_tools
from trivium.types import Message


class Weather(BaseModel):
    """The weather in a city."""

    city: str


TOOL: Any = pydantic_function_tool(Weather, name="weather")
CALL = '<tool_call>{"name":"weather",  "arguments": {"city": "Zürich"}}</tool_call>'
"""As no program would write it: the policy's own white space."""


def client_of(here: Served) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)


def saying(text: str) -> dict[str, Any]:
    """Arguments of an engine that always writes this text."""
    return {"replies": (tuple(RENDERER._tokenizer.encode(text, add_special_tokens=False)),)}


# --------------------------------------------------------------------------- the text


def test_a_template_that_knows_tools_gets_them() -> None:
    tools, user = Message(TOOLS, json.dumps([TOOL])), Message("user", "hi")
    template = "{% if tools %}{{ tools[0].function.name }}: {% endif %}" + TEMPLATE
    native = ChatRenderer(tiny_tokenizer("bytes"), chat_template=template)
    assert native.decode(native.render([tools, user]).tokens).startswith("weather: ")
    assert native.decode(native.render([user]).tokens).startswith("<|user|>hi")
    told = RENDERER.decode(RENDERER.render([tools, user]).tokens)
    assert told == RENDERER.decode(RENDERER.render(described([TOOL], [user], HERMES.instructions(), "")).tokens)
    assert '"city"' in told
    system = described([TOOL], [Message("system", "Be brief."), user], "write", "You are helpful.")
    assert [message.role for message in system] == ["system", "user"]
    assert system[0].content.startswith("Be brief.\n\n# Tools")
    with refused(DataError, "JSON"):
        split_tools([Message(TOOLS, "{")])


# --------------------------------------------------------------------------- the client


async def test_a_call_of_a_tool_goes_to_the_client_and_back_token_for_token(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, max_new_tokens=120, **saying(CALL)) as here, client_of(here) as client:
        messages: list[Any] = [{"role": "user", "content": "Warm?"}]
        labels = {"session": "s", "task_id": "t"}
        asked: dict[str, Any] = {"model": "policy", "tools": [TOOL], "extra_body": labels}
        first = (await client.chat.completions.create(messages=messages, **asked)).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content is None
        (call,) = first.message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Zürich"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "21 °C"}
        messages += [first.message.model_dump(exclude_none=True), result]
        stream = await client.chat.completions.create(messages=messages, stream=True, **asked)
        streamed = [chunk.choices[0] async for chunk in stream]
        parts = [again for choice in streamed for again in choice.delta.tool_calls or ()]
        assert (parts[0].index, bool(parts[0].id), parts[0].id != call.id) == (0, True, True)
        arguments = "".join(again.function.arguments or "" for again in parts if again.function is not None)
        assert arguments == call.function.arguments
        assert streamed[-1].finish_reason == "tool_calls"
        (one, said), (two, _) = here.engine.given
        known = np.concatenate([one.prompt_tokens, said.tokens])
        assert np.array_equal(two.prompt_tokens[: len(known)], known)
        assert "21 °C" in RENDERER.decode(two.prompt_tokens)
        await client.post("/feedback", body={**labels, "reward": 1}, cast_to=object)
        (group,) = await here.take()
        assert len(group.trajectories[0].turns) == 2
        assert [message.role for message in group.task.prompt] == [TOOLS, "user"]


async def test_the_clients_helpers_for_tools_and_streams_work(tmp_path: Path) -> None:
    async with served(tmp_path, max_new_tokens=120, **saying(CALL)) as here, client_of(here) as client:
        messages: list[Any] = [{"role": "user", "content": "Warm?"}]
        parsed = await client.chat.completions.parse(model="policy", messages=messages, tools=[TOOL])
        (call,) = parsed.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == Weather(city="Zürich")
        async with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as stream:
            final = await stream.get_final_completion()
        assert (final.choices[0].message.tool_calls or [])[0].function.parsed_arguments == Weather(city="Zürich")
        plain = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], tool_choice="none"
        )
        assert plain.choices[0].message.content == CALL
        assert plain.choices[0].message.tool_calls is None


async def test_a_history_of_another_policy_is_written_out(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        await here.chat("x", said, {"role": "tool", "tool_call_id": "call_1", "content": "y"})
        text = RENDERER.decode(here.engine.given[0][0].prompt_tokens)
        assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in text
        for broken in ([{}], ["f"], "f", [{**call, "function": {"name": "f", "arguments": "{"}}]):
            error = await here.chat("x", {**said, "tool_calls": broken}, "y", expect=400)
            assert "tool_calls[0]" in error["error"]["param"]


# --------------------------------------------------------------------------- the end


async def test_the_end_is_said_and_the_final_policy_served(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, linger_s=30.0) as here, client_of(here) as client:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        first = await here.chat("x", session="s", task_id="t")
        here.synchronizer.publish(1)
        here.synchronizer.finish()
        await asyncio.wait_for(here.running, 30)
        with pytest.raises(InternalServerError) as raised:
            await client.chat.completions.create(model="policy", messages=messages)
        assert raised.value.response.headers["retry-after"] == "1"
        assert "the training is over" in raised.value.message
        leaving = asyncio.create_task(here.gateway.say_goodbye())
        await here.eventually(status="closed")  # version 1 is published and has not been loaded
        here.synchronizer.adopted(NAME, 1)
        await here.eventually(status="final")
        done = await client.chat.completions.create(
            model="policy", messages=messages, extra_body={"session": "s", "task_id": "t"}
        )
        assert (done.id, done.choices[0].finish_reason) != (first["id"], None)
        assert here.gateway.health()["trajectories"] == 0
        error = await here.feedback(id=done.id, reward=1, expect=503)
        assert error["error"]["code"] == "closed"
        leaving.cancel()
        await asyncio.wait([leaving])


async def test_a_connection_is_answered_until_the_server_closes(tmp_path: Path) -> None:
    async with served(tmp_path) as here:
        here.synchronizer.finish()
        await asyncio.wait_for(here.running, 30)
        leaving = asyncio.create_task(here.gateway.say_goodbye())
        async with httpx.AsyncClient(base_url=here.url) as newcomer:
            assert (await newcomer.get("/v1/models")).status_code == 200
        await here.chat("x", expect=503)
        await leaving
