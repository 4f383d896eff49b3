"""The event loop of a run's process. User code may raise SystemExit, stop the loop, ignore cancellation or block: the
run still ends in time, and never looks finished.

`asyncio.Runner` cannot drive this loop. It fails when a task stops the loop, and its `close` waits without a deadline
for tasks that ignore their cancellation and, before Python 3.12, for the threads of the executor.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_int, c_void_p
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from trivium.foundation.concurrency import interrupted
from trivium.foundation.errors import DeadlineExceeded, TriviumError, first_cause, text_of, user_place
from trivium.models.cpu.openmp import release_team

T = TypeVar("T")

_log = logging.getLogger("trivium")
GRACE_S = 10.0
"""Seconds beyond `deadline_s` that a function may block the loop."""
_CANCEL_S = 2.0
"""Seconds that a cancelled task has to end."""
_THREADS_S = 300.0
"""Longest wait, in seconds, for threads (for example of a train step) at the end of the loop."""
_LOOK_S = 1.0
"""Seconds between two checks of the watchdog."""
COLLECT_AFTER = 50_000
"""New objects between two collections of the youngest generation; Python's default is 700. With thousands of rollouts
in flight, the default collector would traverse hundreds of thousands of live objects repeatedly and take half of the
explorer's time. A run creates no reference cycles that grow with its steps or hold tensors."""
_SWITCH_S = 0.0005
"""Seconds that a thread keeps the interpreter while another waits for it; Python's default is 5 ms. The threads of a
train step and of the engine release it with every operation, and would wait that long each time: with the default, the
updates of `trivium demo` beside its rollouts took a third longer."""
_left_behind: set[asyncio.Task[Any]] = set()
"""Tasks that ignore their cancellation. The event loop itself holds only weak references to tasks."""


def run_in_loop(main: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """Runs the coroutine in a new event loop and returns its result, like `asyncio.run`. In addition:

    - the loop continues after SystemExit in a task and after `loop.stop()`; if `main` is cancelled without Ctrl-C, this
      raises an error;
    - a task that ignores its cancellation for two seconds is abandoned and logged;
    - a function that blocks the loop for longer than `deadline_s` and `GRACE_S` is logged, and the process ends with
      code 1;
    - the garbage collector runs seldom;
    - Ctrl-C cancels `main` and raises KeyboardInterrupt; a second Ctrl-C ends the process at once.
    """
    loop = asyncio.new_event_loop()
    release_team()  # which loaded models
    executor = _Executor(thread_name_prefix=f"loop-{id(loop):x}")
    loop.set_default_executor(executor)
    task = loop.create_task(main, name="main")
    try:
        with _interruptible(loop, task) as signals:
            with _watched(loop, deadline_s + GRACE_S), interpreter_settings:
                _drive(loop, task, signals)
                _drive(loop, loop.create_task(_end(), name="end"), signals)
            executor.shutdown(wait=False)
            names = f"loop-{id(loop):x}"
            join([t for t in threading.enumerate() if t.name.startswith(names)], min(deadline_s + GRACE_S, _THREADS_S))
    finally:
        loop.close()
    return _result(task, signals.raised)


class _Executor(ThreadPoolExecutor):
    """A pool whose threads keep no OpenMP threads while they wait."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return super().submit(_with_its_team, fn, *args, **kwargs)


def _with_its_team(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    try:
        return function(*args, **kwargs)
    finally:
        release_team()


class _InterpreterSettings:
    """Process-wide settings while at least one block runs: the garbage collector runs seldom (unless its first
    threshold is higher already, or 0: off), and threads switch often. Blocks of several threads may overlap in any
    order: the first one changes the settings, the last one restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._before: tuple[tuple[int, int, int], float] = gc.get_threshold(), sys.getswitchinterval()

    def __enter__(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._blocks == 1:
                (first, *others), switch = self._before = gc.get_threshold(), sys.getswitchinterval()
                gc.set_threshold(max(first, COLLECT_AFTER) if first else 0, *others)
                sys.setswitchinterval(min(switch, _SWITCH_S))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                gc.set_threshold(*self._before[0])
                sys.setswitchinterval(self._before[1])


interpreter_settings = _InterpreterSettings()


def _result(task: asyncio.Task[T], raised: BaseException | None) -> T:
    """Returns the task's result, or raises its error; a BaseException such as SystemExit becomes a TriviumError."""
    if task.cancelled():
        raise raised or _not_finished("all of its tasks were cancelled")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        cause = first_cause(error)
        raise _not_finished(f"{type(cause).__name__}({text_of(cause)}) was raised") from error
    return task.result()


def _not_finished(problem: str) -> TriviumError:
    return TriviumError(
        "a run that ends because it has finished",
        f"{problem}, by user code",
        "let user code raise an error of its own, and cancel only tasks that it started",
    )


def _drive(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], signals: _Signals) -> None:
    """Runs the loop until the task is done. Restarts the loop if user code stops it or raises through it."""
    task.add_done_callback(lambda _: loop.stop())
    while not task.done():
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as raised:
            if signals.sent(raised):
                signals.raised = raised
                task.cancel()
            else:
                _log.warning("user code raised %r in a task; the run continues", raised)
                _log.info("its traceback", exc_info=raised)


async def _end() -> None:
    """Cancels all tasks, and abandons those that ignore the cancellation."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    ended, ignoring = await asyncio.wait(others, timeout=_CANCEL_S) if others else (set(), set())
    for task in ended:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that the exception was never retrieved
    places = Counter(user_place(_stack_of(task)) or repr(task.get_coro()) for task in ignoring)
    for place, number in places.items():
        _log.warning("%d task(s) ignore their cancellation and are abandoned, in %s", number, place)
    for task in ignoring:
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
        _left_behind.add(task)


def _stack_of(task: asyncio.Task[Any]) -> Iterator[tuple[str, int, str]]:
    """Yields (file, line, function) of the coroutines that await one another, outermost first."""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        coroutine = coroutine.cr_await


# --------------------------------------------------------------------------- Ctrl-C


@dataclass
class _Signals:
    """The state of SIGINT and SIGTERM."""

    handled: bool
    """Whether this module handles Ctrl-C. If it does, a KeyboardInterrupt comes from user code."""
    raised: BaseException | None = None
    """The exception of the received signal."""

    def sent(self, raised: BaseException) -> bool:
        """Whether a signal handler, and not user code, may have raised this."""
        if isinstance(raised, KeyboardInterrupt):
            return not self.handled
        return threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGTERM))


@contextmanager
def _interruptible(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> Generator[_Signals]:
    """Makes Ctrl-C cancel the task. At the second Ctrl-C the kernel ends the process in any state."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = _Signals(in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    def interrupt(number: int, frame: FrameType | None) -> None:
        signals.raised = KeyboardInterrupt()
        interrupted.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with suppress(OSError):  # the reader of the stream may have ended
            os.write(2, b"interrupted: the run ends; Ctrl-C again ends it at once\n")
        loop.call_soon_threadsafe(task.cancel)

    if not signals.handled:
        yield signals
        return
    signal.signal(signal.SIGINT, interrupt)
    _for_one_signal(signal.SIGINT)
    try:
        yield signals
    finally:
        interrupted.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _for_one_signal(number: int) -> None:
    """Makes the kernel restore the default action when the signal arrives, if the C library can; Python's `signal`
    lacks this. A handler in Python waits for the interpreter, which a function in C may hold forever."""
    libc = CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "sysv_signal"):
        return
    libc.signal.restype = c_void_p
    libc.signal.argtypes = libc.sysv_signal.argtypes = [c_int, c_void_p]
    # `signal` returns the handler that Python has set, which stays the same: only the reset is new.
    libc.sysv_signal(number, libc.signal(number, None))


# --------------------------------------------------------------------------- watchdog


@contextmanager
def _watched(loop: asyncio.AbstractEventLoop, patience_s: float) -> Generator[None]:
    """Ends the process if the loop is blocked for `patience_s`, which a thread counts in checks. Time during which the
    process is stopped does not count. It does count for faulthandler's timer: after a stop by SIGSTOP or in a paused
    container for longer than that, the process may end."""
    thread_id, stopped = threading.get_ident(), threading.Event()
    answered = threading.Event()

    def watch() -> None:
        look_s = min(_LOOK_S, patience_s / 4)
        silent_s = 0.0
        answered.set()
        # While C code holds the interpreter, no Python thread runs. faulthandler's timer prints all stacks anyway.
        faulthandler.dump_traceback_later(patience_s + GRACE_S, exit=True, file=2)
        while not stopped.wait(look_s):
            faulthandler.dump_traceback_later(patience_s + GRACE_S, exit=True, file=2)
            silent_s = 0.0 if answered.is_set() else silent_s + look_s
            if silent_s > patience_s:
                _end_process(thread_id, silent_s)
            if answered.is_set():
                answered.clear()
                loop.call_soon_threadsafe(answered.set)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        with _suspendable():
            yield
    finally:
        stopped.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _suspendable() -> Generator[None]:
    """Cancels faulthandler's timer before Ctrl-Z stops the process. The watchdog's next check sets it again."""

    def suspend(number: int, frame: FrameType | None) -> None:
        faulthandler.cancel_dump_traceback_later()
        os.kill(os.getpid(), signal.SIGSTOP)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _end_process(thread_id: int, silent_s: float) -> None:
    """Logs the function that blocks the loop, and ends the process."""
    stack = traceback.extract_stack(sys._current_frames()[thread_id])
    error = DeadlineExceeded(
        "an event loop that is not blocked",
        f"{_innermost(stack)} has blocked it for {silent_s:.0f} s, and workflow.deadline_s is over",
        "let it `await`, or call blocking code with asyncio.to_thread; a reward without `async` runs in a thread",
    )
    _log.critical("%s", error)
    _log.info("the stack of the event loop:\n%s", "".join(traceback.format_list(stack)))
    # `os._exit` flushes no file.
    logging.shutdown()
    os._exit(1)


def _innermost(stack: traceback.StackSummary) -> str:
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in stack]
    file, line, function = frames[-1]
    return user_place(frames) or f"{function} ({file}:{line})"


def join(threads: Sequence[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Waits for the threads for at most `seconds`. Returns and logs those that still run."""
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    running = [thread for thread in threads if thread.is_alive()]
    frames = sys._current_frames()
    for thread in running:
        stack = traceback.extract_stack(frames.get(thread.ident or 0))
        _log.warning("abandoned: a thread that still runs %s", _innermost(stack))
    return running


def exit_without_threads(code: object, seconds: float = 30.0) -> None:
    """Ends a process that is about to exit with this code, if threads keep it running for longer than `seconds`."""

    def running() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]

    def end() -> None:
        time.sleep(seconds)
        if join(running(), 0.0):
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else int(code is not None))

    if running():
        threading.Thread(target=end, name="exit", daemon=True).start()
