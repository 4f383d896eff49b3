"""The one actor stack: processes on Ray, calls between them, errors that cross whole, deaths that are noticed.

An error is not raised through Ray but carried in an `Answer`, so that the caller sees what was raised, with all of its
parts. A call that is cancelled is cancelled where it runs. The death of a process is `ActorDied`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from trivium.errors import RoleFailed, TriviumError, first_cause
from trivium.runtime.logs import logging_to

_log = logging.getLogger("trivium")
MAX_CONCURRENCY = 100_000
"""Calls that a host takes at once; more wait. Most of them sleep: a request per rollout in flight, and long polls."""
_UNDO_S = 10.0
"""How long a cancelled call may take to return what it did."""
_NUMBERS = itertools.count()
"""Numbers of the calls that this process makes."""

Inputs = tuple[Sequence[object], Mapping[str, object]]
"""Positional and keyword arguments of one call."""


class ActorDied(RoleFailed):
    """The process of an actor died."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned or raised in another process."""

    value: Any = None
    error: BaseException | None = None

    def unwrap(self) -> Any:
        """The value. Raises the error, where there was one."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True)
class Call:
    """A call in flight."""

    ref: ray.ObjectRef[Answer]
    actor: str
    """The name of the process that runs it."""

    def answer(self) -> Answer:
        """Blocks for the answer. The death of the process is an answer too: ActorDied."""
        try:
            return ray.get(self.ref)
        except RayError as error:
            return Answer(error=ActorDied(self.actor, death_cause(error)))


# --------------------------------------------------------------------------- in the process of an actor


class Actor:
    """What every actor's process begins with: its name, its threads, its log."""

    def __init__(self, name: str, run_dir: Path | None, threads: int) -> None:
        """Without a `run_dir` the log is what Ray shows on the driver's terminal."""
        self.name = name
        # Ray sets it to 1. Set before torch is imported, so that this process computes as any other with so many.
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

    def _failed(self, error: BaseException) -> Answer:
        """The first cause, as an error that any process can unpickle: one of Trivium's as it is, another as the failure
        of this actor, since its class may be known to this process alone; its traceback is in the log."""
        cause = first_cause(error)
        is_ours = isinstance(cause, TriviumError) and type(cause).__module__.partition(".")[0] == "trivium"
        if is_ours or isinstance(cause, StopAsyncIteration):
            return Answer(error=cause)
        _log.info("failed", exc_info=error)
        return Answer(error=RoleFailed(self.name, f"{type(cause).__name__}: {cause}"))

    def run(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Answer:
        """What `function(*args, **kwargs)` returns or raises."""
        try:
            return Answer(function(*args, **kwargs))
        except BaseException as error:
            return self._failed(error)


class RoleActor(Actor):
    """A role that runs from its beginning to its end, in the process's main thread."""

    def ready(self) -> Answer:
        """Answers once the process has started."""
        return Answer()


class Host(Actor):
    """Holds one object that other processes call.

    Calls run on one event loop, any number at a time (`call`); or they start in the order in which their caller made
    them, functions in one thread and coroutines on the loop (`call_in_order`).
    """

    def __init__(self, name: str, run_dir: Path | None, threads: int) -> None:
        super().__init__(name, run_dir, threads)
        self._object: Any = None
        self._built = asyncio.Event()
        self._building = asyncio.Lock()
        self._running: dict[tuple[str, int], asyncio.Task[Answer]] = {}
        """By caller and number of the call."""
        self._cancelled: set[tuple[str, int]] = set()
        """Calls that were cancelled before they arrived: Ray does not promise an order."""
        self._forgotten: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "calls-in-order")
        self._next_number: dict[str, int] = {}
        """The ordered call that may start next, by caller."""
        self._started = asyncio.Condition()

    async def build(self, make: Callable[..., Any], *args: object) -> Answer:
        """Builds the object, once; answers with its surface. Calls that arrive earlier wait."""
        async with self._building:
            try:
                if not self._built.is_set():
                    self._object = make(*args)
                    self._built.set()
                return Answer(_surface(self._object))
            except Exception as error:
                return self._failed(error)

    async def surface(self) -> Answer:
        """The kinds of the object's public attributes by name: `coroutine`, `function` or `value`."""
        await self._built.wait()
        return Answer(_surface(self._object))

    async def call(
        self, caller: str, number: int, attribute: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Answer:
        """What a method returns or raises, or the value of an attribute."""
        key = (caller, number)
        if caller in self._forgotten or key in self._cancelled:
            self._cancelled.discard(key)
            return Answer()
        task = self._running[key] = asyncio.ensure_future(self._answer_of(attribute, args, kwargs))
        try:
            await asyncio.wait({task})
            return Answer() if task.cancelled() else task.result()
        finally:
            del self._running[key]

    async def call_in_order(
        self, caller: str, number: int, attribute: str, inputs: Inputs, is_wanted: bool, *head: object
    ) -> Answer:
        """What a method returns or raises; nothing but errors unless the value `is_wanted`. `number` counts the ordered
        calls of the caller to this host. The arguments of `head` come before those of `inputs`, which Ray may have
        fetched from its object store."""
        await self._built.wait()
        args, kwargs = [*head, *inputs[0]], inputs[1]
        async with self._started:
            await self._started.wait_for(lambda: self._next_number.get(caller, 0) == number)
            if inspect.iscoroutinefunction(getattr(self._object, attribute, None)):
                running = asyncio.ensure_future(self._answer_of(attribute, args, kwargs))
            else:
                call = methodcaller(attribute, *args, **kwargs)
                running = asyncio.get_running_loop().run_in_executor(self._thread, self.run, call, self._object)
            self._next_number[caller] = number + 1
            self._started.notify_all()
        answer = await running
        return answer if is_wanted or answer.error is not None else Answer()

    async def cancel(self, caller: str, number: int) -> None:
        """Ends a call that its caller no longer waits for."""
        if (task := self._running.get((caller, number))) is not None:
            task.cancel()
        else:
            self._cancelled.add((caller, number))

    async def forget(self, caller: str) -> Answer:
        """The caller is dead: its calls are cancelled, and those that arrive late do nothing."""
        self._forgotten.add(caller)
        tasks = [task for (owner, _), task in self._running.items() if owner == caller]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return Answer()

    async def respond(self, after_s: float) -> Answer:
        """Answers after so many seconds, unless the process is stopped or its event loop hangs."""
        await asyncio.sleep(after_s)
        return Answer()

    async def live(self) -> None:
        """Never returns: only the death of this process ends the call."""
        await asyncio.Event().wait()

    async def _result(self, attribute: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        await self._built.wait()
        result = getattr(self._object, attribute)
        if callable(result):
            result = result(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def _answer_of(self, attribute: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Answer:
        try:
            return Answer(await self._result(attribute, args, kwargs))
        except Exception as error:
            return self._failed(error)


def _surface(hosted: object) -> dict[str, str]:
    return {name: _kind(inspect.getattr_static(hosted, name)) for name in dir(hosted) if not name.startswith("_")}


def _kind(attribute: object) -> str:
    if isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    if inspect.iscoroutinefunction(attribute):
        return "coroutine"
    return "function" if inspect.isroutine(attribute) else "value"


# --------------------------------------------------------------------------- in the process of a caller


class Proxy:
    """A hosted object as another process sees it: with its own methods. Coroutines are awaited, functions block."""

    def __init__(self, actor: ActorHandle[Host], name: str, caller: str, surface: dict[str, str] | None = None) -> None:
        self._actor, self._name, self._caller = actor, name, caller
        self._kinds = surface

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        if self._kinds is None:
            self._kinds = result_of(self._actor.surface.remote(), self._name)
        match self._kinds.get(attribute):
            case "coroutine":
                return partial(self._await, attribute)
            case "function":
                return partial(self._block, attribute)
            case "value":
                return self._block(attribute)
            case _:
                raise AttributeError(f"{self._name} has no {attribute!r}")

    async def _await(self, attribute: str, *args: object, **kwargs: object) -> object:
        number = next(_NUMBERS)
        ref: Any = self._actor.call.remote(self._caller, number, attribute, args, kwargs)
        try:
            answer: Answer = await ref
        except asyncio.CancelledError:
            self._actor.cancel.remote(self._caller, number)
            await self._undo(ref, attribute, *args)
            raise
        except RayError as error:
            raise ActorDied(self._name, death_cause(error)) from error
        return answer.unwrap()

    async def _undo(self, ref: ray.ObjectRef[Answer], attribute: str, *args: object) -> None:
        """The call may have ended before its cancellation arrived: an object with an `undo(method, answer, *args)`
        takes back what it did."""
        if (self._kinds or {}).get("undo") != "coroutine":
            return
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(ref.future()), _UNDO_S)
        except (RayError, TimeoutError):
            return  # dead, or stuck: what it holds returns when its owner is released
        if answer.value is not None:
            undone: Any = self._actor.call.remote(
                self._caller, next(_NUMBERS), "undo", (attribute, answer.value, *args), {}
            )
            await undone

    def _block(self, attribute: str, *args: object, **kwargs: object) -> object:
        return call(self._actor, self._name, self._caller, attribute, *args, **kwargs)


async def build_hosted(
    actor: ActorHandle[Host], name: str, caller: str, make: Callable[..., Any], *args: object
) -> Proxy:
    """Has a host build its object. Raises what building it raises, and ActorDied."""
    try:
        built: Any = actor.build.remote(make, *args)
        answer: Answer = await built
    except RayError as error:
        raise ActorDied(name, death_cause(error)) from error
    return Proxy(actor, name, caller, answer.unwrap())


def call(actor: ActorHandle[Host], name: str, caller: str, attribute: str, *args: object, **kwargs: object) -> Any:
    """Blocks for what a hosted object's method returns, coroutine or not. Raises ActorDied if its process died."""
    return result_of(actor.call.remote(caller, next(_NUMBERS), attribute, args, kwargs), name)


def result_of(ref: ray.ObjectRef[Answer], name: str, timeout_s: float | None = None) -> Any:
    """Blocks for the answer of the process `name`, and unwraps it. Raises ActorDied if it died."""
    try:
        answer: Answer = ray.get(ref, timeout=timeout_s)
    except RayError as error:
        raise ActorDied(name, death_cause(error)) from error
    return answer.unwrap()


def start_host(
    name: str,
    run_dir: Path | None,
    threads: int,
    *,
    namespace: str,
    num_gpus: float = 0,
    existing: bool = False,
    kind: type[Host] = Host,
    detached: bool = False,
) -> ActorHandle[Host]:
    """An actor that hosts an object, which is to be built. Ray kills it when the process that started it ends, unless
    it is `detached`."""
    options = _options(name, namespace, num_gpus) | {"max_concurrency": MAX_CONCURRENCY, "get_if_exists": existing}
    options |= {"lifetime": "detached"} if detached else {}
    handle: Any = ray.remote(kind).options(**options).remote(name, run_dir, threads)
    return handle


def start_role(
    name: str, run_dir: Path, threads: int, *, namespace: str, num_gpus: float = 0
) -> ActorHandle[RoleActor]:
    """An actor for a role that runs by itself."""
    options = _options(name, namespace, num_gpus)
    handle: Any = ray.remote(RoleActor).options(**options).remote(name, run_dir, threads)
    return handle


def _options(name: str, namespace: str, num_gpus: float) -> dict[str, Any]:
    # No share of a CPU is reserved: the roles take turns, and all must fit on the smallest machine. Ray restarts
    # nothing by itself: which process died, and what follows, is for the supervisor to decide.
    return {
        "name": name,
        "namespace": namespace,
        "num_cpus": 0,
        "num_gpus": num_gpus,
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": "SPREAD",
    }


def death_cause(error: BaseException) -> str:
    """Why a process died, as far as Ray knows, without its general advice."""
    text = str(error)
    known = text.partition("The actor is dead because ")[2] or text
    return " ".join(known.partition(" Some common causes")[0].split())


def causality(failure: BaseException) -> int:
    """Orders failures by how near they are to the first cause, least first: the death of a process, then what a role
    reports of itself, then what one role reports of another."""
    if isinstance(failure, ActorDied):
        return 0
    return 1 if isinstance(failure, TriviumError) and not isinstance(failure, RoleFailed) else 2
