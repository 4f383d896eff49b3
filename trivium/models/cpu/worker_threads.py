"""Computes parts of a batch in parallel on the CPU, each in its own thread.

Threads that share an operation wait for each other at its end, and a pass through a small model has a thousand
operations of some hundred microseconds. Threads that have a part of the batch each do not wait. Results are used in the
order of the parts, so their sums do not depend on timing or on the number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from threading import Barrier
from typing import TYPE_CHECKING, TypeVar

from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import nn

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerThreads:
    """Threads that compute parts of a batch. They start with the first part."""

    def __init__(self, number: int, threads: int) -> None:
        """`number` parts run at once; each has an equal share of torch's `threads`."""
        self.number, self._threads = number, max(1, threads // number)
        self._pool: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yields the function's results in the order of the items. Keeps at most one item more than there are workers.
        When it raises, no function is running. The caller has one torch thread until the last result, so that it does
        not take cores from the workers. It computes a single item itself, which saves the change of threads.

        torch's settings of a thread (grad mode, inference mode) in the function may differ from those of the caller.
        """
        if len(items) == 1:
            with one_thread():
                result = function(items[0])
            yield result
            return
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
            torch.get_num_threads()  # a thread's first call of torch copies the number of the others
            torch.set_num_threads(self._threads)
            together.wait()  # so that each thread gets one of these calls

        list(pool.map(start, range(self.number)))
        torch.set_num_threads(threads)  # threads that start later copy the last number that was set
        return pool


@contextmanager
def with_threads(number: int) -> Generator[None]:
    """Runs the caller's operations in the block on `number` threads each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def one_thread() -> AbstractContextManager[None]:
    """Runs the caller's operations in the block on one thread. Threads of one operation wait for each other; if other
    work has the cores, for milliseconds, which is longer than a small operation takes."""
    return with_threads(1)


def size_of(module: nn.Module) -> int:
    """Bytes of its parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
