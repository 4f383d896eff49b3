"""The built-in engine: any Hugging Face causal language model, continuous batching, exact counter-based sampling.

One worker thread owns the model. It takes requests from a queue and resolves the futures of finished ones in one batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trivium.engines.reporting import call_on
from trivium.engines.servable import check_request
from trivium.engines.torch.batch import SCORED, Batch, Ticket
from trivium.engines.torch.decoder import Decoder, Prefix, Unread, padded_length
from trivium.engines.torch.image_prompts import PromptImages
from trivium.engines.torch.section import DescribedTorchEngine, resolve_context, resolve_invariance
from trivium.engines.torch.selfcheck import check_decoder, first_layers
from trivium.foundation.errors import DataError, RolloutError, SyncError
from trivium.models.cpu import linear
from trivium.models.cpu.openmp import release_team
from trivium.models.heads.trained_models import logit_scale
from trivium.models.precision import precision_of, set_matmul_precision
from trivium.planning.choices import MAX_ROWS
from trivium.policy import EngineFailure
from trivium.protocols import DescribedWeights, Weights
from trivium.types import Completion, Request, StopReason

if TYPE_CHECKING:
    from trivium.protocols.rollout import OnTokens

_log = logging.getLogger("trivium")

_RELOAD = "load a whole version; the trainer's log has the cause"
_CLOSE_S = 60.0
"""Longest wait for the worker to end its current step when the engine is closed."""


@dataclass(slots=True, eq=False)
class _Load:
    """A request to load new weights."""

    version: int
    weights: Weights
    future: Any
    at_once: bool = False
    """Load between two tokens of the completions in flight instead of after them."""
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _ReadWeights:
    """A request for copies of the weights."""

    future: Any
    cancelled: bool = False


_Item = Ticket | _Load | _ReadWeights


@dataclass(slots=True)
class _Waiting:
    """Queued requests with the same prompt, and the prompt's prefix once it is computed."""

    tickets: deque[Ticket] = field(default_factory=deque)
    images: PromptImages | None = None
    """The decoded images, once a worker of `_image_threads` has read them; None for a prompt without images."""
    prefix: Prefix | None = None
    """The keys and values of the prompt; None until it is read."""


def decoder_of(config: DescribedTorchEngine.Config, model_dir: Path) -> Decoder:
    """Loads the model of an engine whose config is `on_this_machine`. Raises ConfigError for a model that the engine
    cannot run."""
    dtype = getattr(torch, config.dtype)
    if config.device == "cpu" and not linear.multiplies(dtype):
        _log.warning("engine.dtype %s: this CPU has no such matrix products; float32 is faster", dtype)
    precision = precision_of(config.head_precision, config.device, config.dtype, "engine.head_precision")
    set_matmul_precision(precision)
    return Decoder(
        model_dir,
        dtype=dtype,
        device=config.device,
        head_precision=precision,
        cuda_graphs=config.cuda_graphs and config.device == "cuda",
        exact=resolve_invariance(config),
    )


def check_every_layer(config: DescribedTorchEngine.Config, model_dir: Path) -> bool:
    """Checks decoding with all layers of the model, not only the first ones. Returns whether the optimized layers are
    used wherever the model has them. Raises ConfigError if the outputs differ from those of transformers."""
    config = config.on_this_machine()
    decoder = decoder_of(config, model_dir)
    optimized = decoder.layers is not None
    with torch.inference_mode():
        check_decoder(decoder, resolve_context(config.max_context, decoder.max_positions))
    return optimized == (decoder.layers is not None)


class TorchEngine(DescribedTorchEngine):
    """Samples completions with torch and transformers, on the CPU or one GPU."""

    def __init__(
        self,
        config: DescribedTorchEngine.Config,
        *,
        model_dir: Path,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        threads: int,
    ) -> None:
        """Loads the model, compares the decoder with the model's own forward pass, and starts the worker.

        Raises ConfigError for a model or device that this engine cannot run.
        """
        self.config = config = config.on_this_machine()
        self.capabilities = replace(self.capabilities, batch_invariant=resolve_invariance(config))
        self._eos, self._decode, self._threads = eos_token_ids, decode, threads
        self._gpu = torch.cuda.current_device() if config.device == "cuda" else None
        """The current GPU of the constructing thread: on a rank, the GPU of the rank."""
        self._version = 0
        self._failure: BaseException | None = None
        self._closing = False
        self._inbox: deque[_Item] = deque()
        self._awake = threading.Condition()
        self._notifying: asyncio.AbstractEventLoop | None = None
        """The event loop that is scheduled to notify the worker."""
        self._image_threads = ThreadPoolExecutor(2, thread_name_prefix="trivium-images")
        """Threads that read the images of prompts while the worker continues sampling."""
        # Only the worker changes the following attributes, except for `_any_cancelled`.
        self._any_cancelled = False
        """Whether a request was cancelled since the worker last looked."""
        self._backlog: deque[_Item] = deque()
        """Items in order of arrival that are not in `_waiting` yet: a load that must wait, and all items after it."""
        self._mixed = ""
        """Describes the weights if they are not those of one version; otherwise empty."""
        self._waiting: dict[bytes, _Waiting] = {}
        """Requests without a row in the batch, by prompt, oldest prompt first."""
        self._admitting: list[Ticket] = []
        self._done: list[tuple[_Item, Any]] = []
        """Items with their results or errors, until `_deliver`."""
        self.counters: dict[str, int] = dict.fromkeys(
            ("prompts_read", "prompt_tokens_read", "steps", "tokens_sampled"), 0
        )
        """Counts of the work done so far, for measurements."""
        started: ThreadFuture[tuple[int, int]] = ThreadFuture()
        self._thread = threading.Thread(
            target=self._work, args=(model_dir, started), name="trivium-engine", daemon=True
        )
        self._thread.start()
        self._max_context, self._vocab_size = started.result()

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        """Longest prompt and completion together, in tokens."""
        return self._max_context

    async def generate(self, request: Request) -> Completion:
        """One completion. Raises RolloutError for an invalid request, EngineFailure once the worker has died."""
        return await self._completion(request, None)

    async def stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        """One completion. Calls `on_tokens` with each token as soon as it is sampled."""
        return await self._completion(request, on_tokens)

    async def _completion(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        loop = asyncio.get_running_loop()
        ticket = self._ticket(request, loop.create_future())
        ticket.on_tokens = on_tokens
        self._submit(ticket, loop)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            ticket.cancelled = self._any_cancelled = True
            self._notify()
            raise

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Loads weights. With `finish`, waits until all requests submitted so far have finished. With `update`, loads
        between two tokens of the completions in progress.

        An update keeps the keys and values of completions in progress. Prompts of waiting requests are read again.
        Raises SyncError and keeps the old weights if names or shapes do not fit. Raises the error of reading the
        weights; if some of them were loaded by then, requests fail until the next successful load. Cancelling the call
        does not stop the load.
        """
        loop = asyncio.get_running_loop()
        held = weights if isinstance(weights, DescribedWeights) else list(weights)
        load = _Load(version, held, loop.create_future(), at_once=in_flight == "update")
        self._submit(load, loop)
        await load.future

    async def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Copies of every parameter and persistent buffer, after the loads that were requested before."""
        loop = asyncio.get_running_loop()
        copy_request = _ReadWeights(loop.create_future())
        self._submit(copy_request, loop)
        return await copy_request.future

    async def close(self) -> None:
        """Ends the worker. Completions in progress return their tokens so far, with `abort`."""
        self._closing = True
        self._notify()
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        self._image_threads.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            raise EngineFailure(
                "close the engine",
                f"its worker is still in one step after {_CLOSE_S:.0f} s",
                "lower engine.max_rows or engine.prefill_tokens; the process can be ended safely",
            )

    # ------------------------------------------------------------------ the caller's side

    def _ticket(self, request: Request, future: asyncio.Future[Completion]) -> Ticket:
        limit = check_request(request, self._max_context, self._vocab_size)
        if SCORED in request.sampling.extra:
            logit_scale(self._decoder.model)  # refuses a model whose logits the head cannot compute
        prompt = np.asarray(request.prompt_tokens, np.int32)
        images = (f"{item.sha256}{item.span}".encode() for item in request.media)
        return Ticket(request, limit, future, request.key.digest(), prompt=b"".join([prompt.tobytes(), *images]))

    def _submit(self, item: _Item, loop: asyncio.AbstractEventLoop) -> None:
        with self._awake:
            if self._failure is not None or self._closing:
                raise self._failed()
            if isinstance(item, Ticket) and item.request.media:  # computed while the worker continues sampling
                item.images = self._image_threads.submit(
                    self._decoder.look, item.request.prompt_tokens, item.request.media
                )
            self._inbox.append(item)
        # Notifies the worker in the next iteration of the event loop, so that requests of the same one share a batch.
        if self._notifying is not loop:
            self._notifying = loop
            loop.call_soon(self._notify)

    def _notify(self) -> None:
        self._notifying = None
        with self._awake:
            self._awake.notify()

    def _failed(self) -> EngineFailure:
        """A new error for each caller, so that tracebacks do not accumulate on one object."""
        if self._failure is None:
            return EngineFailure("a completion of the engine", "the engine was closed", "build a new engine")
        error = EngineFailure(
            "a completion of the engine",
            f"its worker died of {type(self._failure).__name__}: {self._failure}",
            "fix the cause and build a new engine",
        )
        error.__cause__ = self._failure
        return error

    # ------------------------------------------------------------------ the worker's side

    def _work(self, model_dir: Path, started: ThreadFuture[tuple[int, int]]) -> None:
        try:
            torch.set_num_threads(self._threads)
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)
            self._decoder = decoder_of(self.config, model_dir)
            max_context = resolve_context(self.config.max_context, self._decoder.max_positions)
            with torch.inference_mode():
                with first_layers(self._decoder):
                    check_decoder(self._decoder, max_context)
                self._batch = Batch(self._decoder, self.config.max_rows or MAX_ROWS, self._eos, self._decode)
        except BaseException as error:  # raised in the constructor
            started.set_exception(error)
            return
        started.set_result((max_context, self._decoder.vocab_size))
        try:
            with torch.inference_mode():
                self._serve()
        except BaseException as error:  # raised in all current and later calls
            self._fail(error)

    def _serve(self) -> None:
        """The worker's loop: each iteration samples one token of every row. Aborts all requests when it is closing."""
        while self._receive():
            if self._any_cancelled:
                self._drop_cancelled()
            self._take_backlog()
            while self._batch.free and self._waiting:
                self._admit()
            if self._batch.live:
                self._finish(self._batch.step(self._version))
                self.counters["steps"] += 1
            self._deliver()
        waiting = [ticket for entry in self._waiting.values() for ticket in entry.tickets]
        self._finish(self._batch.abort())
        empty = Completion(np.empty(0), np.empty(0), np.empty(0), StopReason.ABORT)  # pyright: ignore[reportArgumentType]
        self._done += [
            (item, empty if isinstance(item, Ticket) else self._failed()) for item in (*waiting, *self._backlog)
        ]
        self._deliver()

    def _receive(self) -> bool:
        """Takes the submitted items; waits for one while the engine is idle. False once it is closing."""
        with self._awake:
            idle = not (self._batch.live or self._waiting or self._backlog)
            if idle and not self._inbox:
                release_team()
                self._decoder.rest()
            while idle and not self._inbox and not self._closing:
                self._awake.wait()
            self._backlog += self._inbox
            self._inbox.clear()
            return not self._closing

    def _take_backlog(self) -> None:
        """Moves requests from the backlog to `_waiting`, in order of arrival, up to a load that must wait. Performs
        that load once the requests before it have finished."""
        while self._backlog:
            item = self._backlog[0]
            if self._mixed and not isinstance(item, _Load):
                self._done.append((item, self._refusal()))
            elif isinstance(item, Ticket):
                self._record(item)
                entry = self._waiting.setdefault(item.prompt, _Waiting())
                if item.asks(SCORED) and entry.prefix is not None and entry.prefix.log_prob is None:
                    entry.prefix = None
                entry.tickets.append(item)
            elif isinstance(item, _ReadWeights):
                self._done.append((item, self._decoder.weights()))
            elif (self._batch.live or self._waiting) and not item.at_once:
                return
            else:
                self._adopt(item)
            self._backlog.popleft()

    def _record(self, ticket: Ticket) -> None:
        """Makes the decoder record the routing of experts from the first request that asks for it."""
        if "routing" in ticket.request.sampling.extra and self._decoder.recorder is None:
            self._decoder.record_routing()
            for entry in self._waiting.values():
                entry.prefix = None  # computed without routing, and not used yet by a row that records it

    def _adopt(self, load: _Load) -> None:
        """Performs a load. After an error, the engine keeps the old weights or, if they are mixed, refuses requests."""
        try:
            self._decoder.load(load.weights)
        except (SyncError, Unread) as error:  # an error of the trainer or of the channel
            unread = error.__cause__ or SyncError(f"load version {load.version}", str(error), _RELOAD)
            self._done.append((load, error if isinstance(error, SyncError) else unread))
            if not self._decoder.is_whole:
                self._mixed = f"a part of version {load.version} over another one: {error}"
                self._refuse_all()
            return
        self._version, self._mixed = load.version, ""
        for entry in self._waiting.values():
            entry.prefix = None  # computed with the old weights, and not used yet
        self._done.append((load, None))

    def _refuse_all(self) -> None:
        """Fails the requests in progress, because the weights are a mixture of two versions."""
        waiting = [ticket for entry in self._waiting.values() for ticket in entry.tickets]
        self._waiting = {}
        lost = [*waiting, *(ticket for ticket, _ in self._batch.abort())]
        self._done += [(ticket, self._refusal()) for ticket in lost]

    def _refusal(self) -> EngineFailure:
        return EngineFailure("a completion of the engine", f"it holds {self._mixed}", _RELOAD)

    def _admit(self) -> None:
        """Assigns waiting requests to free rows, oldest prompt first. Reads each prompt once for all its requests: at
        most `prefill_tokens` tokens of prompts, or one longer prompt, in one pass for each padded length."""
        chosen: list[tuple[_Waiting, int]] = []
        free = self._batch.free
        unread: dict[int, list[_Waiting]] = {}
        budget = self.config.prefill_tokens
        for entry in self._waiting.values():
            if entry.prefix is None:
                if not self._wait_for_images(entry):
                    continue
                length = padded_length(len(entry.tickets[0].request.prompt_tokens))
                if unread and length > budget:
                    break
                budget -= length
                unread.setdefault(length, []).append(entry)
            chosen.append((entry, min(free, len(entry.tickets))))
            free -= chosen[-1][1]
            if not free:
                break
        for entries in unread.values():
            self._read(entries)
        tickets = [entry.tickets.popleft() for entry, count in chosen for _ in range(count)]
        prefixes = [entry.prefix for entry, count in chosen for _ in range(count) if entry.prefix is not None]
        self._waiting = {prompt: entry for prompt, entry in self._waiting.items() if entry.tickets}
        if not tickets:
            return
        self._admitting = tickets  # while their rows are allocated, they are in neither queue nor batch
        self._finish(self._batch.admit(tickets, prefixes, self._version))
        self._admitting = []
        last, _ = chosen[-1]
        if last.tickets and last.prefix is not None:  # some of its requests wait for rows
            last.prefix = last.prefix.alone()

    def _wait_for_images(self, entry: _Waiting) -> bool:
        """Waits for the images of a prompt. Returns False if they cannot be read; all requests of the prompt fail
        then."""
        look = entry.tickets[0].images
        try:
            if look is not None and entry.images is None:
                entry.images = look.result()
        except DataError as error:
            self._done += [(ticket, RolloutError(error.asked, error.found, error.do)) for ticket in entry.tickets]
            entry.tickets.clear()
        return bool(entry.tickets)

    def _read(self, entries: Sequence[_Waiting]) -> None:
        """Computes the prefixes of prompts of equal padded length."""
        prompts = [entry.tickets[0].request.prompt_tokens for entry in entries]
        images = [entry.images for entry in entries]
        scored = any(ticket.asks(SCORED) for entry in entries for ticket in entry.tickets)
        for entry, prefix in zip(entries, self._decoder.read(prompts, images, scored=scored), strict=True):
            entry.prefix = prefix
        self.counters["prompts_read"] += len(prompts)
        self.counters["prompt_tokens_read"] += sum(map(len, prompts))

    def _drop_cancelled(self) -> None:
        self._any_cancelled = False
        self._batch.drop_cancelled()
        for entry in self._waiting.values():
            entry.tickets = deque(ticket for ticket in entry.tickets if not ticket.cancelled)
        self._waiting = {prompt: entry for prompt, entry in self._waiting.items() if entry.tickets}
        self._backlog = deque(item for item in self._backlog if not item.cancelled)

    def _finish(self, completions: Sequence[tuple[Ticket, Completion]]) -> None:
        self._done += completions
        self.counters["tokens_sampled"] += sum(len(completion.tokens) for _, completion in completions)

    def _deliver(self) -> None:
        """Reports the tokens of streams. Then resolves the futures of all finished items, with one callback per event
        loop."""
        for ticket, token, log_prob in self._batch.take_streamed():
            call_on(ticket.future.get_loop(), _report, ticket, token, log_prob)
        items, self._done = self._done, []
        loops: dict[Any, list[tuple[Any, Any]]] = {}
        for item, result in items:
            loops.setdefault(item.future.get_loop(), []).append((item.future, result))
        for loop, results in loops.items():
            call_on(loop, _resolve, results)

    def _fail(self, error: BaseException) -> None:
        """Fails all requests after an error of the worker."""
        with self._awake:
            self._failure = error
            self._backlog += self._inbox
            self._inbox.clear()
        resolved = {item for item, _ in self._done}
        waiting = [ticket for entry in self._waiting.values() for ticket in entry.tickets]
        decoding = [ticket for ticket in self._batch.tickets if ticket is not None]
        lost = dict.fromkeys((*decoding, *self._admitting, *waiting, *self._backlog))
        self._done += [(item, self._failed()) for item in lost if item not in resolved]
        self._deliver()


def _report(ticket: Ticket, token: int, log_prob: float) -> None:
    if not ticket.future.done():  # cancelled
        ticket.on_tokens([token], [log_prob])


def _resolve(results: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in results:
        if future.done():  # cancelled
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
