"""The overrides of a command line as Hydra reads them: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trivium.errors import ConfigError, Problem

_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_WORDS: Mapping[str, object] = {"null": None, "true": True, "false": False}


def overridden(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the config with the overrides applied in order. Raises a ConfigError that lists all invalid overrides."""
    result, problems = _copied(config), list[Problem]()
    for text in overrides:
        key, equals, value = text.lstrip("+~").partition("=")
        if not key or not (equals or text.startswith("~")):
            do = "write section.key=value, +section.key=value or ~section.key"
            problems.append(Problem(text, "an override", "no `=`" if key else "no key", do))
            continue
        try:
            put(result, key.split("."), None if text.startswith("~") else value_of(value), text.startswith("~"))
        except ValueError as error:
            problems.append(Problem(key, value, str(error), "correct the value, or quote it: key='...'"))
    if problems:
        raise ConfigError("overrides", f"{len(problems)} problem(s)", "fix them all at once:", problems)
    return result


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in config.items()}


def put(config: dict[str, Any], parts: list[str], value: object, remove: bool = False) -> None:
    """Sets or removes a key. A mapping is merged into an existing mapping."""
    *above, last = parts
    for part in above:
        inner = config.get(part)
        config[part] = config = inner if isinstance(inner, dict) else {}
    old = config.get(last)
    if remove:
        config.pop(last, None)
    elif isinstance(value, dict) and isinstance(old, dict):
        for name, part in value.items():
            put(old, [name], part)
    else:
        config[last] = value


def value_of(text: str) -> Any:
    """Parses a value: null, a boolean, a number, quoted text, `[a, b]` or `{a: b}`; any other text is a string.

    Raises ValueError for unclosed brackets or quotes, and for more than one value.
    """
    parser = _Values(text)
    value = parser.value("")
    if parser.rest():
        raise ValueError(f"{parser.rest()!r} after the value")
    return value


class _Values:
    """Reads values from text, one after another."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text.strip(), 0

    def rest(self) -> str:
        return self._text[self._at :].strip()

    def value(self, ends: str) -> Any:
        """Parses the next value. An unquoted value ends before any character of `ends`."""
        self._blanks()
        first = self._text[self._at : self._at + 1]
        if first == "[":
            return self._items("]", lambda: self.value(",]"))
        if first == "{":
            return dict(self._items("}", self._pair))
        if first and first in "'\"":
            quoted = self._quoted(first)
            self._blanks()
            if not self.rest() or self._text[self._at] in ends:
                return quoted
            raise ValueError(f"{self.rest()!r} after the quoted text")
        return _primitive(self._bare(ends))

    def _blanks(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _items(self, close: str, item: Any) -> list[Any]:
        items: list[Any] = []
        self._at += 1
        self._blanks()
        while self._text[self._at : self._at + 1] != close:
            items.append(item())
            self._blanks()
            if self._text[self._at : self._at + 1] == ",":
                self._at += 1
                self._blanks()
            elif self._text[self._at : self._at + 1] != close:
                raise ValueError(f"no {close!r} at its end")
        self._at += 1
        return items

    def _pair(self) -> tuple[str, Any]:
        key = self.value(":,}")
        self._blanks()
        if self._text[self._at : self._at + 1] != ":":
            raise ValueError("no `:` after a key")
        self._at += 1
        return str(key), self.value(",}")

    def _quoted(self, quote: str) -> str:
        match = re.compile(rf"{quote}((?:\\.|[^\\{quote}])*){quote}").match(self._text, self._at)
        if match is None:
            raise ValueError("a quote that does not close")
        self._at = match.end()
        return re.sub(rf"\\([\\{quote}])", r"\1", match.group(1))

    def _bare(self, ends: str) -> str:
        """Parses unquoted text. `\\` escapes the next character, and a reference (`${...}`) is not split."""
        text, depth = "", 0
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter == "\\" and self._at + 1 < len(self._text):
                self._at += 1
                letter = self._text[self._at]
            elif self._text.startswith("${", self._at):
                depth += 1
            elif letter == "}" and depth:
                depth -= 1
            elif letter in ends and not depth:
                break
            text += letter
            self._at += 1
        return text.strip()


def _primitive(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
