"""The error tree: the drawing is the code, every error has three parts, and all survive a trip between processes."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from trivium import errors
from trivium.errors import ConfigError, MissingPackage, Problem, TriviumError, UnknownName


def drawn_tree(text: str) -> dict[str, str]:
    """Class -> parent, read from the drawing in the module's docstring."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in text.splitlines():
        found = re.match(r"^((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)(?:\s|$)", line)
        if found is None:
            continue
        depth = len(found[1]) // 4
        if depth == 0 and above:
            continue  # prose
        above = [*above[:depth], found[2]]
        if depth:
            parents[found[2]] = above[depth - 1]
    return parents


def written_tree() -> dict[str, str]:
    return {
        name: thing.__bases__[0].__name__
        for name, thing in inspect.getmembers(errors, inspect.isclass)
        if issubclass(thing, TriviumError) and thing is not TriviumError
    }


def test_the_drawing_is_the_code() -> None:
    text = (errors.__doc__ or "").partition("\n\n")[2]
    assert drawn_tree(text) == written_tree()
    assert len(drawn_tree(text)) >= 10


def test_the_reader_of_drawings_notices_a_wrong_parent() -> None:
    text = (errors.__doc__ or "").partition("\n\n")[2]
    assert drawn_tree(text.replace("│   └── UnknownName ", "├── UnknownName ")) != written_tree()


def test_what_the_drawing_says_an_error_also_is() -> None:
    also = dict(re.findall(r"─ (\w+) .*also an? (\w+)", errors.__doc__ or ""))
    assert len(also) == 5
    for name, kind in also.items():
        builtin = __builtins__[kind] if isinstance(__builtins__, dict) else getattr(__builtins__, kind)
        assert issubclass(getattr(errors, name), builtin), name


def test_an_error_says_what_was_asked_what_was_found_and_what_to_do() -> None:
    error = TriviumError("read x", "no such file", "create it")
    assert str(error) == "asked: read x\nfound: no such file\ndo: create it"
    assert str(TriviumError("read x")) == "asked: read x"


def test_a_config_error_shows_all_its_problems() -> None:
    problems = [Problem("a.b", "x", "y", "z"), Problem("c", "u", "v", "w")]
    text = str(ConfigError("a valid config", "2 problem(s)", "mend them:", problems))
    assert text.count("\n  - ") == 2
    assert "a.b: x\n    found: y\n    do: z" in text


def test_a_missing_package_prints_the_install_command() -> None:
    assert str(MissingPackage("wandb", "wandb", "log")).endswith("do: pip install 'trivium[wandb]'")


@pytest.mark.parametrize(
    "error",
    [
        TriviumError("a", "b", "c"),
        UnknownName("a", "b", "c"),
        ConfigError("a", "b", "c", [Problem("w", "x", "y", "z")]),
        MissingPackage("wandb", "wandb", "log"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_a_trip_between_processes(error: TriviumError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
