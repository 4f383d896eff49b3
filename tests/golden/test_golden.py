"""Values of reference implementations, and whether a wrong expectation would be noticed."""

from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from deviations import DEVIATIONS, LATER
from golden_cases import DATA, Case, read
from golden_runners import RUNNERS, answer_to, family

for part in sorted(Path(__file__).parent.glob("golden_*.py")):
    import_module(part.stem)


def cases_in(folder: Path) -> list[Case]:
    return [case for file in sorted(folder.glob("*.json")) for case in read(file)]


def golden_dir(config: pytest.Config) -> Path:
    return config.getoption("golden_dir", DATA)


def deviation(case: Case) -> str | None:
    """Why the case is not met, where that is on purpose."""
    home = family(case.file, case.function)
    return DEVIATIONS.get((home, case.function), DEVIATIONS.get((home, case.name)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        built = [case for case in cases_in(golden_dir(metafunc.config)) if answer_to(case) and not deviation(case)]
        ids = [f"{case.file}/{case.function}/{case.name.rpartition('/')[2]}" for case in built]
        metafunc.parametrize("case", built, ids=ids)


def run(case: Case) -> None:
    inputs = case.tensors()
    answer = answer_to(case)
    assert answer is not None, f"{case.file}/{case.function} is not answered"
    case.check(answer(inputs, case.kwargs), inputs)


def test_golden_case(case: Case) -> None:
    run(case)


def test_every_case_is_answered(pytestconfig: pytest.Config) -> None:
    folder = golden_dir(pytestconfig)
    cases = cases_in(folder)
    assert cases, f"no fixture files in {folder}"
    absent = Counter(
        f"{case.file}/{case.function}"
        for case in cases
        if answer_to(case) is None and family(case.file, case.function) not in LATER
    )
    listed = ", ".join(f"{function} ({count})" for function, count in sorted(absent.items()))
    assert not absent, f"{absent.total()} cases of {len(absent)} functions have no answer: {listed}"


OWN = cases_in(DATA)


def test_deviations_have_a_reason_and_differ() -> None:
    for which, reason in DEVIATIONS.items():
        cases = [case for case in OWN if which in ((case.file, case.function), (case.file, case.name))]
        assert cases, which
        assert reason, which
        for case in cases:
            with pytest.raises(AssertionError):
                run(case)


def test_a_file_of_another_name_is_answered_by_its_family() -> None:
    case = next(case for case in OWN if case.file == "policy_loss")
    for name in ("policy_loss_more", "hidden_policy_loss", "policy_loss"):
        assert answer_to(replace(case, file=name)) is RUNNERS["policy_loss", case.function]
    unique = next(case for case in OWN if case.function == "compute_policy_loss")
    assert answer_to(replace(unique, file="extra")) is answer_to(unique)
    assert answer_to(replace(case, function="no_such_function")) is None


@pytest.mark.parametrize("function", sorted({f"{file}/{function}" for file, function in RUNNERS}))
def test_a_wrong_expectation_is_noticed(function: str) -> None:
    case = next(case for case in OWN if f"{case.file}/{case.function}" == function and not deviation(case))
    run(case)
    for key in case.expect:
        with pytest.raises(AssertionError):
            run(replace(case, expect={**case.expect, key: shifted(case.expect[key])}))


def shifted(expected: Any) -> Any:
    """Something slightly different."""
    if isinstance(expected, list):
        return [shifted(item) for item in expected] or [0.0]
    if isinstance(expected, dict):
        return {name: shifted(item) for name, item in expected.items()} or {"unexpected": 0.0}
    if isinstance(expected, bool):
        return not expected
    if expected is None:
        return 0.0
    if isinstance(expected, str):
        return 0.0 if expected in ("nan", "inf", "-inf") else expected + "?"
    return expected * (1 + 1e-4) + 1e-4
