"""Formats that write each argument between tags: a text as it is, any other value as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from trivium.text.tool_formats.base import NOTHING, Calls, Schemas, ToolCall, ToolFormat, all_calls, call_with, decoded

_WORDS = {"True": True, "False": False, "None": None}
"""What Jinja's `string` makes of these values."""
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_PLAIN_KEY = re.compile(r"[\w.$-]+")
_GROUPS = {
    "name": r'(?P<name>[^\s<>"{}\[\]]+)',
    "key": r'(?P<key>"(?:[^"\\\n]|\\.)*"|[^"<>\n]*)',
    "value": r"(?P<value>.*?)",
}


@dataclass(frozen=True, eq=False)
class Tagged(ToolFormat):
    """A notation of tags: `block` with {calls}, `call` with {name} and {arguments}, `argument` with {key} and {value}.

    A value is read by the type that the schema of its tool names: a text stays one. Without a schema, JSON that is no
    text is that value. A text that would be read as another value is written as a JSON string.
    """

    block: str
    call: str
    argument: str
    one_block: bool = False
    """Whether several calls share a block."""
    schemas: Schemas = field(default_factory=dict[str, Mapping[str, Any]])

    @cached_property
    def marks(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        tags = re.findall(r"</?[\w:]+>", self.block + self.call + self.argument)
        return tuple(dict.fromkeys(tags))

    def typed(self, schemas: Schemas) -> ToolFormat:
        return replace(self, schemas=schemas)

    def read(self, text: str) -> Calls | None:
        content, mark, _ = text.partition(self.marks[0])
        return all_calls(content, self._calls(text, len(content))) if mark else None

    def write(self, calls: Sequence[ToolCall]) -> str:
        written = [self._written(call) for call in calls]
        return "\n".join(self.block.format(calls=body) for body in (["".join(written)] if self.one_block else written))

    def instructions(self) -> str:
        return f"{super().instructions()}\nWrite texts as they are, and other values as JSON."

    # ------------------------------------------------------------------ reading

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        """What begins and ends a block, what begins and ends a call, an argument."""
        opening, _, closing = self.block.partition("{calls}")
        head, _, tail = self.call.partition("{arguments}")
        follows = "|".join(re.escape(mark.strip()) for mark in (self.argument.partition("{key}")[0], tail or closing))
        argument = _pattern(self.argument).replace(r"\s*(?P<value>.*?)\s*", r"\n?(?P<value>.*?)\n?")
        parts = [*map(_pattern, (opening, closing, head, tail)), rf"{argument}(?=\s*(?:{follows}))"]
        return tuple(re.compile(rf"\s*{part}", re.DOTALL) for part in parts)

    def _calls(self, text: str, at: int) -> Iterator[ToolCall | None]:
        """Reads blocks up to the end of the text."""
        opening, closing, *_ = self._patterns
        while text[at:].strip():
            if (opened := opening.match(text, at)) is None:
                yield None
                return
            at = opened.end()
            while (closed := closing.match(text, at)) is None:
                call, at = self._call(text, at)
                yield call
                if call is None:
                    return
            at = closed.end()

    def _call(self, text: str, at: int) -> tuple[ToolCall | None, int]:
        """(a call, the place after it); (None, `at`) for anything else."""
        *_, head, tail, argument = self._patterns
        if (named := head.match(text, at)) is None:
            return None, at
        end, values = named.end(), dict[str, Any]()
        while (entry := argument.match(text, end)) is not None:
            quoted = _literal(entry["key"])
            key = entry["key"] if quoted is None else quoted
            values[key] = self._value(entry["value"], self._types(named["name"], key))
            end = entry.end()
        ended = tail.match(text, end)
        return (None, at) if ended is None else (call_with(named["name"], values), ended.end())

    def _value(self, text: str, types: frozenset[str] | None) -> Any:
        """The value of a text between tags, which may be of these `types`; None: the schema names none."""
        quoted = _literal(text)
        if quoted is not None and not self._is_plain(quoted, types):
            return quoted
        if types == {"string"}:
            return text
        value, rest = decoded(text)
        value = _WORDS.get(text.strip(), NOTHING) if rest.strip() else value
        if value is NOTHING or isinstance(value, str):
            return text
        kind = _KINDS.get(type(value), "null")
        fits = types is None or "string" not in types or kind in types or (kind == "integer" and "number" in types)
        return value if fits else text

    def _types(self, name: str, key: str) -> frozenset[str] | None:
        properties = self.schemas.get(name, {}).get("properties")
        return _types_of(properties.get(key)) if isinstance(properties, Mapping) else None

    # ------------------------------------------------------------------ writing

    def _written(self, call: ToolCall) -> str:
        """A call without its block."""
        arguments = ""
        for key, value in json.loads(call.arguments).items():
            plain = isinstance(value, str) and self._is_plain(value, self._types(call.name, key))
            # Within JSON, a closing tag would end the argument.
            text = value if plain else json.dumps(value).replace("</", "\\u003c/")
            name = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key).replace("<", "\\u003c").replace(">", "\\u003e")
            arguments += self.argument.format(key=name, value=text)
        return self.call.format(name=call.name, arguments=arguments)

    def _is_plain(self, text: str, types: frozenset[str] | None) -> bool:
        """Whether a text between the tags is read as the same text."""
        return self.argument.partition("{value}")[2].strip() not in text and self._value(text, types) == text


class Muse(Tagged):
    """Each block is a message to the function, as reasoning is one to `self` and an answer one to `user`."""

    reasoning = ("to=self<|message|>", "<|eom|>")
    answers = ("<|start|>assistant to=user<|message|>", "to=user<|message|>")
    starts = ("to=",)
    _TO = re.compile(r"(?:<\|start\|>assistant)?\s*to=[^\s<]+<\|message\|>(?=<atem:function_calls>)")
    _END = re.compile(r"(?<=</atem:function_calls>)<\|eo[mt]\|>")

    @cached_property
    def marks(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*super().marks, " to=", "<|start|>", "<|message|>", "<|eom|>")

    def read(self, text: str) -> Calls | None:
        return super().read(self._END.sub("", self._TO.sub("", text)))

    def write(self, calls: Sequence[ToolCall]) -> str:
        messages = (f" to={call.name}<|message|>{super(Muse, self).write([call])}" for call in calls)
        return "<|eom|><|start|>assistant".join(messages)


def _types_of(schema: Any) -> frozenset[str] | None:
    """The types that a JSON schema allows; None if it does not name them."""
    if not isinstance(schema, Mapping):
        return None
    if isinstance(options := schema.get("anyOf", schema.get("oneOf")), list):
        types = [_types_of(option) for option in options]
        return None if None in types else frozenset(name for names in types for name in names or ())
    kind = schema.get("type")
    return frozenset([kind] if isinstance(kind, str) else kind) if isinstance(kind, str | list) else None


def _pattern(template: str) -> str:
    """The regular expression of a template. White space at its lines' ends may be any."""
    parts = re.split(r"\{(\w+)\}", template.strip("\n") if template.strip() else "")
    texts = (_GROUPS[part] if number % 2 else re.escape(part) for number, part in enumerate(parts))
    return "".join(texts).replace("\\\n", r"\s*")


def _literal(text: str) -> str | None:
    """The text of a JSON string; None for anything else."""
    value, rest = decoded(text) if text.startswith('"') else (None, "")
    return value if isinstance(value, str) and not rest else None


XML = Tagged(
    block="<tool_call>\n{calls}</tool_call>",
    call="<function={name}>\n{arguments}</function>\n",
    argument="<parameter={key}>\n{value}\n</parameter>\n",
)
GLM = Tagged(
    block="<tool_call>{calls}</tool_call>",
    call="{name}\n{arguments}",
    argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
)
MINIMAX = Tagged(
    block="<minimax:tool_call>\n{calls}</minimax:tool_call>",
    call='<invoke name="{name}">\n{arguments}</invoke>\n',
    argument='<parameter name="{key}">{value}</parameter>\n',
    one_block=True,
)
MUSE = Muse(
    block="<atem:function_calls>\n{calls}</atem:function_calls>",
    call='<atem:invoke name="{name}">\n{arguments}</atem:invoke>\n',
    argument='<atem:parameter name="{key}">{value}</atem:parameter>\n',
)
