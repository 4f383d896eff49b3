"""Things that live in processes of their own: hosted by one actor, called from others.

An error is not raised through Ray but carried home in an `Answer`, so that whoever called sees what was raised, with
all of its parts. A call that is cancelled is cancelled where it runs. The death of the process is `Gone`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from trivium.errors import RoleFailed, TriviumError, first_cause
from trivium.logs import logging_to

_log = logging.getLogger("trivium")
_AT_ONCE = 100_000
"""Calls that a host takes at once; more wait. Most of them sleep: a request per rollout in flight, and long polls."""

_UNDO_S = 10.0
"""How long a call that was cancelled may take to say what became of it."""
_NUMBERS = itertools.count()
"""Numbers of the calls that this process makes."""


class Gone(RoleFailed):
    """The process of a role died."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of something that ran in another process."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        """The value. Raises the error, where there was one."""
        if self.error is not None:
            raise self.error
        return self.value


class Process:
    """What every actor's process begins with: its name, its threads, its log."""

    def __init__(self, name: str, run_dir: Path | None, threads: int) -> None:
        """Without a `run_dir` the log is what Ray shows on the terminal of whoever started it."""
        self.name = name
        # Ray sets it to 1. Said before torch is imported, so that this process computes as any other with so many.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if run_dir is None:
            _log.setLevel(logging.INFO)
            _log.addHandler(logging.StreamHandler())
        else:
            self._logging = logging_to(run_dir, "log.txt", name)
            self._logging.__enter__()  # until the process ends
        _log.info("process %d on %s", os.getpid(), ray.util.get_node_ip_address())

    def __repr__(self) -> str:
        return self.name  # how Ray marks the lines that this process prints

    def failed(self, error: BaseException) -> Answer:
        """The first cause, as an error that any process can read. What is not ours, and may be of a class that only
        this process knows, is told as the failure of this role; its traceback is in the log."""
        cause = first_cause(error)
        ours = isinstance(cause, TriviumError) and type(cause).__module__.partition(".")[0] == "trivium"
        if ours or isinstance(cause, StopAsyncIteration):
            return Answer(error=cause)
        _log.info("failed", exc_info=error)
        return Answer(error=RoleFailed(self.name, f"{type(cause).__name__}: {cause}"))

    def outcome(self, body: Callable[..., Any], *args: Any) -> Answer:
        """What `body(*args)` returns or raises."""
        try:
            return Answer(body(*args))
        except BaseException as error:
            return self.failed(error)


# No method of Process: Ray would run everything that such an actor does on an event loop.
async def awaited(process: Process, result: Any) -> Answer:
    """What comes of a coroutine."""
    try:
        return Answer(await result)
    except Exception as error:
        return process.failed(error)


class Worker(Process):
    """A role that runs from its beginning to its end, in the process's main thread."""

    def begun(self) -> Answer:
        """Answers once the process is there."""
        return Answer()

    def run(self, body: Callable[..., Any], *args: Any) -> Answer:
        """What `body(name, *args)` returns or raises."""
        return self.outcome(body, self.name, *args)


class Host(Process):
    """Holds one thing that others call, any number of calls at a time, on one event loop."""

    def __init__(self, name: str, run_dir: Path, threads: int) -> None:
        super().__init__(name, run_dir, threads)
        self._thing: Any = None
        self._built = asyncio.Event()
        self._building = asyncio.Lock()
        self._running: dict[tuple[str, int], asyncio.Task[Answer]] = {}
        """By caller and number of the call."""
        self._called_off: set[tuple[str, int]] = set()
        """Cancelled before they arrived: Ray does not promise an order."""
        self._forgotten: set[str] = set()

    async def build(self, make: Callable[..., Any], *args: Any) -> Answer:
        """Builds the thing, once; the kinds of its public attributes by name. Calls that come earlier wait."""
        async with self._building:
            try:
                if not self._built.is_set():
                    self._thing = make(*args)
                    self._built.set()
                return Answer(_surface(self._thing))
            except Exception as error:
                return self.failed(error)

    async def surface(self) -> Answer:
        """The kinds of the thing's public attributes by name: `coroutine`, `function` or `value`."""
        await self._built.wait()
        return Answer(_surface(self._thing))

    async def call(self, caller: str, number: int, attribute: str, args: Any, named: Any) -> Answer:
        """What a method returns or raises, or the value of an attribute."""
        key = (caller, number)
        if caller in self._forgotten or key in self._called_off:
            self._called_off.discard(key)
            return Answer()
        task = self._running[key] = asyncio.ensure_future(self._call(attribute, args, named))
        try:
            await asyncio.wait({task})
            return Answer() if task.cancelled() else task.result()
        finally:
            del self._running[key]

    async def _call(self, attribute: str, args: Any, named: Any) -> Answer:
        await self._built.wait()
        return await awaited(self, self._result(attribute, args, named))

    async def _result(self, attribute: str, args: Any, named: Any) -> Any:
        result = getattr(self._thing, attribute)
        if callable(result):
            result = result(*args, **named)
        return await result if inspect.isawaitable(result) else result

    async def cancel(self, caller: str, number: int) -> None:
        """Nobody waits for this call any more."""
        if (task := self._running.get((caller, number))) is not None:
            task.cancel()
        else:
            self._called_off.add((caller, number))

    async def forget(self, caller: str) -> Answer:
        """The caller is dead: what it asked for is called off, what arrives late is not done."""
        self._forgotten.add(caller)
        tasks = [task for (who, _), task in self._running.items() if who == caller]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return Answer()

    async def live(self) -> None:
        """Never returns: whoever waits for it hears of this process's death at once."""
        await asyncio.Event().wait()


class Proxy:
    """A hosted thing as another process sees it: with its own methods. Coroutines are awaited, functions block."""

    def __init__(self, actor: Any, name: str, caller: str, surface: dict[str, str] | None = None) -> None:
        self._actor, self._name, self._caller = actor, name, caller
        self._known = surface

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        if self._known is None:
            self._known = wait_for(self._actor.surface.remote(), self._name)
        match self._known.get(attribute):
            case "coroutine":
                return partial(self._await, attribute)
            case "function":
                return partial(self._ask, attribute)
            case "value":
                return self._ask(attribute)
            case _:
                raise AttributeError(f"{self._name} has no {attribute!r}")

    async def _await(self, attribute: str, *args: Any, **named: Any) -> Any:
        number = next(_NUMBERS)
        calling = self._actor.call.remote(self._caller, number, attribute, args, named)
        try:
            answer = await calling
        except asyncio.CancelledError:
            self._actor.cancel.remote(self._caller, number)
            await self._undo(calling, attribute, *args)
            raise
        except RayError as error:
            raise Gone(self._name, reason(error)) from error
        return answer.unwrap()

    async def _undo(self, calling: Any, attribute: str, *args: Any) -> None:
        """The call may have been over there when its cancellation came: what it did is taken back, by a thing that
        has an `undo(method, answer, *args)`."""
        if (self._known or {}).get("undo") != "coroutine":
            return
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(calling.future()), _UNDO_S)
        except (RayError, TimeoutError):
            return  # dead, or stuck: what it holds returns when its owner is released
        if answer.value is not None:
            await self._actor.call.remote(self._caller, next(_NUMBERS), "undo", (attribute, answer.value, *args), {})

    def _ask(self, attribute: str, *args: Any, **named: Any) -> Any:
        return ask(self._actor, self._name, self._caller, attribute, *args, **named)


async def build_in(actor: Any, name: str, caller: str, make: Callable[..., Any], *args: Any) -> Proxy:
    """Has a host build its thing. Raises what building it raises, and Gone."""
    try:
        answer: Answer = await actor.build.remote(make, *args)
    except RayError as error:
        raise Gone(name, reason(error)) from error
    return Proxy(actor, name, caller, answer.unwrap())


def ask(actor: Any, name: str, caller: str, attribute: str, *args: Any, **named: Any) -> Any:
    """Blocks for what a hosted thing's method returns, coroutine or not. Raises Gone if its process died."""
    return wait_for(actor.call.remote(caller, next(_NUMBERS), attribute, args, named), name)


def wait_for(ref: Any, name: str, timeout_s: float | None = None) -> Any:
    """Blocks for the answer of the process `name`, and unwraps it. Raises Gone if it died."""
    try:
        answer: Answer = ray.get(ref, timeout=timeout_s)
    except RayError as error:
        raise Gone(name, reason(error)) from error
    return answer.unwrap()


def start_host(
    name: str, run_dir: Path, threads: int, *, namespace: str, num_gpus: float = 0, existing: bool = False
) -> Any:
    """An actor that hosts a thing, which is to be built. Ray kills it when the process that started it ends."""
    options = _options(name, namespace, num_gpus) | {"max_concurrency": _AT_ONCE, "get_if_exists": existing}
    return ray.remote(Host).options(**options).remote(name, run_dir, threads)


def start_worker(name: str, run_dir: Path, threads: int, *, namespace: str, num_gpus: float = 0) -> Any:
    """An actor for a role that runs by itself."""
    return ray.remote(Worker).options(**_options(name, namespace, num_gpus)).remote(name, run_dir, threads)


def _options(name: str, namespace: str, num_gpus: float) -> dict[str, Any]:
    # No share of a CPU is reserved: the roles take turns, and all must find room on the smallest machine. Ray restarts
    # nothing by itself: who died, and what that means, is for the run to know.
    return {
        "name": name, "namespace": namespace, "num_cpus": 0, "num_gpus": num_gpus, "max_restarts": 0,
        "max_task_retries": 0, "scheduling_strategy": "SPREAD",
    }  # fmt: skip


def reason(error: BaseException) -> str:
    """Why a process is no more, as far as Ray knows, without its general advice."""
    text = str(error)
    known = text.partition("The actor is dead because ")[2] or text
    return " ".join(known.partition(" Some common causes")[0].split())


def blame(failure: BaseException) -> int:
    """Which of several failures to show: the one with the least. Whose process died says more than who noticed; what a
    role says of itself more than what others say of it."""
    if isinstance(failure, Gone):
        return 0
    return 1 if isinstance(failure, TriviumError) and not isinstance(failure, RoleFailed) else 2


def _surface(thing: Any) -> dict[str, str]:
    return {name: _kind(inspect.getattr_static(thing, name)) for name in dir(thing) if not name.startswith("_")}


def _kind(attribute: Any) -> str:
    if isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    if inspect.iscoroutinefunction(attribute):
        return "coroutine"
    return "function" if inspect.isroutine(attribute) else "value"
