"""Real ranks for tests: processes that meet over gloo, forked by one that the preloaded process forks."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.processes import fork_server


def run_ranks(
    sizes: Sequence[int], work: Callable[..., Any], folder: Path, *args: Any, deadline_s: float = 240.0
) -> dict[int, list[Any]]:
    """`work(rank, size, *args)` in `size` processes with torchrun's variables set, for one size after the other: what
    each returned, in order of rank.

    `work` is a function of a module. Fails with what a rank raised, or when not all is done in time.
    """
    folder.mkdir(parents=True)
    deadline = time.monotonic() + deadline_s
    parent = fork_server().Process(target=_start, args=(sizes, work, folder, args, deadline_s))
    parent.start()
    parent.join(deadline_s + 30)
    if parent.is_alive():
        parent.kill()
        parent.join()
    troubles = [file.read_text() for suffix in ("txt", "exit", "crash") for file in sorted(folder.glob(f"*.{suffix}"))]
    assert not any(troubles), "\n".join(troubles)
    assert parent.exitcode == 0, f"exit code {parent.exitcode}, {deadline - time.monotonic():.0f} s before the deadline"
    return {
        size: [torch.load(folder / f"{size}-{rank}.pt", weights_only=False) for rank in range(size)] for size in sizes
    }


def _start(
    sizes: Sequence[int], work: Callable[..., Any], folder: Path, args: tuple[Any, ...], deadline_s: float
) -> None:
    deadline = time.monotonic() + deadline_s
    for size in sizes:
        listener = socket.create_server(("127.0.0.1", 0), backlog=size)
        port = listener.getsockname()[1]
        ranks = [
            multiprocessing.get_context("fork").Process(
                target=_rank, args=(rank, size, port, work, folder, args), daemon=True
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        # The store starts a thread, so it comes after the forks: of 150 groups forked beside that thread, 3 had a rank
        # that hung, by a lock that the thread held. The ranks connect to the listening socket before.
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        _wait(ranks, deadline)
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        if late:
            _print_stacks([ranks[rank] for rank in late])
        for process in ranks:
            process.kill()
        del store  # its thread ends before the next ranks are forked
        if late and not failed:
            (folder / f"{size}-late.txt").write_text(f"ranks {late} of {size} were not done after {deadline_s} s")
        for rank in failed:
            (folder / f"{size}-{rank}.exit").write_text(
                f"rank {rank} of {size} ended with exit code {ranks[rank].exitcode}"
            )
        if late or failed:
            raise SystemExit(1)


def _wait(ranks: Sequence[BaseProcess], deadline: float) -> None:
    """Until all are done, one has failed, or it is late."""
    while (alive := [process for process in ranks if process.is_alive()]) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in ranks):
            return
        alive[0].join(0.05)


def _print_stacks(late: Sequence[BaseProcess]) -> None:
    """Has the ranks write where they are to their `.crash` files, by the handler that `_rank` registers."""
    for process in late:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)  # the time that they take to write


def _rank(rank: int, size: int, port: int, work: Callable[..., Any], folder: Path, args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the caller's, as it is under torchrun
    )
    torch.set_num_threads(1)
    crash = (folder / f"{size}-{rank}.crash").open("w")
    faulthandler.enable(crash)
    faulthandler.register(signal.SIGUSR1, crash)
    try:
        torch.save(work(rank, size, *args), folder / f"{size}-{rank}.pt")
    except BaseException:
        (folder / f"{size}-{rank}.txt").write_text(f"rank {rank} of {size}: {traceback.format_exc()}")
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
