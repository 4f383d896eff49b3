"""Streams are sent while tokens are sampled, in each protocol; a dropped connection cancels the generation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from example_counts import number_of
from failing import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI

from tests.serving import RENDERER, Babbler, Served, anthropic, served
from trivium.engines.torch.engine import TorchEngine
from trivium.foundation.errors import RolloutError
from trivium.foundation.registry import resolve
from trivium.serving.bodies import RequestError
from trivium.serving.completion_parts import Answer, Recorded, answer_of, settled
from trivium.serving.requests import read_chat
from trivium.serving.session_records import visible_text
from trivium.serving.streams import StreamedCompletion
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TEMPLATE, TinyModel, tiny_tokenizer
from trivium.text.tool_formats import FORMATS, GPT_OSS, HERMES, CallableTools
from trivium.text.tools import ToolCall
from trivium.types import Completion, Request, Sampling, StopReason, Turn

LABELS: Any = {"session": "s", "task_id": "t"}
USER: Any = [{"role": "user", "content": "Warm?"}]
CALL = '<tool_call>{"name":"weather",  "arguments": {"city": "Zürich"}}</tool_call>'
TEXT = f"<think>\nIt is <b>cold</b>.\n</think>\n\nLet me see. {CALL}{CALL}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def saying(text: str) -> dict[str, Any]:
    """Arguments of an engine that always writes this text."""
    tokens = RENDERER._tokenizer.encode(text, add_special_tokens=False)
    return {"replies": (tuple(tokens),), "max_new_tokens": 300}


# --------------------------------------------------------------------------- what is certain

CALL_OF = ToolCall("f", "{}")
PIECES = {
    how: [*'ab {}":\n', "stop", *how.marks, *how.reasoning, *how.answers, "</tool_call>", how.write([CALL_OF])]
    for how in FORMATS
}
PIECES[GPT_OSS] += [" to=functions.f<|channel|>commentary<|message|>{}", " to=functions.f"]
PIECES[HERMES] += ['<|python_tag|>{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {}}', "<|python_tag|>"]


def test_an_end_of_the_answer_that_is_followed_by_another_one_is_text_and_stays_it() -> None:
    (how,) = [how for how in FORMATS if how.answered]
    tools, text = CallableTools(frozenset(), how), 2 * how.answered
    shown = [settled(text[:size], tools, ()).content for size in range(len(text) + 1)]
    assert shown == sorted(shown)
    assert shown[-1] == how.answered == answer_of(text, tools).content


@given(st.data())
@settings(max_examples=number_of(300))
def test_what_is_certain_begins_the_final_parts(data: st.DataObject) -> None:
    how = data.draw(st.sampled_from(FORMATS))
    text = data.draw(st.lists(st.sampled_from(PIECES[how])).map("".join))
    stop = data.draw(st.sampled_from([(), ("stop", "a{")]))
    tools = CallableTools(data.draw(st.sampled_from([frozenset[str](), frozenset("f")])), how)
    flags: dict[str, Any] = {"reasoning": data.draw(st.booleans()), "opened": data.draw(st.booleans())}
    ends = [text.find(end) + len(end) for end in stop if end in text]
    text = text[: min(ends)] if ends else text  # where an engine ends the completion
    turn = Turn([1], [], [], [], StopReason.STOP if ends else StopReason.EOS, text)  # pyright: ignore[reportArgumentType]
    whole, before = answer_of(visible_text(turn, stop), tools, **flags), Answer(None, "")
    for size in range(len(text) + 1):
        now = settled(text[:size], tools, stop, **flags)
        assert now.content.startswith(before.content)
        assert (now.reasoning or "").startswith(before.reasoning or "")
        before = now
    assert whole.content.startswith(before.content)
    assert before.reasoning is None or (whole.reasoning or "").startswith(before.reasoning)
    assert not before.content or (before.reasoning is None) is (whole.reasoning is None)


def test_the_mark_that_ends_an_answer_is_held_back_until_it_is_none() -> None:
    tools = CallableTools(frozenset(), resolve("tool_calls", "cohere"))
    texts = ["Yes.", "Yes.<|END_RESP", "Yes.<|END_RESPONSE|>", "Yes.<|END_RESPONSE|> No"]
    assert [settled(text, tools, ()).content for text in texts] == ["Yes.", "Yes.", "Yes.", texts[-1]]


# --------------------------------------------------------------------------- the protocols


class Whole:
    """An engine that reports no tokens before the end."""

    def __init__(self, engine: Babbler) -> None:
        self.version, self.max_context = engine.version, engine.max_context
        self.generate, self.load, self.close = engine.generate, engine.load, engine.close


async def chat_stream(here: Served) -> dict[str, Any]:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    chunks = []
    async with AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="policy", messages=USER, tools=[tool], logprobs=True, stream=True, extra_body=LABELS
        )
        chunks = [chunk.choices[0] async for chunk in stream]
    deltas = [chunk.delta for chunk in chunks]
    texts = [delta.content for delta in deltas if delta.content]
    calls: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        assert call.function is not None
        calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
    entries = [entry for chunk in chunks if chunk.logprobs is not None for entry in chunk.logprobs.content or ()]
    assert [entry.logprob for entry in entries] == here.engine.given[0][1].log_prob.tolist()
    assert chunks[-1].finish_reason == "tool_calls"
    return {"texts": texts, "calls": [calls[index] for index in sorted(calls)]}


async def message_stream(here: Served) -> dict[str, Any]:
    tool: Any = {"name": "weather", "input_schema": SCHEMA}
    async with (
        anthropic(here.url) as client,
        client.messages.stream(
            model="policy",
            max_tokens=300,
            messages=USER,
            tools=[tool],
            thinking={"type": "adaptive"},
            extra_body=LABELS,
        ) as stream,
    ):
        events = [event async for event in stream]
        final = await stream.get_final_message()
    deltas: list[Any] = [event.delta for event in events if event.type == "content_block_delta"]
    thinking, text, *calls = final.content
    assert (thinking.type, text.type, final.stop_reason) == ("thinking", "text", "tool_use")
    return {
        "thoughts": [delta.thinking for delta in deltas if delta.type == "thinking_delta"],
        "texts": [delta.text for delta in deltas if delta.type == "text_delta"],
        "calls": [json.dumps(call.input) for call in calls if call.type == "tool_use"],
    }


async def response_stream(here: Served) -> dict[str, Any]:
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    async with (
        AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="policy", input="Warm?", tools=[tool], extra_body=LABELS) as stream,
    ):
        events: list[Any] = [event async for event in stream]
        final: Any = await stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    dumps = [item.model_dump(exclude={"parsed_arguments"}) for item in done]
    kept = [
        item.model_dump(exclude={"parsed_arguments": True, "content": {"__all__": {"parsed"}}}) for item in final.output
    ]
    assert dumps == kept
    return {
        "thoughts": [event.delta for event in events if event.type == "response.reasoning_text.delta"],
        "texts": [event.delta for event in events if event.type == "response.output_text.delta"],
        "calls": [item.arguments for item in final.output if item.type == "function_call"],
    }


@pytest.mark.parametrize("reports", [True, False], ids=["as sampled", "at the end"])
@pytest.mark.parametrize("read", [chat_stream, message_stream, response_stream])
async def test_text_is_streamed_and_what_may_be_a_call_is_held_back(read: Any, reports: bool, tmp_path: Path) -> None:
    babbler = Babbler(replies=saying(TEXT)["replies"])
    more: dict[str, Any] = {} if reports else {"policy": Whole(babbler)}
    async with served(tmp_path, group_size=1, **saying(TEXT), **more) as here:
        here.engine = here.engine if reports else babbler
        parts = await read(here)
        await here.feedback(**LABELS, reward=1)
        (group,) = await here.take()
    (turn,) = group.trajectories[0].turns
    assert turn.text == TEXT
    reasoning = read is not chat_stream
    whole = answer_of(TEXT, CallableTools(frozenset({"weather"})), reasoning=reasoning)
    assert "".join(parts["texts"]) == whole.content
    assert "".join(parts.get("thoughts", ())) == (whole.reasoning or "")
    assert parts["calls"] == [call.arguments for call in whole.calls]
    assert len(parts["texts"]) > 2 if reports else len(parts["texts"]) == 1


OPENED = ChatRenderer(
    tiny_tokenizer("bytes"), chat_template=TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_that_the_prompt_opens_is_a_block_and_continues_its_tokens(
    stream: bool, tmp_path: Path
) -> None:
    text = "It is cold.\n</think>\n\nYes, <b>cold</b>."
    async with (
        served(tmp_path, group_size=1, renderer=OPENED, **saying(text)) as here,
        anthropic(here.url) as client,
    ):
        messages: list[Any] = [*USER]
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 300, "thinking": {"type": "adaptive"}}
        for _ in range(2):
            if stream:
                async with client.messages.stream(messages=messages, extra_body=LABELS, **asked) as events:
                    final: Any = await events.get_final_message()
            else:
                final = await client.messages.create(messages=messages, extra_body=LABELS, **asked)
            thinking, answer = final.content
            assert (thinking.thinking, answer.text) == ("It is cold.", "Yes, <b>cold</b>.")
            blocks = [block.model_dump(exclude_none=True) for block in final.content]
            messages += [{"role": "assistant", "content": blocks}, *USER]
        (one, done), (two, _) = here.engine.given
        known = [*one.prompt_tokens, *done.tokens]
        assert [*two.prompt_tokens[: len(known)]] == known


HARMONY = ChatRenderer(tiny_tokenizer("bytes"), chat_template=TEMPLATE, tool_calls="gpt_oss")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_channel_of_a_chat_is_left_out_and_its_tokens_continue(stream: bool, tmp_path: Path) -> None:
    text = "<|channel|>final<|message|>Yes, very."
    thought = answer_of(
        f"<|channel|>analysis<|message|>Cold.<|end|><|start|>assistant{text}", CallableTools(format=GPT_OSS)
    )
    assert (thought.reasoning, thought.content) == ("Cold.", "Yes, very.")
    async with served(tmp_path, group_size=1, renderer=HARMONY, **saying(text)) as here:
        messages: list[Any] = [*USER]
        for _ in range(2):
            async with AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
                if stream:
                    async with client.chat.completions.stream(
                        model="policy", messages=messages, extra_body=LABELS
                    ) as events:
                        final: Any = await events.get_final_completion()
                else:
                    final = await client.chat.completions.create(model="policy", messages=messages, extra_body=LABELS)
            assert final.choices[0].message.content == "Yes, very."
            messages += [{"role": "assistant", "content": "Yes, very."}, *USER]
        (one, done), (two, _) = here.engine.given
        known = [*one.prompt_tokens, *done.tokens]
        assert [*two.prompt_tokens[: len(known)]] == known


async def test_a_stream_of_arbitrary_tokens_has_the_recorded_text(tmp_path: Path) -> None:
    async with served(tmp_path, group_size=1, max_new_tokens=8) as here:
        for number in range(30):
            labels = {"session": f"s{number}", "evaluation": True, "stream": True}
            body = {"model": "policy", "messages": [{"role": "user", "content": f"{number}"}], **labels}
            answer = await here.client.post("/v1/chat/completions", json=body)
            chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
            texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
            assert "".join(texts) == RENDERER.decode(here.engine.given[-1][1].tokens)


def stream_of(renderer: Any) -> StreamedCompletion:
    chat = read_chat({"model": "m", "messages": USER}, {}, "m", Sampling(300), Recorded(lambda _: None, HERMES))
    return StreamedCompletion(0, chat, renderer, asyncio.Event())


def test_a_character_after_many_undecodable_tokens_is_whole() -> None:
    emoji = RENDERER._encode("\U0001f600").tolist()
    invalid = next(i for i in range(263) if RENDERER.decode([i]) == "\ufffd" and i not in emoji)
    for before in range(55, 70):
        tokens = [*[invalid] * before, *emoji, *RENDERER._encode("ok").tolist()]
        completion, texts = stream_of(RENDERER), []
        for token in tokens:
            completion.add([token], [0.0])
            texts += [step.text for step in completion.steps()]
        assert "".join(texts) == RENDERER.decode(tokens)


def test_text_that_changes_after_it_was_sent_is_an_error() -> None:
    completion = stream_of(RENDERER)
    completion.add(RENDERER._encode("abc").tolist(), [0.0] * 3)
    assert "".join(step.text for step in completion.steps()) == "abc"
    completion._text = "a?c"  # as a tokenizer with byte fallback does after an invalid byte
    with refused(RequestError, "abc", "a?c"):
        list(completion.steps())


# --------------------------------------------------------------------------- how a stream ends early


async def test_a_dropped_stream_frees_its_row_and_is_not_recorded(tmp_path: Path) -> None:
    model = TinyModel(TinyModel.Config(alphabet="bytes", hidden=32, mlp=48, kv_heads=2, max_position=4096), seed=0)
    engine = TorchEngine(
        TorchEngine.Config(),
        model_dir=model.materialize(tmp_path / "model"),
        eos_token_ids=frozenset(),
        decode=RENDERER.decode,
        threads=1,
    )
    try:
        async with served(tmp_path, group_size=1, policy=engine, max_new_tokens=4000) as here:
            body = {"model": "policy", "messages": USER, "stream": True, **LABELS}
            async with here.client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                texts = ""
                while len(texts) < 20:
                    line = await anext(lines)
                    if line.startswith("data: {"):
                        texts += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                assert engine._batch.live == 1  # it is still sampling
            await here.eventually(in_flight=0, sessions=0)
            assert engine.counters["steps"] < 4000
            body["max_tokens"] = 5
            whole = (await here.chat(*USER, max_tokens=5, **LABELS))["choices"][0]
            assert engine._batch.live == 0
            await here.feedback(id=whole["id"], reward=1)
            (group,) = await here.take()
            (turn,) = group.trajectories[0].turns
            assert len(turn.tokens) == 5
    finally:
        await engine.close()


class Breaks(Babbler):
    """An engine that fails a completion after two tokens."""

    async def stream(self, request: Request, on_tokens: Any) -> Completion:
        on_tokens([65, 66], [-0.5, -0.5])
        raise RolloutError("a completion", "a scripted failure", "try another")


async def test_an_error_in_a_stream_is_an_event_of_the_protocol_and_nothing_is_recorded(tmp_path: Path) -> None:
    from anthropic import APIStatusError

    async with served(tmp_path, group_size=1, policy=Breaks()) as here:
        async with AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(APIError) as refused:
                async for _ in await client.chat.completions.create(model="policy", messages=USER, stream=True):
                    pass
            assert "a scripted failure" in refused.value.message
            events = [event async for event in await client.responses.create(model="policy", input="x", stream=True)]
            assert events[-1].type == "error"
            assert "a scripted failure" in events[-1].message
        async with anthropic(here.url) as client:
            with pytest.raises(APIStatusError) as failed:
                async for _ in await client.messages.create(model="policy", max_tokens=8, messages=USER, stream=True):
                    pass
        assert failed.value.body["error"]["type"] == "invalid_request_error"  # pyright: ignore
        await here.eventually(in_flight=0, sessions=0)
