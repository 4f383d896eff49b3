"""Rollout engine over vLLM: its AsyncLLM, whose engine core and workers are separate processes.

One thread owns the AsyncLLM and its event loop; requests from other event loops are submitted to it. If a vLLM process
dies, vLLM is restarted with the current weights and the requests in flight are sent again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import shutil
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future as ThreadFuture
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trivium.engines.load_gate import LoadGate
from trivium.engines.reporting import TokenReport, call_on
from trivium.engines.servable import check_request
from trivium.engines.stopping import StopScan
from trivium.engines.vllm.forms import (
    empty_completion,
    kept_tokens,
    listed_tokens,
    prompt_log_probs,
    prompt_reader,
    read_output,
    read_tokens,
    sampling_params,
)
from trivium.engines.vllm.process import (
    dead_error,
    no_vllm,
    refuse_images_without_torchvision,
    shut_down,
    started,
    unless_dead,
)
from trivium.engines.vllm.section import DescribedVllmEngine
from trivium.engines.vllm.weight_files import WeightFiles, fast_directory, own_directory
from trivium.models.backbone.routing import routed
from trivium.models.vision.families import family_in
from trivium.models.weights.lora import is_adapter
from trivium.models.weights.stream import described
from trivium.policy import EngineFailure
from trivium.protocols import DescribedWeights, Weights
from trivium.types import AnyArray, Completion, Request

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    from trivium.protocols.rollout import OnTokens

T = TypeVar("T")

_log = logging.getLogger("trivium")

_CLOSE_S = 60.0
"""Longest wait for vLLM's processes when the engine is closed."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The weights that vLLM holds or is to load."""

    version: int = 0
    weights: Path | None = None
    """A directory with safetensors files; None: the weights of the model directory."""
    adapter: Path | None = None
    """A directory with a LoRA adapter for those weights."""


class VllmEngine(DescribedVllmEngine):
    """Samples completions with vLLM, on GPUs or (with a vLLM built for it) on the CPU."""

    def __init__(
        self,
        config: DescribedVllmEngine.Config,
        *,
        model_dir: Path,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        threads: int,
    ) -> None:
        """Starts vLLM and loads the model. Raises MissingPackage without vLLM, ConfigError if vLLM cannot run the
        model."""
        if importlib.util.find_spec("vllm") is None:
            raise no_vllm()
        if family_in(model_dir) is not None:
            refuse_images_without_torchvision()
        self.config, self._model_dir = config.on_this_machine(), model_dir
        self._eos, self._decode, self._threads = eos_token_ids, decode, threads
        self._files = WeightFiles(model_dir, config.adapter_rank)
        self._directory = own_directory(fast_directory(model_dir, self.config.engines_here))
        self._deaths, self._closing = 0, False
        self._counted: AsyncLLM | None = None
        """The vLLM instance whose death was counted last."""
        self._loaded, self._sleeps = _Loaded(), False
        self._prompt = prompt_reader(model_dir)
        self._numbers = itertools.count()
        self._gate = LoadGate()
        self._exclusive = asyncio.Lock()
        """Held during a change of the weights or of the process."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="trivium-vllm", daemon=True)
        self._thread.start()
        try:
            self._llm = self._submit(self._started()).result()
        except BaseException:
            self._end()
            raise
        self._max_context = int(self._llm.model_config.max_model_len)
        self._vocab_size = int(self._llm.model_config.get_vocab_size())

    @property
    def version(self) -> int:
        return self._loaded.version

    @property
    def max_context(self) -> int:
        """Longest prompt and completion together, in tokens."""
        return self._max_context

    async def generate(self, request: Request) -> Completion:
        """One completion. Raises RolloutError for an invalid request, EngineFailure once vLLM is dead for good."""
        return await self._completion(request, None)

    async def stream(self, request: Request, on_tokens: OnTokens) -> Completion:
        """One completion. Calls `on_tokens` with its tokens after each step that samples some."""
        return await self._completion(request, TokenReport(partial(call_on, asyncio.get_running_loop(), on_tokens)))

    async def _completion(self, request: Request, report: TokenReport | None) -> Completion:
        if self._closing:
            raise _closed()
        limit = check_request(request, self._max_context, self._vocab_size)
        return await asyncio.wrap_future(self._submit(self._generate(request, limit, report)))

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Adopts weights, or with `adapter_rank` a LoRA adapter, once everything submitted so far has finished; with
        `update` between two tokens of it.

        An update keeps the keys and values of completions in flight. Later prompts are computed with the new weights.
        Raises SyncError (and keeps the old weights) when names or shapes do not fit.
        """
        if self._closing:
            raise _closed()
        adopting = self._submit(self._load(version, weights, in_flight))
        await asyncio.shield(asyncio.wrap_future(adopting))  # cancelling would leave a mix of two versions

    async def rest(self) -> None:
        """Lets vLLM sleep (`sleep_level`) once everything submitted so far has finished, until the next completion or
        the next weights."""
        if self.config.sleep_level and not self._closing:
            await asyncio.wrap_future(self._submit(self._rest()))

    async def close(self) -> None:
        """Ends vLLM. Completions in progress return their tokens so far, with `abort`."""
        if self._closing:
            return
        self._closing = True
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.wrap_future(self._submit(self._close()))
        except TimeoutError as error:
            raise EngineFailure(
                "close the engine",
                f"vLLM still runs after {_CLOSE_S:.0f} s",
                "end its processes (VLLM::EngineCore), which this process started",
            ) from error
        finally:
            self._end()

    # ------------------------------------------------------------------ on the thread's loop

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # the Runner cancels the remaining tasks
            runner.get_loop().run_forever()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> ThreadFuture[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _generate(self, request: Request, limit: int, report: TokenReport | None) -> Completion:
        async with self._gate.completion():
            while not self._closing:
                if self._sleeps:
                    await self._wake()
                llm = self._llm
                try:
                    completion = await self._sampled(llm, request, limit, report)
                    return completion if report is None else report.end(completion)
                except dead_error() as error:
                    await self._replace(llm, error)
            raise _closed()

    async def _sampled(self, llm: AsyncLLM, request: Request, limit: int, report: TokenReport | None) -> Completion:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        sampling, number = request.sampling, str(next(self._numbers))
        ends = sampling.ends(self._eos)
        scan = StopScan(sampling.stop, self._decode) if sampling.stop else None
        reads = (self._prompt, request, self.version)
        prompt = await asyncio.to_thread(*reads) if request.media else self._prompt(request, self.version)
        listed = listed_tokens(sampling, self._vocab_size)
        is_partial = scan is not None or report is not None
        params = sampling_params(request, limit, ends, seeded=self.config.seeds, listed=listed, partial=is_partial)
        directory = self._loaded.adapter
        adapter = None if directory is None else LoRARequest("policy", 1, str(directory))
        greedy = sampling.temperature == 0
        result, output, scanned, stopped = None, None, 0, False
        async for result in llm.generate(prompt, params, number, lora_request=adapter):
            output = result.outputs[0]
            while scan is not None and not stopped and scanned < len(output.token_ids):
                scanned += 1
                ended = output.token_ids[scanned - 1] in ends
                stopped = not ended and scan.hit(output.token_ids[:scanned])
            if report is not None:
                start = len(report.tokens)
                stop = scanned if stopped else None
                tokens, log_prob = read_tokens(output, self.version, start, stop, greedy=greedy, listed=listed)
                report.add(tokens.tolist(), log_prob.tolist())
            if stopped and not result.finished:
                await llm.abort(number)  # its last output follows
        if output is None:
            return empty_completion()
        stopped_at = scanned if stopped else None
        completion = read_output(output, self.version, stopped_at, ends, greedy=greedy, listed=listed)
        extra, length = dict[str, AnyArray](), len(completion.tokens)
        if "routing" in sampling.extra:
            extra["routing"] = routed(output.routed_experts, request, length)
        if "kept" in sampling.extra:
            extra |= kept_tokens(output, length, listed, sampling, self._vocab_size)
        if "prompt_log_prob" in sampling.extra:
            extra["prompt_log_prob"] = prompt_log_probs(result, length)
        return replace(completion, extra=extra)

    # ------------------------------------------------------------------ weights

    async def _load(self, version: int, weights: Weights, in_flight: str) -> None:
        """Writes the weights while completions in flight continue. Later ones wait, except during an update."""
        writing = asyncio.ensure_future(asyncio.to_thread(self._written, version, weights))
        if in_flight == "update":
            new = await writing
            # Completions in flight cannot switch between adapter and full weights.
            if (new.adapter is None) == (self._loaded.adapter is None):
                return await self._adopt(new, at_once=True)
        async with self._gate.load():
            await self._adopt(await writing)

    def _written(self, version: int, weights: Weights) -> _Loaded:
        source = weights if isinstance(weights, DescribedWeights) else described(weights)
        path = self._files.write(source, self._directory / f"{version}-{next(self._numbers)}")
        is_adapted = is_adapter((spec.name, spec) for spec in source.tensors)
        return _Loaded(version, adapter=path) if is_adapted else _Loaded(version, weights=path)

    async def _adopt(self, new: _Loaded, *, at_once: bool = False) -> None:
        async with self._exclusive:
            while True:
                try:
                    await self._give(self._llm, self._loaded, new, at_once=at_once)
                    break
                except dead_error() as error:
                    await self._restart(error)
            before, self._loaded = self._loaded, new
        if (old := before.weights or before.adapter) is not None:
            shutil.rmtree(old)

    async def _rest(self) -> None:
        async with self._gate.load(), self._exclusive:
            try:
                await unless_dead(self._llm, self._llm.sleep(self.config.sleep_level, mode="wait"))
            except dead_error() as error:
                await self._restart(error)
            else:
                self._sleeps = True

    async def _wake(self) -> None:
        async with self._exclusive:
            if self._sleeps:  # the first of several waiting requests
                try:
                    await self._give(self._llm, self._loaded, self._loaded)
                except dead_error() as error:
                    await self._restart(error)

    async def _give(self, llm: AsyncLLM, before: _Loaded, new: _Loaded, *, at_once: bool = False) -> None:
        """Loads weights into vLLM, which then reports their version in its outputs. Completions in flight keep their
        keys and values."""
        try:
            async with asyncio.timeout(self.config.deadline_s):
                await unless_dead(llm, self._update(llm, before, new, at_once))
        except dead_error():
            raise
        except Exception as error:
            raise EngineFailure(
                f"adopt version {new.version}",
                f"vLLM's workers raised {type(error).__name__}: {error}",
                "see its log above; build a new engine: this one holds parts of two versions",
            ) from error

    async def _update(self, llm: AsyncLLM, before: _Loaded, new: _Loaded, at_once: bool) -> None:
        lost = self._sleeps and self.config.sleep_level == 2
        if self._sleeps:
            await llm.wake_up()
            self._sleeps = False
        # Cached prefixes were computed with the old weights; completions in flight continue from theirs.
        await llm.pause_generation(mode="keep" if at_once else "wait", clear_cache=not at_once)
        if lost or new.weights != before.weights:
            await self._transfer(llm, self._files.files(new.weights))
        if new.adapter is not None:
            await llm.collective_rpc("adopt_adapter", args=(str(new.adapter),))
        await llm.update_weight_version(str(new.version))
        await llm.resume_generation()

    async def _transfer(self, llm: AsyncLLM, paths: list[str]) -> None:
        from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
            WeightTransferUpdateRequest,
        )

        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest({"paths": paths}))
        await llm.finish_weight_update()

    # ------------------------------------------------------------------ its processes

    async def _replace(self, dead: AsyncLLM, error: Exception) -> None:
        """Returns once another instance than `dead` runs with the current weights."""
        async with self._exclusive:
            if self._llm is dead:
                await self._restart(error)

    async def _restart(self, error: Exception) -> None:
        if self._closing:
            raise _closed() from error
        if self._counted is not self._llm:  # several requests detect the same death
            self._counted, self._deaths = self._llm, self._deaths + 1
        if self._deaths > self.config.max_restarts:
            raise EngineFailure(
                "completions from vLLM",
                f"its process died {self._deaths} time(s)",
                "fix the cause (see its log above), or raise engine.max_restarts; the same command continues",
            ) from error
        _log.warning("vLLM died; it is restarted with version %d", self.version)
        shut_down(self._llm)
        self._sleeps = False
        self._llm = await self._started()

    async def _started(self) -> AsyncLLM:
        """Starts vLLM with the current weights. Blocks the event loop, which has no other work."""
        arguments = self.config.arguments(self._model_dir)
        if self.config.adapter_rank is not None:
            # Else vLLM adds an adapter to the output layer in every step, and dies of log-probabilities of a prompt.
            arguments["lora_target_modules"] = self._files.adapted_layers()
        arguments |= self.config.options
        llm = started(arguments, self.config.device, self._threads, self._directory)
        await self._give(llm, _Loaded(), self._loaded)
        return llm

    async def _close(self) -> None:
        drained = asyncio.ensure_future(self._drained())
        while not drained.done():
            with suppress(dead_error()):
                await self._llm.abort([*self._llm.output_processor.external_req_ids])
            await asyncio.wait({drained}, timeout=0.05)  # a request may be about to be submitted
        async with self._exclusive:
            shut_down(self._llm)

    async def _drained(self) -> None:
        async with self._gate.load():
            """Nothing is in flight."""


def _closed() -> EngineFailure:
    return EngineFailure("a completion of the engine", "the engine was closed", "build a new engine")
