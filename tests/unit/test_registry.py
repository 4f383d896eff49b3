"""Names to things: short names, dotted paths, files, and what a mistyped one is told."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from failing import refused

from trivium.foundation.errors import ConfigError, UnknownName
from trivium.foundation.registry import CATALOGUE, lazy_names, resolve, suggest
from trivium.models import late


@pytest.mark.parametrize(
    ("room", "name", "path"), [(room, name, path) for room, names in CATALOGUE.items() for name, path in names.items()]
)
def test_every_listed_name_leads_somewhere(room: str, name: str, path: str) -> None:
    thing = resolve(room, name)
    assert thing.__module__ == path.partition(":")[0]
    assert thing is resolve(room, path)


def test_a_mistyped_name_is_met_with_the_nearest_one() -> None:
    with refused(UnknownName, "'grop'", "'grpo'"):
        resolve("algorithms", "grop")


def test_a_name_like_nothing_is_met_with_all_of_them() -> None:
    assert suggest("zzzz", ["b", "a"]) == "known: a, b"


def test_a_dotted_path_leads_to_a_users_own_thing() -> None:
    assert resolve("rewards", "math:isclose")(1.0, 1.0)


@pytest.mark.parametrize("path", ["no_such_package:Thing", "trivium.no_such_module:Thing"])
def test_a_module_that_does_not_exist(path: str) -> None:
    with refused(ConfigError, path, "PYTHONPATH"):
        resolve("rewards", path)


def test_an_attribute_that_does_not_exist() -> None:
    with refused(UnknownName, "'isclos'", "'isclose'"):
        resolve("rewards", "math:isclos")


def test_a_file_is_relative_to_the_config_and_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("calls = []\ndef judge(prompt, completion):\n    return 1.0\n")
    judge = resolve("rewards", "mine.py:judge", tmp_path)
    assert judge("", "") == 1.0
    assert resolve("rewards", "mine.py:judge", tmp_path) is judge


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"where = lambda: {folder!r}\n")
    assert [resolve("rewards", "mine.py:where", tmp_path / folder)() for folder in ("a", "b")] == ["a", "b"]


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with refused(ConfigError, tmp_path / "gone.py"):
        resolve("rewards", "gone.py:judge", tmp_path)


def test_an_error_inside_a_users_file_keeps_its_own_message(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import package_that_is_not_there\n")
    for _ in range(2):  # a module that failed must not be found half loaded the second time
        with pytest.raises(ModuleNotFoundError, match="package_that_is_not_there"):
            resolve("rewards", "broken.py:judge", tmp_path)


@pytest.mark.parametrize("door", ["lightrft", "trinity"])
def test_a_star_imports_every_lazy_name(door: str) -> None:
    module, names = importlib.import_module(f"trivium.frontdoors.{door}"), {}
    exec(f"from {module.__name__} import *", names)
    assert {*names} - {"__builtins__"} == {*lazy_names(str(module.__file__))}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda late: pickle.loads(pickle.dumps(late))])
def test_a_copy_of_a_late_module_is_the_module(copied: Callable[[object], object]) -> None:
    assert copied(late.torch) is sys.modules["torch"]
