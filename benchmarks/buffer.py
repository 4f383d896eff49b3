"""What a buffer costs per experience, put in and taken out, and whether that grows with the experiences it holds.

    python benchmarks/buffer.py [--rows 1000 10000 100000] [--tokens 128] [--repeats 3] [--postgres URL]

For each buffer and each number of rows: so many experiences, in groups of 8 with prompts and replies of `--tokens`
tokens, are leased and put one group after the other; then all are taken, 16 groups at a time. The small sizes are
repeated as often as a warm measurement needs, the largest once; the median counts. They run in the event loop of a
run, whose garbage collector runs seldom: with Python's default thresholds it alone costs 38 µs per row at 100,000 rows
and 2 µs at 1,000.

Without `--postgres` a server of Debian's package is started in a temporary directory, as the tests start it: with
`fsync=off`, so it is the program that is measured and not the disk. SQLite and the journal of the memory buffer do not
wait for the disk either.

Exits 1 where an experience costs more than 1.5 times as much at the largest size as at the smallest. Other work on the
machine makes every number worse, and not equally.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from trivium.buffers.memory import MemoryBuffer
from trivium.buffers.sql.buffer import SqlBuffer
from trivium.protocols import Buffer
from trivium.runtime.main_loop import run_in_loop
from trivium.schedule import Schedule
from trivium.types import Group, Lease, Message, StopReason, Task, Trajectory, Turn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from postgres import Server, binaries

GROUP_SIZE, GROUPS_PER_STEP = 8, 16
FLAT = 1.5
DEADLINE_S = 3600.0
TASKS: Any = [Task(f"t{place}", (Message("user", f"{place}="),), {"answer": place}) for place in range(100)]

Make = Callable[[Schedule, Path], Buffer]


def make_group(lease: Lease, tokens: int) -> Group:
    noise = np.random.default_rng(lease.slot)
    trajectories: list[Trajectory] = []
    for index in range(GROUP_SIZE):
        prompt, reply = noise.integers(0, 32000, (2, tokens), dtype=np.int32)
        log_prob = noise.standard_normal(tokens, dtype=np.float32)
        turn = Turn(prompt, reply, log_prob, np.zeros(tokens, np.int32), StopReason.EOS, "a reply " * (tokens // 8))
        trajectories.append(Trajectory(index, (turn,), {"exact": float(index % 2)}))
    return Group(lease.slot, TASKS[lease.slot % len(TASKS)], tuple(trajectories), lease.slot // len(TASKS))


async def measure(make: Make, rows: int, tokens: int) -> tuple[float, float]:
    """(seconds per experience in, seconds per experience out) of an empty buffer that is filled and emptied."""
    groups = rows // GROUP_SIZE
    # One version admits everything: what grows is what the buffer holds.
    schedule = Schedule(TASKS, 0, groups_per_step=groups, steps=1, shuffle=False, max_staleness=1)
    with tempfile.TemporaryDirectory() as directory:
        buffer = make(schedule, Path(directory))
        await buffer.restore(None, 0)
        await buffer.advance("explorer", 0)
        inside = 0.0
        for _ in range(groups):
            started = time.perf_counter()
            lease = await buffer.lease("explorer")
            inside += time.perf_counter() - started
            assert lease is not None
            group = make_group(lease, tokens)
            started = time.perf_counter()
            await buffer.put("explorer", group)
            inside += time.perf_counter() - started
        started, taken = time.perf_counter(), 0
        while taken < groups:
            taken += len(await buffer.take(min(GROUPS_PER_STEP, groups - taken), 0))
        outside = time.perf_counter() - started
        await buffer.close()
    return inside / rows, outside / rows


def in_memory(schedule: Schedule, directory: Path) -> Buffer:
    return MemoryBuffer(
        MemoryBuffer.Config(), schedule=schedule, rollouts=directory / "rollouts", renderer=None, deadline_s=60
    )  # pyright: ignore[reportArgumentType]


def in_database(url: str | None = None) -> Make:
    """Each buffer under a name of its own; without a URL in a SQLite file of its own."""

    def make(schedule: Schedule, directory: Path) -> Buffer:
        config = SqlBuffer.Config(url=url or f"sqlite:///{directory / 'buffer.db'}")
        return SqlBuffer(
            config,
            schedule=schedule,
            rollouts=directory / "rollouts",
            renderer=None,
            deadline_s=60,
            name=uuid.uuid4().hex,
        )  # pyright: ignore[reportArgumentType]

    return make


@contextmanager
def postgres(url: str | None) -> Generator[str | None]:
    """The URL of a server: that one, or one of our own; None where there is none."""
    if url is not None or binaries() is None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="trivium-postgres-") as directory:
        Path(directory).chmod(0o755)
        server = Server(Path(directory))
        try:
            yield server.url
        finally:
            server.stop()


def report(name: str, make: Make, sizes: list[int], tokens: int, repeats: int) -> bool:
    """Prints a line per size; whether the cost of a row stays flat."""
    run_in_loop(measure(make, sizes[0], tokens), DEADLINE_S)  # warm: imports, tables, caches
    costs: list[tuple[float, float]] = []
    for rows in sizes:
        times = 1 if rows == max(sizes) else repeats
        measured = [run_in_loop(measure(make, rows, tokens), DEADLINE_S) for _ in range(times)]
        inside, outside = (median(column) for column in zip(*measured, strict=True))
        costs.append((inside, outside))
        print(
            f"{name:>10} {rows:>9,} {1e6 * inside:>12.1f} {1e6 * outside:>12.1f} {1 / inside:>12,.0f} "
            f"{1 / outside:>12,.0f}",
            flush=True,
        )
    ratios = [last / first for first, last in zip(costs[0], costs[-1], strict=True)]
    flat = max(ratios) <= FLAT
    verdict = "flat" if flat else f"NOT flat (more than {FLAT})"
    print(f"{name:>10} {sizes[-1]:,} against {sizes[0]:,} rows: in {ratios[0]:.2f}, out {ratios[1]:.2f}: {verdict}")
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="experiences")
    parser.add_argument("--tokens", type=int, default=128, help="of each prompt and of each reply")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--postgres", metavar="URL", help="a server to use instead of one of our own")
    said = parser.parse_args()
    print(f"{'buffer':>10} {'rows':>9} {'in µs/row':>12} {'out µs/row':>12} {'in rows/s':>12} {'out rows/s':>12}")
    with postgres(said.postgres) as url:
        makers = {"memory": in_memory, "sqlite": in_database()}
        if url is None:
            print("PostgreSQL is left out: its binaries are missing (apt-get install postgresql)")
        else:
            makers["postgresql"] = in_database(url)
        flat = [report(name, make, sorted(said.rows), said.tokens, said.repeats) for name, make in makers.items()]
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())
