"""How long weights take from a trainer to an engine, by each method, beside what the machine copies and hashes.

    python benchmarks/weights.py [--gigabytes 0.5] [--repeats 3] [--dtype bfloat16]

Random weights in layers of Qwen3's shapes, on the CPU. A method's time is from the offer to the last tensor that was
read and verified; nothing loads them. Both ends are threads of one process, except for `processes` (pickled, over a
socket of this machine). `checkpoint` writes to the disk that temporary files are on, and waits for it; what is read
comes from the system's cache. The methods take turns, and what is printed is the best of each: seconds for a GB, and
how many times the floor that is. The floor is what the method cannot do without: a copy in memory, a file that is
written and read, a raw broadcast of gloo. Hashing is that of all weights, once for each end. The last lines give the
time of one hash by the size of the tensor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trivium.engines.process_pool import EngineHost, ProcessPool
from trivium.foundation.board import MemoryBoard
from trivium.foundation.concurrency import usable_cores
from trivium.models.weights.stream import BUCKET_BYTES, described
from trivium.protocols import RolloutEngine, WeightChannel
from trivium.sync.collective import CollectiveChannel
from trivium.sync.files import FileChannel
from trivium.sync.hashes import digest, digests
from trivium.sync.memory import MemoryChannel
from trivium.synchronizer import Synchronizer
from trivium.types import TRAINER, Capabilities

Named = list[tuple[str, torch.Tensor]]
_KEY = b"weights"


def layers(size: float, dtype: torch.dtype, device: str) -> Named:
    """Tensors of about so many bytes."""
    named: Named = []
    shapes = {"q": (2048, 1024), "k": (1024, 1024), "gate": (3072, 1024), "down": (1024, 3072), "norm": (1024,)}
    layer = {name: torch.randn(shape).to(device, dtype) for name, shape in shapes.items()}
    while sum(tensor.nbytes for _, tensor in named) < size:
        named += [(f"{len(named)}.{name}", tensor.clone()) for name, tensor in layer.items()]
    return named


class Drain:
    """An engine that reads weights and keeps none."""

    max_context, capabilities = 1, Capabilities()

    async def load(self, version: int, weights: Iterable[Any], *, in_flight: str = "finish") -> None:
        await asyncio.to_thread(lambda: [None for _ in weights])

    async def close(self) -> None: ...


def host(answer: Connection) -> None:
    """A process with an engine."""
    answer.send(EngineHost(cast(RolloutEngine, Drain()), "127.0.0.1", _KEY).address)
    answer.recv()


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def through(channel: WeightChannel, named: Named) -> Callable[[], object]:
    """A version into a channel of one process, and out of it."""

    def run() -> None:
        channel.offer(1, described(named))
        for _ in channel.collect(1):
            pass

    return run


def collective(named: Named) -> Callable[[], object]:
    board = MemoryBoard()
    ends: dict[str, tuple[Synchronizer, CollectiveChannel]] = {}
    for role in (TRAINER, "ann"):
        synchronizer = Synchronizer(board, deadline_s=120.0, collective=True)
        how: dict[str, Any] = {"keep": 1, "directory": Path(), "synchronizer": synchronizer, "role": role}
        ends[role] = synchronizer, CollectiveChannel(**how)
    ends[TRAINER][0].open()
    ann, channel = ends["ann"]
    asyncio.run(ann.wait_for_trainer("ann"))
    asyncio.run(ann.join("ann"))
    versions = iter(range(1, 1000))

    def run() -> None:
        version = next(versions)
        offer = threading.Thread(target=ends[TRAINER][1].offer, args=(version, described(named)))
        offer.start()
        asyncio.run(ann.next_version("ann", None, newest=True))
        for _ in channel.collect(version):
            pass
        ann.adopted("ann", version)
        offer.join()

    return run


def broadcast(named: Named) -> Callable[[], object]:
    """The same bytes by gloo alone: no hashes, no answers."""
    store, buckets = HashStore(), max(1, sum(t.nbytes for _, t in named) // BUCKET_BYTES)
    size = sum(tensor.nbytes for _, tensor in named) // buckets
    flat = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    groups: dict[int, Any] = {}

    def end(rank: int) -> None:
        if rank not in groups:
            options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=60)
            groups[rank] = dist.ProcessGroupGloo(store, rank, 2, options)
        for _ in range(buckets):
            groups[rank].broadcast([flat[rank]], dist.BroadcastOptions()).wait()

    def run() -> None:
        other = threading.Thread(target=end, args=(1,))
        other.start()
        end(0)
        other.join()

    return run


def file(folder: Path, named: Named) -> Callable[[], object]:
    """The same bytes into one file, to the disk, and out of it."""
    raw = torch.cat([tensor.view(-1).view(torch.uint8) for _, tensor in named]).cpu().numpy().data
    into, path = bytearray(len(raw)), folder / "floor"

    def run() -> None:
        with path.open("wb", buffering=0) as opened:
            written = 0
            while written < len(raw):
                written += opened.write(raw[written:])
            os.fsync(opened.fileno())
        with path.open("rb", buffering=0) as opened:
            opened.readinto(into)

    return run


def measure(folder: Path, gigabytes: float, repeats: int, dtype: torch.dtype, device: str) -> None:
    named = layers(gigabytes * 1e9, dtype, device)
    total = sum(tensor.nbytes for _, tensor in named) / 1e9
    copies = [torch.empty_like(tensor) for _, tensor in named]
    synchronizer = Synchronizer(MemoryBoard(), deadline_s=60.0)
    synchronizer.open()
    synchronizer.publish(1)
    files = FileChannel(keep=1, directory=folder, synchronizer=synchronizer, role=TRAINER)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=host, args=(there,), daemon=True)
    process.start()
    pool = ProcessPool(cast(RolloutEngine, Drain()), [("host", here.recv())], _KEY, 120.0)
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: [into.copy_(tensor) for into, (_, tensor) in zip(copies, named, strict=True)],
        "file": file(folder, named),
        "broadcast": broadcast(named),
        "hash": lambda: digests(named),
        "memory": through(MemoryChannel(), named),
        "checkpoint": through(files, named),
        "nccl (gloo)": collective(named),
        "processes": lambda: asyncio.run(pool.load(1, named)),
    }
    best: dict[str, float] = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats + 1):  # the first of each counts too, where it happens to be the best
        for name, run in runs.items():
            best[name] = min(best[name], seconds(run) / total)
    here.send(None)
    process.join(10)
    print(f"{total:.2f} GB in {len(named)} tensors of {dtype}, {usable_cores()} cores; seconds for a GB")
    for name in ("copy", "file", "broadcast", "hash"):
        print(f"{name:14} {best[name]:6.3f}  ({1 / best[name]:.1f} GB/s)")
    floors = {"memory": "copy", "checkpoint": "file", "nccl (gloo)": "broadcast", "processes": "copy"}
    for name, floor in floors.items():
        hashing = 0.0 if name == "processes" else 2 * best["hash"] / best[name]
        share = f", hashing {hashing:.0%} of the time" if hashing else ", not hashed"
        print(f"{name:14} {best[name]:6.3f}  {best[name] / best[floor]:.1f} x {floor}{share}")
        print(json.dumps({"figure": {"method": name, "s_per_gb": best[name], "floor_s_per_gb": best[floor]}}))


def hashed(size: int) -> float:
    """Seconds that one thread takes to hash a tensor of so many bytes."""
    tensor, repeats = torch.randn(size // 4), max(1, 2**24 // size)
    return min(seconds(lambda: [digest(tensor) for _ in range(repeats)]) for _ in range(5)) / repeats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu", help="where the sender's weights are")
    asked = parser.parse_args()
    torch.set_num_threads(usable_cores())
    folder = Path(tempfile.mkdtemp(prefix="weights-"))
    try:
        measure(folder, asked.gigabytes, asked.repeats, getattr(torch, asked.dtype), asked.device)
        torch.set_num_threads(1)
        for size in (2**10, 2**16, 2**22, 2**28):
            print(f"a hash of {size:11,} bytes: {hashed(size) * 1e6:9,.0f} us")
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
