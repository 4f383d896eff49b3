"""Detects that code needs the main thread: it handles signals, or asks whether it runs there.

Python lets only the main thread set a signal handler. In another thread `signal.signal` raises ValueError, which many
graders catch with everything else (math-verify then gives 0), and the timer of `signal.alarm` would fire in unrelated
code of the main thread. Inside `main_thread_wanted` such a call is recorded and ends the code, unless the code catches
BaseException.
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

from trivium.foundation.errors import user_place

_NAMES = ("signal", "alarm", "setitimer", "set_wakeup_fd")
"""The functions of `signal` that only the main thread may call."""

_calls: ContextVar[list[str] | None] = ContextVar("main_thread_wanted", default=None)
_main_thread = threading.main_thread


class MainThreadWanted(BaseException):
    """Code outside the main thread called what only the main thread may call. Not an Exception: graders catch those."""


@contextmanager
def main_thread_wanted() -> Generator[list[str]]:
    """Records calls that only the main thread may make, by the block or by threads in its context, outside that thread.

    Each raises MainThreadWanted and has no other effect.
    """
    calls: list[str] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


def _refuse(name: str) -> None:
    calls = _calls.get()
    if calls is not None and threading.current_thread() is not _main_thread():
        calls.append(name)
        raise MainThreadWanted(f"{name} needs the main thread")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        _refuse(f"signal.{name}")
        return function(*arguments)

    return checked


@functools.wraps(_main_thread)
def _checked_main_thread() -> threading.Thread:
    if _calls.get() is not None:
        caller = sys._getframe(1)
        if user_place([(caller.f_code.co_filename, caller.f_lineno, "")]):  # libraries ask for other reasons as well
            _refuse("threading.main_thread")
    return _main_thread()


def _install_checks() -> None:
    """Puts a check in front of these functions. Outside `main_thread_wanted` it changes nothing."""
    builtin_signal = sys.modules["_signal"]  # signal.signal calls this one's, also where a module imported it by name
    for name in _NAMES:
        function = getattr(builtin_signal, name, None)
        if function is not None:
            checked = _checked(name, function)
            if getattr(signal, name) is function:
                setattr(signal, name, checked)
            setattr(builtin_signal, name, checked)
    threading.main_thread = _checked_main_thread


_install_checks()  # before a module of the user's takes these functions by name
