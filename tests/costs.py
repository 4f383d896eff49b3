"""What tests cost in CPU seconds: which belong to `make test`, which files run first, and whether `make test` grew.

costs.json has the seconds of each file as one machine measured them in a run of all tests (`make costs`), and its
functions that are slow. Another machine needs other seconds, in about the same proportions. The sums by folder are in
CONTRIBUTING.md.
"""

from __future__ import annotations

import json
import os
import resource
from collections import defaultdict
from collections.abc import Collection, Generator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

ROOT = Path(__file__).parent
FILE = ROOT / "costs.json"
PAGE = ROOT.parent / "CONTRIBUTING.md"
_TABLE = "| tests | all | `make test` |\n|---|---|---|\n"
"""The head of the table in that page. CPU seconds."""
_FEW = 15.0
"""Folders that cost fewer CPU seconds share a row."""
MOST = 0.15
"""CPU seconds, on the machine of costs.json, that each case of a test of `make test` needs at most, with the fixtures
that it shares with others."""
GROWTH = 1.2
"""By how much the share of `make test` in the cost of all tests may exceed its recorded share."""
WHOLE = ("e2e", "simulation", "doors/e2e")
"""Folders of tests that start whole runs, mostly in processes of their own. `make test` has the chosen ones only."""
CHOSEN = frozenset(
    {
        "test_architecture.py::test_the_package_keeps_the_rule",
        "golden/test_golden.py::test_golden_case",
        "oracle/test_log_prob_head.py::test_candidates_agree_with_finite_differences",
        "oracle/test_log_prob_head.py::test_finite_differences",
        "oracle/test_shaping.py::test_difficulty_by_default_is_the_constraint_of_dapo",
        "oracle/test_shaping.py::test_trajectories_are_drawn_by_their_rewards",
        "oracle/test_shaping.py::test_zero_variance_against_all_pairs",
        "contract/test_buffers_contract.py::test_the_sql_buffer_keeps_the_contract_on_sqlite",
        "contract/test_engines.py::test_the_torch_engine",
        "contract/test_tool_formats.py::test_each_format_reads_what_it_writes",
        "contract/test_train_engines.py::test_shipped_engines",
        "e2e/test_first_hour.py::test_the_example_of_the_readme_learns_and_says_so",
        "e2e/test_kill.py::test_killed_while_a_checkpoint_is_written_beside_training",
        "e2e/test_rl_loop.py::test_the_policy_learns_within_a_few_steps",
        "doors/e2e/test_lightrft_scripts.py::test_the_script_trains_on_supervised_text_and_continues",
        "doors/e2e/test_trinity_door.py::test_the_run_of_a_trainer_is_that_of_trivium_run",
        "doors/e2e/test_verl_door.py::test_the_script_runs",
    }
)
"""Functions of `make test` that cost more: rules of the code, formulas, golden values, contracts, a run, a resume, a
run through each front door."""
_PROPERTY = "cpu_s"


class Cost(NamedTuple):
    """CPU seconds of one test."""

    alone: float
    """Of the test itself, with the fixtures that only it has."""
    setup: float = 0.0
    """Of the fixtures for several tests that this one was the first to need."""
    shared: float = 0.0
    """Of all fixtures for several tests that it needs, also those that another test set up: where that one is left out,
    this one sets them up."""

    @property
    def spent(self) -> float:
        return self.alone + self.setup

    @property
    def by_itself(self) -> float:
        """What it costs to run this test only."""
        return self.alone + self.shared


class Recorded(NamedTuple):
    """The costs of a file."""

    seconds: float
    quick: float
    """The seconds of its tests in `make test`."""
    slow: frozenset[str]
    """Its functions that are not in `make test`."""


def name_of(nodeid: str) -> tuple[str, str]:
    """(file, function) of a node id; the file relative to this folder."""
    file, _, test = nodeid.partition("::")
    return file.removeprefix("tests/"), test.partition("[")[0]


def recorded() -> dict[str, Recorded]:
    """The content of costs.json, by file."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return {file: Recorded(each["seconds"], each["quick"], frozenset(each["slow"])) for file, each in content.items()}


def is_slow(file: str, function: str, before: Mapping[str, Recorded]) -> bool:
    """Whether `make test` leaves a function out."""
    if f"{file}::{function}" in CHOSEN:
        return False
    return _is_whole(file) or (file in before and function in before[file].slow)


def is_left_out(path: Path) -> bool:
    """Whether `make test` leaves out all of a file: `WHOLE` has it and `CHOSEN` names none of its functions."""
    chosen = {name.partition("::")[0] for name in CHOSEN}
    file = path.relative_to(ROOT).as_posix() if path.is_file() and path.is_relative_to(ROOT) else ""
    return _is_whole(file) and file not in chosen


def _is_whole(file: str) -> bool:
    return file.startswith(tuple(f"{folder}/" for folder in WHOLE))


def write(costs: Mapping[str, Cost]) -> None:
    """Writes costs.json from the cost of each node id. Files without a measurement keep theirs."""
    before = recorded() if FILE.is_file() else {}
    files = defaultdict[str, dict[str, list[Cost]]](lambda: defaultdict(list))
    for nodeid, cost in costs.items():
        file, function = name_of(nodeid)
        files[file][function].append(cost)
    now = {file: each for file, each in before.items() if (ROOT / file).is_file()}
    for file, functions in files.items():
        heavy = {name for name, each in functions.items() if max(cost.by_itself for cost in each) > MOST}
        measured = Recorded(0.0, 0.0, frozenset(heavy))
        quick = [cost for name, each in functions.items() if not is_slow(file, name, {file: measured}) for cost in each]
        seconds = sum(cost.spent for each in functions.values() for cost in each)
        now[file] = Recorded(round(seconds, 1), round(_together(quick), 1), frozenset(heavy))
    content = {
        file: {"seconds": each.seconds, "quick": each.quick, "slow": sorted(each.slow)}
        for file, each in sorted(now.items())
    }
    FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), now), encoding="utf-8")


def _together(costs: Collection[Cost]) -> float:
    """CPU seconds of some tests of a file that run without its others."""
    return sum(cost.alone for cost in costs) + max((cost.shared for cost in costs), default=0.0)


def with_table(page: str, now: Mapping[str, Recorded]) -> str:
    """The page with the costs by folder in its table."""
    folders = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for file, recorded in now.items():
        for name in ("/".join(file.split("/")[:-1][:2]) or ".", "all"):
            folders[name][0] += recorded.seconds
            folders[name][1] += recorded.quick
    for name in [name for name, (seconds, _) in folders.items() if seconds < _FEW and name != "all"]:
        for place, seconds in enumerate(folders.pop(name)):
            folders["the others"][place] += seconds
    last = ["the others", "all"]
    order = sorted(folders, key=lambda name: (last.index(name) if name in last else -1, -folders[name][0], name))
    shown = {name: name if name in last else f"`{name}`" for name in order} | {".": "the root"}
    rows = [f"| {shown[name]} | {folders[name][0]:.0f} | {folders[name][1]:.0f} |\n" for name in order]
    before, head, rest = page.partition(_TABLE)
    _, end, after = rest.partition("\n\n")
    return before + head + "".join(rows).rstrip("\n") + end + after


def grown(costs: Mapping[str, Cost], skipped: Collection[str] = ()) -> list[str]:
    """The files whose part of `make test` grew most in a run of all tests, if the whole part did; else none.

    The costs of all tests of such a run, divided by the recorded ones, are the pace of this machine. Files with a test
    among the `skipped` are not compared: without the configs of the peers, the front doors need 40 % less."""
    before = recorded()
    seconds, chosen = defaultdict[str, float](float), defaultdict[str, list[Cost]](list)
    incomplete = {name_of(nodeid)[0] for nodeid in skipped}
    for nodeid, cost in costs.items():
        file, function = name_of(nodeid)
        if file not in incomplete:
            seconds[file] += cost.spent
            chosen[file] += [] if is_slow(file, function, before) else [cost]
    quick = {file: _together(each) for file, each in chosen.items()}
    known = [file for file in seconds if file in before]
    pace = sum(seconds[file] for file in known) / max(1e-9, sum(before[file].seconds for file in known))
    expected = {file: pace * before[file].quick if file in before else 0.0 for file in quick}
    if sum(quick.values()) <= GROWTH * sum(expected.values()):
        return []
    most = sorted(quick, key=lambda file: expected[file] - quick[file])[:10]
    return [f"{file}: {quick[file]:.1f} CPU s in `make test`, {expected[file]:.1f} expected" for file in most]


# --------------------------------------------------------------------------- measuring


def spent() -> float:
    """CPU seconds of this process and of those that it waited for, and of its server of forks."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    server: int | None = forkserver._forkserver._forkserver_pid
    stat = Path(f"/proc/{server}/stat")
    if server is not None and stat.is_file():
        ticks = stat.read_text().rpartition(")")[2].split()[11:15]
        seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return seconds


class Costs:
    """Measures the tests of a run of all tests. At its end it records them, or fails the run if `make test` grew."""

    def __init__(self, *, records: bool) -> None:
        self.records = records
        self._grown: list[str] = []
        self._began = 0.0
        self._setup = 0.0
        self._fixtures: dict[pytest.FixtureDef[Any], float] = {}
        self._costs: dict[str, Cost] = {}
        self._skipped = set[str]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self._began, self._setup = spent(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        began, inner = spent(), self._setup
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                seconds = spent() - began - (self._setup - inner)  # without those that it asks for as it runs
                self._fixtures[fixturedef] = seconds
                self._setup += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        if call.when == "teardown":  # the last report of a test; pytest-xdist sends it to the first process
            known = cast(Any, item)._fixtureinfo.name2fixturedefs.values()
            shared = sum(self._fixtures.get(each, 0.0) for fixtures in known for each in fixtures)
            item.user_properties.append((_PROPERTY, (spent() - self._began - self._setup, self._setup, shared)))
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skipped.add(report.nodeid)
        if report.when == "teardown":
            alone, setup, shared = cast(list[float], dict(report.user_properties)[_PROPERTY])
            self._costs[report.nodeid] = Cost(alone, setup, shared)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # a process of pytest-xdist
            return
        if self.records:
            write(self._costs)
        elif session.exitstatus == 0 and (found := grown(self._costs, self._skipped)):
            self._grown, session.exitstatus = found, 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._grown:
            terminalreporter.section(
                "`make test` grew by more than 20 %: make these cheaper, or record them (make costs)"
            )
            terminalreporter.write("\n".join(self._grown) + "\n")
