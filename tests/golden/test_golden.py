"""Values of reference implementations, and whether a wrong formula would be noticed."""

from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from golden_cases import DATA, Case, read
from golden_runners import RUNNERS

import trivium.algorithms.advantages.group as group
import trivium.algorithms.advantages.returns as returns
from trivium.algorithms import Advantages, PerToken
from trivium.algorithms.policy_losses import clipped, supervised, weighted

for part in sorted(Path(__file__).parent.glob("golden_*.py")):
    import_module(part.stem)


def cases_in(folder: Path) -> list[Case]:
    return [case for file in sorted(folder.glob("*.json")) for case in read(file)]


def golden_dir(config: pytest.Config) -> Path:
    return config.getoption("golden_dir", DATA)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        built = [case for case in cases_in(golden_dir(metafunc.config)) if (case.file, case.function) in RUNNERS]
        metafunc.parametrize("case", built, ids=[f"{case.file}/{case.name}" for case in built])


def run(case: Case) -> None:
    inputs = case.tensors()
    case.check(RUNNERS[case.file, case.function](inputs, case.kwargs), inputs)


def test_golden_case(case: Case) -> None:
    run(case)


def test_every_function_is_built(pytestconfig: pytest.Config) -> None:
    cases = cases_in(golden_dir(pytestconfig))
    absent = Counter(f"{case.file}/{case.function}" for case in cases if (case.file, case.function) not in RUNNERS)
    if absent:
        listed = ", ".join(f"{function} ({count})" for function, count in sorted(absent.items()))
        pytest.skip(f"{absent.total()} cases of {len(absent)} functions that are not built yet: {listed}")


OWN = cases_in(DATA)


@pytest.mark.parametrize("function", sorted({f"{file}/{function}" for file, function in RUNNERS}))
def test_a_wrong_expectation_is_noticed(function: str) -> None:
    case = next(case for case in OWN if f"{case.file}/{case.function}" == function)
    run(case)
    for key in case.expect:
        with pytest.raises(AssertionError):
            run(replace(case, expect=_shifted(case.expect, key)))


def _shifted(expect: dict, key: str) -> dict:
    def shift(value):
        if isinstance(value, list):
            return [shift(item) for item in value]
        if isinstance(value, dict):
            return {name: shift(item) for name, item in value.items()} or {"unexpected": 0.0}
        return value * (1 + 1e-4) + 1e-4

    return {**expect, key: shift(expect[key])}


GOLDEN_OF = {
    (clipped, "ppo"): ("policy_loss", "vanilla"),
    (weighted, "reinforce"): ("policy_loss", "gpg"),
    (supervised, "sft"): ("trinity", "sft"),
    (returns, "gae"): ("advantages", "gae"),
    (group, "grpo"): ("advantages", "grpo"),
    (group, "rloo"): ("advantages", "rloo"),
}


@pytest.mark.parametrize(("module", "name"), GOLDEN_OF, ids=lambda x: getattr(x, "__name__", x).rpartition(".")[2])
def test_a_perturbed_formula_is_noticed(module, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(module, name)

    def perturbed(x, **options):
        done = original(x, **options)
        if isinstance(done, PerToken):
            return replace(done, loss=done.loss * 1.0001)
        return Advantages(done.advantages * 1.0001, done.returns)

    vars(perturbed).update(law=original.law, Config=original.Config)
    monkeypatch.setattr(module, name, perturbed)
    for case in (case for case in OWN if (case.file, case.function) == GOLDEN_OF[module, name]):
        with pytest.raises(AssertionError):
            run(case)
