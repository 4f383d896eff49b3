"""tests/costs.py: what a run of all tests records, and when it finds that `make test` grew."""

import json
from pathlib import Path

import costs
import pytest

QUICK = {
    f"tests/unit/test_{name}.py::test_{number}[{case}]": costs.Cost(0.1)
    for name in "abc"
    for number in "12"
    for case in "xy"
}
ALL = {**QUICK, "tests/unit/test_a.py::test_heavy": costs.Cost(5.0), "tests/e2e/test_d.py::test_run": costs.Cost(0.2)}

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


def test_files_of_which_nothing_is_chosen_are_not_imported() -> None:
    chosen = {name.partition("::")[0] for name in costs.CHOSEN}
    tests = {path: path.relative_to(costs.ROOT).as_posix() for path in sorted(costs.ROOT.rglob("test_*.py"))}
    whole = {name for name in tests.values() if name.startswith(("e2e/", "simulation/", "doors/e2e/"))}
    left_out = {name for path, name in tests.items() if costs.is_left_out(path)}
    assert left_out == whole - chosen
    assert len(left_out) > 50
    assert not costs.is_left_out(costs.ROOT / "e2e")
    assert not costs.is_left_out(Path(__file__).parents[3] / "README.md")


def test_a_slower_machine_is_no_growth_and_a_slower_file_is_named() -> None:
    slower = {name: costs.Cost(3 * cost.alone) for name, cost in ALL.items()}
    assert not costs.grown(slower)
    grew = slower | {name: costs.Cost(3.0) for name in QUICK if "test_b" in name}
    assert costs.grown(grew)[0].startswith("unit/test_b.py")
    added = slower | {f"tests/unit/test_new.py::test_{number}": costs.Cost(0.4) for number in range(9)}
    assert costs.grown(added)[0].startswith("unit/test_new.py")


def test_skipped_tests_do_not_change_the_pace() -> None:
    heavy = "tests/unit/test_a.py::test_heavy"
    skipping = ALL | {heavy: costs.Cost(0.0)}
    assert costs.grown(skipping)  # the others would look slow beside them
    assert not costs.grown(skipping, {heavy})


FIXTURES = """
import time
import pytest

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def dear():
    work(0.7)

@pytest.fixture
def own():
    work(0.2)

def test_first(dear): pass
def test_second(dear, own): pass
def test_alone(): pass
"""


def test_a_fixture_for_several_tests_counts_for_each_and_is_spent_once(tmp_path: Path) -> None:
    """Whichever test of `make test` is the first sets it up."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    (tmp_path / "test_shared.py").write_text(FIXTURES)
    measured = costs.Costs(records=True)
    assert pytest.main(["-q", "-p", "no:cacheprovider", str(tmp_path)], plugins=[measured]) == 0
    found = {name.partition("::")[2]: cost for name, cost in measured._costs.items()}
    assert {name for name, cost in found.items() if cost.by_itself > costs.MOST} == {"test_first", "test_second"}
    assert found["test_first"].setup == found["test_second"].shared > 0.6
    assert found["test_second"].setup == 0.0
    assert 0.1 < found["test_second"].alone < 0.6
    assert sum(cost.spent for cost in found.values()) < 1.4
