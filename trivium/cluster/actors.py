"""The actor layer: processes on Ray, calls between them, errors with all their parts, detection of deaths.

An `Answer` carries an error instead of raising it through Ray, so that the caller gets the error with all its parts.
Cancelling a call also cancels it in the actor. The death of a process raises `ActorDied`.
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

from trivium.foundation.errors import ProcessDied, RoleFailed, TriviumError
from trivium.processes.answers import Answer, Failures
from trivium.runtime.logs import logging_to

_log = logging.getLogger("trivium")
MAX_CONCURRENCY = 100_000
"""Maximum number of concurrent calls of a host. Most of them sleep: one request per rollout in flight, and long
polls."""
_UNDO_S = 10.0
"""Maximum wait for the result of a cancelled call, which may need `undo`."""
_NUM_ENDED = 10_000
"""The number of ended calls that a host remembers: more than can end before the cancellation of one of them arrives."""
_NUMBERS = itertools.count()
"""Numbers the calls of this process."""

Inputs = tuple[Sequence[object], Mapping[str, object]]
"""Positional and keyword arguments of one call."""


class ActorDied(ProcessDied):
    """The process of an actor died."""


@dataclass(frozen=True)
class Call:
    """A call in flight."""

    ref: ray.ObjectRef[Answer]
    actor: str
    """The name of the actor that runs it."""

    def answer(self, timeout_s: float | None = None) -> Answer:
        """Blocks until the answer arrives. If the process died, or does not answer within `timeout_s`, the answer holds
        ActorDied."""
        try:
            return ray.get(self.ref, timeout=timeout_s)
        except RayError as error:
            return self._died(error)

    async def answered(self) -> Answer:
        """Like `answer`, without blocking the event loop."""
        ref: Any = self.ref
        try:
            return await ref
        except RayError as error:
            return self._died(error)

    def _died(self, error: RayError) -> Answer:
        return Answer(error=ActorDied(self.actor, death_cause(error)))


# --------------------------------------------------------------------------- in the process of an actor


class Actor:
    """Base of every actor: sets the name, the number of threads and the log of its process."""

    def __init__(self, name: str, run_dir: Path | None, threads: int) -> None:
        """Without a `run_dir`, logs to the stream that Ray forwards to the driver's terminal."""
        self.name, self._failures = name, Failures(name, partial(RoleFailed, name))
        # Ray sets this variable to 1. It must be set before torch is imported: with another number of threads the bits
        # of results differ.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if run_dir is None:
            _log.setLevel(logging.INFO)
            _log.addHandler(logging.StreamHandler())
        else:
            self._logging = logging_to(run_dir, "log.txt", name)
            self._logging.__enter__()  # stays open until the process ends
        _log.info("process %d on %s", os.getpid(), ray.util.get_node_ip_address())

    def __repr__(self) -> str:
        return self.name  # Ray's prefix for lines that this process prints

    def run(self, function: Callable[..., Any], *args: object, **kwargs: object) -> Answer:
        """Runs `function(*args, **kwargs)` and returns its result or error."""
        try:
            return Answer(function(*args, **kwargs))
        except BaseException as error:
            return self._failures.answer(error)


class RoleActor(Actor):
    """An actor that runs one role in the main thread of its process."""

    def ready(self) -> Answer:
        """Returns once the process has started."""
        return Answer()


class Host(Actor):
    """Hosts one object that other processes call.

    `call` runs calls concurrently on one event loop. `call_in_order` starts them in the order in which the caller made
    them, functions in one thread and coroutines on the loop.
    """

    def __init__(self, name: str, run_dir: Path | None, threads: int) -> None:
        super().__init__(name, run_dir, threads)
        self._object: Any = None
        self._built = asyncio.Event()
        self._building = asyncio.Lock()
        self._running: dict[tuple[str, int], asyncio.Task[Answer]] = {}
        """By caller and number of the call."""
        self._cancelled: set[tuple[str, int]] = set()
        """Calls whose cancellation arrived before the call itself. Ray does not guarantee an order."""
        self._ended: dict[tuple[str, int], None] = {}
        """The last calls that ended, oldest first. Their cancellations may still arrive."""
        self._forgotten: set[str] = set()
        """Dead callers, whose late calls do nothing."""
        self._thread = ThreadPoolExecutor(1, "calls-in-order")
        self._next_number: dict[str, int] = {}
        """The number of the next ordered call, by caller."""
        self._started = asyncio.Condition()

    async def build(self, make: Callable[..., Any], *args: object) -> Answer:
        """Builds the object once and returns its surface. Calls that arrive earlier wait."""
        async with self._building:
            try:
                if not self._built.is_set():
                    self._object = make(*args)
                    self._built.set()
                return Answer(_surface(self._object))
            except Exception as error:
                return self._failures.answer(error)

    async def surface(self) -> Answer:
        """The kinds of the object's public attributes by name: `coroutine`, `function` or `value`."""
        await self._built.wait()
        return Answer(_surface(self._object))

    async def call(
        self, caller: str, number: int, attribute: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Answer:
        """The result or error of a method, or the value of an attribute."""
        key = (caller, number)
        if caller in self._forgotten or key in self._cancelled:
            self._cancelled.discard(key)
            return Answer()
        task = self._running[key] = asyncio.ensure_future(self._answer_of(attribute, args, kwargs))
        try:
            await asyncio.wait({task})  # unlike `await task`, does not raise if `cancel` cancels it
            return Answer() if task.cancelled() else task.result()
        finally:
            del self._running[key]
            self._ended[key] = None
            if len(self._ended) > _NUM_ENDED:
                del self._ended[next(iter(self._ended))]

    async def call_in_order(
        self, caller: str, number: int, attribute: str, inputs: Inputs, is_wanted: bool, *head: object
    ) -> Answer:
        """The result or error of a method; without `is_wanted`, only the error. `number` counts the ordered calls of
        the caller to this host, from 0. The positional arguments are those of `head`, then those of `inputs`. `inputs`
        is one argument, so that the caller may pass it as a reference to Ray's object store."""
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
        """Cancels a call whose caller no longer waits for it."""
        if (task := self._running.get((caller, number))) is not None:
            task.cancel()
        elif (caller, number) not in self._ended:
            self._cancelled.add((caller, number))

    async def forget(self, caller: str) -> Answer:
        """Cancels all calls of a dead caller. Its calls that arrive later do nothing."""
        self._forgotten.add(caller)
        tasks = [task for (owner, _), task in self._running.items() if owner == caller]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return Answer()

    async def respond(self, after_s: float) -> Answer:
        """Returns after this number of seconds, unless the process is stopped or its event loop hangs."""
        await asyncio.sleep(after_s)
        return Answer()

    async def live(self) -> None:
        """Never returns: the call ends only with the death of this process."""
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
            return self._failures.answer(error)


def _surface(hosted: object) -> dict[str, str]:
    """The kinds of an object's public attributes by name, without evaluating its properties."""
    return {name: _kind(inspect.getattr_static(hosted, name)) for name in dir(hosted) if not name.startswith("_")}


def _kind(attribute: object) -> str:
    if isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    if inspect.iscoroutinefunction(attribute):
        return "coroutine"
    return "function" if inspect.isroutine(attribute) else "value"


# --------------------------------------------------------------------------- in the process of a caller


class Proxy:
    """A proxy of a hosted object in another process. Coroutine methods are awaited, functions block."""

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
        ref = self._actor.call.remote(self._caller, number, attribute, args, kwargs)
        try:
            answer = await Call(ref, self._name).answered()
        except asyncio.CancelledError:
            self._actor.cancel.remote(self._caller, number)
            await self._undo(ref, attribute, *args)
            raise
        return answer.unwrap()

    async def _undo(self, ref: ray.ObjectRef[Answer], attribute: str, *args: object) -> None:
        """Waits for the end of a cancelled call. If it ended before the cancellation arrived, the object's
        `undo(method, answer, *args)`, if any, reverts its effect."""
        if (self._kinds or {}).get("undo") != "coroutine":
            return
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(ref.future()), _UNDO_S)
        except (RayError, TimeoutError):
            return  # dead or stuck: its resources return when the owner is released
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
    """Makes a host build its object. Raises the error of the build, and ActorDied."""
    built = await Call(actor.build.remote(make, *args), name).answered()
    return Proxy(actor, name, caller, built.unwrap())


def call(actor: ActorHandle[Host], name: str, caller: str, attribute: str, *args: object, **kwargs: object) -> Any:
    """Calls a method of a hosted object, coroutine or not, and blocks for the result. Raises ActorDied if the process
    died."""
    return result_of(actor.call.remote(caller, next(_NUMBERS), attribute, args, kwargs), name)


def result_of(ref: ray.ObjectRef[Answer], name: str, timeout_s: float | None = None) -> Any:
    """Blocks for the answer of the actor `name` and unwraps it. Raises ActorDied if its process died."""
    return Call(ref, name).answer(timeout_s).unwrap()


def start_host(
    name: str,
    run_dir: Path | None,
    threads: int,
    *,
    namespace: str,
    num_gpus: float = 0,
    kind: type[Host] = Host,
) -> ActorHandle[Host]:
    """Starts an actor that hosts an object, which is built later. Ray kills the actor when the process that started it
    ends."""
    options = _options(name, namespace, num_gpus) | {"max_concurrency": MAX_CONCURRENCY}
    handle: Any = ray.remote(kind).options(**options).remote(name, run_dir, threads)
    return handle


def start_role(
    name: str, run_dir: Path, threads: int, *, namespace: str, num_gpus: float = 0
) -> ActorHandle[RoleActor]:
    """Starts an actor that runs one role."""
    options = _options(name, namespace, num_gpus)
    handle: Any = ray.remote(RoleActor).options(**options).remote(name, run_dir, threads)
    return handle


def _options(name: str, namespace: str, num_gpus: float) -> dict[str, Any]:
    # Reserves no CPU: the roles take turns, and all of them must fit on the smallest machine. Ray restarts nothing: the
    # supervisor handles the death of a process.
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
    """The cause of death of a process that Ray reports, without its general advice."""
    text = str(error)
    cause = text.partition("The actor is dead because ")[2] or text
    return " ".join(cause.partition(" Some common causes")[0].split())


def causality(failure: BaseException) -> int:
    """A sort key of failures, most probable first cause first: the death of a process, then a role's report about
    itself, then a role's report about another role."""
    if isinstance(failure, ActorDied):
        return 0
    return 1 if isinstance(failure, TriviumError) and not isinstance(failure, RoleFailed) else 2
