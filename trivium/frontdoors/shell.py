"""Reads the commands of a shell script, with its variables expanded. Nothing is run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from trivium.foundation.errors import ConfigError

OUTPUT = "${command_output}"
"""An unset variable that stands for the output of a command, because commands are not run."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\}|(\w+))")
_ARGUMENTS = re.compile(r'"?\$(?:\{[@*][^}]*\}|[@*])"?')
_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_SUM = re.compile(r"\ue002([^\ue002\ue003]*)\ue003")
# Private code points of Unicode, which no script contains.
_QUOTED, _DOLLAR, _ITEM = "\ue000", "\ue001", "\ue004"
"""Marks: before a `$` in double quotes, instead of a `$` that is not expanded, and after each item of an array."""
# These stand before a command or an assignment.
_KEYWORDS = ("export", "local", "readonly", "then", "do", "else")


def commands(text: str, path: Path) -> Iterator[list[str]]:
    """Yields the words of each command, without redirections and assignments.

    Expands the variables and arrays that the script assigns, those of the environment, and arithmetic of whole numbers.
    A variable without a value stays as it is; the arguments of the script (`"$@"`) are left out. Both branches of an
    `if` are read. Raises ConfigError for quotes that do not close.
    """
    variables: dict[str, str] = {}
    for statement in _statements(text, path):
        words = [word for raw in statement if raw not in _KEYWORDS for word in _words(raw, variables)]
        if words and words[0].endswith("=") and words[-1] == ")":
            words = [words[0] + "".join(word + _ITEM for word in words[1:-1])]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            name, adds, value = match.groups()
            variables[name] = variables.get(name, "") + value if adds else value
            words.pop(0)
        yield words


def _words(raw: str, variables: Mapping[str, str]) -> list[str]:
    """Returns the words that a word of the script expands to. A variable that is not in quotes is split."""
    value = expanded(raw, variables)
    if _VARIABLE.fullmatch(raw) is None or value == raw:
        return [value]
    return value.split(_ITEM)[:-1] if _ITEM in value else value.split()


def _statements(text: str, path: Path) -> Iterator[list[str]]:
    """Yields the words of each command, without redirections. The words of an array end with `)`."""
    marked = _marked(_ARRAY.sub(r"${\1}", _ARGUMENTS.sub("", text)))
    lexer = shlex.shlex(marked, posix=True, punctuation_chars=";<>|&\n")
    # shlex ends a word at any `#`, a shell only before a word: `_marked` has removed the comments.
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    statement: list[str] = []
    try:
        for word in lexer:
            if word and not word.strip(";<>|&\n"):
                redirected = word[0] in "<>" and statement and statement[-1].isdigit()
                yield statement[:-1] if redirected else statement
                statement = []
            else:
                statement.append(word)
    except ValueError as error:
        raise ConfigError(f"the shell script {path}", str(error), "close its quotes") from error
    yield statement


def _marked(text: str) -> str:
    """Returns a script without comments and line continuations, an array on one line, `OUTPUT` for commands in `$(...)`
    and backquotes, and marks at arithmetic and at each `$` in quotes."""
    result, quote, array, place = "", "", False, 0
    while place < len(text):
        letter, end = text[place], -1
        if quote != "'" and text.startswith("$(", place):
            end = _closing(text, place + 2)
        elif quote != "'" and letter == "`":
            end = text.find("`", place + 1)
        if end > 0:
            result, place = result + _output(text[place : end + 1]), end + 1
            continue
        if letter == "\\" and quote != "'":
            escaped = text[place : place + 2]
            result, place = result + {"\\\n": "", "\\$": _DOLLAR}.get(escaped, escaped), place + 2
            continue
        if letter == "#" and not quote and result[-1:].strip() == "":
            place += len(text[place:].partition("\n")[0])
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "$" and quote:
            letter = _DOLLAR if quote == "'" else _QUOTED + letter
        elif not quote and letter == "(" and result.endswith("="):
            array, letter = True, " "
        # An array may have several lines, at whose ends the lexer would end the statement.
        elif not quote and array and letter in ")\n":
            array, letter = letter == "\n", " " if letter == "\n" else " )"
        result, place = result + letter, place + 1
    return result


def _output(command: str) -> str:
    """Returns what stands for a command or arithmetic in the script."""
    if command.startswith("$((") and command.endswith("))"):
        return "\ue002" + "".join(command[3:-2].split()) + "\ue003"
    return os.getcwd() if command.strip("$()` ") == "pwd" else OUTPUT


def _closing(text: str, place: int) -> int:
    """Returns the place of the parenthesis that closes one opened before `place`, or -1."""
    depth = 1
    for at in range(place, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    return -1


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expands `$NAME`, `${NAME}`, `${NAME:-default}` and arithmetic. A variable without a value or default stays as it
    is."""

    def known(match: re.Match[str]) -> str:
        name, default = match.group(1) or match.group(3), match.group(2)
        return variables.get(name, os.environ.get(name, match.group(0) if default is None else value_of(default)))

    def value_of(part: str) -> str:
        return _VARIABLE.sub(known, part)

    def sum_of(match: re.Match[str]) -> str:
        return _calculated(value_of(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", r"$\1", match.group(1))))

    return value_of(_SUM.sub(sum_of, text.replace(_QUOTED, ""))).replace(_DOLLAR, "$")


def _calculated(text: str) -> str:
    """Returns the value of arithmetic of whole numbers, or `OUTPUT` if it has other parts."""
    # The bound and the refused `**` keep a short text from a number of millions of digits.
    if not re.fullmatch(r"[\d+*/()-]{1,80}", text) or "**" in text:
        return OUTPUT
    try:
        # A shell divides whole numbers.
        return str(eval(re.sub(r"/+", "//", text), {"__builtins__": {}}))  # only digits and operators
    except (SyntaxError, ZeroDivisionError, TypeError):
        return OUTPUT
