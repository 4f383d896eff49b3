"""Formats whose arguments are written as in Python, or as JSON with texts between marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from trivium.text.tool_formats.base import Calls, ToolCall, ToolFormat, all_calls, call_with, decoded

_TOKEN = re.compile(
    r"<\|tool_call>call:(?P<begin>[^\s{}<>]+)\{|(?P<end>\}<tool_call\|>(?:\s*<\|tool_response>\s*\Z)?)"
    r"|(?P<name>[^\s,:=\[\](){}'\"<>]+)\(|(?P<key>[^\s,:=\[\](){}'\"<>]+)\s*[:=]|(?P<word>[^\s,:=\[\](){}'\"<>]+)"
    r"|<\|\"\|>(?P<marked>.*?)<\|\"\|>"
    # Some templates escape no quote in a text: it ends at one that something else follows.
    r"|(?P<quote>['\"])(?P<quoted>(?:[^\\]|\\.)*?)(?P=quote)(?=\s*[,:=)\]}])"
    r"|(?P<other>[\[\]{},:=)]|\s+)",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "=": ":", ")": "}]"}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0", "\n": ""} | {c: c for c in "\\'\"/"}


class Lfm(ToolFormat):
    """A list of calls in Python's notation between `<|tool_call_start|>` and `<|tool_call_end|>`, as LFM2 writes it."""

    _END = "<|tool_call_end|>"
    marks = ("<|tool_call_start|>", _END)

    def read(self, text: str) -> Calls | None:
        content, _, body = text.partition(self.marks[0])
        body, end, rest = body.rpartition(self._END)
        return all_calls(content, _read(body)) if end and not rest.strip() else None

    def write(self, calls: Sequence[ToolCall]) -> str:
        texts = (f"{name}({self._written(json.loads(arguments))})" for name, arguments in calls)
        return f"{self.marks[0]}[{', '.join(texts)}]{self._END}"

    def _written(self, arguments: dict[str, Any]) -> str:
        """Arguments by name; a name that Python does not allow is a text."""
        pairs = ((key if re.fullmatch(r"\w+", key) else _quoted(key), value) for key, value in arguments.items())
        return ", ".join(f"{key}={_quoted(value)}" for key, value in pairs)


class Gemma(ToolFormat):
    """`<|tool_call>call:name{key:value}<tool_call|>` with texts between `<|"|>`, as Gemma 4 writes it."""

    _QUOTE, _END = '<|"|>', "<tool_call|>"
    reasoning = ("<|channel>thought\n", "<channel|>")
    marks = ("<|tool_call>", _END, _QUOTE, "<|channel>", "<channel|>")

    def read(self, text: str) -> Calls | None:
        content, mark, body = text.partition(self.marks[0])
        return all_calls(content, _read(mark + body, blocks=True)) if mark else None

    def write(self, calls: Sequence[ToolCall]) -> str:
        blocks = (f"call:{name}{self._written(json.loads(arguments))}" for name, arguments in calls)
        return "".join(f"{self.marks[0]}{block}{self._END}" for block in blocks)

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            # A text with the mark of its end is written as JSON, in which a mark can be escaped.
            plain = self._QUOTE not in value
            return f"{self._QUOTE}{value}{self._QUOTE}" if plain else json.dumps(value).replace("<", "\\u003c")
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if not isinstance(value, dict):
            return json.dumps(value)
        pairs = ((key if re.fullmatch(r"\w+", key) else self._written(key), content) for key, content in value.items())
        return f"{{{','.join(f'{key}:{self._written(content)}' for key, content in pairs)}}}"


def _quoted(value: Any) -> str:
    """A literal of Python. Texts have single quotes, as models were trained on them."""
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
        return f"'{escaped}'"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _read(text: str, *, blocks: bool = False) -> list[ToolCall | None]:
    """Reads a list of calls, or blocks one after the other, by writing them as JSON: pairs of a name and arguments."""
    parts, at = list[str](), 0
    while at < len(text):
        if (token := _TOKEN.match(text, at)) is None:
            return [None]
        parts.append(_as_json(token))
        at = token.end()
    listed, rest = decoded(f"[{''.join(parts).rstrip().rstrip(',')}]" if blocks else "".join(parts))
    if not isinstance(listed, list) or rest.strip():
        return [None]
    pairs = [entry if isinstance(entry, list) and len(entry) == 2 else [None, None] for entry in listed]
    return [call_with(name, arguments) for name, arguments in pairs]


def _as_json(token: re.Match[str]) -> str:
    if (name := token["begin"] or token["name"]) is not None:
        return f"[{json.dumps(name)}, {{"
    if token["end"] is not None:
        return "}],"
    if token["key"] is not None:
        return f"{json.dumps(token['key'])}:"
    if token["marked"] is not None or token["quoted"] is not None:
        return json.dumps(token["marked"] if token["quoted"] is None else _unescaped(token["quoted"]))
    return _WORDS.get(token[0], token[0])


def _unescaped(text: str) -> str:
    """A text without the escapes of Python and JSON."""

    def meaning(escape: re.Match[str]) -> str:
        code = escape[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, escape[0])

    # Two escapes of JSON may be one character.
    return _ESCAPE.sub(meaning, text).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


LFM, GEMMA = Lfm(), Gemma()
