"""docs/models.md says what tiny models of each family do, and docs/install.md what each extra is for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import models_page
import pytest

ROOT = Path(__file__).parents[3]
PAGE = models_page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", models_page.FAMILIES)
def test_a_family_does_what_the_page_says(family: str) -> None:
    assert models_page.row(family) in PAGE.splitlines(), "run `make docs`"


def test_the_page_is_what_the_tool_writes_around_these_rows() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "`model_type`" not in line]
    [pinned] = re.findall(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert models_page.written(rows, pinned) == PAGE, "run `make docs`"
    assert len(rows) == len(models_page.FAMILIES)


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(extras)
