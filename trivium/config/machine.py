"""The memory and the GPUs of a machine."""

from __future__ import annotations

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
    limits = [_meminfo()]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _text(path).strip()
        if text.isdigit():
            limits.append(int(text))
    return min((limit for limit in limits if limit), default=0)


def _meminfo() -> int:
    line = next((line for line in _text("/proc/meminfo").splitlines() if line.startswith("MemTotal:")), "")
    return int(line.split()[1]) * 1024 if line else 0


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8") if file.is_file() else ""
