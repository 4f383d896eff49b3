"""Every format of calls that ships keeps the contract; the notations of real models are read."""

from __future__ import annotations

import json
import string

import pytest
from example_counts import number_of
from failing import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from trivium.foundation.errors import DataError, UnknownName
from trivium.foundation.registry import CATALOGUE, resolve
from trivium.serving.completion_parts import answer_of
from trivium.testing import check_tool_format
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TEMPLATE, tiny_tokenizer
from trivium.text.tool_formats import MAX_DEPTH, CallableTools, ToolFormat, detected, format_of, rendered_by
from trivium.text.tool_formats.detection import Render
from trivium.text.tool_formats.json_calls import COHERE, DEEPSEEK, GPT_OSS, HERMES, LLAMA3, MISTRAL
from trivium.text.tool_formats.literal_calls import GEMMA, LFM
from trivium.text.tool_formats.tagged_calls import GLM, MINIMAX, MUSE, XML
from trivium.text.tools import TOOLS, ToolCall, attempted_calls, read_tool_calls
from trivium.types import Message

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
        (HERMES, '<tool_call>{"name": "g"}</tool_call>', "", (G,)),
        (HERMES, '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", (G,)),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": [1]}"}</tool_call>', "", (F,)),
        (LLAMA3, '{"name": "g"}', "", (G,)),
        (LLAMA3, '{"name": "f", "parameters": "{\\"x\\": [1]}"}; {"name": "g", "parameters": ""}', "", (F, G)),
        (MISTRAL, '[TOOL_CALLS][{"name": "g"}, {"name": "g", "arguments": null}]', "", (G, G)),
        (MISTRAL, "[TOOL_CALLS]g[ARGS]null", "", (G,)),
        (DEEPSEEK, f"{D._BEGIN}{D._CALL}g{D._SEP}null{D._OVER}{D._END}", "", (G,)),
        (GPT_OSS, '<|channel|>commentary to=functions.f json<|message|>"{\\"x\\": [1]}"<|call|>', "", (F,)),
        (COHERE, 'Hm. <|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "g"}\n]<|END_ACTION|>', "Hm.", (G,)),
        (XML, "<tool_call>\n<function=f>\n<parameter=x>\n[1]\n</parameter>\n</function>\n</tool_call>", "", (F,)),
        (XML, "Hm.\n<tool_call><function=g></function></tool_call>\n", "Hm.", (G,)),
        (GLM, "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>", "", (F,)),
        (GLM, "<tool_call>f<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call>", "", (F,)),
        (GLM, "<tool_call>g</tool_call>\n<tool_call>g\n</tool_call>", "", (G, G)),
        (
            MINIMAX,
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">[1]</parameter>\n</invoke>\n'
            '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
            "",
            (F, G),
        ),
        (
            MUSE,
            ' to=f<|message|><atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="x">[1]'
            "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=g<|message|>"
            '<atem:function_calls>\n<atem:invoke name="g">\n</atem:invoke>\n</atem:function_calls><|eot|>',
            "",
            (F, G),
        ),
        (LFM, "Hm. <|tool_call_start|>[f(x=[1]), g()]<|tool_call_end|>", "Hm.", (F, G)),
        (GEMMA, "<|tool_call>call:f{x:[1]}<tool_call|><|tool_call>call:g{}<tool_call|><|tool_response>", "", (F, G)),
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
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{</tool_call>',
        NESTED.arguments.join(['<tool_call>{"name": "f", "arguments": {"y": ', "}}</tool_call>"]),
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [3]",
        "[TOOL_CALLS]f[ARGS]",
        f"{D._BEGIN}{D._CALL}f{D._SEP}{{}}{D._END}",
        "<|channel|>commentary to=functions.f<|message|>{",
        "<tool_call><function=f></tool_call>",
        "<tool_call><function=f><parameter=x>1</function></tool_call>",
        "<tool_call>f<arg_key>x</arg_key></tool_call>",
        "<tool_call>f</tool_call> and more",
        "<|tool_call_start|>f(x=1)<|tool_call_end|>",
        "<|tool_call_start|>[f(x=)]<|tool_call_end|>",
        "<|tool_call_start|>[f(" + "x=[" * 100_000,
        "<|tool_call>call:f{x:}<tool_call|>",
        "<|tool_call>call:f{x:1}",
        "<|START_ACTION|>[]<|END_ACTION|>",
        "{" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=range(23),
)
def test_what_is_not_a_call_is_text(kind: str, text: str) -> None:
    assert resolve("tool_calls", kind).read(text) is None


# --------------------------------------------------------------------------- values without types


VERSE = " \n a < b </b> 'x' \"y\" \\n {z} Zürich 🌍\n"


@pytest.mark.parametrize(
    "text", [VERSE, "", "\n", "it's", "7", "true", "None", '"7"', "</parameter>", "[1]", "a, b=c)]", "', '"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_text_is_an_argument(kind: str, text: str) -> None:
    how: ToolFormat = resolve("tool_calls", kind)
    call = ToolCall("f", json.dumps({"t": text, "n": {"t": [text, 1, None, True]}}))
    for each in (how, how.typed({"f": {"properties": {"t": {"type": "string"}}}})):
        assert each.read(each.write([call])) == ("", (call,))


def xml(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("7", {}, 7),
        ("7", {"type": "string"}, "7"),
        ("7", {"type": "integer"}, 7),
        ("007", {"type": "string"}, "007"),
        ("7", {"type": ["string", "null"]}, "7"),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("7", {"anyOf": [{"type": "string"}, {"type": "number"}]}, 7),
        ("1e400", {}, "refused"),
        ("True", {"type": "boolean"}, True),
        ("True", {"type": "string"}, "True"),
        ("None", {}, None),
        ("1", {"enum": ["1", "2"], "type": "string"}, "1"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ('{"a": [1]}', {"type": "string"}, '{"a": [1]}'),
        ('"quoted"', {"type": "string"}, '"quoted"'),
        ("  two\n\nlines ", {}, "  two\n\nlines "),
        ("x", {"type": "integer"}, "x"),
        ("x", {"$ref": "#/$defs/X"}, "x"),
    ],
)
def test_the_schema_gives_a_value_its_type(written: str, schema: dict[str, object], value: object) -> None:
    _, calls = read_tool_calls(xml(written), {"f": {"properties": {"x": schema}}}, XML)
    assert [json.loads(call.arguments) for call in calls] == ([] if value == "refused" else [{"x": value}])


def test_what_templates_write_unescaped_is_read() -> None:
    assert XML.read(xml("a </parameter> b")) == ("", (ToolCall("f", '{"x": "a </parameter> b"}'),))
    text = "<|tool_call_start|>[f(x='it's\nso', y=['a', None, True], z={\"b\": null})]<|tool_call_end|>"
    _, (call, *_) = read_tool_calls(text, {"f"}, LFM)
    assert json.loads(call.arguments) == {"x": "it's\nso", "y": ["a", None, True], "z": {"b": None}}
    text = '<|tool_call>call:f{x:<|"|>"a", {b}\n<|"|>,y:[None,1.5,{z:false}]}<tool_call|>'
    _, (call, *_) = read_tool_calls(text, {"f"}, GEMMA)
    assert json.loads(call.arguments) == {"x": '"a", {b}\n', "y": [None, 1.5, {"z": False}]}


# --------------------------------------------------------------------------- the chat template


def template(call: str, *, condition: str = "true", between: str = "", before: str = "", after: str = "") -> str:
    """A template that writes calls like this under a condition, and says which tools there are."""
    each = f"{{% set f = c.function %}}{call}{{% if not loop.last %}}{between}{{% endif %}}"
    calls = f"{{% for c in m.tool_calls %}}{each}{{% endfor %}}"
    return (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
        f"{{% if m.tool_calls and ({condition}) %}}{before}{calls}{after}{{% endif %}}<|end|>{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


ARGUMENTS = "{% for k, v in f.arguments.items() %}%s{% endfor %}"
RAW = "{{ v if v is string else v | tojson }}"
JSON_CALL = "{'name': f.name, '%s': f.arguments} | tojson"
GEMMA_MACRO = (
    "{% macro show(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{% raw %}{{% endraw %}{% for k, w in v | dictsort %}{{ k }}:{{ show(w) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{% raw %}}{% endraw %}"
    "{% elif v is sequence %}[{% for w in v %}{{ show(w) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
XML_CALL = (
    "<tool_call>\n<function={{ f.name }}>\n"
    + ARGUMENTS.replace("%s", "<parameter={{ k }}>\n" + RAW + "\n</parameter>\n")
    + "</function>\n</tool_call>\n"
)
TEMPLATES: dict[str, tuple[str, ToolFormat]] = {
    "hermes": (template("<tool_call>{{ " + JSON_CALL % "arguments" + " }}</tool_call>"), HERMES),
    "after an empty block of reasoning": (template(XML_CALL, before="<think>\n\n</think>\n\n"), XML),
    "one call, without a mark": (
        template(
            "{% if not loop.first %}{{ raise_exception('one call') }}{% endif %}{{ " + JSON_CALL % "parameters" + " }}"
        ),
        LLAMA3,
    ),
    "identifiers of nine characters": (
        template(
            "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
            "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"
        ),
        MISTRAL,
    ),
    "arguments as text, no content": (
        template(
            f"{D._CALL}{{{{ f.name + '{D._SEP}' + f.arguments }}}}{D._OVER}",
            condition="m.content is none or m.content is undefined",
            before=D._BEGIN,
            after=D._END,
        ),
        DEEPSEEK,
    ),
    "the first call only": (
        template(
            "{% if loop.first %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
            "{{ f.arguments | tojson }}<|call|>{% endif %}"
        ),
        GPT_OSS,
    ),
    "a list": (
        template(
            "{{ {'tool_call_id': loop.index0 | string, 'tool_name': f.name, 'parameters': f.arguments} | tojson }}",
            between=",",
            before="<|START_ACTION|>[",
            after="]<|END_ACTION|>",
        ),
        COHERE,
    ),
    "xml": (template(XML_CALL), XML),
    "contents in parts": (
        template(XML_CALL).replace("{{ m.content or '' }}", "{% for p in m.content %}{{ p['text'] + '' }}{% endfor %}"),
        XML,
    ),
    "xml with Jinja's texts": (template(XML_CALL.replace("v | tojson", "(v | tojson if v is mapping else v)")), XML),
    "glm": (
        template(
            "<tool_call>{{ f.name }}\n"
            + ARGUMENTS.replace("%s", "<arg_key>{{ k }}</arg_key>\n<arg_value>" + RAW + "</arg_value>\n")
            + "</tool_call>"
        ),
        GLM,
    ),
    "minimax, with results": (
        template(
            '<invoke name="{{ f.name }}">\n'
            + ARGUMENTS.replace("%s", '<parameter name="{{ k }}">' + RAW + "</parameter>\n")
            + "</invoke>\n",
            condition="not loop.last",
            before="<minimax:tool_call>\n",
            after="</minimax:tool_call>",
        ),
        MINIMAX,
    ),
    "muse": (
        template(
            '<|start|>assistant to={{ f.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n'
            + ARGUMENTS.replace("%s", '<atem:parameter name="{{ k }}">' + RAW + "</atem:parameter>\n")
            + "</atem:invoke>\n</atem:function_calls><|eom|>"
        ),
        MUSE,
    ),
    "lfm": (
        template(
            "{{ f.name }}("
            + ARGUMENTS.replace(
                "%s", "{{ k }}={{ '\"%s\"' % v if v is string else v | tojson }}{{ '' if loop.last else ', ' }}"
            )
            + ")",
            between=", ",
            before="<|tool_call_start|>[",
            after="]<|tool_call_end|>",
        ),
        LFM,
    ),
    "gemma": (
        GEMMA_MACRO
        + template("<|tool_call>call:{{ f.name }}{{ show(f.arguments) }}<tool_call|>", after="<|tool_response>"),
        GEMMA,
    ),
}


def rendering(source: str) -> Render:
    return rendered_by(tiny_tokenizer("bytes"), source)


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_format_is_the_one_that_reads_what_the_template_writes(family: str) -> None:
    source, how = TEMPLATES[family]
    assert format_of(rendering(source)) is how
    assert format_of(rendering(source), "mistral") is MISTRAL


def test_a_template_without_calls_has_a_default() -> None:
    refuses = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    for source in (TEMPLATE, refuses):
        assert detected(rendering(source)) == (HERMES, "")
    with pytest.raises(UnknownName):
        format_of(rendering(TEMPLATE), "mistrall")


def test_a_template_that_only_describes_tools_has_every_format() -> None:
    how = ChatRenderer(tiny_tokenizer("bytes"), chat_template=template("", condition="false")).tool_format
    schemas = {"f": {"properties": {"x": {"type": "string"}}}}
    for kind in KINDS:
        own: ToolFormat = resolve("tool_calls", kind)
        written = own.typed(schemas).write([ToolCall("f", '{"x": "7"}')])
        assert read_tool_calls(written, schemas, how)[1] == (ToolCall("f", '{"x": "7"}'),)
        assert {*own.marks} <= {*how.marks}


def test_calls_that_no_format_reads_are_an_error_once_there_are_tools() -> None:
    source = template("CALL {{ f.name }} WITH {{ f.arguments | tojson }} END")
    renderer = ChatRenderer(tiny_tokenizer("bytes"), chat_template=source)
    question, how = Message("user", "hi"), renderer.tool_format
    assert "hi" in renderer.decode(renderer.render([question]).tokens)
    assert CallableTools(frozenset(), how).read("CALL f") == ("CALL f", ())
    with refused(DataError, "model.tool_calls", "CALL", *KINDS):
        CallableTools(frozenset({"f"}), how)
    assert "hi" in renderer.decode(renderer.render([Message(TOOLS, "[]"), question]).tokens)


# --------------------------------------------------------------------------- broken calls


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_is_cut_or_of_an_unknown_tool_is_attempted(kind: str) -> None:
    how: ToolFormat = resolve("tool_calls", kind)
    written, schemas = how.write([F]), {"f": {}}
    assert attempted_calls(written, schemas, how) == ((F,), "")
    assert attempted_calls(written, {"other": {}}, how) == ((F,), "")
    for broken in (written[:-3], f"Hm. {written} and more", written.replace("[1]", '[1", ')):
        if broken != written[:-3] and how.typed(schemas) is not how and '[1", ' in broken:
            continue  # any text is a value there
        calls, fault = attempted_calls(broken, schemas, how)
        assert calls == ()
        assert fault
    for text in ("", "An answer.", '{"x": 1}', '{"name": "Rome"}', "to be"):
        assert attempted_calls(text, schemas, how) == ((), "")
    assert attempted_calls(written, {}, how) == ((), "")


@pytest.mark.parametrize(
    ("tokens", "kind"), [(DEEPSEEK.marks, "deepseek"), (("<|python_tag|>",), "llama3"), (("<tool_call>",), "hermes")]
)
def test_a_template_that_writes_no_call_has_the_format_of_the_tokens_of_its_tokenizer(
    tokens: tuple[str, ...], kind: str
) -> None:
    tokenizer = tiny_tokenizer("bytes", more=tokens)
    assert ChatRenderer(tokenizer, chat_template=TEMPLATE).tool_format is resolve("tool_calls", kind)
    assert ChatRenderer(tokenizer, chat_template=TEMPLATE, tool_calls="mistral").tool_format is MISTRAL


def test_special_tokens_that_mark_calls_stay_in_the_text_of_a_completion() -> None:
    tokenizer = tiny_tokenizer("bytes")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[OTHER]"]})
    text = 'Hm [TOOL_CALLS][{"name": "g", "arguments": {}}]'
    tokens = tokenizer.encode(text.replace("Hm", "[OTHER]Hm"), add_special_tokens=False)
    template = TEMPLATES["identifiers of nine characters"][0]
    assert ChatRenderer(tokenizer, chat_template=template, strip_special_tokens=True).decode(tokens) == text
    assert ChatRenderer(tokenizer, chat_template=template).decode(tokens) == text.replace("Hm", "[OTHER]Hm")
    assert MISTRAL.read(text) == ("Hm", (G,))
