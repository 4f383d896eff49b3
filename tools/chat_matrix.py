"""Measures what the renderer does with public chat templates and tokenizers, for the table of docs/chat-templates.md.

`python tools/chat_matrix.py` writes tests/data/chat_templates.json, of which `make docs` makes the table. It reads what
`tools/fetch_chats.py` has fetched.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import fetch_chats
import numpy as np

from trivium.foundation.errors import TriviumError
from trivium.foundation.registry import CATALOGUE, resolve
from trivium.models.backbone.huggingface import with_variables
from trivium.text.renderer import ChatRenderer
from trivium.text.tokenizer import hf_tokenizer
from trivium.text.tool_formats import REASONING_TAIL
from trivium.text.tools import attempted_calls
from trivium.types import Message, Prompt, StopReason, ToolCall

OUTCOMES = Path(__file__).parents[1] / "tests" / "data" / "chat_templates.json"

CELLS = (
    *("one turn", "three turns", "system", "developer", "thinking", "no thinking", "one call", "two calls"),
    *("call without arguments", "unicode", "supervised", "supervised calls", "generation"),
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "a city"}},
                "required": [],
            },
        },
    }
]
SCHEMAS = {"weather": TOOLS[0]["function"]["parameters"]}
TOLD = Message("tools", json.dumps(TOOLS))
UNICODE = "Zürich e\u0301 👩\u200d👩\u200d👧 שלום العربية 漢字かな 🇨🇭 ไทย"
"""Combining marks, a joiner, text from right to left, several scripts."""
_ROLES: tuple[dict[str, str], ...] = (
    {"tool": "user"},
    {"system": "user"},
    {"developer": "user"},
    {"tool": "user", "system": "user"},
)
"""What a user may map with model.roles where a template drops a role or refuses it, in the order of trial."""
_OF_ROLES = {"system", "developer", "one call", "two calls", "call without arguments", "supervised calls"}
_IN_TAGS = re.compile(r"<[|｜]?[\w▁]+[|｜]?>|\[/?[A-Z_]+\]|<\|\"\|>")
_SPECIAL = re.compile(r"<[|｜].+>|<\w+\|>|\[/?[A-Z_]+\]|</?s>|<(?:start|end)_of_\w+>|<image>|<sop>")


class Silent(AssertionError):
    """Something of a conversation is lost or changed without an error."""


@dataclass
class Subject:
    """A chat template with its tokenizer."""

    name: str
    tokenizer: Any
    source: str
    training: str = ""
    """The same template with `{% generation %}`; empty without one."""
    renderers: dict[str, ChatRenderer] = field(default_factory=dict)

    def renderer(self, roles: Mapping[str, str] | None = None, source: str = "") -> ChatRenderer:
        key = f"{sorted((roles or {}).items())}{source}"
        if key not in self.renderers:
            self.renderers[key] = ChatRenderer(
                self.tokenizer, chat_template=source or self.source, roles=roles, today=date.today()
            )
        return self.renderers[key]

    def whole(self, messages: Sequence[Message], *, generation: bool, source: str = "") -> list[int]:
        """The tokens of a conversation as transformers renders and encodes it at once; empty if the template refuses
        it."""
        from jinja2 import TemplateError

        tools = TOOLS if messages[0].role == "tools" else None
        entries = list(_entries(self.renderer(), messages[1:] if tools else messages))
        try:
            encoded = self.tokenizer.apply_chat_template(
                entries,
                tools=tools,
                chat_template=source or self.source,
                tokenize=True,
                return_dict=True,
                add_generation_prompt=generation,
            )
        except (TemplateError, TypeError):
            return []
        return [int(token) for token in encoded["input_ids"]]


def subjects() -> Iterator[Subject]:
    """The tokenizers with their own templates, and the templates with one tokenizer that has the special tokens of all
    of them."""
    for name in fetch_chats.TOKENIZERS:
        tokenizer = tokenizer_of(name)
        own = tokenizer.chat_template or template("gptoss")
        yield Subject(f"{name} (tokenizer)", tokenizer, own)
    shared = tokenizer_of("qwen3")
    names = sorted(path.stem for path in fetch_chats.TEMPLATES.glob("*.jinja"))
    marks = {mark for name in names for mark in _IN_TAGS.findall(template(name)) if _SPECIAL.fullmatch(mark)}
    marks |= {"<s>", "</s>"}
    shared.add_special_tokens({"additional_special_tokens": sorted(marks)}, replace_extra_special_tokens=False)
    shared.bos_token, shared.eos_token = "<s>", "</s>"
    for name in names:
        if not name.endswith("_training"):
            training = template(f"{name}_training") if f"{name}_training" in names else ""
            yield Subject(name, shared, template(name), training)


def tokenizer_of(name: str) -> Any:
    """One of the tokenizers; that of GPT-OSS has no template in its package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hf_tokenizer(fetch_chats.tokenizer_dir(name), correct_pad_token=False)


def template(name: str) -> str:
    return (fetch_chats.TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


# ----------------------------------------------------------------------- the cells


def measured(subject: Subject) -> dict[str, list[str]]:
    """Cell -> [outcome, the sentence of a refusal, the mapping of roles that it needs], without empty ends."""
    return {cell: _outcome(subject, cell) for cell in CELLS}


def _outcome(subject: Subject, cell: str) -> list[str]:
    if cell == "generation":
        return [_generation(subject)]
    try:
        return [*_tried(subject, cell, {})]
    except TriviumError as error:
        refusal = _sentence(error)
    for roles in _ROLES if cell in _OF_ROLES else ():
        try:
            _tried(subject, cell, roles)
        except TriviumError:
            continue
        return ["mapped", refusal, ", ".join(f"{one}: {other}" for one, other in roles.items())]
    return ["refused", refusal]


def _sentence(error: TriviumError) -> str:
    """What was found, without the values of a template."""
    return re.sub(r"\s+", " ", error.found)[:90]


def _tried(subject: Subject, cell: str, roles: Mapping[str, str]) -> tuple[str, ...]:
    """The outcome of a cell. Raises TriviumError for a refusal."""
    user, answer, following = Message("user", "first question"), Message("assistant", "fine"), Message("user", "next")
    match cell:
        case "one turn":
            return (in_turns(subject, roles, [user], []),)
        case "three turns":
            rounds = [(answer, [following]), (Message("assistant", "well"), [Message("user", "third")])]
            return (in_turns(subject, roles, [user], rounds),)
        case "system":
            return (in_turns(subject, roles, [Message("system", "told words"), user], [(answer, [following])]),)
        case "developer":
            told = [Message("developer", "told words"), user]
            outcome = in_turns(subject, roles, told, [(answer, [following])])
            same = subject.renderer(roles).render(told).tokens.tolist() == subject.whole(told, generation=True)
            return (outcome,) if same or roles else ("mapped", "", "developer: system")
        case "thinking" | "no thinking":
            return _thinking(subject, roles, cell == "thinking")
        case "one call" | "two calls" | "call without arguments":
            arguments = {"one call": ['{"city": "Rome"}'], "two calls": ['{"city": "Rome"}', '{"city": "Bern"}']}
            calls = tuple(ToolCall("weather", each) for each in arguments.get(cell, ["{}"]))
            results = [Message("tool", f"sunny {n}", name="weather") for n in range(len(calls))]
            asked = [TOLD, user]
            called = [(Message("assistant", "", tool_calls=calls), results)]
            return (in_turns(subject, roles, asked, [*called, (answer, [following])]),)
        case "unicode":
            said, asked = Message("assistant", f"{UNICODE} fine"), Message("user", UNICODE)
            return (in_turns(subject, roles, [asked], [(said, [Message("user", f"next {UNICODE}")])]),)
        case "supervised":
            return (supervised(subject, roles, [user, answer, following, Message("assistant", "well")]),)
        case _:
            called = Message("assistant", "", tool_calls=(ToolCall("weather", '{"city": "Rome"}'),))
            result = Message("tool", "sunny", name="weather")
            return (supervised(subject, roles, [TOLD, user, called, result, answer]),)


def in_turns(
    subject: Subject, roles: Mapping[str, str], first: list[Message], rounds: list[tuple[Message, list[Message]]]
) -> str:
    """Renders turn by turn: `exact` if the tokens are those of the whole conversation, else `kept`. Each completion is
    what the template writes there, or what the policy may write. Raises Silent."""
    renderer = subject.renderer(roles)
    history = [*first]
    prompt = renderer.render(history)
    check_shown(renderer, prompt.tokens, first)
    turns = [message for reply, new in rounds for message in (reply, *new)]
    whole = subject.whole([*first, *turns], generation=True)
    for reply, new in rounds:
        tokens = _written(subject, renderer, prompt, whole, reply)
        said = Message("assistant", renderer.decode(tokens))
        if not _calls_are(subject, renderer, prompt, said.content, reply):
            raise Silent(f"{subject.name}: the calls of {said.content!r} are not read")
        seen = prompt.then(Prompt(np.asarray(tokens, np.int32)))
        history.append(said)
        prompt = renderer.extend(history, seen, StopReason.EOS, new)
        history += new
        if prompt.tokens[: len(seen)].tolist() != seen.tokens.tolist():
            raise Silent(f"{subject.name}: the tokens of the policy are changed")
        check_shown(renderer, prompt.tokens[len(seen) :], new)
    return "exact" if prompt.tokens.tolist() == whole else "kept"


def _written(
    subject: Subject, renderer: ChatRenderer, prompt: Prompt, whole: list[int], reply: Message
) -> Sequence[int]:
    """A completion with its end: what the template writes after the prompt, or what the policy may write."""
    begun, rest = whole[: len(prompt)] == prompt.tokens.tolist(), whole[len(prompt) :]
    end = next((at + 1 for at, token in enumerate(rest) if token in renderer.eos_token_ids), 0)
    text = _same(renderer.decode(rest[:end])) if begun and not reply.reasoning else ""
    other = text and re.search("next|third|sunny", text)
    if text and not other and _same(reply.content) in text and _calls_are(subject, renderer, prompt, text, reply):
        return rest[:end]
    opening, closing = renderer.tool_format.reasoning
    opened = _opens(subject, renderer, prompt)
    text = renderer.tool_format.write(reply.tool_calls) if reply.tool_calls else reply.content
    if reply.reasoning or opened:
        text = f"{'' if opened else opening}{reply.reasoning or ''}{closing}{text}"
    tokens = subject.tokenizer.encode(text, add_special_tokens=False)
    return [*tokens, _end(subject, renderer, called=bool(reply.tool_calls))]


def _opens(subject: Subject, renderer: ChatRenderer, prompt: Prompt) -> bool:
    """Whether the prompt opens a block of reasoning."""
    return renderer.tool_format.opens(_tail(subject, prompt))


def _tail(subject: Subject, prompt: Prompt) -> str:
    return str(subject.tokenizer.decode(prompt.tokens[-REASONING_TAIL:].tolist()))


def _calls_are(subject: Subject, renderer: ChatRenderer, prompt: Prompt, text: str, reply: Message) -> bool:
    """Whether the calls of a message are read from the text of a completion."""
    calls, _ = attempted_calls(text, SCHEMAS, renderer.tool_format, _tail(subject, prompt))
    read, meant = ([(each.name, json.loads(each.arguments)) for each in some] for some in (calls, reply.tool_calls))
    return read == meant


def _end(subject: Subject, renderer: ChatRenderer, *, called: bool) -> int:
    """The token with which the policy ends a turn: the last that the template writes, or the end of sequence."""
    end = Message("assistant", "fine")
    if called:
        calls = (ToolCall("weather", "{}"),)
        end = Message("assistant", "", tool_calls=calls)
    whole = subject.whole([Message("user", "question"), end], generation=False)
    ends = [token for token in whole[-8:] if token in renderer.eos_token_ids]
    return ends[-1] if ends else subject.tokenizer.eos_token_id


def supervised(subject: Subject, roles: Mapping[str, str], messages: list[Message]) -> str:
    """`exact` if the tokens of a supervised conversation are those of transformers, up to what follows the last end of
    turn, or with an end of turn that the template does not write. Raises Silent."""
    renderer = subject.renderer(roles)
    turns = renderer.supervised(messages)
    whole, decode = subject.whole(messages, generation=False), subject.tokenizer.decode
    answers = [message for message in messages if message.role == "assistant"]
    if len(turns) != len(answers):
        raise Silent(f"{subject.name}: {len(turns)} turns of {len(answers)}")
    for (prompt, tokens), message in zip(turns, answers, strict=True):
        text = str(decode(tokens.tolist()))
        words = "Rome" if message.tool_calls else message.content
        if words not in text or any(other in text for other in ("question", "next", "sunny")):
            raise Silent(f"{subject.name}: the turn {message} is {text!r}")
        start = str(decode(prompt.tokens.tolist()))
        if message.tool_calls and "weather" in start.rpartition("question")[2]:
            raise Silent(f"{subject.name}: the prompt of the calls has them: {start[-80:]!r}")
        if str(decode(tokens[-1:].tolist(), skip_special_tokens=True)).strip():
            raise Silent(f"{subject.name}: the turn {text!r} has no end")
    prompt, tokens = turns[-1]
    own = [*prompt.tokens.tolist(), *tokens.tolist()]
    if int(own[-1]) in renderer.eos_token_ids and whole[len(own) - 1 : len(own)] != own[-1:]:
        own.pop()  # the template writes no end of turn
    rest = str(decode(whole[len(own) :], skip_special_tokens=True)).strip()
    return "exact" if whole[: len(own)] == own and not rest else "kept"


def _thinking(subject: Subject, roles: Mapping[str, str], on: bool) -> tuple[str, ...]:
    user, following = Message("user", "first question"), Message("user", "next")
    one, other = (
        Subject(subject.name, subject.tokenizer, with_variables(subject.source, {"enable_thinking": value}))
        for value in (on, not on)
    )
    reply = Message("assistant", "fine", reasoning="reasons" if on else None)
    examples = [[user], [user, Message("assistant", "fine"), following]]
    if all(one.whole(each, generation=True) == other.whole(each, generation=True) for each in examples):
        return "none", "the chat template does not use `enable_thinking`"
    outcome = in_turns(one, roles, [user], [(reply, [following])])
    return (outcome,)


def _generation(subject: Subject) -> str:
    """`exact` if the tokens of supervised turns are those that `{% generation %}` encloses."""
    if not subject.training:
        return "none"
    renderer = subject.renderer(source=subject.training)
    messages = [Message("user", "question"), Message("assistant", "fine")]
    messages += [Message("user", "next"), Message("assistant", "well")]
    mask = np.asarray(
        subject.tokenizer.apply_chat_template(
            list(_entries(renderer, messages)),
            chat_template=subject.training,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )["assistant_masks"],
        np.bool_,
    )
    own = np.zeros_like(mask)
    for prompt, tokens in renderer.supervised(messages):
        own[len(prompt) : len(prompt) + len(tokens)] = True
    return "exact" if (own == mask).all() else "other tokens"


# ----------------------------------------------------------------------- conversations for transformers


def _entries(renderer: ChatRenderer, messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The conversation as OpenAI's clients send it, in the form that the template takes."""
    style, by_parts, number = renderer.template.call_style, renderer.template.by_parts, 0
    answered = 0
    for message in messages:
        content: Any = [{"type": "text", "text": message.content}] if by_parts else message.content
        entry: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            entry["content"] = content if style is None or style.content is not None else None
            entry["tool_calls"] = []
            for call in message.tool_calls:
                as_text = style is not None and style.as_text
                function = {"name": call.name, "arguments": call.arguments if as_text else json.loads(call.arguments)}
                entry["tool_calls"].append({"id": f"call{number:05d}", "type": "function", "function": function})
                number += 1
        if message.role == "tool":
            entry |= {"tool_call_id": f"call{answered:05d}", "name": message.name}
            answered += 1
        yield entry


def check_shown(renderer: ChatRenderer, tokens: Any, messages: Sequence[Message]) -> None:
    """Raises Silent if the text of a message is not in these tokens, in the order of those after the system message."""
    text, at = _same(renderer.decode(tokens)), 0
    for message in messages:
        word = TOOLS[0]["function"]["name"] if message.role == "tools" else message.content
        forms = {_same(word), json.dumps(_same(word), ensure_ascii=False)[1:-1]}  # some write results as JSON
        place = min((place for form in forms if (place := text.find(form, at)) >= 0), default=-1)
        if place < 0:
            raise Silent(f"the message {message} is not in {text!r}")
        at = at if message.role in ("tools", "system", "developer") else place + 1


@cache
def _same(text: str) -> str:
    """A text as tokenizers may normalize it."""
    return normalize("NFC", text)


def row(subject: Subject) -> dict[str, Any]:
    """The ends of a turn, the format of calls, and the cells of a template."""
    renderer = subject.renderer()
    forms = (name for name in CATALOGUE["tool_calls"] if resolve("tool_calls", name) is renderer.tool_format)
    ends = subject.tokenizer.convert_ids_to_tokens(sorted(renderer.eos_token_ids))
    return {"ends": ends, "format": next(forms, "any"), "cells": measured(subject)}


def written(rows: Mapping[str, Any]) -> str:
    """The text of the JSON file: a line for each cell."""
    return re.sub(r"\[\n\s+([^\[\]]*?)\n\s+\]", _on_a_line, json.dumps(rows, indent=1, ensure_ascii=False)) + "\n"


def _on_a_line(values: re.Match[str]) -> str:
    return "[" + re.sub(r"\n\s+", " ", values[1]) + "]"


if __name__ == "__main__":
    OUTCOMES.write_text(written({subject.name: row(subject) for subject in subjects()}), encoding="utf-8")
