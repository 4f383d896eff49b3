"""Reads the commands of a shell script, with its variables expanded. Nothing is run."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from trivium.errors import ConfigError

OUTPUT = "${command_output}"
"""An unset variable that stands for the output of a command, because commands are not run."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\}|(\w+))")
_WORD = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ARRAY = re.compile(r"\ue000?\$\{(\w+)\[[@*]\]\}")
_ARGUMENTS = re.compile(r"\ue000?\$(?:\{[@*][^}]*\}|[@*])")
"""Matches the arguments of the script itself."""
_SUM = re.compile(r"\ue002([^\ue002\ue003]*)\ue003")
_QUOTED, _DOLLAR = "\ue000", "\ue001"
"""Marks of `_marked`: before a `$` in double quotes, and instead of a `$` that is not expanded."""
_KEYWORDS = ("export", "local", "readonly", "then", "do", "else")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv}


def commands(text: str, path: Path) -> Iterator[list[str]]:
    """Yields the words of each command, in the order of the script, without redirections and assignments.

    Expands the variables and arrays that the script assigns, those of the environment, and arithmetic of whole numbers.
    A variable without a value stays as it is; the arguments of the script (`"$@"`) are left out. Both branches of an
    `if` are read. Raises ConfigError for quotes that do not close.
    """
    variables: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    for statement in _statements(text, path):
        if statement and statement[-1] == ")" and (match := ASSIGNMENT.fullmatch(statement[0])):
            name, adds = match.group(1), match.group(2)
            items = [word for raw in statement[1:-1] for word in _words(raw, variables, arrays)]
            arrays[name] = [*arrays.get(name, []), *items] if adds else items
            continue
        words = [word for raw in statement if raw not in _KEYWORDS for word in _words(raw, variables, arrays)]
        while words and (match := ASSIGNMENT.fullmatch(words[0])):
            name, adds, value = match.groups()
            variables[name] = variables.get(name, "") + value if adds else value
            words.pop(0)
        yield words


def _words(raw: str, variables: Mapping[str, str], arrays: Mapping[str, list[str]]) -> list[str]:
    """Returns the words that a word of the script expands to."""
    if _ARGUMENTS.fullmatch(raw):
        return []
    if match := _ARRAY.fullmatch(raw):
        return arrays.get(match.group(1), [])
    value = expanded(raw, variables)
    # The shell splits the value of a variable that is not in quotes.
    return value.split() if _WORD.fullmatch(raw) and value != raw else [value]


def _statements(text: str, path: Path) -> Iterator[list[str]]:
    """Yields the words of each command, without redirections. The words of an array end with `)`."""
    lexer = shlex.shlex(_marked(text), posix=True, punctuation_chars=";<>|&\n")
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
            place = text.find("\n", place)
            if place < 0:
                break
            continue
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "$" and quote:
            letter = _DOLLAR if quote == "'" else _QUOTED + letter
        elif not quote and letter == "(" and result.endswith("="):
            array, letter = True, " "
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
        named = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", match.group(1).replace("{", "").replace("}", ""))
        return _calculated(value_of(named))

    return value_of(_SUM.sub(sum_of, text.replace(_QUOTED, ""))).replace(_DOLLAR, "$")


def _calculated(text: str) -> str:
    """Returns the value of arithmetic of whole numbers, or `OUTPUT` if it has other parts."""

    def number(node: ast.expr) -> int:
        match node:
            case ast.Constant(int() as value):
                return value
            case ast.BinOp(left, operation, right):
                return _OPERATORS[type(operation)](number(left), number(right))
            case _:
                raise ValueError

    try:
        return str(number(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return OUTPUT
