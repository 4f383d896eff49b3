"""`pytest tests/golden --golden-dir DIR` runs every fixture file of this format in DIR; default: `data`."""

from collections import Counter
from pathlib import Path

import pytest
from deviations import DEVIATIONS, LATER
from golden_cases import DATA

_OUTCOMES: dict[str, Counter[str]] = {"passed": Counter(), "failed": Counter()}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-dir", type=Path, default=DATA, help="a folder of golden fixture files (*.json)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "test_golden_case[" in report.nodeid and report.outcome in _OUTCOMES:
        _OUTCOMES[report.outcome][report.nodeid.partition("[")[2].rpartition("/")[0]] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed, failed = _OUTCOMES["passed"], _OUTCOMES["failed"]
    if passed or failed:
        terminalreporter.section("golden cases passed per function")
        for function in sorted(passed | failed):
            wrong = f", {failed[function]} FAILED" if failed[function] else ""
            terminalreporter.write_line(f"{passed[function]:4d}  {function}{wrong}")
        terminalreporter.write_line(f"{passed.total():4d}  in all")
        for which, reason in {**{("", family): reason for family, reason in LATER.items()}, **DEVIATIONS}.items():
            terminalreporter.write_line(f"left out: {'/'.join(filter(None, which))}: {reason}")
