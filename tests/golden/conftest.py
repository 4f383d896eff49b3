"""`pytest tests/golden --golden-dir DIR` runs every fixture file of this format in DIR; default: `data`."""

from collections import Counter
from pathlib import Path

import pytest
from golden_cases import DATA

_passed: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-dir", type=Path, default=DATA, help="a folder of golden fixture files (*.json)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and "test_golden_case[" in report.nodeid:
        _passed[report.nodeid.partition("[")[2].rpartition("/")[0]] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _passed:
        terminalreporter.section("golden cases passed per function")
        for function, count in sorted(_passed.items()):
            terminalreporter.write_line(f"{count:4d}  {function}")
