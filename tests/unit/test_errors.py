"""The error tree: the drawing is the code, every error has three parts, and all survive a trip between processes.
Also the check of errors that other tests use."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
from failing import check_error, refused

from trivium.foundation import errors
from trivium.foundation.errors import ConfigError, MissingPackage, Problem, TriviumError, UnknownName


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
    text = str(ConfigError("a valid config", "2 problem(s)", "correct them:", problems))
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


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (UnknownName("train.lr", "0.3", "lower it"), ["train.lr"]),
        (ConfigError("train.lr", "0.3"), ["train.lr"]),
        (ConfigError("train.lr", "", "lower it"), ["train.lr"]),
        (ConfigError("", "0.3", "lower it"), ["0.3"]),
        (ConfigError("a config", "1 problem", "correct it", [Problem("train.lr", "", "0.3", "")]), ["train.lr"]),
        (ConfigError("train.lr", "0.3", "lower it"), ["train.lr", "0.4"]),
        (ConfigError("train.lr_final", "10.3", "lower it"), ["lr"]),
        (ConfigError("train.lr_final", "10.3", "lower it"), ["0.3"]),
    ],
)
def test_an_error_of_another_type_or_without_a_part_or_a_name_is_no_refusal(
    error: ConfigError, names: list[str]
) -> None:
    with pytest.raises(AssertionError), refused(ConfigError, *names):
        raise error


def test_a_complete_error_is_a_refusal() -> None:
    with refused(ConfigError, "train.lr", 0.3) as caught:
        raise ConfigError("a config", "1 problem", "correct it", [Problem("train.lr", "", "0.3", "lower it")])
    check_error(caught.value, ConfigError, "correct it", "train")
    with pytest.raises(pytest.fail.Exception), refused(ConfigError):
        pass
