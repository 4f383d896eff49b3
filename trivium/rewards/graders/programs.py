"""Scores programs: the share of at most ten tests that a program passes, run in the sandbox.

A program does not learn what is expected of it: its output is compared outside its process. This process compares it;
an `assert` that is not of the form `call == literal` is evaluated in a second sandbox (`sandbox/asserts.py`).
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trivium.foundation.errors import DataError
from trivium.rewards.sandbox import Check, Ran, Sandbox, long_integers

MAX_TESTS = 10
_CLOSE = 1e-6
"""The relative difference up to which numbers with a fraction are equal."""
_LARGEST = 1e300
"""Whole numbers beyond it may not fit a float, so they are compared exactly."""

_WALLS = 4
"""The time of all tests of a program together, in time limits of one test: 120 s by default, less than the deadline of
a reward."""


class Test(NamedTuple):
    """A test of a program: its input and check, or an `assert` (`statement`); `passed` reads the outcome."""

    stdin: str
    check: Check | None
    passed: Callable[[Ran], bool]
    statement: str = ""

    def run(self, code: str, sandbox: Sandbox) -> Ran:
        return sandbox.judge(code, self.statement) if self.statement else sandbox.run(code, self.stdin, self.check)


def program_score(completion: str, tests: object, sandbox: Sandbox) -> float:
    """The share of the first ten tests that the completion's program passes.

    A test fails if it cannot be run, if its result cannot be read or compared, or if the program's time is over before
    it begins.

    `tests` (or JSON text of it) is `{inputs, outputs}` of a script; the same with `fn_name` for the arguments and
    results of a function or a method of `Solution`; a list of `assert` statements, or `{assert_case: that list}`.
    Raises DataError for anything else.
    """
    code = program_of(completion)
    selected = read_tests(tests)[:MAX_TESTS]
    remaining_s, passed = _WALLS * sandbox.limits.wall_s, 0
    for test in selected:
        if remaining_s <= 0:
            break
        ran = test.run(code, sandbox)
        remaining_s -= ran.wall_s
        passed += ran.end == "done" and _passed(test, ran)
    return passed / len(selected)


def _passed(test: Test, ran: Ran) -> bool:
    try:
        with long_integers():
            return test.passed(ran)
    except (ValueError, ArithmeticError, RecursionError):
        return False  # a number too large for a float or for text


def program_of(completion: str) -> str:
    """The last fenced block of Python, else the last fenced block, else the whole text."""
    blocks = re.findall(r"```([^\n`]*)\n(.*?)(?:```|\Z)", completion, re.DOTALL)
    python = [code for language, code in blocks if language.strip().lower() in ("python", "python3", "py")]
    return (python or [code for _, code in blocks] or [completion])[-1]


def read_tests(tests: object) -> list[Test]:
    """The tests of a ground truth, in a form that `program_score` lists. Raises DataError."""
    with long_integers():
        parsed, reason = _parsed(tests), ""
        try:
            if program_tests := _tests_in(parsed):
                return program_tests
        except DataError:
            raise
        except (TypeError, ValueError, RecursionError) as error:  # an input that is no list, or no JSON
            reason = f" ({error})"
        raise DataError(
            "tests of a program",
            f"{str(tests)[:200]!r}{reason}",
            "give {inputs, outputs} of equal length, with `fn_name` for a function, or a list of assert statements",
        )


def _tests_in(parsed: object) -> list[Test]:
    """The tests, or none if the value has no form of tests."""
    if isinstance(parsed, Mapping) and parsed.get("assert_case") is not None:
        parsed = parsed["assert_case"]
    if isinstance(parsed, Mapping) and {"inputs", "outputs"} <= parsed.keys():
        sides, name = [parsed["inputs"], parsed["outputs"]], parsed.get("fn_name")
        if any(isinstance(side, str | Mapping) for side in sides):
            return []
        pairs = zip(*sides, strict=True)
        return [_function_test(str(name), i, o) if name else _script_test(i, o) for i, o in pairs]
    if isinstance(parsed, Sequence) and not isinstance(parsed, str) and all(isinstance(s, str) for s in parsed):
        return [_assert_test(statement) for statement in parsed]
    return []


def _parsed(tests: object) -> object:
    if not isinstance(tests, str):
        return tests
    try:
        return json.loads(tests)
    except (ValueError, RecursionError) as error:
        raise DataError("tests of a program as JSON", f"{error} in {tests[:80]!r}", "fix the ground truth") from error


# --------------------------------------------------------------------------- kinds of tests


def _script_test(inputs: str | Iterable[object], wanted: str | Iterable[object]) -> Test:
    """A script that reads its standard input and prints."""

    text = _lines(wanted)
    return Test(_lines(inputs), None, lambda ran: _same_text(ran.stdout, text))


def _function_test(name: str, inputs: str | Iterable[object], wanted: object) -> Test:
    """A function, or a method of `Solution`; its arguments are lines of JSON or values."""
    if not name.isidentifier():
        raise DataError("`fn_name`, the name of a function", repr(name), "fix the ground truth")
    arguments = [json.loads(line) for line in inputs.split("\n")] if isinstance(inputs, str) else _plain(list(inputs))
    wanted = _plain(json.loads(wanted) if isinstance(wanted, str) else wanted)
    call = f"(Solution().{name} if 'Solution' in globals() else {name})(*_arguments)"

    def passed(ran: Ran) -> bool:
        value = _value(ran, wanted)
        alone = isinstance(wanted, list) and len(wanted) == 1 and _same(value, wanted[0])
        return alone or _same(value, wanted)

    return Test("", Check(call, names={"_arguments": arguments}), passed)


def _assert_test(statement: str) -> Test:
    """An `assert`. `call == literal` is compared in this process, any other in a second sandbox."""
    try:
        tree = ast.parse(statement)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError: it has a null character
        raise DataError("an assert statement", repr(statement[:200]), "fix the ground truth") from error
    if not any(isinstance(node, ast.Assert | ast.Call) for node in ast.walk(tree)):
        raise DataError("an assert statement", repr(statement[:200]), "write what the program must fulfil")
    *before, last = tree.body
    match last:
        case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
            literal = _literal(ast.unparse(right))
            if literal is not None and (_is_call(left) or not isinstance(literal[0], bool)):
                check = Check(ast.unparse(left), "\n".join(map(ast.unparse, before)))
                return Test("", check, lambda ran: _value(ran, literal[0]) == literal[0])
    return Test("", None, lambda ran: ran.answer == "True", statement)


def _is_call(expression: ast.expr) -> bool:
    """Whether an expression calls what a program defines. The program could make another one true, such as
    `f(1) > 2`."""
    match expression:
        case ast.Call(func=ast.Name(id=name)):
            return not hasattr(builtins, name)
        case ast.Call(func=ast.Attribute()):
            return True
    return False


# --------------------------------------------------------------------------- comparing


class _Nothing:
    """Stands for a result that equals no expected value."""


def _value(ran: Ran, wanted: object) -> object:
    """The program's result. Returns `_Nothing` if there is none, or if its text is no literal."""
    if ran.answer is None:
        return _Nothing
    written = repr(wanted)
    if ran.answer == written:
        return wanted
    if len(ran.answer) > 4 * len(written) + 1000:
        return _Nothing  # too long to be right, and too long to parse
    literal = _literal(ran.answer)
    return _Nothing if literal is None else literal[0]


def _literal(text: str) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(text),)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _same(value: object, wanted: object) -> bool:
    """Whether two results are equal as JSON: tuples are lists, keys are text, numbers with a fraction are close."""
    if isinstance(value, list | tuple) and isinstance(wanted, list | tuple):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        ours, theirs = ({str(k): v for k, v in result.items()} for result in (value, wanted))
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(value, int | float) and isinstance(wanted, int | float) and float in (type(value), type(wanted)):
        return _close(value, wanted)
    return value == wanted


def _close(a: float, b: float) -> bool:
    if max(abs(a), abs(b)) >= _LARGEST:
        return a == b
    # By the relative difference alone, no other number would be close to 0.
    return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=_CLOSE * 1e-3)


def _same_text(output: str, wanted: str) -> bool:
    """Whether two outputs have equal words. White space does not count, and numbers with a fraction may be close."""
    ours, theirs = output.split(), wanted.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(output: str, wanted: str) -> bool:
    if output == wanted:
        return True
    if not any(mark in word for word in (output, wanted) for mark in ".eE"):
        return False  # whole numbers and words are compared exactly
    try:
        return _close(float(output), float(wanted))
    except ValueError:
        return False


def _lines(text: str | Iterable[object]) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text))


def _plain(value: object) -> object:
    """A value with lists for numpy arrays, as which Parquet tables hold them."""
    tolist = getattr(value, "tolist", None)
    if tolist is not None:
        value = tolist()
    return [_plain(element) for element in value] if isinstance(value, list | tuple) else value
