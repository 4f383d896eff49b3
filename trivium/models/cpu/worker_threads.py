"""Computes parts of a batch in parallel on the CPU, each in its own thread.

Threads that share an operation wait for each other at its end, and a pass through a small model has a thousand
operations of some hundred microseconds. Threads that have a part of the batch each do not wait. Results are used in the
order of the parts, so their sums do not depend on timing or on the number of threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Barrier
from typing import TYPE_CHECKING, TypeVar

from trivium.models.late import torch

if TYPE_CHECKING:
    from torch import nn

Item = TypeVar("Item")
Result = TypeVar("Result")

_COMPARED = 4
"""Calls that `FasterThreads` compares with as many others."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 16, 256
"""Calls between two comparisons."""


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


class FasterThreads:
    """Runs short work of several kinds on one thread or with several threads in each operation, whichever took less
    time lately. The bits of the work must not depend on the number of threads.

    Several threads are faster on idle cores, and up to twice as slow beside other work. From time to time, some
    successive calls use the other number. The pause until the next comparison doubles while the choice stays the same.
    """

    def __init__(self, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.threads, self._clock = threads, clock
        self.fixed: int | None = 1 if threads == 1 else None
        """The number of threads of all calls; None: the faster one."""
        self._kinds: dict[Hashable, _Comparison] = {}

    def __call__(self, kind: Hashable, function: Callable[[Item], Result], item: Item) -> Result:
        state = self._kinds.setdefault(kind, _Comparison())
        compared = self.fixed is None and state.until == 0
        with with_threads(self.fixed or (self._other(state.threads) if compared else state.threads)):
            began = self._clock()
            result = function(item)
            taken = self._clock() - began
        if self.fixed is not None:
            return result
        if not compared:
            state.recent.append(taken)
            state.until -= 1
            return result
        state.other.append(taken)
        if len(state.other) > _COMPARED:
            self._decide(state, state.other[1:])  # the first call may compile kernels
        return result

    def _decide(self, state: _Comparison, other: list[float]) -> None:
        if sum(other) < sum(state.recent):
            state.threads, state.pause = self._other(state.threads), _SHORTEST_PAUSE
            state.recent.extend(other)
        else:
            state.pause = min(2 * state.pause, _LONGEST_PAUSE)
        state.until = state.pause
        state.other.clear()

    def _other(self, threads: int) -> int:
        return self.threads if threads == 1 else 1


@dataclass(slots=True)
class _Comparison:
    """The faster number of threads for one kind of work."""

    threads: int = 1
    until: int = _COMPARED + 1
    """Calls until the next comparison. The first call of all may compile kernels, too."""
    pause: int = _SHORTEST_PAUSE
    recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=_COMPARED))
    """Seconds of the last calls with `threads`."""
    other: list[float] = field(default_factory=list[float])
    """Seconds of the calls with the other number in the current comparison."""


def size_of(module: nn.Module) -> int:
    """Bytes of its parameters."""
    return sum(each.numel() * each.element_size() for each in module.parameters())
