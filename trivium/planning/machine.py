"""The memory and the GPUs of a machine."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Bytes of host memory that processes may use, and of each GPU; 0 and none if they are unknown."""

    memory: int = 0
    gpus: tuple[int, ...] = ()
    ranks: int | None = None
    """Processes that torchrun starts there; None if the config or this process's environment decides."""


def host_memory() -> int:
    """Bytes of memory that processes may use here: the machine's, or the limit of their control group."""
    limits = [_kib("/proc/meminfo", "MemTotal:")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(path).strip()
        if text.isdigit():
            limits.append(int(text))
    return min((limit for limit in limits if limit), default=0)


def peak_memory() -> int:
    """Bytes of memory that this process and the largest one that it waited for held at most; 0 if that is unknown."""
    # Not this process's ru_maxrss: it counts what a parent held that started it by vfork.
    peak = _kib("/proc/self/status", "VmHWM:")
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak and peak + (largest > _largest_copy) * largest * 1024


_largest_copy = 0
"""The `ru_maxrss` of the largest fork of this process so far."""


def ended_copy(usage: resource.struct_rusage) -> None:
    """Counts a fork of this process that has ended. Its pages are those of this process: with them, a reward function
    that is called in a fork would double the memory of a run."""
    global _largest_copy
    _largest_copy = max(_largest_copy, usage.ru_maxrss)


def _kib(path: str, name: str) -> int:
    """The bytes in a line of KiB in a file of /proc; 0 without it."""
    line = next((line for line in _text(path).splitlines() if line.startswith(name)), "")
    return int(line.split()[1]) * 1024 if line else 0


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8") if file.is_file() else ""
