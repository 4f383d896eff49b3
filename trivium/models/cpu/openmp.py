"""The threads of OpenMP, of which libgomp keeps a team for every Python thread that has computed in parallel."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

_SOFT = 1
"""`omp_pause_soft`: settings such as the number of threads stay."""


def release_team() -> None:
    """Ends the OpenMP threads of the calling thread, which the next parallel operation starts again. A thread that will
    wait calls it: an engine without requests, a thread of a pool.

    While a process has more of these threads than cores, libgomp lets them sleep at every barrier, where they would
    spin: an update of SmolLM2-135M takes 1.5 times as long on two cores if the engine's team stays meanwhile.
    """
    if "torch" in sys.modules and (library := _libgomp()) is not None:
        library.omp_pause_resource_all(_SOFT)


@cache
def _libgomp() -> ctypes.CDLL | None:
    """The libgomp of torch; None with another OpenMP."""
    folder = Path(str(sys.modules["torch"].__file__)).parent / "lib"
    file = next(folder.glob("libgomp*"), None)
    library = None if file is None else ctypes.CDLL(str(file))
    return library if hasattr(library, "omp_pause_resource_all") else None
