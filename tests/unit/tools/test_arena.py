"""The arena: one cell end to end, what a second call skips, and the page that follows from the results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import arena  # noqa: E402
import arena_page  # noqa: E402


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task `sums` with little to train, one learning rate and one reported seed."""
    sums = arena.ARENAS["sums"]
    start = {"steps": 2, "groups_per_step": 4}
    monkeypatch.setitem(arena.ARENAS, "sums", replace(sums, start=start, grid=(1e-3,)))
    for name, value in {"STEPS": 1, "GROUPS": 4, "MEMBERS": 2, "REPORTED": (0,)}.items():
        monkeypatch.setattr(arena, name, value)
    arena.settings.cache_clear()


@pytest.mark.usefixtures("small")
def test_a_cell_runs_once_and_its_result_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, chosen = tmp_path / "results.jsonl", [("grpo", "sums")]
    arena.work_through(chosen, results, tmp_path / "work", minutes=5)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["seed"], row["lr"]) for row in rows] == [(100, 1e-3), (0, 1e-3)], "selection, then the reported seed"
    assert all(row["tokens"] > 0 and 0 <= row["accuracy"] <= 1 for row in rows)

    monkeypatch.setattr(arena, "run_cell", None)  # a second call has nothing to run
    arena.work_through(chosen, results, tmp_path / "work", minutes=5)
    # A killed process left half a line: only that cell is missing.
    lines = results.read_text().splitlines()
    results.write_text(f"{lines[0]}\n{lines[1][:20]}")
    assert list(arena.wanted(arena.read_results(results), chosen)) == [arena.Cell("sums", "grpo", 0, 1e-3)]
    arena.append(results, rows[1])
    assert arena.read_results(results) == rows
    # A cell of other settings does not count.
    results.write_text(json.dumps({**rows[1], "settings": "other"}) + "\n")
    assert arena.read_results(results) == []


MARKS = {"accuracy": "", "observations": "old\n", "absent": "old\nlines\n"}


def row(preset: str, seed: int, lr: float, accuracy: float, task: str = "code", **more: Any) -> dict[str, Any]:
    return {"task": task, "preset": preset, "seed": seed, "lr": lr, "accuracy": accuracy, "start": 0.25, **more}


def test_the_learning_rate_comes_from_seeds_that_are_not_reported() -> None:
    low, middle, high = arena.ARENAS["code"].grid
    selection = [row("grpo", 100, low, 0.5), row("grpo", 100, middle, 0.5), row("grpo", 100, high, 0.1)]
    assert arena.best_lr(selection[:2], "grpo", "code") is None, "a cell of the selection is missing"
    assert arena.best_lr([*selection, row("grpo", 0, high, 1.0)], "grpo", "code") == low
    failed = {**row("grpo", 100, low, 0.5), "error": "diverged"}
    assert arena.best_lr([failed, *selection[1:]], "grpo", "code") == middle
    assert not {*arena.SELECTION} & {*arena.REPORTED}


def test_the_page_follows_from_the_results(tmp_path: Path) -> None:
    rows = [row("sdft", 100, 1e-3, 0.0)]
    rows += [row("sdft", seed, 1e-3, 0.4 + 0.1 * seed, observation_loss=2.0) for seed in range(3)]
    rows += [row("echo", seed, 1e-3, 0.5) for seed in range(2)]
    page = tmp_path / "arena.md"
    marks = [f"<!-- {name} -->\n{old}<!-- end of {name} -->" for name, old in MARKS.items()]
    page.write_text("\n\n".join(["# Text", *marks, "More text"]))
    arena_page.write_page(rows, arena.layout(rows), "code", page)
    text = page.read_text()
    # 0.4, 0.5, 0.6: deviation 0.1, and 4.303 * 0.1 / sqrt(3)
    assert "| `sdft` | – | – | 0.50 ± 0.25 (3), 0.001 |" in text
    assert "0.50 (2), 0.001 |" in text, "two seeds have no interval"
    assert "| `sdft` | 2.00 ± 0.00 (3) |" in text
    missing = next(line for line in text.splitlines() if line.startswith("- secret code: "))
    assert "`grpo`" in missing
    assert "`sdft`" not in missing
    assert "old" not in text
    assert text.startswith("# Text")
    assert text.endswith("More text")
    svg = page.with_suffix(".svg").read_text()
    assert svg.count("<circle") == 2
    assert "sdft" in svg
    assert "grpo" not in svg
    arena_page.write_page(rows, arena.layout(rows), "code", page)
    assert page.read_text() == text
