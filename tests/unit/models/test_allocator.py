"""Freed memory is used again: what the kernel counts, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, threading
from trivium.models.cpu.allocator import keep_freed_memory

kept = keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [b"x" * (12 << 20) for _ in range(4)]
        del blocks
    counted.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

counted = []
faults()
thread = threading.Thread(target=faults)
thread.start()
thread.join()
print(kept, *counted)
"""


def faults(**environment: str) -> tuple[bool, int, int]:
    """(whether memory is kept, page faults of ten rounds in the main thread, and of ten in another)."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=120, check=True, env=own | environment
    )
    kept, *counted = ran.stdout.split()
    return kept == "True", int(counted[0]), int(counted[1])


def test_freed_memory_is_used_again_in_every_thread() -> None:
    kept, first, other = faults()
    if not kept:
        pytest.skip("the C library is not glibc")
    as_usual, first_as_usual, other_as_usual = faults(MALLOC_PERTURB_="0")  # an allocator that is configured is left
    assert not as_usual
    assert first < first_as_usual / 3
    assert other < other_as_usual / 3
