"""tests/costs.py: what a run of all tests records, and when it finds that `make test` grew."""

from pathlib import Path

import costs
import pytest

QUICK = {f"tests/unit/test_{name}.py::test_{number}[{case}]": 0.1 for name in "abc" for number in "12" for case in "xy"}
ALL = {**QUICK, "tests/unit/test_a.py::test_heavy": 5.0, "tests/e2e/test_d.py::test_run": 0.2}


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "FILE", tmp_path / "costs.json")
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
