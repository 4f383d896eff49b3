"""A rank of torchrun that is stopped or dies: the driving rank names it, whatever it was sending."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing import refused

from tests.rank_processes import run_ranks
from trivium.foundation.errors import RoleFailed
from trivium.processes.sockets import own_interface
from trivium.training.distributed.data_parallel import RankVerbs
from trivium.training.distributed.ranks import Ranks, open_process_group
from trivium.training.distributed.torchrun import TorchrunRanks, connect_ranks, life_of_rank, serve_rank

DEADLINE_S = 3.0
"""Of a call, and for the ranks to connect on a busy machine."""


class Engine:
    def take(self, data: bytes) -> int:
        return len(data)


def with_a_stopped_rank(rank: int, size: int, num_bytes: int) -> str:
    """What the driving rank raises for a call of a rank that is stopped."""
    connect_ranks("cpu", DEADLINE_S)
    engine: Any = Engine()
    if rank:
        with suppress(RoleFailed, RuntimeError):  # it continues after the driving rank has given up
            serve_rank("cpu", lambda spec: RankVerbs(engine))
        return ""
    time.sleep(1.5 * DEADLINE_S)  # a rank waits for a command as long as it takes
    group = TorchrunRanks("cpu", "a spec", lambda: (Ranks(0, size), engine))
    assert group.run_on_all_ranks("take", b"123") == 3
    life = life_of_rank(1)
    os.kill(life.pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with refused(RoleFailed) as failed:
            group.run_on_all_ranks("take", bytes(num_bytes))
    finally:
        os.kill(life.pid, signal.SIGCONT)
    assert time.monotonic() - began < 60
    return str(failed.value).replace(str(life.pid), "PID")


@pytest.mark.parametrize("num_bytes", [10, 100_000_000], ids=["small", "more than the kernel holds"])
def test_a_stopped_rank_is_named(num_bytes: int, tmp_path: Path) -> None:
    raised = run_ranks([2], with_a_stopped_rank, tmp_path / "ranks", num_bytes, deadline_s=90)
    assert "rank 1: process PID was stopped (SIGSTOP)" in raised[2][0]


class Together:
    """Engines that meet in a collective call. The one of rank 1 leaves it, and its process ends half a second later."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def meet(self) -> None:
        if self._rank == 0:
            dist.all_reduce(torch.ones(1))
        else:
            dist.destroy_process_group()
            time.sleep(0.5)
            torch.save("", self._folder / f"2-{self._rank}.pt")  # what `run_ranks` reads
            os._exit(0)


def with_a_rank_that_dies_elsewhere(rank: int, size: int, folder: Path) -> str:
    """What the driving rank raises if a rank of another machine dies, whose process it cannot look at."""
    if rank:
        socket.gethostname = lambda: "elsewhere"
    connect_ranks("cpu", 60.0)
    engine: Any = Together(folder, rank)
    if rank:
        serve_rank("cpu", lambda spec: RankVerbs(engine))
    group = TorchrunRanks("cpu", "a spec", lambda: (Ranks(0, size), engine))
    with refused(RoleFailed) as failed:
        group.run_on_all_ranks("meet")
    return str(failed.value)


def test_a_rank_that_dies_on_another_machine_is_named_after_the_collective_call_has_failed(tmp_path: Path) -> None:
    raised = run_ranks([2], with_a_rank_that_dies_elsewhere, tmp_path / "ranks", tmp_path / "ranks", deadline_s=90)
    assert "trainer rank 1" in raised[2][0]


def interfaces(rank: int, size: int, on_this_machine: int) -> tuple[str, str]:
    """The interface that gloo is told to use, and the one that other machines reach."""
    outward = own_interface()
    os.environ["LOCAL_WORLD_SIZE"] = str(on_this_machine)
    open_process_group("cpu", 60.0)
    dist.barrier()  # a rank that ends while the other one still connects to it would fail that one
    return os.environ.get("GLOO_SOCKET_IFNAME", ""), outward


def test_ranks_of_one_machine_do_not_listen_on_the_interface_that_others_reach(tmp_path: Path) -> None:
    for on_this_machine in (1, 2):
        found = run_ranks([2], interfaces, tmp_path / str(on_this_machine), on_this_machine, deadline_s=90)[2]
        assert all(used == (outward if on_this_machine == 1 else "") for used, outward in found)
