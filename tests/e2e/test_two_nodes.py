"""Two machines, as two network namespaces of this one: each has its own loopback interface and one address, and they
share only a cable and the file system."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.test_kill import outcome_of
from tests.e2e.test_torchrun import steps

PLAIN = str(Path(__file__).parent / "ray.yaml")
PORT = 29511


def can_make_namespaces() -> bool:
    ip = shutil.which("ip")
    return (
        ip is not None
        and subprocess.run([ip, "netns", "list"], capture_output=True).returncode == 0
        and (subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0)
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2"),
]


class Node:
    """A namespace with one address."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, output: Path, *command: str) -> subprocess.Popen[str]:
        """Starts a command on this node; it leads a group of its own."""
        with output.open("a") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, "-m", *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
                | {"RAY_AUTH_MODE": "disabled"},
            )
        self.processes.append(process)
        return process

    def torchrun(self, output: Path, head: str, rank: int, *arguments: str) -> subprocess.Popen[str]:
        how = [
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={rank}",
            f"--master-addr={head}",
            f"--master-port={PORT}",
        ]
        return self.start(output, "torch.distributed.run", *how, "-m", "trivium", "run", PLAIN, *arguments)

    def dies(self) -> None:
        """Kills every process of this node at once."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]


@pytest.fixture
def nodes() -> Generator[tuple[Node, Node]]:
    first, second = (Node(f"trivium-{os.getpid()}-{n}", f"10.213.7.{n}") for n in (1, 2))

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    for node in (first, second):
        ip("netns", "add", node.name)
    try:
        cable = [f"tv{os.getpid()}a", f"tv{os.getpid()}b"]
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for node, end in zip((first, second), cable, strict=True):
            ip("link", "set", end, "netns", node.name)
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", end)
            ip("-n", node.name, "link", "set", end, "up")
            ip("-n", node.name, "link", "set", "lo", "up")
            ip("-n", node.name, "route", "add", "default", "dev", end)
        yield first, second
    finally:
        for node in (first, second):
            node.dies()
            for process in node.processes:
                process.wait(30)
            ip("netns", "delete", node.name)


def until(happened: object, output: Path, *running: subprocess.Popen[str]) -> None:
    assert callable(happened)
    end = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < end, output.read_text()
        assert all(process.poll() is None for process in running), output.read_text()
        time.sleep(0.05)


@contextmanager
def ends(code: int, output: Path, *processes: subprocess.Popen[str]) -> Generator[None]:
    yield
    for process in processes:
        assert process.wait(300) == code, output.read_text()


def test_ranks_on_two_nodes_have_the_bits_of_ranks_on_one_and_name_a_node_that_dies(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    first, second = nodes
    output = tmp_path / "output.txt"
    run = [f"run.dir={tmp_path / 'two'}", "schedule.steps=6"]
    both = [node.torchrun(output, first.address, rank, *run) for rank, node in enumerate(nodes)]
    with ends(0, output, *both):
        pass
    one = [f"run.dir={tmp_path / 'one'}", "schedule.steps=6"]
    how = ("torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", f"--master-port={PORT}", "-m", "trivium", "run")
    with ends(0, output, first.start(output, *how, PLAIN, *one)):
        pass
    assert outcome_of(tmp_path / "two") == outcome_of(tmp_path / "one")

    run = [f"run.dir={tmp_path / 'dying'}", "schedule.steps=60", "workflow.pause_s=0.2"]
    survivor, _ = (node.torchrun(output, first.address, rank, *run) for rank, node in enumerate(nodes))
    until(lambda: steps(tmp_path / "dying") >= 3, output, survivor)
    second.dies()
    killed = time.monotonic()
    assert survivor.wait(90) != 0
    assert time.monotonic() - killed < 60
    assert "rank 1" in output.read_text().partition("found: ")[2]
    run[1] = "schedule.steps=6"
    both = [node.torchrun(output, first.address, rank, *run) for rank, node in enumerate(nodes)]
    with ends(0, output, *both):
        pass


@pytest.mark.parametrize("method", ["checkpoint", "nccl"])
def test_rollouts_on_one_node_and_training_on_the_other_give_the_bits_of_one_process(
    method: str, nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    """The nodes share the file system with the database. With `nccl`, weights travel over the network."""
    output, apart, together = tmp_path / "output.txt", tmp_path / "apart", tmp_path / "together"
    meeting = [f"buffer={{kind: sql, url: 'sqlite:///{tmp_path / 'buffer.db'}'}}", f"sync.method={method}"]
    run = ["trivium", "run", PLAIN, f"run.dir={apart}", *meeting, "evaluation.every=0"]
    trainer = nodes[0].start(output, *run, "run.mode=train")
    explorer = nodes[1].start(output, *run, "run.mode=explore", "run.explorer=a")
    with ends(0, output, trainer, explorer):
        pass
    with ends(0, output, nodes[0].start(output, "trivium", "run", PLAIN, f"run.dir={together}", "evaluation.every=0")):
        pass
    ended = [outcome_of(directory) for directory in (apart, together)]
    for outcome in ended:
        outcome["tensors"] = {name: data for name, data in outcome["tensors"].items() if "/versions/" not in name}
        assert outcome["tensors"]
    assert ended[0] == ended[1]


@pytest.mark.timeout(900)
def test_a_run_on_a_ray_cluster_of_two_nodes_survives_the_death_of_one(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    first, second = nodes
    output = tmp_path / "output.txt"
    ray = ("ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=4")
    head = first.start(
        output, *ray, "--head", f"--node-ip-address={first.address}", "--port=6379", "--include-dashboard=0"
    )
    until(lambda: "runtime started" in output.read_text(), output, head)
    other = second.start(output, *ray, f"--address={first.address}:6379", f"--node-ip-address={second.address}")
    until(lambda: output.read_text().count("runtime started") == 2, output, head, other)
    how = ["cluster.kind=ray", f"cluster.address={first.address}:6379", "evaluation.every=0"]
    run_dir = tmp_path / "run"
    run = [f"run.dir={run_dir}", "schedule.steps=12", "workflow.pause_s=0.2", "cluster.explorers=2"]
    run.append("cluster.max_restarts=5")  # Ray may place a role on a node before it knows that it is dead
    process = first.start(output, "trivium", "run", PLAIN, *how, *run)
    until(lambda: steps(run_dir) >= 3, output, process)
    assert second.pids(), "roles run on both nodes"
    second.dies()
    with ends(0, output, process):
        pass
    one = [f"run.dir={tmp_path / 'one'}", "schedule.steps=12", "evaluation.every=0"]
    with ends(0, output, first.start(output, "trivium", "run", PLAIN, *one)):
        pass
    assert outcome_of(run_dir) == outcome_of(tmp_path / "one")
