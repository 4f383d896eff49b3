"""The renderer: templates to tokens, the bridge to the next turn, and what ends a turn."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import refused

from trivium.config import config_from_mapping, merged
from trivium.foundation.errors import ConfigError, DataError, TemplateRefusal
from trivium.models.backbone.huggingface import PLAIN_TEMPLATE as PLAIN
from trivium.models.backbone.huggingface import HuggingFaceModel
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.text.tiny import TinyModel, tiny_tokenizer
from trivium.types import Media, Message, Prompt, StopReason

THINKING = """{%- for m in messages -%}
{%- if m.role == 'assistant' and not loop.last -%}
<|assistant|>{{ m.content.split('</think>')[-1] }}<|end|>
{%- else -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|><think>{%- endif -%}"""
"""Opens with <think> and drops earlier reasoning."""

MOVING = """{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- elif m.role == 'user' and loop.last -%}<|user|>{{ messages[0].content }}|{{ m.content }}<|end|>
{%- else -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""Puts the system prompt into the last user message, wherever that is."""

DEFAULT_SYSTEM = """{%- if messages[0].role != 'system' -%}<|system|>You are helpful.<|end|>{%- endif -%}
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}"""
"""Writes a system message into a conversation without one, as SmolLM2's does."""

SPACED = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{ m.content }}{{ ' <|end|>' }}
{%- else -%}{{ '<|user|>[' + m.content + '] ' }}{%- endif -%}{%- endfor -%}"""
"""White space between a reply and its end of turn."""


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def renderer(template: str | None = None, alphabet: str = "bytes") -> ChatRenderer:
    return ChatRenderer(tiny_tokenizer(alphabet), chat_template=template)


def written(tokens, alphabet: str = "bytes") -> str:
    """The tokens with special tokens shown."""
    tokens = tokens.tokens if isinstance(tokens, Prompt) else tokens
    return tiny_tokenizer(alphabet).decode(np.asarray(tokens).tolist())


def ids(text: str, alphabet: str = "bytes") -> list[int]:
    return tiny_tokenizer(alphabet)(text)["input_ids"]


def sampled_after(prompt: Prompt, completion: list[int]) -> Prompt:
    return prompt.then(Prompt(np.asarray(completion, np.int32)))


def test_a_prompt_ends_where_the_assistant_speaks():
    tokens = renderer().render([Message("system", "s"), user("1+1=")])
    assert written(tokens) == "<|system|>s<|end|><|user|>1+1=<|end|><|assistant|>"
    assert tokens.tokens.dtype == np.int32
    assert tokens.unexpanded is tokens.tokens


def test_every_longer_conversation_extends_the_shorter_one():
    """The tiny template is stable under prefixes, in tokens."""
    talk = [Message("system", "a b"), user("1 "), assistant(" 2\n"), Message("tool", "3"), assistant("é"), user("4")]
    chat = renderer()
    shorter = np.empty(0, np.int32)
    for length in range(1, len(talk) + 1):
        longer = chat.render(talk[:length]).tokens[:-1]
        assert longer[: len(shorter)].tolist() == shorter.tolist()
        assert len(longer) > len(shorter)
        shorter = longer


@pytest.mark.parametrize("template", [None, PLAIN, THINKING, SPACED])
def test_extending_equals_rendering_where_text_and_tokens_agree(template):
    """With a reply that the policy ended itself, a bridge gives what a rendering gives (THINKING keeps its own)."""
    chat = renderer(template)
    first, reply, second = [user("1+1=")], "2", [user("2+2=")]
    sampled = ids(reply + (" " if template is SPACED else "") + "<|end|>")
    tokens = sampled_after(chat.render(first), sampled)
    extended = chat.extend([*first, assistant(reply)], tokens, StopReason.EOS, second)
    assert extended.tokens[: len(tokens)].tolist() == tokens.tokens.tolist()
    assert extended.tokens.dtype == np.int32
    full = written(chat.render([*first, assistant(reply), *second]))
    if template is THINKING:
        full = full.replace("<|assistant|>2", "<|assistant|><think>2")
    assert written(extended) == full


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.STOP, StopReason.ABORT])
def test_a_reply_that_was_cut_is_closed_for_the_policy(reason):
    chat = renderer()
    tokens = sampled_after(chat.render([user("a")]), ids("bc"))
    extended = chat.extend([user("a"), assistant("bc")], tokens, reason, [user("d")])
    assert written(extended) == "<|user|>a<|end|><|assistant|>bc<|end|><|user|>d<|end|><|assistant|>"


def test_another_end_of_sequence_than_the_templates_is_kept_and_closed():
    chat = renderer()
    tokens = sampled_after(chat.render([user("a")]), ids("b<|pad|>"))
    extended = chat.extend([user("a"), assistant("b")], tokens, StopReason.EOS, [user("d")])
    assert written(extended).endswith("b<|pad|><|end|><|user|>d<|end|><|assistant|>")


def test_white_space_before_a_sampled_end_of_turn_is_not_repeated():
    chat = renderer(SPACED)
    tokens = sampled_after(chat.render([user("a")]), ids("b<|end|>"))
    extended = chat.extend([user("a"), assistant("b")], tokens, StopReason.EOS, [user("d")])
    assert written(extended) == "<|user|>[a] b<|end|><|user|>[d] "


def test_a_cut_reply_that_ends_like_the_closing_keeps_both():
    chat = renderer(SPACED)
    tokens = sampled_after(chat.render([user("a")]), ids("b "))
    extended = chat.extend([user("a"), assistant("b ")], tokens, StopReason.LENGTH, [user("d")])
    assert written(extended) == "<|user|>[a] b  <|end|><|user|>[d] "


def test_reasoning_that_the_template_would_drop_stays_as_sampled():
    chat = renderer(THINKING)
    tokens, talk = chat.render([user("a")]), [user("a")]
    for turn in range(3):
        tokens = sampled_after(tokens, ids(f"hm{turn}</think>{turn}<|end|>"))
        talk.append(assistant(f"hm{turn}</think>{turn}"))
        tokens = chat.extend(talk, tokens, StopReason.EOS, [user("b")])
        talk.append(user("b"))
    assert all(f"<think>hm{turn}</think>{turn}<|end|>" in written(tokens) for turn in range(3))
    assert "hm0" not in written(chat.render(talk))


def test_a_template_that_rewrites_earlier_messages_is_an_error_that_shows_where():
    chat = renderer(MOVING)
    talk = [Message("system", "S"), user("a")]
    tokens = chat.render(talk)
    with refused(TemplateRefusal, "character 8", "'S|a<"):
        chat.extend([*talk, assistant("b")], tokens, StopReason.EOS, [user("c")])


def test_a_template_that_drops_the_reply_is_an_error():
    chat = renderer("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with refused(TemplateRefusal, "message 2", "assistant"):
        chat.extend([user("a"), assistant("b")], chat.render([user("a")]), StopReason.EOS, [user("c")])


def test_a_message_that_holds_the_marker_does_not_mislead():
    chat = renderer()
    tokens = chat.render([user("sampledreply0")])
    extended = chat.extend([user("sampledreply0"), assistant("x")], tokens, StopReason.LENGTH, [user("sampledreply1")])
    assert written(extended.tokens[len(tokens) :]) == "<|end|><|user|>sampledreply1<|end|><|assistant|>"


def test_history_must_end_with_the_reply():
    chat = renderer()
    with refused(DataError, "assistant's"):
        chat.extend([user("a")], chat.render([user("a")]), StopReason.EOS, [user("c")])


def test_expert_text_ends_with_the_end_of_turn():
    prompt, reply = renderer().expert([user("1+1=")], "2")
    assert written(prompt) == "<|user|>1+1=<|end|><|assistant|>"
    assert written(reply) == "2<|end|>"
    assert reply.dtype == np.int32
    assert written(renderer(PLAIN).expert([user("1+1=")], "2")[1]) == "2<|end|>"


@pytest.mark.parametrize(
    "setting",
    [
        {"truncation": True, "max_length": 4},
        {"padding": "max_length", "max_length": 40},
        {"split_special_tokens": True},
    ],
)
def test_a_call_of_another_that_cuts_pads_or_splits_changes_no_prompt(setting):
    tokenizer = tiny_tokenizer("bytes")
    chat, text = ChatRenderer(tokenizer), "é 1+1="
    expected = ids(f"<|user|>{text}<|end|><|assistant|>")
    tokenizer("another text", **setting)
    assert chat.render([user(text)]).tokens.tolist() == expected
    tokenizer("another text", **setting)
    assert chat.expert([user(text)], text)[1].tolist() == ids(f"{text}<|end|>")


def test_decoding_drops_special_tokens_and_survives_any_token():
    chat = renderer()
    assert chat.decode(np.asarray(ids("é\n<|end|>"), np.int32)) == "é\n"
    assert chat.decode([0xC3, 0x28]) == "\ufffd("
    assert chat.decode([]) == ""
    assert chat.decode([ord("a"), 5000]) == "a"  # a model's vocabulary may be padded beyond the tokenizer's


def test_what_ends_a_turn_comes_from_template_tokenizer_and_generation_config(tmp_path):
    end, pad, tool = ids("<|end|><|pad|><|tool|>")
    assert renderer().eos_token_ids == {end}
    ended_by_tool = "{% for m in messages %}{{ m.content }}<|tool|>{% endfor %}"
    assert renderer(ended_by_tool).eos_token_ids == {end, tool}
    assert written(renderer(ended_by_tool).expert([user("a")], "b")[1]) == "b<|tool|>"
    tokenizer = tiny_tokenizer("bytes")
    tokenizer.name_or_path = str(tmp_path)
    assert ChatRenderer(tokenizer).eos_token_ids == {end}
    for listed in (pad, [pad, end]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        assert ChatRenderer(tokenizer).eos_token_ids == {end, pad}


def test_a_tokenizer_without_template_says_what_to_do():
    tokenizer = tiny_tokenizer("bytes")
    tokenizer.chat_template = None
    with refused(DataError, "chat_template.jinja"):
        ChatRenderer(tokenizer)
    assert written(ChatRenderer(tokenizer, chat_template=PLAIN).render([user("1+1=")])) == "1+1="


def test_without_any_end_of_turn_there_is_no_renderer():
    tokenizer = tiny_tokenizer("bytes")
    tokenizer.eos_token = None
    with refused(DataError, "tokenizer.eos_token"):
        ChatRenderer(tokenizer, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert renderer().eos_token_ids == ChatRenderer(tokenizer).eos_token_ids


def test_what_cannot_be_rendered_is_said_in_three_parts():
    chat = renderer()
    with refused(DataError, "text only", "`media`"):
        chat.render([Message("user", "look", (Media("image/png", b""),))])
    with refused(TemplateRefusal, "critic"):
        chat.render([Message("critic", "no")])
    with refused(DataError, "one token"):
        renderer(PLAIN).render([user("")])


def test_characters_the_policy_cannot_see_are_told():
    chat = renderer(alphabet="0123456789+=")
    with pytest.warns(UserWarning, match=r"2 token\(s\) of a prompt are <\|unk\|>"):
        tokens = chat.render([user("1x1é")])
    assert written(tokens, "0123456789+=") == "<|user|>1<|unk|>1<|unk|><|end|><|assistant|>"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat.render([user("1+1")])


TEMPLATE = (
    "{# noted #}{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %}<none>{% endif %}"
)


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json", "config"])
def test_variables_of_a_chat_template_are_set_for_every_prompt(where: str, tmp_path: Path) -> None:
    path = TinyModel(TinyModel.Config(alphabet="bytes"), seed=0).materialize(tmp_path / "model")
    (path / "chat_template.jinja").unlink()
    section: dict[str, Any] = {"path": str(path), "template_variables": {"enable_thinking": False}}
    if where == "config":
        section["chat_template"] = TEMPLATE
    elif where == "chat_template.jinja":
        (path / where).write_text(TEMPLATE)
    else:
        settings = json.loads((path / where).read_text())
        named = [{"name": "tools", "template": "?"}, {"name": "default", "template": TEMPLATE}]
        (path / where).write_text(json.dumps({**settings, "chat_template": named}))
    model = HuggingFaceModel(HuggingFaceModel.Config.model_validate(section))
    directory = model.materialize(tmp_path / "run")
    renderer = ChatRenderer(hf_tokenizer(str(directory)))
    assert renderer.text([user("1+1=")]) == "1+1=<none>"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"model": {"template_variables": {"enable_thinkin": False}}}, "model.template_variables.enable_thinkin"),
        ({"model": {"template_variables": {"noted": False}}}, "model.template_variables.noted"),
        (
            {"engine": {"kind": "endpoint", "model": "m", "urls": ["http://a/v1"], "protocol": "chat"}},
            "engine.extra_body",
        ),
    ],
)
def test_variables_of_a_chat_template_without_effect_are_refused(
    change: dict[str, Any], where: str, tmp_path: Path
) -> None:
    path = TinyModel(TinyModel.Config(alphabet="bytes"), seed=0).materialize(tmp_path / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    model = {"kind": "hf", "path": str(path), "template_variables": {"enable_thinking": False}}
    tasks = {"train": {"kind": "arithmetic", "max_operand": 9}}
    with refused(ConfigError) as raised:
        config_from_mapping(merged({"model": model, "tasks": tasks, "rewards": ["exact"]}, change))
    assert any(problem.where.startswith(where) for problem in raised.value.problems), raised.value
    sent = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    if "engine" in change:
        engine = {**change["engine"], **sent}
        config_from_mapping({"model": model, "tasks": tasks, "rewards": ["exact"], "engine": engine})


@pytest.mark.parametrize(
    ("template", "own", "system"),
    [
        (DEFAULT_SYSTEM, None, "You are helpful.\n\n# Tools"),
        (DEFAULT_SYSTEM, "Add.", "Add.\n\n# Tools"),
        (MOVING.replace("messages[0].content", "''"), None, None),
        (DEFAULT_SYSTEM.replace("You are helpful.", ""), None, "# Tools"),
        (None, None, "# Tools"),
    ],
    ids=["the template's", "the conversation's", "dropped", "empty", "none"],
)
def test_tools_are_described_after_the_system_message_that_the_policy_would_see(
    template: str | None, own: str | None, system: str | None
) -> None:
    tools = Message("tools", json.dumps([{"type": "function", "function": {"name": "add"}}]))
    conversation = [tools, *([Message("system", own)] if own else []), user("1?")]
    if system is None:
        with refused(TemplateRefusal, "system message", "model.chat_template"):
            renderer(template).render(conversation)
        return
    text = written(renderer(template).render(conversation))
    assert text.startswith(f"<|system|>{system}")
    assert '"name": "add"' in text
    assert text.count("<|system|>") == 1
