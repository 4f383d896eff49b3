"""Ranks that torchrun starts: the death of one ends all, named; the same command goes on where the run was."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.e2e.test_kill import outcome_of
from tests.processes import Forked, eventually, trivium

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def start(run_dir: Path, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--max-restarts={restarts}",
        "--nproc-per-node",
        "2",
        "-m",
        "trivium",
        "run",
        str(HERE / "ray.yaml"),
        f"run.dir={run_dir}",
        *arguments,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.is_file() else []
    return max((json.loads(row)["step"] for row in rows[:-1]), default=0)


def pids(run_dir: Path) -> dict[int, int]:
    """The ranks of a run that live, and their processes."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = dict(row.partition("=")[::2] for row in (process / "environ").read_text().split("\0"))
            if f"run.dir={run_dir}" in (process / "cmdline").read_text() and "RANK" in said:
                found[int(said["RANK"])] = int(process.name)
        except (OSError, UnicodeDecodeError):
            continue  # it has ended, or is somebody else's
    return found


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


def kill_rank_1(process: subprocess.Popen[str], run_dir: Path, at_step: int) -> float:
    """SIGKILL once the run has come so far; when that was."""
    end = time.monotonic() + 240
    while steps(run_dir) < at_step or 1 not in pids(run_dir):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(pids(run_dir)[1], signal.SIGKILL)
    return time.monotonic()


@pytest.mark.timeout(900)
def test_torchrun_starts_ranks_again_then_names_the_one_that_died_and_the_same_command_continues(
    tmp_path: Path,
) -> None:
    run_dir, arguments = tmp_path / "killed", ("workflow.pause_s=0.2", "schedule.steps=16")
    with start(run_dir, *arguments, restarts=1) as process:
        kill_rank_1(process, run_dir, 3)
        killed = kill_rank_1(process, run_dir, 8)
        said = process.communicate()[0]
        assert time.monotonic() - killed < 120
    assert process.returncode != 0
    assert (run_dir / "log.txt").read_text().count("continuing from step-") == 1
    root_cause = said.partition("Root Cause")[2]
    assert "rank      : 1 " in root_cause
    assert "SIGKILL" in root_cause
    assert not pids(run_dir)
    for _ in range(2):  # the second time there is nothing left to do
        assert_ranks_end(0, run_dir, *arguments)
    sampled = re.findall(r"this rank sampled (\d+) completions", (run_dir / "log-rank-1.txt").read_text())
    assert sum(map(int, sampled)) > 0  # not the first rank alone
    assert (run_dir / "log.txt").read_text().count("continuing from step-") > 1
    with start(tmp_path / "whole", "workflow.pause_s=0", "schedule.steps=16") as process:
        said = process.communicate()[0]
    assert process.returncode == 0, said
    assert outcome_of(run_dir) == outcome_of(tmp_path / "whole")


def test_ranks_of_two_agents_meet_again_if_one_agent_counts_a_restart_and_the_other_none(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=two", "--local-addr=127.0.0.1"]
    command += [str(HERE / "second_round.py"), str(tmp_path)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        agents = list[subprocess.Popen[str]]()
        for _ in range(2):
            agent = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
            agents.append(stack.enter_context(agent))
            stack.callback(agent.terminate)  # and its rank with it
        said = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
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
