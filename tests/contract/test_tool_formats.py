"""Every format of calls that ships keeps the contract; the notations of real models are read."""

from __future__ import annotations

import json
import string

import pytest
from example_counts import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.errors import UnknownName
from trivium.registry import CATALOGUE, resolve
from trivium.serving.completion_parts import answer_of
from trivium.testing import check_tool_format
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TEMPLATE, tiny_tokenizer
from trivium.text.tool_formats import (
    DEEPSEEK,
    GPT_OSS,
    HERMES,
    LLAMA3,
    MAX_DEPTH,
    MISTRAL,
    CallableTools,
    ToolFormat,
    format_of,
)
from trivium.text.tools import ToolCall, read_tool_calls

KINDS = sorted(CATALOGUE["tool_calls"])
MARKS = [
    mark for kind in KINDS for mark in (*resolve("tool_calls", kind).marks, "</tool_call>", "```", ";", "<|call|>")
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(MARKS)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(string.ascii_letters + string.digits + "_-.", min_size=1, max_size=20) | st.just("function")
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(TEXTS, VALUES, max_size=4).map(json.dumps))


@pytest.mark.parametrize("kind", KINDS)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), content=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=number_of(60))
def test_each_format_reads_what_it_writes(kind: str, calls: list[ToolCall], content: str) -> None:
    how: ToolFormat = resolve("tool_calls", kind)
    plain = content.strip().lstrip("{")
    plain = "" if any(mark in plain for mark in how.marks) else plain.rstrip("<[ \\n")
    check_tool_format(how, calls, content=plain.strip())


F, G = ToolCall("f", '{"x": [1]}'), ToolCall("g", "{}")
NESTED = ToolCall("f", '{"x": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}")
D = DEEPSEEK


@pytest.mark.parametrize(
    ("how", "text", "content", "calls"),
    [
        (HERMES, 'So:\n<tool_call>{"name": "g", "parameters": {}}</tool_call>', "So:", (G,)),
        (HERMES, '{"name": "f", "parameters": {"x": [1]}}', "", (F,)),
        (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"x": [1]}}; {"name": "g", "parameters": {}}', "", (F, G)),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1]}, "id": "abcdefghi"}]', "", (F,)),
        (MISTRAL, 'Hm. [TOOL_CALLS]f[CALL_ID]a1[ARGS]{"x": [1]}[TOOL_CALLS]g[ARGS]{}', "Hm.", (F, G)),
        (
            DEEPSEEK,
            f'Hm.{D._BEGIN}{D._CALL}function{D._SEP}f\n```json\n{{"x": [1]}}\n```{D._OVER}\n'
            f"{D._CALL}function{D._SEP}g\n```json\n{{}}\n```{D._OVER}{D._END}",
            "Hm.",
            (F, G),
        ),
        (GPT_OSS, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": [1]}', "", (F,)),
        (GPT_OSS, "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>", "", (G,)),
        (HERMES, f'<tool_call>{{"name": "f", "arguments": {NESTED.arguments}}}</tool_call>', "", (NESTED,)),
        (GPT_OSS, " to=functions.g<|channel|>commentary<|message|>{}", "", (G,)),
    ],
)
def test_the_notations_of_models_are_read(
    how: ToolFormat, text: str, content: str, calls: tuple[ToolCall, ...]
) -> None:
    assert how.read(text) == (content, calls)
    assert read_tool_calls(text, {"f", "g"}) == (content, calls)
    assert read_tool_calls(text, {"h"}) == (text, ())


CALL = HERMES.write([G])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<think>I could write <tool_call>.</think>\n{CALL}", "<think>I could write <tool_call>.</think>", (G,)),
        (f"<think>Hm.</think>\n So: {CALL}", "<think>Hm.</think>\n So:", (G,)),
        ('<think>Hm.</think>{"name": "g", "parameters": {}}', "<think>Hm.</think>", (G,)),
        (f"<think>Maybe {CALL}", f"<think>Maybe {CALL}", ()),
        (f"<think>Maybe {CALL}</think> No.", f"<think>Maybe {CALL}</think> No.", ()),
    ],
    ids=range(5),
)
def test_nothing_in_the_reasoning_is_a_call(text: str, content: str, calls: tuple[ToolCall, ...]) -> None:
    assert read_tool_calls(text, {"g"}) == (content, calls)
    tools = CallableTools(frozenset({"g"}), HERMES)
    assert answer_of(text, tools, reasoning=False) == (None, content, calls)
    opened = content.removeprefix("<think>"), calls
    assert answer_of(text.removeprefix("<think>"), tools, reasoning=False, opened=True)[1:] == opened
    assert answer_of(text, tools).calls == calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f"}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>',
        NESTED.arguments.join(['<tool_call>{"name": "f", "arguments": {"y": ', "}}</tool_call>"]),
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [3]",
        "[TOOL_CALLS]f[ARGS]",
        f"{D._BEGIN}{D._CALL}f{D._SEP}{{}}{D._END}",
        "<|channel|>commentary to=functions.f<|message|>{",
        "{" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=range(13),
)
def test_what_is_not_a_call_is_text(kind: str, text: str) -> None:
    assert resolve("tool_calls", kind).read(text) is None


def test_the_chat_template_or_the_config_chooses_the_format() -> None:
    for template, how in {
        "{{ '<|channel|>' }}": GPT_OSS,
        "<｜tool▁calls▁begin｜>": DEEPSEEK,
        "[TOOL_CALLS]": MISTRAL,
        "<tool_call>": HERMES,
        '{"name": ..., "parameters": ...}': LLAMA3,
        "{{ message.content }}": HERMES,
    }.items():
        assert format_of(template) is how
    assert format_of("<tool_call>", "mistral") is MISTRAL
    with pytest.raises(UnknownName):
        format_of("", "mistrall")


def test_special_tokens_that_mark_calls_stay_in_the_text_of_a_completion() -> None:
    tokenizer = tiny_tokenizer("bytes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[OTHER]"]})
    text = 'Hm [TOOL_CALLS][{"name": "g", "arguments": {}}]'
    tokens = tokenizer.encode(text.replace("Hm", "[OTHER]Hm"), add_special_tokens=False)
    for template, decoded in {
        TEMPLATE + "{# [TOOL_CALLS] #}": text,
        TEMPLATE: text.replace("[TOOL_CALLS]", ""),
    }.items():
        assert ChatRenderer(tokenizer, chat_template=template).decode(tokens) == decoded
    assert MISTRAL.read(text) == ("Hm", (G,))
