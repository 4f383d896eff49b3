"""What a chat template does with a conversation, found by rendering it: which roles, calls and tools it writes, and in
which form it takes them.

Every conversation is rendered a second time with a word in place of each text, once for each sequence of roles. What
the template drops is missing there, whatever the texts are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trivium.foundation.errors import DataError, TemplateRefusal
from trivium.text.tool_formats import REFUSALS, ToolFormat, format_of, rendered_by
from trivium.text.tools import described, split_tools
from trivium.types import IMAGE, BoolArray, Media, Message, ToolCall, openai_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")


def _word(number: int, call: int | None = None) -> str:
    """A word that no template writes or changes, in place of the text of a message or of the argument of a call."""
    return f"word{number}word" if call is None else f"word{number}call{call}word"


_KEY = "key"
_CALL = ToolCall("outlined", json.dumps({_KEY: _word(0, 0)}))
_USER = {"role": "user", "content": _word(0)}
_RESULT = {"role": "tool", "content": _word(2), "tool_call_id": "call00000", "name": _CALL.name}
_TOOL = {
    "type": "function",
    "function": {
        "name": _CALL.name,
        "description": "A tool in place of others.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "a text"}}},
    },
}


class CallStyle(NamedTuple):
    """The form in which a template takes the calls of an assistant's message."""

    as_text: bool
    """Whether the arguments are JSON text instead of a mapping."""
    content: str | None
    """The content of a message that is nothing but calls."""


class _Form(NamedTuple):
    """What a template sees of a message apart from its texts."""

    role: str
    has_text: bool
    num_media: int
    num_calls: int
    has_reasoning: bool
    has_name: bool
    call: int | None


class ChatTemplate:
    """Writes conversations as text with the chat template of a tokenizer.

    `source` (Jinja text) replaces the tokenizer's own template. `takes_images` is whether the model reads images: then
    a content with media is a list of parts, if the template takes one. `tool_calls` names the format of calls of tools
    (`trivium.text.tool_formats`). `roles` maps roles to those that the template writes instead. `today` is the day that
    a template writes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str | None = None,
        *,
        takes_images: bool = False,
        tool_calls: str = "auto",
        roles: Mapping[str, str] | None = None,
        today: date | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sources = _sources(tokenizer.chat_template if source is None else source, today)
        self.by_parts = self._takes(True) and (takes_images or not self._takes(False))
        """Whether the content of a message is a list of parts."""
        added = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
        self.tool_format: ToolFormat = format_of(rendered_by(tokenizer, source), tool_calls, added)
        self._roles = dict(roles or {})
        if "developer" not in self._roles and not self._writes_role("developer") and self._writes_role("system"):
            self._roles["developer"] = "system"  # as OpenAI's clients name it for newer models
        self._dropped = lru_cache(maxsize=4096)(self._missing)  # members of a group share an outline, and turns many

    def text(self, messages: Sequence[Message], *, generation: bool, checked: bool = True) -> str:
        """The text of a conversation; `generation` opens the assistant's next turn.

        Raises TemplateRefusal if the template refuses a message of this role in this place, or drops it (`checked`),
        and DataError if it refuses these texts.
        """
        tools, rest = split_tools(messages)
        conversation = self._mapped(rest)
        try:
            text = self._written(conversation, tools, generation)
        except _Refused as error:
            refused = self._refuses(self._form(conversation), bool(tools), generation)
            raise (TemplateRefusal if refused else DataError)(
                f"render a conversation of roles {[message.role for message in rest]}",
                f"the chat template refuses it: {error}",
                f"use the roles that it writes ({', '.join(self.roles)}), or map one to another with model.roles",
            ) from error
        if checked and (dropped := self._dropped(self._form(conversation), bool(tools), generation)):
            raise TemplateRefusal(
                f"render a conversation of roles {[message.role for message in rest]}",
                f"the chat template leaves out {dropped}",
                f"use the roles that it writes ({', '.join(self.roles)}), or map one to another with model.roles",
            )
        return text

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that the template writes, or that are mapped to one that it writes."""
        return tuple(role for role in ROLES if role in self._roles or self._writes_role(role))

    @cached_property
    def call_style(self) -> CallStyle | None:
        """The form in which the template takes calls; None if it writes no call."""
        for form in product((False, True), ("", None)):
            style = CallStyle(*form)
            if self._shows([_USER, self._calling(style)], _CALL.name, _word(0, 0)):
                return style
        return None

    @cached_property
    def results_need_calls(self) -> bool:
        """Whether the template writes a result only after a message with the call, not after the text of one."""
        if "tool" in self._roles or self.call_style is None or self._results_follow_text:
            return False
        return self._shows([_USER, self._calling(self.call_style), _RESULT], _word(2))

    def _calling(self, style: CallStyle) -> dict[str, Any]:
        """A message that is nothing but a call."""
        [parts] = openai_parts([Message("assistant", "", tool_calls=(_CALL,))])
        return {"role": "assistant", "content": style.content, "tool_calls": self._calls(parts["tool_calls"], style)}

    @cached_property
    def _results_follow_text(self) -> bool:
        return self._shows([_USER, {"role": "assistant", "content": _word(1)}, _RESULT], _word(1), _word(2))

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the template describes the tools that it is given."""
        return self._shows([_USER], _CALL.name, tools=[_TOOL])

    def tried(self, messages: Sequence[Message]) -> str:
        """The text of a conversation without an opening, of which the template may drop a part; empty if it refuses
        it."""
        try:
            return self._written(self._mapped(messages), (), False)
        except _Refused:
            return ""

    def calling(self, results: Sequence[Message], argument: str) -> Message:
        """An assistant's message with a call for each result, with this argument."""
        calls = [ToolCall(result.name or _CALL.name, json.dumps({_KEY: argument})) for result in results]
        return Message("assistant", "", tool_calls=tuple(calls))

    def generated(self, messages: Sequence[Message], num_tokens: int) -> BoolArray | None:
        """Which tokens of a conversation `{% generation %}` of the template encloses; None if it encloses nothing."""
        if not self._encloses:
            return None
        tools, rest = split_tools(messages)
        tokenizer: Any = self._tokenizer
        encoded = tokenizer.apply_chat_template(
            self._entries(self._mapped(rest)),
            tools=tools or None,
            chat_template=self._source_for(bool(tools)),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = np.asarray(encoded["assistant_masks"], np.bool_)
        return mask if mask.any() and len(mask) == num_tokens else None

    @cached_property
    def _encloses(self) -> bool:
        """Whether the template has the tag `generation`, without which transformers logs a warning."""
        from jinja2 import Environment

        kinds = [(kind, text) for _, kind, text in Environment().lex(self._source_for(False)) if kind != "whitespace"]
        return any(one[0] == "block_begin" and two == ("name", "generation") for one, two in pairwise(kinds))

    def _source_for(self, with_tools: bool) -> str:
        """The Jinja text for a conversation: a tokenizer may have another one for tools."""
        return self._sources[with_tools]

    # ----------------------------------------------------------------------- rendering

    def _written(self, messages: Sequence[Message], tools: Sequence[Any], generation: bool) -> str:
        """Raises _Refused."""
        if tools and not self.writes_tools:
            default = "" if "system" in self._roles else self._default_system
            messages = self._mapped(described(tools, messages, self.tool_format.instructions(), default))
            tools = []
        return self._apply(self._entries(messages), tools, generation)

    def _apply(self, entries: Sequence[Mapping[str, Any]], tools: Sequence[Any], generation: bool) -> str:
        """Raises _Refused."""
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                entries,  # pyright: ignore[reportArgumentType]
                tools=list(tools) or None,
                chat_template=self._source_for(bool(tools)),
                tokenize=False,
                add_generation_prompt=generation,
            )
        except (TemplateError, *REFUSALS) as error:
            raise _Refused(error) from error
        assert isinstance(text, str)
        return text

    def _shows(self, entries: Sequence[dict[str, Any]], *words: str, tools: Sequence[Any] = ()) -> bool:
        """Whether the template writes these words of a conversation."""
        return (text := self._tried(entries, tools)) is not None and all(word in text for word in words)

    def _tried(self, entries: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> str | None:
        """The text of a conversation whose contents are texts; None if the template refuses it."""
        parted = [{**entry, "content": [{"type": "text", "text": entry["content"]}]} for entry in entries]
        try:
            return self._apply(parted if self.by_parts else entries, tools, False)
        except _Refused:
            return None

    def _entries(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The conversation as the template takes it."""
        following = [message.role for message in messages[1:]] + [""]
        spoken = [
            self._in_parts(message, after == "tool") if message.role == "assistant" else message
            for message, after in zip(messages, following, strict=True)
        ]
        entries: list[dict[str, Any]] = []
        for message, parts in zip(spoken, openai_parts(spoken), strict=True):
            entry: dict[str, Any] = {"role": message.role, "content": self._content(message), **parts}
            if message.tool_calls and self.call_style is not None:
                entry["tool_calls"] = self._calls(parts["tool_calls"], self.call_style)
                entry["content"] = None if self.call_style.content is None and not message.content else entry["content"]
            if message.reasoning is not None:
                entry["thinking"] = message.reasoning  # as GPT-OSS's template names it
            entries.append(entry)
        return entries

    @staticmethod
    def _calls(calls: Sequence[Mapping[str, Any]], style: CallStyle) -> list[dict[str, Any]]:
        """The calls of a message as the template takes them."""
        if style.as_text:
            return [dict(call) for call in calls]
        functions = [call["function"] for call in calls]
        parsed = [{**function, "arguments": json.loads(function["arguments"])} for function in functions]
        return [{**call, "function": function} for call, function in zip(calls, parsed, strict=True)]

    def _in_parts(self, message: Message, answered: bool) -> Message:
        """An assistant's message whose calls and reasoning are apart from its content, where the template needs that;
        `answered`: results follow. Otherwise the text as the policy wrote it, which the template gets as content."""
        tool_format = self.tool_format
        if message.tool_calls or message.reasoning is not None:
            if not message.tool_calls or self.call_style is not None:
                return message
            text = "\n".join(part for part in (message.content, tool_format.write(message.tool_calls)) if part)
            return replace(message, content=text, tool_calls=())
        if not tool_format.answers and not (answered and self.results_need_calls):
            return message
        thought, rest = tool_format.split(message.content)
        content, calls = tool_format.read(rest) or (rest, ())
        if answered and self.results_need_calls and not calls:
            raise DataError(
                "results of tools after a message with their calls, as the chat template asks for",
                f"no call can be read in {message.content!r:.80}",
                "end the rollout, or answer as the user",
            )
        return replace(message, content=content, reasoning=thought, tool_calls=calls)

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        """The content of a message for the template: text, or a list of parts."""
        if not self.by_parts:
            return message.content
        content: list[dict[str, str]] = []
        for number, text in enumerate(parts_of(message)):
            content += [{"type": "image"}] if number else []
            content += [{"type": "text", "text": text}] if text else []
        return content or [{"type": "text", "text": ""}]

    def _mapped(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with mapped roles. A mapped message joins its neighbours of the role that it gets, for many
        templates refuse two messages of one role; a mapped result of a tool is marked as one."""
        if not any(message.role in self._roles for message in messages):
            return list(messages)
        joined: list[Message] = []
        mapped_before = False
        for message in messages:
            role = self._roles.get(message.role, message.role)
            mapped = role != message.role
            is_result = mapped and message.role == "tool"
            content = f"<tool_response>\n{message.content}\n</tool_response>" if is_result else message.content
            last = joined[-1] if joined else None
            alike = last is not None and last.role == role and not (last.media or message.media)
            if last is not None and alike and (mapped or mapped_before):
                joined[-1] = replace(last, content=f"{last.content}\n\n{content}")
            else:
                joined.append(Message(role, content, message.media) if mapped else message)
            mapped_before = mapped
        return joined

    @cached_property
    def _default_system(self) -> str:
        """The system message that the template writes into a conversation without one; empty if it writes none.

        Raises TemplateRefusal if it writes no system message at all: what is described there would not reach the
        policy.
        """
        text = self._tried([{"role": "system", "content": _word(1)}, _USER])
        before, word, after = (text or "").partition(_word(1))
        if not word:
            raise TemplateRefusal(
                "tools described in the system message, since the chat template does not write them",
                "the template drops or refuses the system message",
                "set model.chat_template to one that writes tools or system messages, or model.roles: {system: user}",
            )
        text = self._tried([_USER]) or ""
        is_default = text.startswith(before) and text.endswith(after)
        return text[len(before) : len(text) - len(after)] if is_default else ""

    # ----------------------------------------------------------------------- what is dropped

    def _form(self, messages: Sequence[Message]) -> tuple[_Form, ...]:
        """What a template can make of a conversation apart from its texts."""
        form: list[_Form] = []
        for number, message in enumerate(messages):
            has_text, num_calls = bool(message.content) and not message.content.isspace(), len(message.tool_calls)
            if message.media:
                has_text = bool(message.content.replace(IMAGE, "").strip())
            if message.role == "assistant" and not num_calls and self.results_need_calls:
                num_calls = _num_results(messages[number + 1 :])
                has_text = has_text and not num_calls
            parts = message.reasoning is not None, bool(message.name), message.call
            form.append(_Form(message.role, has_text, len(message.media), num_calls, *parts))
        return tuple(form)

    def _missing(self, form: tuple[_Form, ...], with_tools: bool, generation: bool) -> str:
        """Which messages, calls and tools of a conversation are not in its text; empty if all are."""
        outline = _outline(form)
        try:
            text = self._written(outline, [_TOOL] if with_tools else [], generation)
        except _Refused:  # and the conversation itself is written: its texts differ from words
            return ""
        missing = ["the tools"] * (with_tools and _CALL.name not in text)
        missing += [
            f"message {number + 1} ({message.role})"
            for number, message in enumerate(outline)
            if message.content and _word(number) not in text
        ]
        missing += [
            f"call {place + 1} of message {number + 1}"
            for number, message in enumerate(outline)
            for place in range(len(message.tool_calls))
            if _word(number, place) not in text
        ]
        return ", ".join(missing)

    def _refuses(self, form: Sequence[_Form], with_tools: bool, generation: bool) -> bool:
        """Whether the template refuses all conversations of this form."""
        try:
            self._written(_outline(form), [_TOOL] if with_tools else [], generation)
        except _Refused:
            return True
        return False

    def _writes_role(self, role: str) -> bool:
        entry = {"role": role, "content": _word(1)}
        match role:
            case "system" | "developer":
                return self._shows([entry, _USER], _word(1))
            case "user":
                return self._shows([entry], _word(1))
            case "tool":
                return self.results_need_calls or self._results_follow_text
            case _:
                return self._shows([_USER, entry], _word(1))

    def _takes(self, parts: bool) -> bool:
        """Whether the template writes a content that is a list of parts, or text. One for text prints the list."""
        content = [{"type": "text", "text": _word(0)}] if parts else _word(0)
        try:
            text = self._apply([{"role": "user", "content": content}], (), False)
        except _Refused:
            return False
        return _word(0) in text and "'text'" not in text


class _Refused(Exception):
    """A template raised an error."""


def _sources(source: Any, today: date | None) -> tuple[str, str]:
    """The Jinja texts for conversations without and with tools: a tokenizer may have another one for these."""
    texts = source if isinstance(source, dict) else {"default": source}
    plain, with_tools = texts["default"], texts.get("tool_use", texts["default"])
    clock = "" if today is None else _clock(today)
    return clock + plain, clock + with_tools


def _clock(today: date) -> str:
    """Jinja text that defines the clock of templates. transformers offers `strftime_now`, which tells the time, and
    makes texts of all variables that it is given, so it takes no other function."""
    parts = ("-d", "-m", "-H", "-I", "-j", "-M", "-S", *"aAwdbBmyYHIpMSfzZjUWcxXeDFuVGT")
    values = {f"%{part}": today.strftime(f"%{part}") for part in parts}
    # A loop: to compile a chain of 35 filters took Jinja a seventh of the start of a tiny run.
    return (
        "{% macro strftime_now(format) %}{% set now = namespace(text=format) %}"
        f"{{% for part, value in {values!r}.items() %}}"
        "{% set now.text = now.text | replace(part, value) %}"
        "{% endfor %}{{ now.text }}{% endmacro %}\n"
    )


def _outline(form: Sequence[_Form]) -> list[Message]:
    """A conversation of this form with a word in place of each text."""
    return [
        Message(
            message.role,
            _word(number) if message.has_text else "",
            tuple(Media("image/png", b"", sha256="outline") for _ in range(message.num_media)),
            tuple(ToolCall(_CALL.name, json.dumps({_KEY: _word(number, place)})) for place in range(message.num_calls)),
            "reasons" if message.has_reasoning else None,
            _CALL.name if message.has_name else "",
            message.call,
        )
        for number, message in enumerate(form)
    ]


def _num_results(messages: Sequence[Message]) -> int:
    """The number of results of tools that the conversation begins with."""
    return next((n for n, message in enumerate(messages) if message.role != "tool"), len(messages))


def parts_of(message: Message) -> list[str]:
    """The texts before, between and after the media of a message: one more than the number of media.

    Raises DataError if its text marks a different number of images.
    """
    if not message.media:
        return [message.content]
    texts = message.content.split(IMAGE)
    if len(texts) == 1:
        return [*[""] * len(message.media), message.content]
    if len(texts) != len(message.media) + 1:
        raise DataError(
            f"a message with one {IMAGE} for each image",
            f"{len(texts) - 1} in {message.content!r:.80}, and {len(message.media)} image(s)",
            f"mark the place of each image with {IMAGE}, or of none (they precede the text)",
        )
    return texts
