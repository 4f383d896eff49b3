"""Parts of a batch side by side on the CPU, each in a thread of its own.

Threads that share an operation wait for each other at its end; a pass through a small model has a thousand operations
of some hundred microseconds. Threads with a part of the batch each do not wait. Results are used in the order of the
parts: sums of them do not depend on which was done first, nor on how many run at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Barrier
from typing import TypeVar

import torch
from torch import nn

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerThreads:
    """Threads that compute parts of a batch; they start with the first one."""

    def __init__(self, number: int, threads: int) -> None:
        """So many parts at once, with an equal share of torch's threads each."""
        self.number, self._threads = number, max(1, threads // number)
        self._pool: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The function's results, in the order of the items; at most one more than there are workers is kept. Nothing
        runs any more when an error leaves it. The caller has one thread until the last result: others would take the
        cores from the workers, and wait for each other.

        What torch keeps for each thread (gradients or none, inference mode) is not the caller's in the function.
        """
        pool = self._pool = self._pool or self._started()
        waiting: deque[Future[Result]] = deque()
        with one_thread():
            try:
                for item in items:
                    waiting.append(pool.submit(function, item))
                    if len(waiting) > self.number:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()
                wait(waiting)

    def _started(self) -> ThreadPoolExecutor:
        pool, threads = ThreadPoolExecutor(self.number, "trivium-worker"), torch.get_num_threads()
        together = Barrier(self.number)

        def start(_: int) -> None:
            torch.get_num_threads()  # the first of torch's calls that a thread makes sets it to what others have
            torch.set_num_threads(self._threads)
            together.wait()  # so that each thread gets one of these calls

        list(pool.map(start, range(self.number)))
        torch.set_num_threads(threads)  # threads that start later take what was set last
        return pool


@contextmanager
def one_thread() -> Generator[None]:
    """The caller's operations in the block are not split: threads of one operation wait for each other, and where other
    work has the cores, for milliseconds, which is longer than a small operation takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def size_of(module: nn.Module) -> int:
    """Bytes of its parameters."""
    return sum(each.numel() * each.element_size() for each in module.parameters())
