"""Dispatch rules of worker methods: which rank receives which arguments, and how results are collected.

A user's rule is a pair of functions. `dispatch_fn(group, *args, **kwargs)` returns `(args, kwargs)`, in which each
argument is a list with one entry per rank. `collect_fn(group, results)` combines the results, one per rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, cast

from trivium.errors import ConfigError

_MARK = "__trivium_registered__"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """A rule that assigns arguments to ranks and collects their results."""

    ONE_TO_ALL = "the same arguments for every rank; one result per rank"
    ALL_TO_ALL = "arguments that are lists with an entry per rank are distributed, else as ONE_TO_ALL"
    DP_COMPUTE = "every argument is a list with an entry per rank; one result per rank"
    DP_COMPUTE_PROTO = "arguments with rows are split by data rank, padded; results are gathered without the padding"
    DP_COMPUTE_PROTO_WITH_FUNC = "the same: a function has no rows, and goes to every rank whole"
    DP_COMPUTE_METRIC = "arguments as DP_COMPUTE_PROTO; one result per data rank"
    RANK_ZERO = "rank 0 only; its result"


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Dispatch:
    """Returns the rule that splits values by data rank. `mesh_name` has no effect: a worker has one data rank, which it
    sets with `set_data_rank`."""
    del mesh_name
    return Dispatch.DP_COMPUTE_PROTO


SPLITS = (Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, Dispatch.DP_COMPUTE_METRIC)
"""The rules that split values by their rows."""


class Execute(Enum):
    """The ranks that run a method."""

    ALL = "every rank"
    RANK_ZERO = "rank 0 only"


@dataclass(frozen=True)
class OwnRule:
    """A user's rule as a pair of functions."""

    dispatch_fn: Callable[..., tuple[Any, Any]]
    collect_fn: Callable[..., Any]


@dataclass(frozen=True)
class Registered:
    """The dispatch settings of a method."""

    dispatch_mode: Dispatch | OwnRule
    execute_mode: Execute
    blocking: bool
    materialize_futures: bool


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[_Method], _Method]:
    """Registers a method of a worker class, so that groups of the class have it.

    `dispatch_mode` is a rule, or a mapping with the functions `dispatch_fn` and `collect_fn`. Without `blocking`, the
    group's method returns a DataFuture immediately. The worker replaces a DataFuture among the arguments by its value.
    Without `materialize_futures`, the method receives an object with `get()` instead.
    """
    rule = dispatch_mode if isinstance(dispatch_mode, Dispatch) else _own_rule(dispatch_mode)
    if rule in SPLITS and not (execute_mode is Execute.ALL and materialize_futures):
        raise ConfigError(
            f"the rule {rule.name} with {execute_mode} and materialize_futures={materialize_futures}",
            "the rule splits rows over all ranks, and reads them before the call",
            "leave out the other two arguments, or use Dispatch.ONE_TO_ALL",
        )
    known = Registered(rule, execute_mode, blocking, materialize_futures)

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, known)
        return method

    return mark


def collect_all_to_all(worker_group: Any, output: Any) -> Any:
    """The `collect_fn` that returns the results of the ranks as they are."""
    del worker_group
    return output


def registered_methods(worker: type) -> dict[str, Registered]:
    """Returns the registered methods of a class. An override keeps the registration of the method it overrides."""
    methods: dict[str, Registered] = {}
    for kind in reversed(inspect.getmro(worker)):
        marked = {name: getattr(attribute, _MARK, None) for name, attribute in vars(kind).items()}
        methods |= {name: cast(Registered, known) for name, known in marked.items() if known is not None}
    return methods


def _own_rule(functions: Mapping[str, Callable[..., Any]]) -> OwnRule:
    if not isinstance(functions, Mapping) or set(functions) != {"dispatch_fn", "collect_fn"}:
        raise ConfigError(
            f"the dispatch mode {functions!r}",
            "neither a rule nor a mapping with both functions",
            f"use one of {', '.join(f'Dispatch.{rule.name}' for rule in Dispatch)}, "
            "or {'dispatch_fn': ..., 'collect_fn': ...}",
        )
    return OwnRule(**functions)
