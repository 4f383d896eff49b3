"""Ranks that torchrun starts: the death of one ends all, named; the same command goes on where the run was."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.ahead import Ahead, children
from tests.e2e.test_kill import outcome_of
from tests.ports import port_below_ephemeral
from tests.processes import Forked, alive, survivors, trivium
from tests.waiting import eventually

HERE = Path(__file__).parent


@contextmanager
def torchrun(output: Path, *arguments: str, forked: int = 4) -> Generator[Forked]:
    """torchrun, which is forked, as are the first `forked` ranks that it starts."""
    agent = Forked("torchrun", output, as_agent, forked, *arguments)
    try:
        yield agent
    finally:
        if agent.poll() is None:
            os.kill(agent.pid, signal.SIGTERM)  # and its ranks with it
            agent.wait(120)
            agent.kill()


def as_agent(forked: int, *arguments: str) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main

    ahead = Ahead(forked)

    def popen(self: SubprocessHandler, command: Sequence[str], env: dict[str, str]) -> Any:
        return ahead.start(command, env=env, start_new_session=True)

    SubprocessHandler._popen = popen
    main(arguments)


def start(run_dir: Path, *arguments: str, restarts: int = 0, forked: int = 4) -> AbstractContextManager[Forked]:
    how = ("--standalone", f"--max-restarts={restarts}", "--nproc-per-node", "2", "-m", "trivium")
    command = (*how, "run", str(HERE / "ray.yaml"), f"run.dir={run_dir}", *arguments)
    return torchrun(run_dir.with_suffix(".out"), *command, forked=forked)


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.is_file() else []
    return max((json.loads(row)["step"] for row in rows[:-1]), default=0)


@contextmanager
def forked_ranks(
    run_dir: Path, *arguments: str, config: Path = HERE / "ray.yaml", work: Callable[..., None] | None = None
) -> Generator[list[Forked]]:
    """The commands that torchrun starts, in their environment, but forked; none is left at the end."""
    run_dir.mkdir(exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": store.host, "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    command = ("run", str(config), f"run.dir={run_dir}", *arguments)
    ranks: list[Forked] = []
    for rank in range(2):
        environment = {**shared, "WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(Forked(f"rank {rank}", run_dir / f"rank-{rank}.out", work or as_rank, environment, *command))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def assert_ranks_end(code: int, run_dir: Path, *arguments: str, config: Path = HERE / "ray.yaml") -> list[str]:
    """All ranks end with this exit code. What they wrote, by rank."""
    with forked_ranks(run_dir, *arguments, config=config) as ranks:
        for rank in ranks:
            assert rank.wait(120) == code, rank.text
        return [rank.text for rank in ranks]


def as_rank(environment: dict[str, object], *arguments: str) -> None:
    os.environ |= {name: str(value) for name, value in environment.items()}
    trivium(*arguments)


def as_rank_that_exits_late(environment: dict[str, object], *arguments: str) -> None:
    if environment["RANK"] != 0:
        atexit.register(time.sleep, 2.5)
    as_rank(environment, *arguments)


def kill_rank_1(agent: Forked, run_dir: Path, at_step: int) -> float:
    """SIGKILL once the run has come so far; when that was."""
    eventually(lambda: steps(run_dir) >= at_step and rank_1(agent) != [], 240, lambda: agent.text, agent)
    (rank,) = rank_1(agent)
    os.kill(rank, signal.SIGKILL)
    return time.monotonic()


def rank_1(agent: Forked) -> list[int]:
    return [pid for pid in children(agent.pid, "rank 1") if alive(pid)]


@pytest.mark.timeout(900)
def test_torchrun_starts_ranks_again_then_names_the_one_that_died_and_the_same_command_continues(
    tmp_path: Path,
) -> None:
    run_dir, arguments = tmp_path / "killed", ("workflow.pause_s=0.2", "schedule.steps=16")
    with start(run_dir, *arguments, restarts=1) as process:
        kill_rank_1(process, run_dir, 3)
        eventually(lambda: steps(run_dir) >= 7, 240, lambda: process.text, process)
        ranks = [*children(process.pid, "rank 0"), *rank_1(process)]
        killed = kill_rank_1(process, run_dir, 8)
        assert process.wait(120) != 0
        assert time.monotonic() - killed < 120
    assert (run_dir / "log.txt").read_text().count("continuing from step-") == 1
    # torchrun looks at its ranks ten times a second: one that ended for its peer's death may count as the root cause.
    report = process.text.partition(" FAILED")[2]
    assert re.search(r"rank +: 1 \(.*\n *exitcode +: -9 ", report), report
    assert len(ranks) == 2
    assert not survivors(ranks)
    for _ in range(2):  # the second time there is nothing left to do
        assert_ranks_end(0, run_dir, *arguments)
    sampled = re.findall(r"this rank sampled (\d+) completions", (run_dir / "log-rank-1.txt").read_text())
    assert sum(map(int, sampled)) > 0  # not the first rank alone
    assert (run_dir / "log.txt").read_text().count("continuing from step-") > 1
    with start(tmp_path / "whole", "workflow.pause_s=0", "schedule.steps=16", forked=1) as process:
        process.ended(0)
    assert outcome_of(run_dir) == outcome_of(tmp_path / "whole")


def test_ranks_of_two_agents_meet_again_if_one_agent_counts_a_restart_and_the_other_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"127.0.0.1:{port_below_ephemeral()}"
    how = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    how += ("--rdzv-id=two", "--local-addr=127.0.0.1", str(HERE / "second_round.py"), str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ExitStack() as stack:
        agents = [stack.enter_context(torchrun(tmp_path / f"agent-{number}.out", *how)) for number in range(2)]
        for agent in agents:
            agent.ended(0, seconds=120)
    assert [(tmp_path / f"second-{rank}").read_text() for rank in range(2)] == ["2 0", "2 1"]


def test_a_rank_holds_the_run_directory_and_ends_with_the_driving_rank(tmp_path: Path) -> None:
    with forked_ranks(tmp_path, "workflow.pause_s=0.2", "schedule.steps=60") as (driver, other):
        eventually(lambda: steps(tmp_path) >= 2, 120, lambda: driver.text + other.text, driver)
        held = [os.readlink(path) for path in Path(f"/proc/{other.pid}/fd").iterdir()]
        assert str(tmp_path / ".lock") in held, "a new run waits for it"
        os.kill(driver.pid, signal.SIGKILL)
        assert other.wait(120) != 0
    with forked_ranks(tmp_path, "schedule.steps=6", "workflow.pause_s=0", work=as_rank_that_exits_late) as ranks:
        for rank in ranks:  # a slow machine ends the driving rank long before another one
            rank.ended(0)


def test_what_ranks_cannot_do_is_refused_by_each_of_them(tmp_path: Path) -> None:
    for said in assert_ranks_end(2, tmp_path, "run.mode=bench"):
        assert "found: ranks of torchrun can only train together" in said
