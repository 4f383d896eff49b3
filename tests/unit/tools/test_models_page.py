"""docs/models.md says what tiny models of each family do, and docs/install.md what each extra is for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import models_page
import pytest

from trivium.models.backbone.recurrent import _is_supported

ROOT = Path(__file__).parents[3]
RECURRENT = {
    *("Qwen 3 Next", "Qwen 3.5 (text)", "Qwen 3.5 MoE (text)", "Granite 4 (hybrid)", "Mamba 2", "Falcon-H1"),
    *("Nemotron-H", "Bamba", "Zamba 2", "LFM 2", "LFM 2 MoE"),
}
PAGE = models_page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", models_page.FAMILIES)
def test_a_family_does_what_the_page_says(family: str) -> None:
    if family in RECURRENT and not _is_supported():
        pytest.skip("models with recurrent states need transformers 5.20")
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
