"""What chat templates of real families do with roles, results, calls, tools and dates: small templates with their
habits."""

import json
from datetime import date
from typing import Any

import numpy as np
import pytest
from failing import refused
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trivium.foundation.errors import DataError, TemplateRefusal
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import tiny_tokenizer
from trivium.types import Message, Prompt, StopReason, ToolCall

OPENING = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + OPENING
NO_RESULTS = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endfor %}" + OPENING
)
"""Leaves out every role that it does not name."""
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') or (m.role == 'user') == loop.index0 % 2 %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
) + OPENING
"""Knows two roles, in turn."""
NAMES_ITS_CALL = (
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|tool|>{{ last.name }}: {{ m.content }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set last.name = call.function.name %}"
    "[CALL]{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endif %}{% endfor %}"
) + OPENING
"""Writes a result under the name of the call before it."""
ASKS_FOR_IDS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% if m.tool_call_id is not defined or "
    "m.tool_call_id | length != 9 %}{{ raise_exception('an id of nine characters') }}{% endif %}"
    "<|tool|>{{ m.tool_call_id }} {{ m.content }}<|end|>{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
) + OPENING
TEXT_ARGUMENTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if not m.content %}{% for call in m.tool_calls %}"
    "{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|end|>"
    "{% endfor %}"
) + OPENING
"""Takes arguments as text, and calls only without a content."""
CLOSES_A_BLOCK = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""Opens a block of reasoning, and writes an empty one into histories."""
THINKS_AFTER_THE_LAST_QUESTION = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set last.at = m.content %}{% endfor %}"
    "{% set seen = namespace(last=false) %}{% for m in messages %}"
    "{% if m.role == 'user' and m.content == last.at %}{% set seen.last = true %}{% endif %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and seen.last %}<think></think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
) + OPENING
"""Writes an empty block of reasoning into the turns after the last question."""
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
) + OPENING
DATED = "<|system|>Today: {{ strftime_now('%d %b %Y') }}<|end|>" + EACH
TOOLS_IN_SYSTEM = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tools or '' }}<|end|>{% endfor %}" + OPENING
)
XML_TOOLS = "{% if xml_tools %}<tools>{{ xml_tools }}</tools>{% endif %}" + EACH
TOOLS = Message("tools", json.dumps([{"type": "function", "function": {"name": "add", "description": "Adds."}}]))
USER = Message("user", "1+1=")


def renderer(template: str, **options: Any) -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer("bytes"), chat_template=template, **options)


def written(tokens: Any) -> str:
    return tiny_tokenizer("bytes").decode(np.asarray(getattr(tokens, "tokens", tokens)).tolist())


def answered(chat: ChatRenderer, history: list[Message], completion: str, *new: Message) -> str:
    """The conversation after a sampled completion and what follows, whose beginning is unchanged."""
    seen = chat.render(history).then(Prompt(np.asarray(tiny_tokenizer("bytes")(completion)["input_ids"], np.int32)))
    longer = chat.extend([*history, Message("assistant", "as text")], seen, StopReason.EOS, new)
    assert longer.tokens[: len(seen)].tolist() == seen.tokens.tolist()
    return written(longer)


# ------------------------------------------------------------------------------- what is left out


@pytest.mark.parametrize("role", ["tool", "critic"])
def test_a_message_that_the_template_leaves_out_is_an_error_that_names_it(role: str) -> None:
    chat = renderer(NO_RESULTS)
    with refused(TemplateRefusal, "message 2", role, "model.roles"):
        chat.render([USER, Message(role, "2"), Message("user", "2")])
    with refused(TemplateRefusal, "tool" if role == "tool" else role):
        answered(chat, [USER], "x<|end|>", Message(role, "1"))


def test_the_text_of_another_message_does_not_hide_what_is_left_out() -> None:
    with refused(TemplateRefusal, "message 1"):
        renderer(NO_RESULTS).render([Message("critic", "1"), Message("user", "1")])


def test_a_mapped_result_is_read_as_one_and_joins_its_neighbours() -> None:
    chat = renderer(NO_RESULTS, roles={"tool": "user"})
    text = answered(chat, [USER], "call<|end|>", Message("tool", "2"), Message("tool", "3"))
    two = "<tool_response>\n2\n</tool_response>\n\n<tool_response>\n3\n</tool_response>"
    assert text == f"<|user|>1+1=<|end|><|assistant|>call<|end|><|user|>{two}<|end|><|assistant|>"
    both = renderer(STRICT, roles={"system": "user", "tool": "user"})
    assert written(both.render([Message("system", "Add."), USER])) == "<|user|>Add.\n\n1+1=<|end|><|assistant|>"
    assert answered(both, [USER], "call<|end|>", Message("tool", "2")).count("<|user|>") == 2


def test_neighbours_whose_roles_are_not_mapped_stay_apart() -> None:
    chat = renderer(EACH, roles={"system": "user"})
    text = written(chat.render([Message("system", "a"), Message("user", "b"), Message("user", "c")]))
    assert text == "<|user|>a\n\nb<|end|><|user|>c<|end|><|assistant|>"


def test_developer_is_system_where_only_that_is_written() -> None:
    developer = [Message("developer", "Add."), USER]
    assert written(renderer(NO_RESULTS).render(developer)).startswith("<|system|>Add.<|end|>")
    joined = written(renderer(NO_RESULTS).render([Message("system", "Now:"), *developer]))
    assert joined.startswith("<|system|>Now:\n\nAdd.<|end|>")
    own = renderer(EACH)
    assert written(own.render(developer)).startswith("<|developer|>Add.<|end|>")
    with refused(TemplateRefusal, "developer", "user, assistant"):
        renderer(STRICT).render(developer)


def test_a_template_that_writes_only_parts_gets_parts() -> None:
    assert written(renderer(PARTS).render([USER])) == "<|user|>1+1=<|end|><|assistant|>"


# ------------------------------------------------------------------------------- results of tools


def test_a_result_is_written_under_the_name_of_its_call() -> None:
    chat = renderer(NAMES_ITS_CALL)
    call = '[TOOL_CALLS][{"name": "add", "arguments": {}}]<|end|>'
    text = answered(chat, [USER], call, Message("tool", "2", name="add"))
    assert text == f"<|user|>1+1=<|end|><|assistant|>{call}<|tool|>add: 2<|end|><|assistant|>"


def test_a_later_turn_keeps_the_tokens_of_earlier_calls() -> None:
    chat = renderer(NAMES_ITS_CALL, tool_calls="hermes")
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    seen = chat.render([USER]).then(
        Prompt(np.asarray(tiny_tokenizer("bytes")(f"{call}<|end|>")["input_ids"], np.int32))
    )
    result, history = Message("tool", "2", name="add"), [USER, Message("assistant", call)]
    second = chat.extend(history, seen, StopReason.EOS, [result])
    second = second.then(Prompt(np.asarray(tiny_tokenizer("bytes")("x<|end|>")["input_ids"], np.int32)))
    third = chat.extend([*history, result, Message("assistant", "x")], second, StopReason.EOS, [USER])
    assert written(third).endswith(
        f"{call}<|end|><|tool|>add: 2<|end|><|assistant|>x<|end|><|user|>1+1=<|end|><|assistant|>"
    )
    whole = written(chat.render([*history, result, Message("assistant", "x"), USER]))
    assert "<|assistant|>[CALL]add {}<|end|><|tool|>add: 2<|end|><|assistant|>x<|end|>" in whole


def test_a_history_whose_calls_cannot_be_read_is_refused_where_the_template_needs_them() -> None:
    chat = renderer(NAMES_ITS_CALL, tool_calls="hermes")
    with refused(DataError, "no call"):
        chat.render([USER, Message("assistant", "<tool_call>{broken"), Message("tool", "2")])


def test_a_result_has_an_id_of_nine_characters() -> None:
    text = answered(renderer(ASKS_FOR_IDS), [USER], "call<|end|>", Message("tool", "2"), Message("tool", "3"))
    assert text.endswith("call<|end|><|tool|>call00000 2<|end|><|tool|>call00001 3<|end|><|assistant|>")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (NAMES_ITS_CALL, 'x[CALL]add {"a": 1}'),
        (EACH, 'x\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    ],
)
def test_the_calls_of_a_row_are_written_in_the_notation_of_the_template(template: str, text: str) -> None:
    row = [USER, Message("assistant", "x", tool_calls=(ToolCall("add", '{"a": 1}'),)), Message("tool", "2", name="add")]
    assert f"<|assistant|>{text}<|end|>" in written(renderer(template, tool_calls="hermes").render(row))


def test_arguments_are_text_where_the_template_takes_only_that() -> None:
    row = [USER, Message("assistant", "", tool_calls=(ToolCall("add", '{"a": 1}'),)), Message("tool", "2")]
    assert '<|assistant|>add {"a": 1}<|end|>' in written(renderer(TEXT_ARGUMENTS, tool_calls="hermes").render(row))


def test_marks_of_calls_are_kept_where_the_tokenizer_does_not_list_them_as_special() -> None:
    tokenizer = tiny_tokenizer("bytes")
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    assert not {*marks} & {*tokenizer.all_special_tokens}
    text = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    chat = ChatRenderer(tokenizer, chat_template=EACH, tool_calls="gpt_oss")
    assert chat.decode(tokenizer.encode(text, add_special_tokens=False)) == text


# ------------------------------------------------------------------------------- turns, tools, dates


def test_a_history_that_differs_inside_the_turn_of_the_assistant_keeps_the_sampled_tokens() -> None:
    chat = renderer(CLOSES_A_BLOCK)
    text = answered(chat, [USER], "hm</think>2<|end|>", Message("user", "again"))
    assert (
        text == "<|user|>1+1=<|end|><|assistant|><think>\nhm</think>2<|end|><|user|>again<|end|><|assistant|><think>\n"
    )


def test_an_earlier_turn_that_the_template_rewrites_keeps_its_tokens() -> None:
    """A block of reasoning is written after the last question alone, in each turn with calls of tools there."""
    chat = renderer(THINKS_AFTER_THE_LAST_QUESTION)
    seen = chat.render([USER])
    history = [USER]
    for completion, new in (("call<|end|>", Message("tool", "2")), ("2<|end|>", Message("user", "again"))):
        seen = seen.then(Prompt(np.asarray(tiny_tokenizer("bytes")(completion)["input_ids"], np.int32)))
        history.append(Message("assistant", completion))
        longer = chat.extend(history, seen, StopReason.EOS, [new])
        assert longer.tokens[: len(seen)].tolist() == seen.tokens.tolist()
        seen, history = longer, [*history, new]
    assert written(seen) == (
        "<|user|>1+1=<|end|><|assistant|>call<|end|><|tool|>2<|end|><|assistant|>2<|end|><|user|>again<|end|>"
        "<|assistant|>"
    )
    moves = "{{ messages[-1].content }}" + THINKS_AFTER_THE_LAST_QUESTION
    with refused(TemplateRefusal, "2", "again"):
        renderer(moves).extend([*history, Message("assistant", "2")], seen, StopReason.EOS, [Message("user", "2")])


def test_a_template_that_needs_descriptions_of_tools_may_have_turns_with_results() -> None:
    needs = "{% for tool in tools or [] %}{{ tool.function.name + tool.function.description }}{% endfor %}" + EACH
    renderer(needs, tool_calls="hermes").check_turn("tool")


@pytest.mark.parametrize("template", [TOOLS_IN_SYSTEM, XML_TOOLS])
def test_tools_are_described_where_the_template_has_the_word_and_writes_none(template: str) -> None:
    text = written(renderer(template, tool_calls="hermes").render([TOOLS, USER]))
    assert '"name": "add"' in text
    assert text.startswith("<|system|>")


def test_tools_are_described_in_the_role_that_system_is_mapped_to() -> None:
    with refused(TemplateRefusal, "system"):
        renderer(STRICT).render([TOOLS, USER])
    chat = renderer(STRICT, roles={"system": "user", "tool": "user"})
    for system in ([], [Message("system", "Add.")]):
        text = written(chat.render([TOOLS, *system, USER]))
        assert text.startswith("<|user|># Tools")
        assert text.endswith("\n\nAdd.\n\n1+1=<|end|><|assistant|>" if system else "\n\n1+1=<|end|><|assistant|>")
        assert '"name": "add"' in text
        assert text.count("<|user|>") == 1


def test_tools_that_the_template_leaves_out_of_some_conversations_are_an_error_there() -> None:
    chat = renderer("{% if messages | length == 1 %}{{ tools }}{% endif %}" + EACH, tool_calls="hermes")
    assert "add" in written(chat.render([TOOLS, USER]))
    with refused(TemplateRefusal, "tools"):
        chat.render([TOOLS, Message("system", "Add."), USER])


def test_the_date_is_that_of_the_run() -> None:
    chat = ChatRenderer(tiny_tokenizer("bytes"), chat_template=DATED, today=date(2026, 2, 3))
    assert written(chat.render([USER])).startswith("<|system|>Today: 03 Feb 2026<|end|><|user|>")
    says = "{% macro today() %}{{ 'on ' + strftime_now('%A, %-d.%m.%y %H:%M') }}{% endmacro %}{{ today() }}"
    chat = ChatRenderer(tiny_tokenizer("bytes"), chat_template="\n" + says + EACH, today=date(2026, 2, 3))
    assert written(chat.render([USER])) == "\non Tuesday, 3.02.26 00:00<|user|>1+1=<|end|><|assistant|>"


# ------------------------------------------------------------------------------- conversations that nobody sampled


def prefixing(scheme: str) -> PreTrainedTokenizerFast:
    """A tokenizer that writes a space before a text, as SentencePiece does."""
    special = ["<unk>", "</s>", "<|user|>", "<|assistant|>"]
    pieces = [*special, "▁", "\n", *"abcdefghijklmnopqrstuvwxyz.", "hi", "▁hi"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[("h", "i"), ("▁", "hi")],
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    template = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    opening = "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=template + opening,
    )


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize("text", ["hi", "hi hi", "a hi", "\nhi", " hi"])
def test_a_supervised_completion_has_the_tokens_that_it_has_in_the_conversation(scheme: str, text: str) -> None:
    tokenizer = prefixing(scheme)
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    whole: Any = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    prompt, completion = ChatRenderer(tokenizer).expert([Message("user", "hi")], text)
    together = [*prompt.tokens.tolist(), *completion.tolist()]
    assert together == whole[: len(together)]
    assert completion[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(completion[:-1]).strip() == text.strip()


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_bridge_has_the_tokens_that_it_has_in_the_conversation(scheme: str) -> None:
    tokenizer = prefixing(scheme)
    ends_by_text = str(tokenizer.chat_template).replace("</s>\n", "hi.\n")
    chat = ChatRenderer(tokenizer, chat_template=ends_by_text)
    history, sampled = [Message("user", "hi")], tokenizer.convert_tokens_to_ids(["hi"])
    seen = chat.render(history).then(Prompt(np.asarray(sampled, np.int32)))
    longer = chat.extend([*history, Message("assistant", "hi")], seen, StopReason.LENGTH, history)
    conversation = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
    whole: Any = tokenizer.apply_chat_template(
        conversation, chat_template=ends_by_text, tokenize=True, return_dict=False, add_generation_prompt=True
    )
    assert longer.tokens.tolist() == whole


def test_every_turn_of_a_conversation_continues_the_one_before() -> None:
    talk = [USER, Message("assistant", "2"), Message("user", "2+2="), Message("assistant", "4")]
    turns = renderer(EACH).supervised(talk)
    assert [written(tokens) for _, tokens in turns] == ["2<|end|>", "4<|end|>"]
    first, second = turns
    known = [*first[0].tokens.tolist(), *first[1].tolist()]
    assert second[0].tokens[: len(known)].tolist() == known
    assert written(second[0]) == "<|user|>1+1=<|end|><|assistant|>2<|end|><|user|>2+2=<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("turn", "turns"),
    [
        ("<|assistant|>{% generation %}{{ m.content }}{% endgeneration %}<|end|>", ["two", "four"]),
        (
            "{% generation %}<|assistant|>{{ m.content }}<|end|>{% endgeneration %}",
            ["<|assistant|>two<|end|>", "<|assistant|>four<|end|>"],
        ),
    ],
)
def test_turns_are_what_the_template_encloses_where_it_says(turn: str, turns: list[str]) -> None:
    """`{% generation %}` decides: the end of turn may be left out, and the opening in."""
    template = (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{turn}{{% else %}}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}" + OPENING
    )
    talk = [USER, Message("assistant", "two"), Message("user", "2+2="), Message("assistant", "four")]
    chat, tokenizer = renderer(template), tiny_tokenizer("bytes")
    supervised = chat.supervised(talk)
    assert [written(tokens) for _, tokens in supervised] == turns
    prompt, completion = chat.expert(talk[:-1], "four")
    assert (prompt.tokens.tolist(), completion.tolist()) == (
        supervised[-1][0].tokens.tolist(),
        supervised[-1][1].tolist(),
    )
    encoded: Any = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in talk],
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    mask = np.zeros(len(encoded["input_ids"]), bool)
    for prompt, tokens in supervised:
        mask[len(prompt) : len(prompt) + len(tokens)] = True
    assert mask.tolist() == [bool(each) for each in encoded["assistant_masks"]]


RETURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ eos_token if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
) + OPENING
"""Ends the last turn of the assistant with another token than its earlier ones."""


def test_an_end_of_turn_that_the_template_replaces_in_histories_is_written_once() -> None:
    chat, eos = renderer(RETURNS), tiny_tokenizer("bytes").eos_token
    text = answered(chat, [USER], f"2{eos}", Message("user", "again"))
    assert text == f"<|user|>1+1=<|end|><|assistant|>2{eos}<|user|>again<|end|><|assistant|>"
    turns = chat.supervised([USER, Message("assistant", "2"), Message("user", "again"), Message("assistant", "2")])
    assert [written(tokens) for _, tokens in turns] == ["2<|end|>", f"2{eos}"]


def test_the_last_turn_is_learned_where_earlier_ones_have_no_end() -> None:
    talk = [USER, Message("assistant", "2"), Message("user", "2+2=")]
    chat = renderer("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + OPENING)
    with refused(DataError, "earlier turn"):
        chat.supervised([*talk, Message("assistant", "4")])
    prompt, completion = chat.expert(talk, "4")
    assert written(prompt) == "<|user|>1+1=<|assistant|>2<|user|>2+2=<|assistant|>"
    assert written(completion) == f"4{tiny_tokenizer('bytes').eos_token}"


def test_reasoning_of_a_row_is_written_or_refused() -> None:
    writes = EACH.replace(
        "{{ m.content }}", "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content }}{{ m.content }}"
    )
    row = Message("assistant", "2", reasoning="one and one")
    assert written(renderer(writes).expert([USER], row)[1]) == "<think>one and one</think>2<|end|>"
    with refused(TemplateRefusal, "reasoning", "reasoning_content"):
        renderer(EACH).expert([USER], row)


def test_a_conversation_without_a_last_turn_of_the_assistant_is_refused() -> None:
    with refused(DataError, "user"):
        renderer(EACH).supervised([USER])
