"""Real ranks for tests: processes that meet over gloo, forked from one server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_PRELOADED = ["torch", "torch.distributed.fsdp", "trivium.training.torch", "transformers.models.qwen3.modeling_qwen3"]


def run_ranks(size: int, work: Callable[..., Any], folder: Path, *args: Any, deadline_s: float = 120.0) -> list[Any]:
    """`work(rank, *args)` in `size` processes with torchrun's variables set; what each returned, in order of rank.

    `work` is a function of a module, what it returns is tensors in lists, tuples and dicts.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    folder.mkdir(parents=True)
    store = torch.distributed.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_rank, args=(rank, size, store.port, folder, work, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + deadline_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if failed:
            break
        next(process for process in processes if process.is_alive()).join(0.05)
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    said = [(folder / f"{rank}.txt").read_text() for rank in range(size) if (folder / f"{rank}.txt").is_file()]
    assert not said, "\n".join(said)
    assert not late, f"ranks {late} of {size} were not done after {deadline_s} s"
    assert all(process.exitcode == 0 for process in processes), [process.exitcode for process in processes]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, port: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the caller's, as it is under torchrun
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        torch.save(work(rank, *args), folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
