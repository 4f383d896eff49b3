"""CUDA graphs of decode steps. A replayed graph launches all kernels of a step at once. Without it a step takes as long
as Python needs to launch them, which is several times what a GPU needs to compute it.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trivium.engines.torch.kv_cache import RowCache, StepRows

_MOST = 64
"""The largest number of graphs. A further one replaces the graph that was unused for the longest time."""
_FINEST = 128
"""Smallest difference between two widths."""

Step = Callable[[Tensor, Tensor, StepRows, int], Tensor]
"""Computes logits [R, V] from ids [R], rotary positions [R], the rows, and the number of positions that they see."""

_log = logging.getLogger(__name__)


def graph_width(width: int) -> int:
    """The width of the graph that computes a step of this width. It is up to a quarter or 128 positions larger, so that
    a long completion needs few graphs."""
    step = max(_FINEST, 1 << max(0, width.bit_length() - 3))
    return -(-width // step) * step


class StepGraphs:
    """Runs decode steps as CUDA graphs, one for each number of rows and each width.

    The first step of a shape runs without a graph; the second one is captured. Graphs read and write fixed memory: the
    weights, which loads overwrite in place, the keys and values of the rows, and the inputs and logits below. When one
    of these moves, all graphs are dropped.
    """

    def __init__(self, step: Step, rows: RowCache, vocab_size: int) -> None:
        self._step, self._rows, self._vocab_size = step, rows, vocab_size
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._seen: set[tuple[int, int]] = set()
        self._moves = 0
        """`RowCache.moves` when the graphs were captured."""
        self._inputs = torch.empty(3, 0, dtype=torch.int64)
        """[3, R]: ids, positions and rotary positions."""
        self._logits = torch.empty(0, vocab_size)
        self._pool: Any = None
        """The memory of intermediate results, shared by all graphs, which never run at the same time."""
        self._stream = torch.cuda.Stream()
        """Captures run on it: torch keeps freed memory and workspaces of libraries for each stream."""
        self._refused = False
        """Whether the model contains an operation that cannot be captured."""

    def __call__(self, ids: Tensor, positions: Tensor, rotary: Tensor, width: int) -> Tensor:
        """Logits [R, V] in float32, which the caller may overwrite and the next step overwrites."""
        shape = len(ids), width
        rows = self._rows.begin(positions, width)
        if self._moves != self._rows.moves or len(ids) > len(self._logits):
            self._allocate(ids.device)
        graph = self._graphs.pop(shape, None)
        if graph is None and (self._refused or shape not in self._seen):
            self._seen.add(shape)
            return self._step(ids, rotary, rows, width)
        self._inputs[:, : len(ids)] = torch.stack([ids, positions, rotary])
        graph = self._captured(*shape) if graph is None else graph
        if graph is None:
            return self._step(ids, rotary, rows, width)
        self._graphs[shape] = graph  # last: the most recently used
        if len(self._graphs) > _MOST:
            del self._graphs[next(iter(self._graphs))]
        graph.replay()
        return self._logits[: len(ids)]

    def _allocate(self, device: torch.device) -> None:
        """Drops the graphs and allocates inputs and logits for all rows."""
        self._graphs.clear()
        self._seen.clear()
        self._moves, self._pool = self._rows.moves, torch.cuda.graph_pool_handle()
        self._inputs = torch.zeros(3, self._rows.rows, dtype=torch.int64, device=device)
        self._logits = torch.empty(self._rows.rows, self._vocab_size, device=device)

    def _captured(self, number: int, width: int) -> torch.cuda.CUDAGraph | None:
        """A graph of the step with the current inputs. None if it cannot be captured, which is logged."""
        ids, positions, rotary = self._inputs[:, :number].unbind()

        def step() -> Tensor:
            return self._step(ids, rotary, self._rows.begin(positions, width), width)

        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # libraries allocate their workspaces for this stream
            try:
                # Other threads, such as the trainer's, may use the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._logits[:number] = step()
                finally:
                    graph.capture_end()
            except RuntimeError as error:
                _log.warning("decode steps run without CUDA graphs, because one cannot be captured: %s", error)
                self._refused = True
        torch.cuda.current_stream().wait_stream(stream)
        if self._refused:
            _end_capture(ids, stream)
            return None
        return graph


def _end_capture(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Ends the capture of the random number generator. torch leaves it in that state when a capture fails, and then
    refuses random numbers in this process; a capture that succeeds resets it."""
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        tensor.clone()
        graph.capture_end()
