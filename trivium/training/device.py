"""The machine that trains: memory of the host and of each GPU, number of ranks, instruction sets."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from trivium.config import RunConfig
from trivium.config.sections import ClusterSection
from trivium.models.late import torch
from trivium.models.placement import device_of, has_gpu
from trivium.planning.choices import MIB
from trivium.planning.machine import Machine, host_memory, peak_memory
from trivium.training.launched import launched_ranks

_INSTRUCTION_SETS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
"""Environment variables that choose the instruction sets of libraries."""


def machine() -> Machine:
    """Describes the machine of this process, within the limits of its control group."""
    gpus = range(torch.cuda.device_count()) if has_gpu() else ()
    return Machine(host_memory(), tuple(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus))


def peaks() -> dict[str, int]:
    """MiB of host memory that this process and the largest one that it started held at most, and of its fullest GPU."""
    held = {"host": peak_memory() // MIB}
    if has_gpu() and torch.cuda.is_initialized():
        held["gpu"] = max(torch.cuda.max_memory_reserved(gpu) for gpu in range(torch.cuda.device_count())) // MIB
    return held


def training_ranks(cluster: ClusterSection, here: Machine | None = None) -> int:
    """The number of processes that train together: the Ray actors that the config requests, or the processes of
    torchrun. A described machine `here` may set the latter."""
    if cluster.kind == "ray":
        return cluster.ranks
    return launched_ranks() if here is None or here.ranks is None else here.ranks


def described_machine(config: RunConfig, threads: int) -> dict[str, str]:
    """Everything outside the config that the bits of a train step depend on: equal descriptions give equal bits. A
    driver that finds no GPU cannot name those of its ranks."""
    named = getattr(config.train, "device", "cpu")
    device = device_of("auto") if named == "auto" else torch.device(named)
    sees = device.type == "cuda" and torch.cuda.is_available()
    gpu = {"gpu": torch.cuda.get_device_name(device)} if sees else {}
    return {
        "trivium": _installed("trivium"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _installed("transformers"),
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads),
        "ranks": str(training_ranks(config.cluster)),
        "device": device.type,
        **gpu,
        **{name: os.environ[name] for name in _INSTRUCTION_SETS if name in os.environ},
    }


_installed = lru_cache(version)
"""The version of an installed package. Reading it takes milliseconds, and a run may start many times in a process."""


@lru_cache
def processor_name() -> str:
    """The model of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # `platform.processor` starts `uname`, whose peak memory counts all that this process holds (`peak_memory`).
    return named[0] if named else platform.processor() or platform.machine()


def precision_note(device: torch.device, dtype: str) -> str:
    """The dtype, with a remark that float32 is faster if the CPU has no instructions for bfloat16."""
    slow = dtype == "bfloat16" and device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    slow = slow and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return f"{dtype} (this CPU has no instructions for it; float32 is faster)" if slow else dtype
