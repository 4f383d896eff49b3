"""Configures the C library's allocator to keep the memory of freed tensors."""

from __future__ import annotations

import os
import sys
from ctypes import CDLL
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""From glibc's malloc.h."""
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""The largest that glibc accepts."""


@cache
def keep_freed_memory() -> bool:
    """Makes this process reuse freed memory. Returns whether it does. Further calls have no effect.

    By default glibc returns large blocks to the system when they are freed. The next tensor of that size gets new
    pages, which the kernel clears at their first use. All threads share one arena, because glibc returns the memory of
    other arenas whatever the threshold. Does nothing for other C libraries, or if the environment configures the
    allocator.
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if sys.platform != "linux" or configured:
        return False
    libc = CDLL(None)
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt")):
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_ARENA_MAX, 1),
    )
    results = [libc.mallopt(name, value) for name, value in settings]
    return all(result == 1 for result in results)
