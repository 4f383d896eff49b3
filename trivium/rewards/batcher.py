"""Batches of calls that arrive close together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class _Queue:
    """The calls of one event loop."""

    waiting: deque[tuple[Any, asyncio.Future[Any]]] = field(default_factory=deque[tuple[Any, "asyncio.Future[Any]"]])
    running: set[asyncio.Task[Any]] = field(default_factory=set["asyncio.Task[Any]"])
    timer: asyncio.TimerHandle | None = None


class Batcher(Generic[T, R]):
    """Calls `work` with the items of up to `max_batch` calls. `work` returns one result for each, in order.

    A batch begins when it is full, `window_s` after its first item, or when an earlier batch ends. At most
    `max_concurrent` batches run at the same time; further items wait. An exception of `work` is raised by every call in
    the batch. A cancelled call leaves the queue, and a batch is cancelled with the last of its calls. A batch holds
    calls of one event loop.
    """

    def __init__(
        self, work: Callable[[list[T]], Awaitable[Sequence[R]]], max_batch: int, window_s: float, max_concurrent: int
    ) -> None:
        self._work, self._max_batch = work, max_batch
        self._window_s, self._max_concurrent = window_s, max_concurrent
        # A loop that has ended takes its queue with it.
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _Queue] = WeakKeyDictionary()

    @property
    def num_waiting(self) -> int:
        """The number of items in the queue of this event loop."""
        return len(self._queue().waiting)

    async def __call__(self, item: T) -> R:
        """The result for this item."""
        queue, loop = self._queue(), asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        queue.waiting.append((item, future))
        if len(queue.waiting) >= self._max_batch or not self._window_s:
            self._start(queue)
        elif queue.timer is None:
            queue.timer = loop.call_later(self._window_s, self._start, queue)
        return await future

    def _queue(self) -> _Queue:
        return self._queues.setdefault(asyncio.get_running_loop(), _Queue())

    def _start(self, queue: _Queue) -> None:
        """Starts batches of the waiting items, as many as may run."""
        if queue.timer is not None:
            queue.timer.cancel()
            queue.timer = None
        while len(queue.running) < self._max_concurrent and (batch := self._next(queue)):
            items, futures = [item for item, _ in batch], [future for _, future in batch]
            task = asyncio.ensure_future(self._checked(items))
            queue.running.add(task)
            for future in futures:
                future.add_done_callback(lambda _, task=task, futures=futures: _cancel_unwanted(task, futures))
            task.add_done_callback(lambda task, futures=futures: self._finish(queue, task, futures))

    def _next(self, queue: _Queue) -> list[tuple[T, asyncio.Future[R]]]:
        """The next items whose callers wait."""
        batch: list[tuple[T, asyncio.Future[R]]] = []
        while queue.waiting and len(batch) < self._max_batch:
            item, future = queue.waiting.popleft()
            if not future.done():
                batch.append((item, future))
        return batch

    async def _checked(self, items: list[T]) -> Sequence[R]:
        results = await self._work(items)
        if len(results) != len(items):
            raise ValueError(f"{len(results)} results for {len(items)} items")
        return results

    def _finish(self, queue: _Queue, task: asyncio.Task[Sequence[R]], futures: list[asyncio.Future[R]]) -> None:
        """Passes the outcome of a batch to its calls, and starts the next batches."""
        queue.running.discard(task)
        error = None if task.cancelled() else task.exception()
        for place, future in enumerate(futures):
            if future.done():
                continue
            if task.cancelled():
                future.cancel()
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result()[place])
        self._start(queue)


def _cancel_unwanted(task: asyncio.Task[Any], futures: list[asyncio.Future[Any]]) -> None:
    """Cancels a batch once no call waits for it."""
    if not task.done() and all(future.done() for future in futures):
        task.cancel()
