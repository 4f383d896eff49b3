"""The public names: each exists and explains itself, and together they are enough for examples, recipes and pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import api_page
import pytest

ROOT = Path(__file__).parents[2]
USERS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(
        path
        for folder in ("examples", "recipes")
        for path in (ROOT / folder).rglob("*.[py]*")
        if "__pycache__" not in path.parts
    ),
]
NAMES = api_page.public_names()
OF_THE_DEMO = {"trivium.runtime.demo.questions", "trivium.runtime.demo.short"}
"""The rows and the reward of the recipe that `trivium demo` runs, from the installed package too."""
PUBLIC = {*NAMES, "trivium.algorithms.presets", *OF_THE_DEMO} | {
    f"{module}.{name}" for module in NAMES for name in NAMES[module]
}


def private_names(text: str) -> list[str]:
    """The names of the package that a text imports or mentions, and that are neither public nor of a front door."""
    mentioned = re.findall(r"(?<![\w/.-])trivium(?:[.:](?!db\b)[A-Za-z_]\w*)*", text)
    imported = [
        f"{module}.{name}"
        for module, names in re.findall(r"from (trivium[\w.]*) import (\([^)]*\)|\w+(?:, *\w+)*)", text)
        for name in re.findall(r"\w+", names)
    ]
    named = {name for name in (*mentioned, *imported) if name.replace(":", ".") not in PUBLIC}
    return sorted(name for name in named if not name.startswith("trivium.frontdoors."))


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_recipes_and_pages_need_public_names_alone(path: Path) -> None:
    assert private_names(path.read_text(encoding="utf-8")) == []


def test_another_name_is_detected() -> None:
    text = (
        "from trivium import types, run\nfrom trivium.api import (\n    Task,\n    Journal,\n)\nimport trivium.loops\n"
    )
    assert private_names(text) == ["trivium.api.Journal", "trivium.loops", "trivium.types"]
    assert private_names("`trivium.policy.Policy`, kind: trivium.text.tiny:TinyModel, trivium.api.Policy") == [
        "trivium.policy.Policy",
        "trivium.text.tiny:TinyModel",
    ]
    assert private_names("runs/trivium.db trivium.run(c) trivium.algorithms.presets trivium.frontdoors.verl.Role") == []


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_has_a_docstring_of_its_own(module: str) -> None:
    lines = {name: api_page.first_sentence(value) for name, value in NAMES[module].items()}
    assert [name for name, line in lines.items() if not line.endswith((".", ":"))] == []
    assert len({*lines.values()}) == len(lines)


def test_every_name_of_the_api_is_used_or_documented() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in USERS if path.name != "api.md")
    words = {*re.findall(r"\w+", texts)}
    assert [name for module in ("trivium", "trivium.api") for name in NAMES[module] if name not in words] == []


def test_data_types_and_bases_come_without_torch() -> None:
    code = "import sys; from trivium.api import Message, Plugin, Policy, Task; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "False"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(ImportError, match="Journal"):
        from trivium.api import Journal  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
