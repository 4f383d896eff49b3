"""Functions in processes of their own, because a thread cannot be stopped, and only a main thread handles signals.

`\\boxed{2^{10000000000}}` holds the interpreter inside one multiplication: no thread, signal or deadline of the process
runs until it is done. A child process can be killed, has limits that the kernel enforces, and harms no other by its
exit.
"""

from __future__ import annotations

from trivium.processes.isolated.function import (
    InProcesses,
    Isolated,
    forked,
    isolated_function,
    isolated_reward,
    require,
)

__all__ = ["InProcesses", "Isolated", "forked", "isolated_function", "isolated_reward", "require"]
