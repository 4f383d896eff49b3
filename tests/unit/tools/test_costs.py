"""tests/costs.py: what a run of all tests records, and when it finds that `make test` grew."""

import json
from pathlib import Path

import costs
import pytest

QUICK = {f"tests/unit/test_{name}.py::test_{number}[{case}]": 0.1 for name in "abc" for number in "12" for case in "xy"}
ALL = {**QUICK, "tests/unit/test_a.py::test_heavy": 5.0, "tests/e2e/test_d.py::test_run": 0.2}

PAGE = "Before.\n\n| tests | all | `make test` |\n|---|---|---|\n| of | an | earlier run |\n\nAfter.\n"


def test_the_table_of_contributing_says_what_is_recorded() -> None:
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recorded = {
        file: costs.Recorded(each["seconds"], each["quick"], frozenset(each["slow"]))
        for file, each in json.loads((Path(costs.__file__).parent / "costs.json").read_text(encoding="utf-8")).items()
    }
    assert page == costs.with_table(page, recorded), "pytest --costs record tests/unit/tools/test_costs.py"


def test_folders_that_cost_little_share_a_row() -> None:
    none = frozenset[str]()
    files = {"unit/x/a.py": (9.6, 1.0), "unit/x/y/b.py": (9.0, 2.0), "oracle/c.py": (3.0, 3.0), "d.py": (20.0, 0.0)}
    now = {file: costs.Recorded(*each, none) for file, each in files.items()}
    rows = "| the root | 20 | 0 |\n| `unit/x` | 19 | 3 |\n| the others | 3 | 3 |\n| all | 42 | 6 |\n"
    assert costs.with_table(PAGE, now) == PAGE.replace("| of | an | earlier run |\n", rows)
    written = costs.PAGE.read_text(encoding="utf-8")  # of ALL
    assert written == PAGE.replace("| of | an | earlier run |\n", "| the others | 6 | 1 |\n| all | 6 | 1 |\n")


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "FILE", tmp_path / "costs.json")
    monkeypatch.setattr(costs, "PAGE", tmp_path / "page.md")
    costs.PAGE.write_text(PAGE, encoding="utf-8")
    costs.write(ALL)


def test_what_one_case_makes_slow_and_whole_runs_are_left_out() -> None:
    before = costs.recorded()
    assert costs.is_slow("unit/test_a.py", "test_heavy", before)
    assert costs.is_slow("e2e/test_d.py", "test_run", before)
    assert not costs.is_slow("unit/test_b.py", "test_1", before)
    assert not costs.is_slow("unit/test_new.py", "test_1", before)
    assert before["unit/test_a.py"] == costs.Recorded(5.4, 0.4, frozenset({"test_heavy"}))


def test_a_slower_machine_is_no_growth_and_a_slower_file_is_named() -> None:
    slower = {name: 3 * cost for name, cost in ALL.items()}
    assert not costs.grown(slower)
    grew = slower | {name: 3.0 for name in QUICK if "test_b" in name}
    assert costs.grown(grew)[0].startswith("unit/test_b.py")
    added = slower | {f"tests/unit/test_new.py::test_{number}": 0.4 for number in range(9)}
    assert costs.grown(added)[0].startswith("unit/test_new.py")


def test_skipped_tests_do_not_change_the_pace() -> None:
    heavy = "tests/unit/test_a.py::test_heavy"
    skipping = ALL | {heavy: 0.0}
    assert costs.grown(skipping)  # the others would look slow beside them
    assert not costs.grown(skipping, {heavy})
