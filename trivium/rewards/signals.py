"""Whether code needs the main thread: it handles signals, or asks whether it runs there.

Python lets the main thread alone set a signal handler. In another one `signal.signal` raises ValueError, which many
graders catch together with everything else (math-verify then gives 0), and the timer of `signal.alarm` would fire in
the main thread, in code that knows nothing of it. Inside `main_thread_wanted` such a call ends the code, as far as it
does not catch even that, and is recorded.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from trivium.errors import user_place

_NAMES = ("signal", "alarm", "setitimer", "set_wakeup_fd")
"""The functions of `signal` that are for the main thread alone."""

_calls: ContextVar[list[str] | None] = ContextVar("main_thread_wanted", default=None)
_main_thread = threading.main_thread


class MainThreadWanted(BaseException):
    """Code outside the main thread called what is for the main thread alone. No Exception: graders catch those."""


@contextmanager
def main_thread_wanted() -> Generator[list[str]]:
    """The functions for the main thread alone that the block, and the threads that run in its context, called outside
    of it. The calls raise MainThreadWanted and have no effect."""
    calls: list[str] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def _refuse(name: str) -> None:
    """Records the call and raises, outside the main thread and inside `main_thread_wanted`."""
    calls = _calls.get()
    if calls is not None and threading.current_thread() is not _main_thread():
        calls.append(name)
        raise MainThreadWanted(f"{name} is for the main thread alone")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        _refuse(f"signal.{name}")
        return function(*arguments)

    return checked


@functools.wraps(_main_thread)
def _asked_for_main_thread() -> threading.Thread:
    if _calls.get() is not None:
        caller = sys._getframe(1)
        if user_place([(caller.f_code.co_filename, caller.f_lineno, "")]):  # libraries ask for other reasons as well
            _refuse("threading.main_thread")
    return _main_thread()


def _watch() -> None:
    """Puts the checks in front of these functions. Outside of `main_thread_wanted` they change nothing."""
    own = sys.modules["_signal"]  # signal.signal calls this one's, also where a module imported it by name
    for name in _NAMES:
        function = getattr(own, name, None)
        if function is not None:
            checked = _checked(name, function)
            if getattr(signal, name) is function:
                setattr(signal, name, checked)
            setattr(own, name, checked)
    threading.main_thread = _asked_for_main_thread


_watch()  # before a module of the user's is imported that takes these functions by name
