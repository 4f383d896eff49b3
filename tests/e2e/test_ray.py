"""A run on Ray is the run of one process, whoever is killed on the way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ray_parts import Run, run_command
from tests.e2e.test_kill import outcome_of
from tests.processes import Forked, survivors, trivium

HERE = Path(__file__).parent
PLAIN, STAGED = str(HERE / "ray.yaml"), str(HERE / "tiny.yaml")
SYNCHRONOUS = ("schedule.max_staleness=0",)
DETERMINISTIC = ("schedule.max_staleness=2", "schedule.deterministic=true")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The outcome of a run in one process; each is made once."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def outcome(*arguments: str) -> dict[str, Any]:
        if arguments not in known:
            run = run_command(tmp_path_factory.mktemp("one-process"), *arguments)
            assert run.code == 0, run.said
            known[arguments] = outcome_of(run.dir)
            assert known[arguments]["tensors"]
        return known[arguments]

    return outcome


def on_ray(address: str, *, explorers: int = 1, max_restarts: int = 1, pause_s: float = 0.0) -> list[str]:
    slow = [f"workflow.pause_s={pause_s}"] if pause_s else []
    return [
        "cluster.kind=ray",
        f"cluster.address={address}",
        f"cluster.explorers={explorers}",
        f"cluster.max_restarts={max_restarts}",
        *slow,
    ]


def kill(run: Run, role: str, at_step: int) -> float:
    """SIGKILLs a role once the run has come so far; when that was."""
    run.until(lambda: run.steps >= at_step)
    time.sleep(0.1)  # into the step
    os.kill(run.pids()[role], signal.SIGKILL)
    return time.monotonic()


@contextmanager
def stopped(run: Run, role: str) -> Iterator[None]:
    """A role's process does nothing within the block."""
    pid = run.pids()[role]
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


def test_two_stages_end_with_the_weights_of_one_process(
    ray_address: str, one_process: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    arguments = [STAGED, "cluster.threads=1", "evaluation.every=0"]
    run = run_command(tmp_path / "run", *arguments, *on_ray(ray_address))
    assert run.code == 0, run.said
    assert outcome_of(run.dir) == one_process(*arguments)


def test_an_asynchronous_deterministic_run_ends_with_the_weights_of_one_process(
    ray_address: str, one_process: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """With a reward that needs a main thread, which neither the event loop's threads nor a Ray actor's have."""
    arguments = [PLAIN, *DETERMINISTIC, "rewards.1.kind=slow.py:timely"]
    run = run_command(tmp_path / "run", *arguments, *on_ray(ray_address, explorers=2))
    assert run.code == 0, run.said
    assert outcome_of(run.dir) == one_process(*arguments)


def test_an_explorer_and_an_engine_that_are_killed_do_not_change_the_result(
    ray_address: str, one_process: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def kill_both(run: Run) -> None:
        run.until(lambda: {"engine-0-0", "engine-1-0"} <= run.pids().keys())
        kill(run, "explorer-0", at_step=1)
        with stopped(run, "trainer"):  # the run does not end before the next explorer exists
            run.until(lambda: "explorer-0~1" in run.pids())
        with stopped(run, "explorer-0~1"):
            at = run.steps
            run.until(lambda: run.steps >= at + 2)  # the other explorer plays on
        kill(run, "engine-1-0", at_step=run.steps + 1)

    arguments = [PLAIN, *SYNCHRONOUS, "schedule.steps=10"]
    run = run_command(tmp_path / "run", *arguments, *on_ray(ray_address, explorers=2, pause_s=0.3), meanwhile=kill_both)
    assert run.code == 0, run.said
    assert "explorer-0 died" in run.said
    assert "engine-1-0 died" in (run.dir / "log.txt").read_text()
    assert outcome_of(run.dir) == one_process(*arguments)


def _trivium_whose_first_explorer_dies(*arguments: str) -> None:
    """The command, where `explorer-0` dies before its process is ready."""
    import ray

    from trivium.cluster.supervisor import Supervisor

    start = Supervisor._start_explorer

    def start_and_kill(self: Supervisor, name: str) -> None:
        start(self, name)
        if name == "explorer-0":
            ray.kill(self._actors[name])

    Supervisor._start_explorer = start_and_kill  # in this process alone, which ends with the command
    trivium(*arguments)


def test_an_explorer_that_dies_before_it_is_ready_is_replaced(ray_address: str, tmp_path: Path) -> None:
    arguments = ["run", PLAIN, *SYNCHRONOUS, "schedule.steps=2", f"run.dir={tmp_path / 'run'}", *on_ray(ray_address)]
    command = Forked("trivium", tmp_path / "output.txt", _trivium_whose_first_explorer_dies, *arguments)
    try:
        assert command.wait(280) == 0, command.text
    finally:
        command.kill()
    assert "explorer-0~1 replaces it" in command.text


def test_the_death_of_any_other_role_ends_the_run_naming_it_and_the_same_command_continues(
    ray_address: str, one_process: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    arguments = [PLAIN, *DETERMINISTIC]
    for at_step, role in enumerate(("trainer", "buffer", "synchronizer"), start=1):
        killed = 0.0

        def kill_it(run: Run, role: str = role, at_step: int = 2 * at_step) -> None:
            nonlocal killed
            killed = kill(run, role, at_step)

        how = on_ray(ray_address, pause_s=0.3, max_restarts=0)
        run = run_command(tmp_path / "run", *arguments, *how, meanwhile=kill_it)
        assert run.code == 1, run.said
        assert run.ended - killed < 120
        assert f"found: {role} failed: " in run.said
        for part in ("asked: ", "do: "):
            assert part in run.said
        assert not survivors(run.pids().values())
    run = run_command(tmp_path / "run", *arguments, *on_ray(ray_address))
    assert run.code == 0, run.said
    assert "continuing from step-" in run.log
    assert outcome_of(run.dir) == one_process(*arguments)


def test_a_command_continues_by_itself_after_the_death_of_a_role(
    ray_address: str, one_process: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    def kill_two(run: Run) -> None:
        before = run.pids()["trainer"] if kill(run, "trainer", 3) else 0
        run.until(lambda: run.pids().get("trainer", before) != before and run.steps >= 5)
        kill(run, "buffer", 5)

    arguments = [PLAIN, *DETERMINISTIC]
    how = on_ray(ray_address, pause_s=0.3, max_restarts=2)
    run = run_command(tmp_path / "run", *arguments, *how, meanwhile=kill_two)
    assert run.code == 0, run.said
    assert run.said.count("the run continues from the last checkpoint") == 2
    assert outcome_of(run.dir) == one_process(*arguments)


@pytest.mark.parametrize("role", ["buffer", "synchronizer"])
def test_a_host_that_is_stopped_ends_the_run_naming_it(ray_address: str, role: str, tmp_path: Path) -> None:
    def stop(run: Run) -> None:
        run.until(lambda: run.steps >= 1)
        os.kill(run.pids()[role], signal.SIGSTOP)

    how = ["sync.deadline_s=30", "schedule.steps=1000", *on_ray(ray_address, pause_s=0.1)]
    run = run_command(tmp_path / "run", PLAIN, *how, meanwhile=stop)
    assert run.code == 1, run.said
    assert f"found: {role} failed: its process did not answer within 30 s" in run.said
    assert not survivors(run.pids().values())


def test_the_cause_reaches_the_terminal(ray_address: str, tmp_path: Path) -> None:
    run = run_command(tmp_path / "run", PLAIN, *on_ray(ray_address), "workflow.kind=slow.py:Broken")
    assert run.code == 1, run.said
    assert "explorer-0 failed: Unheard: the simulator is not licensed on this machine" in run.said
    assert "in __init__" in run.log, "the traceback of the role"
    assert not survivors(run.pids().values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_command_with_a_ray_of_its_own_that_is_interrupted_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    seen: list[int] = []

    def interrupt(run: Run) -> None:
        run.until(lambda: {"trainer", "buffer", "explorer-0", "synchronizer"} <= run.pids().keys())
        seen.extend(below(run.pid))
        os.kill(run.pid, number)

    run = run_command(tmp_path / "run", PLAIN, "cluster.kind=ray", "schedule.steps=100", meanwhile=interrupt)
    assert run.code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], run.said
    assert len(seen) > 5
    assert not survivors(seen)


def below(pid: int) -> list[int]:
    """Every process that descends from this one."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(other for child in children for other in below(child))]
