"""Methods that can be called directly, or by `.remote(...)` like those of a Ray actor, on an object that all processes
share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from trivium.foundation.board import Board, Values
from trivium.foundation.concurrency import ProcessLife
from trivium.foundation.errors import SyncError, UnknownName

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Calls(Protocol):
    """Makes references to the results of calls that run in this process."""

    def submit(self, call: Callable[[], Any]) -> Any: ...


@dataclass(frozen=True)
class Shared:
    """The board of a name, and the factory of references for `.remote` calls of the object that uses it."""

    namespace: str
    name: str
    board: Board
    calls: Calls | None = None
    """None without Ray."""
    host: Any = None
    """On Ray, the actor that hosts the board, and references to weights."""
    close: Callable[[], None] = lambda: None
    is_alive: Callable[[ProcessLife], bool] = ProcessLife.__call__
    """Whether a process that uses the board lives."""

    def agree(self, key: str, value: object) -> Any:
        """Writes the value unless one is stored; returns the stored value, which all processes see. Raises UnknownName
        if none is stored and `value` is None."""

        def write(values: Values) -> Values:
            return values if value is None or key in values else {**values, key: value}

        self.board.write(write)
        if key not in (values := self.board.read()):
            raise UnknownName(
                f"the {self.name} of {self.namespace!r}",
                "no process that lives has made one",
                "make it first with everything that it needs; without Ray, on this machine and as this user",
            )
        return values[key]


def ray_session() -> str:
    """Identifies this process's connection to Ray; empty if there is none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_job_id()}"


class Method(Generic[P, R]):
    """A method that can be called directly, or by `.remote(...)`, whose result `ray.get` and `await` accept."""

    def __init__(self, name: str, function: Callable[P, R], calls: Calls | None, doc: str | None) -> None:
        self.__name__, self.__doc__ = name, doc
        self._function, self._calls = function, calls

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Returns Ray's reference to the result of the call. Calls start in the order in which they are made."""
        if self._calls is None:
            raise SyncError(
                f"{self.__name__}.remote(...)",
                "this process was not connected to Ray when it asked for the actor",
                f"call {self.__name__}(...), or `ray.init` before `get_actor`",
            )
        return self._calls.submit(partial(self._function, *args, **kwargs))


class _RemoteMethod:
    """The class attribute that returns a `Method` for its function."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name, self._function = name, function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._function
        shared: Shared | None = getattr(instance, "shared", None)
        calls = None if shared is None else shared.calls
        return Method(self._name, partial(self._function, instance), calls, self._function.__doc__)


def actor_like(kind: type[T]) -> type[T]:
    """Makes the public methods of a class callable by `.remote(...)` too."""
    for name in dir(kind):
        function = inspect.getattr_static(kind, name)
        if inspect.isfunction(function) and not name.startswith("_"):
            setattr(kind, name, _RemoteMethod(name, function))
    return kind
