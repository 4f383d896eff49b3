"""The generated pages say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from trivium.config import RunConfig
from trivium.metrics import METRICS
from trivium.registry import CATALOGUE

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
assert SPEC is not None
assert SPEC.loader is not None
generate_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate_docs)


@pytest.mark.parametrize("page", ["config.md", "metrics.md"])
def test_the_committed_page_is_up_to_date(page: str) -> None:
    committed = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert committed == generate_docs.PAGES[page](), "run `make docs`"


def test_no_section_kind_or_metric_is_left_out() -> None:
    config, metrics = (generate_docs.PAGES[page]() for page in ("config.md", "metrics.md"))
    assert [name for name in RunConfig.model_fields if f"## {name}\n" not in config] == []
    rooms = {room for room, _ in generate_docs.ROOMS.values()}
    assert [kind for room in rooms for kind in CATALOGUE[room] if f"`kind: {kind}`" not in config] == []
    assert set(CATALOGUE) - rooms == {"environments", "channels"}  # named by workflow.environment and sync.method
    assert [key for key in METRICS if f"`{key}`" not in metrics] == []


def test_every_field_has_a_meaning() -> None:
    rows = [line for line in generate_docs.PAGES["config.md"]().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []
    assert [row for row in rows if "Undefined" in row or "Annotated" in row] == []
