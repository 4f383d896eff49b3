"""Two machines, as two network namespaces of this one: each has its own loopback interface and one address, and they
share only a cable and the file system."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e import ray_instance
from tests.e2e.killing import launches
from tests.e2e.test_kill import outcome_of
from tests.e2e.test_torchrun import as_agent, as_rank, assert_ranks_end, steps
from tests.processes import Forked, trivium
from tests.waiting import eventually

CONFIG = Path(__file__).parent / "ray.yaml"
PLAIN = str(CONFIG)
PORT = 29511
CLONE_NEWNET = 0x40000000


def can_make_namespaces() -> bool:
    ip = shutil.which("ip")
    return (
        ip is not None
        and subprocess.run([ip, "netns", "list"], capture_output=True).returncode == 0
        and (subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0)
    )


pytestmark = [
    pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2"),
]


def in_namespace(name: str, work: Callable[..., None], *arguments: object) -> None:
    """`work` in a network namespace, which the calling process enters for good."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    environment = own_environment()
    os.environ.clear()
    os.environ.update(environment)
    work(*arguments)


def own_environment() -> dict[str, str]:
    """Without what is meant for the Ray instance of other tests."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**others, "RAY_AUTH_MODE": "disabled"}


class Node:
    """A namespace with one address."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.processes: list[Forked] = []

    def fork(self, output: Path, work: Callable[..., None], *arguments: object) -> Forked:
        """Calls `work` in a forked process of this node."""
        process = Forked(self.name, output, in_namespace, self.name, work, *arguments)
        self.processes.append(process)
        return process

    def rank(self, output: Path, head: str, rank: int, *arguments: str) -> Forked:
        """Forks the process that torchrun would start on this node, in its environment."""
        environment = {"MASTER_ADDR": head, "MASTER_PORT": PORT, "WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": 0}
        return self.fork(output, as_rank, environment, "run", PLAIN, *arguments)

    def torchrun(self, output: Path, head: str, rank: int, *arguments: str) -> Forked:
        how = [
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={rank}",
            f"--master-addr={head}",
            f"--master-port={PORT}",
        ]
        return self.fork(output, as_agent, 1, *how, "-m", "trivium", "run", PLAIN, *arguments)

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
                process.wait(120)
            ip("netns", "delete", node.name)


@pytest.fixture
def sockets() -> Generator[str]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory() as directory:
        yield directory


def until(happened: Callable[[], bool], output: Path, *running: Forked) -> None:
    eventually(happened, 300, output.read_text, *running)


def assert_ends_well(output: Path, *processes: Forked) -> None:
    for process in processes:
        assert process.wait(300) == 0, output.read_text()


@pytest.mark.timeout(900)
def test_ranks_on_two_nodes_have_the_bits_of_ranks_on_one_and_name_a_node_that_dies(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    first, second = nodes
    output, dying = tmp_path / "output.txt", tmp_path / "dying"
    run = [f"run.dir={dying}", "schedule.steps=12", "workflow.pause_s=0.2"]
    survivor, _ = (node.torchrun(output, first.address, rank, *run) for rank, node in enumerate(nodes))
    until(lambda: steps(dying) >= 3, output, survivor)
    second.dies()
    killed = time.monotonic()
    assert survivor.wait(200) != 0
    assert time.monotonic() - killed < 150
    assert "rank 1" in output.read_text().partition("found: ")[2]
    run = [f"run.dir={dying}", "schedule.steps=12"]
    assert_ends_well(output, *(node.rank(output, first.address, rank, *run) for rank, node in enumerate(nodes)))
    assert_ranks_end(0, tmp_path / "one", "schedule.steps=12", config=CONFIG)
    assert outcome_of(dying) == outcome_of(tmp_path / "one")


@pytest.mark.parametrize("method", ["checkpoint", "nccl"])
def test_rollouts_on_one_node_and_training_on_the_other_give_the_bits_of_one_process(
    method: str, nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    """The nodes share the file system with the database. With `nccl`, weights travel over the network."""
    output, apart, together = tmp_path / "output.txt", tmp_path / "apart", tmp_path / "together"
    meeting = [f"buffer={{kind: sql, url: 'sqlite:///{tmp_path / 'buffer.db'}'}}", f"sync.method={method}"]
    run = ["run", PLAIN, f"run.dir={apart}", *meeting, "evaluation.every=0"]
    trainer = nodes[0].fork(output, trivium, *run, "run.mode=train")
    explorer = nodes[1].fork(output, trivium, *run, "run.mode=explore", "run.explorer=a")
    assert_ends_well(output, trainer, explorer)
    assert launches(CONFIG, together, overrides=("evaluation.every=0",)) == ["finished"]
    ended = [outcome_of(directory) for directory in (apart, together)]
    for outcome in ended:
        outcome["tensors"] = {name: data for name, data in outcome["tensors"].items() if "/versions/" not in name}
        assert outcome["tensors"]
    assert ended[0] == ended[1]


@pytest.mark.timeout(900)
def test_a_run_on_a_ray_cluster_of_two_nodes_survives_the_death_of_one(
    nodes: tuple[Node, Node], sockets: str, tmp_path: Path
) -> None:
    first, second = nodes
    output = tmp_path / "output.txt"
    ray = ("--block", "--disable-usage-stats", "--num-cpus=4")
    head = first.fork(
        output,
        ray_instance.node,
        f"{sockets}/first",
        *ray,
        "--head",
        f"--node-ip-address={first.address}",
        "--port=6379",
        "--include-dashboard=0",
    )
    until(lambda: "runtime started" in output.read_text(), output, head)
    join = (f"--address={first.address}:6379", f"--node-ip-address={second.address}")
    other = second.fork(output, ray_instance.node, f"{sockets}/second", *ray, *join)
    until(lambda: output.read_text().count("runtime started") == 2, output, head, other)
    how = ["cluster.kind=ray", f"cluster.address={first.address}:6379", "evaluation.every=0"]
    run_dir = tmp_path / "run"
    run = [f"run.dir={run_dir}", "schedule.steps=12", "workflow.pause_s=0.2", "cluster.explorers=2"]
    run.append("cluster.max_restarts=5")  # Ray may place a role on a node before it knows that it is dead
    process = first.fork(output, trivium, "run", PLAIN, *how, *run)
    until(lambda: steps(run_dir) >= 3, output, process)
    assert second.pids(), "roles run on both nodes"
    second.dies()
    assert_ends_well(output, process)
    assert launches(CONFIG, tmp_path / "one", overrides=("schedule.steps=12", "evaluation.every=0")) == ["finished"]
    assert outcome_of(run_dir) == outcome_of(tmp_path / "one")
