"""The Messages and Responses APIs as the clients of Anthropic and OpenAI call them: token by token and in streams."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai import BadRequestError as OpenAIBadRequest

from tests.serving import RENDERER, Served, anthropic, served
from trivium.serving.completion_parts import Recorded, Written, answer_of, completion_id, part_id, written
from trivium.text.tool_formats import HERMES, MAX_DEPTH, CallableTools
from trivium.types import forks_of

CALL = 'Let me see.\n<tool_call>{"name":"weather",  "arguments": {"city": "Zürich"}}</tool_call>'
"""As no program would write it: the policy's own white space."""
THOUGHT = "<think>\nIt is winter.\n</think>\n\n" + CALL
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "The weather in a city.", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
LABELS: Any = {"session": "s", "task_id": "t"}


def openai(here: Served) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0)


def saying(text: str) -> dict[str, Any]:
    """Arguments of an engine that always writes this text."""
    return {"replies": (tuple(RENDERER._tokenizer.encode(text, add_special_tokens=False)),), "max_new_tokens": 150}


def assert_one_sequence(here: Served, turns: int) -> None:
    """Each prompt of the engine begins with the tokens of the turn before."""
    assert len(here.engine.given) == turns
    for (request, done), (following, _) in pairwise(here.engine.given):
        known = np.concatenate([request.prompt_tokens, done.tokens])
        assert np.array_equal(following.prompt_tokens[: len(known)], known)


# --------------------------------------------------------------------------- Messages


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_loop_over_messages_is_one_sequence(stream: bool, tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, **saying(THOUGHT)) as here, anthropic(here.url) as client:
        messages: list[Any] = [{"role": "user", "content": "Warm?"}]
        asked: dict[str, Any] = {
            "model": "policy",
            "max_tokens": 4096,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [TOOL],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "extra_body": LABELS,
        }
        for _ in range(3):
            if stream:
                async with client.messages.stream(messages=messages, **asked) as events:
                    texts = [text async for text in events.text_stream]
                    answer = await events.get_final_message()
                assert "".join(texts) == "Let me see."
            else:
                answer = await client.messages.create(messages=messages, **asked)
            thinking, text, call = answer.content
            assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
            assert thinking.thinking == "It is winter."
            assert text.text == "Let me see."
            assert (call.name, call.input) == ("weather", {"city": "Zürich"})
            assert answer.stop_reason == "tool_use"
            assert answer.usage.output_tokens == len(here.engine.given[-1][1].tokens)
            parts = [{"type": "text", "text": "21 °C"}]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": parts, "is_error": True}
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        assert_one_sequence(here, 3)
        assert "error: 21 °C" in RENDERER.decode(here.engine.given[1][0].prompt_tokens)
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
        assert [turn.tokens.tolist() for turn in group.trajectories[0].turns] == [
            done.tokens.tolist() for _, done in here.engine.given
        ]


@pytest.mark.parametrize(
    ("value", "kind"),
    [("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "tool_use"), ("1e999", "text"), ('"\\ud800"', "text")],
    ids=["deepest", "infinite", "surrogate"],
)
async def test_what_a_policy_writes_into_arguments_can_be_sent_and_sent_back(
    value: str, kind: str, tmp_path: Path
) -> None:
    call = f'<tool_call>{{"name": "weather", "arguments": {{"x": {value}}}}}</tool_call>'
    async with served(tmp_path, group_size=1, **saying(call) | {"max_new_tokens": 250}) as here:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        for _ in range(2):
            body = {"model": "policy", "max_tokens": 250, "messages": messages, "tools": [TOOL], **LABELS}
            answer = await here.client.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            (block,) = answer.json()["content"]
            assert block["type"] == kind
            messages += [{"role": "assistant", "content": [block]}, {"role": "user", "content": "y"}]
        assert_one_sequence(here, 2)


async def test_stripped_thinking_starts_another_sequence(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, **saying(THOUGHT)) as here, anthropic(here.url) as client:
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 99, "tools": [TOOL], "extra_body": LABELS}
        asked["thinking"] = {"type": "adaptive"}
        messages: list[Any] = [{"role": "user", "content": "Warm?"}]
        first = await client.messages.create(messages=messages, **asked)
        kept = [block.model_dump(exclude_none=True) for block in first.content if block.type != "thinking"]
        messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": "So?"}]
        await client.messages.create(messages=messages, **asked)
        (one, said), (two, _) = here.engine.given
        assert len(two.prompt_tokens) < len(one.prompt_tokens) + len(said.tokens)
        assert "winter" not in RENDERER.decode(two.prompt_tokens)
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
        assert [len(turn.prompt_tokens) for turn in group.trajectories[0].turns] == [
            len(request.prompt_tokens) for request, _ in here.engine.given
        ]
        (fork,) = forks_of(group.trajectories[0].turns)
        assert fork.reason == "the completion of turn 1 was changed"


async def test_why_a_message_ended_and_how_long_a_prompt_is(tmp_path: Path) -> None:
    async with served(tmp_path, **saying("one two three")) as here, anthropic(here.url) as client:
        messages: list[Any] = [{"role": "user", "content": "Count."}]
        whole = await client.messages.create(model="policy", messages=messages, max_tokens=150)
        assert (whole.stop_reason, whole.content[0].to_dict()["text"]) == ("end_turn", "one two three")
        cut = await client.messages.create(model="policy", messages=messages, max_tokens=5)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
        ended = await client.messages.create(
            model="policy", messages=messages, max_tokens=150, stop_sequences=["two", "9"]
        )
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "two")
        assert ended.content[0].to_dict()["text"] == "one "
        ended = await client.messages.create(
            model="policy", messages=messages, max_tokens=150, stop_sequences=["wo", "two"]
        )
        assert (ended.stop_sequence, ended.content[0].to_dict()["text"]) == ("two", "one ")
        stream = await client.messages.create(
            model="policy", messages=messages, max_tokens=5, stream=True, extra_body={"return_token_ids": True}
        )
        (end,) = [event.delta async for event in stream if event.type == "message_delta"]
        assert end.to_dict()["prompt_token_ids"] == here.engine.given[0][0].prompt_tokens.tolist()
        counted = await client.messages.count_tokens(model="policy", messages=messages)
        assert counted.input_tokens == whole.usage.input_tokens == len(here.engine.given[0][0].prompt_tokens)


async def test_an_unsupported_message_is_refused_in_anthropics_form(tmp_path: Path) -> None:
    from anthropic import AuthenticationError, BadRequestError

    async with served(tmp_path, api_key="secret") as here:
        user = {"role": "user", "content": "x"}
        async with anthropic(here.url, "other") as stranger:
            with pytest.raises(AuthenticationError) as unauthorized:
                await stranger.messages.create(model="policy", messages=[user], max_tokens=3)  # pyright: ignore
        assert unauthorized.value.body["error"]["type"] == "authentication_error"  # pyright: ignore
        document = {"type": "document", "source": {"type": "url", "url": "https://example.org/a.pdf"}}
        async with anthropic(here.url, "secret") as client:
            for key, more in {
                "tool_choice": {"tools": [TOOL], "tool_choice": {"type": "any"}},
                "tools[0]": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
                "tools[1]": {"tools": [TOOL, {**TOOL, "strict": True}]},
                "top_k": {"extra_body": {"top_k": 3}},
                "messages[0].content[0]": {"messages": [{"role": "user", "content": [document]}]},
                "max_tokens": {"max_tokens": 0},
                "messages": {"messages": [user, {"role": "assistant", "content": "Once"}]},
                "thinking": {"thinking": {"type": "often"}},
            }.items():
                asked: dict[str, Any] = {"model": "policy", "messages": [user], "max_tokens": 3, **more}
                with pytest.raises(BadRequestError) as refused:
                    await client.messages.create(**asked)
                error: Any = refused.value.body
                assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
                assert error["error"]["param"] == key
            assert not here.engine.given


SYSTEM, ASKED, NEXT = (
    {"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("user", "b"))
)
REPLY = {"role": "assistant", "content": THOUGHT}


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([SYSTEM, ASKED, REPLY, NEXT], ""),
        ([SYSTEM, ASKED], ""),
        ([SYSTEM, NEXT], ""),
        ([SYSTEM, NEXT, {"role": "assistant", "content": "an example"}, ASKED], ""),
        ([SYSTEM, ASKED, {"role": "assistant", "content": CALL}, NEXT], "message 2 .* its reasoning is gone"),
        ([SYSTEM, ASKED, {"role": "assistant", "content": THOUGHT.replace("\n", " ")}, NEXT], "its white space"),
        (
            [SYSTEM, ASKED, {"role": "assistant", "content": THOUGHT.replace(':"', ': "')}, NEXT],
            "its calls of tools",
        ),
        ([SYSTEM, ASKED, {"role": "assistant", "content": "I"}, NEXT], "its text is another"),
        ([{"role": "system", "content": "at 12:01"}, ASKED, REPLY, NEXT], r"message 0 \(system\)"),
        ([SYSTEM, REPLY, NEXT], r"message 1 \(assistant\)"),
    ],
)
async def test_the_first_rewritten_history_is_a_warning_with_its_usual_cause(
    messages: list[Any], found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path, group_size=1, **saying(THOUGHT)) as here:
        tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
        for sent in ([SYSTEM, ASKED], messages):
            await here.chat(*sent, tools=tools, **LABELS)
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
    assert not found or len(forks_of(group.trajectories[0].turns)) == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(found)
    assert not found or re.search(found, warnings[0])


async def test_an_edited_history_keeps_the_tokens_before_the_edit(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1) as here:  # its completions are arbitrary ids, which no text encodes to
        messages: list[Any] = []
        for number in range(3):
            messages.append({"role": "user", "content": f"{number}"})
            if number == 2:
                messages[-2]["content"] = "edited"
            done = await here.chat(*messages, **LABELS)
            messages.append({"role": "assistant", "content": done["choices"][0]["message"]["content"]})
        (one, said), _, (three, _) = here.engine.given
        known = np.concatenate([one.prompt_tokens, said.tokens])
        assert np.array_equal(three.prompt_tokens[: len(known)], known)
        assert "edited" in RENDERER.decode(three.prompt_tokens[len(known) :])
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
    (fork,) = forks_of(group.trajectories[0].turns)
    assert fork.turn == 2
    assert fork.at >= len(known)


# --------------------------------------------------------------------------- Responses


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
async def test_a_tool_loop_over_responses_is_one_sequence(stored: bool, stream: bool, tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, **saying(THOUGHT)) as here, openai(here) as client:
        items: list[Any] = [{"role": "user", "content": "Warm?"}]
        asked: dict[str, Any] = {
            "model": "policy",
            "instructions": "Be brief.",
            "tools": [FUNCTION],
            "extra_body": LABELS,
        }
        previous: dict[str, Any] = {}
        for _ in range(3):
            if stream:
                async with client.responses.stream(input=items, **previous, **asked) as events:
                    kinds = [event.type async for event in events]
                    answer: Any = await events.get_final_response()
                assert kinds[-1] == "response.completed"
                assert "response.function_call_arguments.done" in kinds
            else:
                answer = await client.responses.create(input=items, **previous, **asked)
            reasoning, message, call = answer.output
            assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
            assert (reasoning.content[0].text, answer.output_text) == ("It is winter.", "Let me see.")
            assert json.loads(call.arguments) == {"city": "Zürich"}
            details = answer.usage.output_tokens_details
            tokens = here.engine.given[-1][1].tokens
            assert RENDERER.decode(tokens[: details.reasoning_tokens]).endswith("</think>")
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 °C"}
            if stored:
                previous, items = {"previous_response_id": answer.id}, [result]
            else:
                items += [*(item.model_dump(exclude_none=True) for item in answer.output), result]
        assert_one_sequence(here, 3)
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
        assert len(group.trajectories[0].turns) == 3


async def test_other_instructions_start_another_sequence_with_the_same_conversation(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, **saying("Yes.")) as here, openai(here) as client:
        asked: dict[str, Any] = {"model": "policy", "extra_body": LABELS}
        first = await client.responses.create(input="Warm?", instructions="Be brief.", **asked)
        assert first.output_text == "Yes."
        more = {"previous_response_id": first.id, "instructions": "Be rude."}
        await client.responses.create(input="Sure?", **more, **asked)
        text = RENDERER.decode(here.engine.given[1][0].prompt_tokens)
        assert "Be rude." in text
        assert "Be brief." not in text
        assert text.index("Warm?") < text.index("Yes.") < text.index("Sure?")
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
        assert len(group.trajectories[0].turns) == 2


async def test_a_continued_response_stays_in_its_session_with_other_tools(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, **saying("Yes.")) as here, openai(here) as client:
        first = await client.responses.create(model="policy", input="Warm?", tools=[FUNCTION])
        await client.responses.create(
            model="policy", input="Sure?", tools=[FUNCTION], tool_choice="none", previous_response_id=first.id
        )
        await here.feedback(id=first.id, reward=1)
        (group,) = await here.take()
        assert len(group.trajectories[0].turns) == 2


async def test_items_without_ids_are_one_completion(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, **saying(THOUGHT)) as here, openai(here) as client:
        asked: dict[str, Any] = {"model": "policy", "tools": [FUNCTION], "extra_body": LABELS}
        items: list[Any] = [{"role": "user", "content": "Warm?"}]
        answer = await client.responses.create(input=items, **asked)
        sent = [item.model_dump(exclude_none=True, exclude={"id"}) for item in answer.output]
        result = {"type": "function_call_output", "call_id": sent[-1]["call_id"], "output": "21 °C"}
        await client.responses.create(input=[*items, *sent, result], **asked)
        assert_one_sequence(here, 2)


async def test_an_empty_thinking_block_continues_its_tokens(tmp_path: Path) -> None:
    text = "<think>\n\n</think>\n\nHello"
    async with served(tmp_path, group_size=1, **saying(text)) as here, anthropic(here.url) as client:
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 99, "thinking": {"type": "adaptive"}}
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        answer = await client.messages.create(messages=messages, extra_body=LABELS, **asked)
        assert [block.type for block in answer.content] == ["thinking", "text"]
        content = [block.model_dump(exclude_none=True) for block in answer.content]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Bye"}]
        await client.messages.create(messages=messages, extra_body=LABELS, **asked)
        assert_one_sequence(here, 2)


async def test_a_prompt_with_an_example_equal_to_a_completion_is_no_rewriting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path, group_size=1, **saying("yes")) as here:
        example = [ASKED, {"role": "assistant", "content": "yes"}, NEXT]
        for _ in range(2):
            await here.chat(*example, **LABELS)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_a_long_response_is_incomplete(tmp_path: Path) -> None:
    async with served(tmp_path, **saying("one two three")) as here, openai(here) as client:
        cut = await client.responses.create(model="policy", input="Count.", max_output_tokens=5)
        assert (cut.status, cut.output_text) == ("incomplete", "one t")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
    async with served(tmp_path / "thought", **saying(THOUGHT)) as here, openai(here) as client:
        cut = await client.responses.create(model="policy", input="Count.", max_output_tokens=9)
        assert cut.usage is not None
        assert cut.usage.output_tokens_details.reasoning_tokens == cut.usage.output_tokens == 9


async def test_an_unsupported_response_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as here, openai(here) as client:
        for key, more in {
            "tool_choice": {"tools": [FUNCTION], "tool_choice": "required"},
            "tools[0]": {"tools": [{"type": "web_search"}]},
            "text": {"text": {"format": {"type": "json_object"}}},
            "background": {"background": True},
            "input[0]": {"input": [{"type": "item_reference", "id": "x"}]},
            "input": {"input": 3},
            "input[0].colour": {"input": [{"role": "user", "content": "x", "colour": "red"}]},
            "input[0].content[0].file_id": {
                "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]
            },
        }.items():
            asked: dict[str, Any] = {"model": "policy", "input": "x", **more}
            with pytest.raises(OpenAIBadRequest) as refused:
                await client.responses.create(**asked)
            assert refused.value.param == key
        answer = await here.client.post(
            "/v1/responses", json={"model": "policy", "input": "x", "previous_response_id": "resp_gone"}
        )
        assert answer.status_code == 404
        assert not here.engine.given


# --------------------------------------------------------------------------- the parts of a completion


PIECES = [*'ab {}":\n', "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}']


def recorded(text: str, opened: bool = False) -> Recorded:
    return Recorded({"chatcmpl-1": Written(text, opened)}.get, HERMES)


@given(st.lists(st.sampled_from(PIECES)).map("".join), st.booleans())
def test_the_parts_of_a_completion_restore_its_text(text: str, opened: bool) -> None:
    tools = CallableTools(frozenset("f"))
    answer = answer_of(text, tools, opened=opened)
    assert written(answer, ["x", "chatcmpl-1"], recorded(text, opened)) == text
    again = written(answer, [], recorded(text))
    assert answer_of(again, tools).calls == answer.calls


def test_edited_parts_are_written_anew() -> None:
    tools = CallableTools(frozenset({"weather"}))
    edited = answer_of(CALL, tools)._replace(content="Let me guess.")
    again = written(edited, ["chatcmpl-1"], recorded(CALL))
    assert again != CALL
    assert answer_of(again, tools) == edited


def test_ids_of_parts_name_their_completion() -> None:
    for part in (part_id("call", "chatcmpl-ab12", 3), part_id("rs", "chatcmpl-ab12"), "chatcmpl-ab12"):
        assert completion_id(part) == "chatcmpl-ab12"
