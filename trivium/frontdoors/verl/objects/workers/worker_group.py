"""Worker groups with verl's API, over `cluster.actor_group`.

A group has the registered methods of its worker class."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from trivium.cluster.actor_group import ActorGroup, put_inputs
from trivium.cluster.actors import Call
from trivium.cluster.pools import ResourcePool
from trivium.errors import ConfigError, DataError
from trivium.frontdoors.verl.objects.batches.protocol import RowsError
from trivium.frontdoors.verl.objects.workers.dispatch import (
    SPLITS,
    Dispatch,
    Execute,
    OwnRule,
    Registered,
    registered_methods,
)
from trivium.frontdoors.verl.objects.workers.row_splitting import (
    Piece,
    common_rows,
    gathered,
    listed,
    num_rows,
    share,
    split,
)
from trivium.frontdoors.verl.objects.workers.worker import Pending, Place, RankWorkers, Worker, WorkerCall

T = TypeVar("T")


class RayClassWithInitArgs:
    """A worker class and the constructor arguments of its instances on every rank."""

    def __init__(self, cls: object, *args: object, **kwargs: object) -> None:
        """`cls` is a subclass of Worker, or the result of `ray.remote` for one."""
        remote = getattr(cls, "__ray_metadata__", None)
        worker = remote.modified_class if remote is not None else cls
        if not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise ConfigError(f"{cls!r} as the class of workers", "it is no Worker", "derive it from Worker")
        self.cls: type[Worker] = worker
        self.args, self.kwargs = args, kwargs

    @property
    def roles(self) -> dict[str, RayClassWithInitArgs]:
        """The workers to build in each process, by role."""
        return {"": self}

    @property
    def name(self) -> str:
        return self.cls.__name__.lower()


@dataclass(frozen=True)
class ColocatedClasses:
    """The worker classes of several roles, for one process."""

    roles: Mapping[str, RayClassWithInitArgs]

    @property
    def name(self) -> str:
        return "+".join(self.roles)


def create_colocated_worker_cls(class_dict: Mapping[Any, RayClassWithInitArgs]) -> ColocatedClasses:
    """Puts several roles (names or `Role`) into each process. `RayWorkerGroup.spawn` returns a view per role."""
    return ColocatedClasses({str(role): made for role, made in class_dict.items()})


create_colocated_worker_cls_fused = create_colocated_worker_cls
"""verl's name of the same for workers that it builds inside one actor."""


def create_colocated_worker_raw_cls(class_dict: Mapping[Any, RayClassWithInitArgs]) -> type[Worker]:
    """Returns a base class whose workers hold a worker of each role, as an attribute of its name. Methods of a subclass
    may call them; `RayWorkerGroup.fuse` gives the group a view of each."""
    roles = {str(role): made for role, made in class_dict.items()}

    class FusedWorker(Worker):
        fused = roles

        def __init__(self) -> None:
            for role, made in roles.items():
                setattr(self, role, made.cls(*made.args, **made.kwargs))

    return FusedWorker


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """Puts values into Ray's object store, and returns their references. `max_workers` has no effect: a put is a copy
    in memory. Raises RowsError for no values."""
    del max_workers
    if not data_list:
        raise RowsError("values for the object store", "data_list is empty", "give at least one")
    return [ray.put(value) for value in data_list]


class DataFuture:
    """The pending result of a call. `get()` or `await` return the value. A method of any group accepts the future as
    an argument in place of the value; the value then moves directly between ranks."""

    def __init__(self, ranks: ActorGroup, calls: Sequence[Call], plan: _Plan) -> None:
        self._ranks, self._calls, self._plan = ranks, tuple(calls), plan

    def get(self, timeout_s: float | None = None) -> Any:
        """Waits for the value. Raises a rank's exception, ActorDied if a rank died, RoleFailed after `timeout_s`."""
        results = self._ranks.results(self._calls, timeout_s)
        return self._plan.collect([results[number] for number in self._plan.chosen])

    def done(self) -> bool:
        """Returns whether every rank has answered or died."""
        refs = [call.ref for call in self._calls]
        return not ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[1]

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> object:
        await self._ranks.settled(self._calls)
        return await asyncio.to_thread(self.get)

    def travelling(self) -> object:
        """Returns the form of the value that is sent to other ranks, which fetch it from the ranks that compute it."""
        if self._plan.own:
            return self.get()  # a user's collect function runs in this process
        return Pending(tuple(self._calls[number] for number in self._plan.chosen), self._plan.collect)

    def piece(self, part: int, parts: int) -> Piece | Pending:
        """Returns the share of data rank `part` of `parts`, in the form that is sent to it."""
        whole = self.travelling()
        if not isinstance(whole, Pending):
            return share(whole, part, parts)
        if self._plan.collect is gathered and len(whole.calls) == parts:
            return Pending(whole.calls[part : part + 1], _passed_on)
        return Pending(whole.calls, partial(_share_of, whole.collect, part, parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.travelling(),)


DataProtoFuture = DataFuture
"""verl's name of DataFuture."""


def _itself(value: T) -> T:
    return value


def _first(values: list[T]) -> T:
    return values[0]


def _passed_on(pieces: list[Piece]) -> Piece:
    return pieces[0].passed_on()


def _share_of(collect: Callable[[list[Any]], Any], part: int, parts: int, values: list[Any]) -> Piece:
    return share(collect(values), part, parts)


@dataclass(frozen=True)
class _Plan:
    """One call of a group's method, as calls to its ranks."""

    inputs: Mapping[int, Any]
    """Called rank -> references to its arguments in the object store."""
    chosen: Sequence[int]
    """Positions, among the called ranks, of the ranks whose results are collected."""
    collect: Callable[[list[Any]], Any]
    splits: bool = False
    own: bool = False
    """Whether `collect` is a user's function, which runs in this process."""


class RayWorkerGroup:
    """One process with a worker per place of a pool. The group has the registered methods of the worker class."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedClasses,
        *,
        name: str | None = None,
        name_prefix: str | None = None,
        run_dir: Path | None = None,
        threads: int = 1,
        deadline_s: float = 3600.0,
    ) -> None:
        """Returns once every worker is built. Raises a constructor's exception, and RoleFailed if a rank is missing.

        `name` (or `name_prefix`) identifies the group in errors and logs; by default, its classes or roles. Rank 1 is
        `<name>-rank-1`. The processes write to `log.txt` in `run_dir`, or to the terminal without one. `threads` is the
        number of threads for model work in each process. `deadline_s` limits every call.
        """
        self._name = name or name_prefix or ray_cls_with_init.name
        self._classes, self._layout = dict(ray_cls_with_init.roles), None
        self._deadline_s = deadline_s
        for made in self._classes.values():
            _refuse_hidden(made.cls)
        self._ranks = ActorGroup(
            self._name,
            resource_pool,
            RankWorkers,
            self._classes,
            run_dir=run_dir,
            threads=threads,
            deadline_s=deadline_s,
        )
        self._become("", self._classes.get(""))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._ranks.names)

    @property
    def data_size(self) -> int:
        """Number of shares that values with rows are split into."""
        return self._places()[0].data_size

    @property
    def names(self) -> list[str]:
        """The names of the processes, by rank."""
        return list(self._ranks.names)

    def spawn(self, prefix_set: Iterable[Any]) -> dict[str, Any]:
        """Returns a view of the group per role: the same processes, with the methods of that role's worker."""
        views: dict[str, Any] = {}
        for role in map(str, prefix_set):
            if role not in self._classes:
                raise ConfigError(
                    f"the role {role!r} of {self._name}",
                    f"its roles are {', '.join(self._classes)}",
                    "name it in create_colocated_worker_cls",
                )
            views[role] = copy.copy(self)
            views[role]._become(role, self._classes[role])
        return views

    def fuse(self, prefix_set: Iterable[Any]) -> None:
        """Makes a view of each role of a fused worker class an attribute of the group. Raises ConfigError for a role
        that the class does not hold."""
        fused: Mapping[str, RayClassWithInitArgs] = getattr(self._cls, "fused", {})
        for role in map(str, prefix_set):
            if role not in fused:
                found = f"the worker class holds {', '.join(fused) or 'no roles'}"
                do = "name one of them, or build the class with create_colocated_worker_raw_cls"
                raise ConfigError(f"a view of the role {role!r}", found, do)
            view = copy.copy(self)
            view._become(role, fused[role])
            setattr(self, role, view)

    def execute_all_sync(self, method_name: str, *args: object, **kwargs: object) -> list[Any]:
        """Returns the result of a method on each rank. If all arguments are lists with an entry per rank, each rank
        receives its entries; otherwise every rank receives all arguments."""
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_all_async(self, method_name: str, *args: object, **kwargs: object) -> DataFuture:
        """Like `execute_all_sync`, but returns a DataFuture."""
        return self._start(method_name, _Plan(self._distributed(args, kwargs), range(self.world_size), _listing))

    def execute_rank_zero_sync(self, method_name: str, *args: object, **kwargs: object) -> Any:
        """Runs a method on rank 0 only, and returns its result."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    def execute_rank_zero_async(self, method_name: str, *args: object, **kwargs: object) -> DataFuture:
        """Like `execute_rank_zero_sync`, but returns a DataFuture."""
        return self.execute_rank_async(0, method_name, *args, **kwargs)

    def execute_rank_async(self, rank: int, method_name: str, *args: object, **kwargs: object) -> DataFuture:
        """Runs a method on one rank only, and returns a DataFuture of its result."""
        return self._start(method_name, _Plan({rank: put_inputs(*args, **kwargs)}, [0], _first))

    async def watch(self) -> None:
        """Waits until a rank dies, then raises ActorDied with the name of the rank."""
        await self._ranks.watch()

    def shutdown(self) -> None:
        """Stops every process of the group, even during a call. This ends all views of the group."""
        self._ranks.shutdown()

    def __enter__(self) -> RayWorkerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        methods: Mapping[str, Registered] = vars(self).get("_methods", {})
        if name not in methods:
            known = ", ".join(methods) or "none, before spawn() has made a view of each role"
            raise AttributeError(f"{vars(self).get('_name')} has no registered method {name!r}; registered: {known}")
        return partial(self._perform, name, methods[name])

    def _become(self, role: str, made: RayClassWithInitArgs | None) -> None:
        """Makes this object the view of a role, or of no role if every role has its own view."""
        self._role, self._layout = role, None
        self._methods = {} if made is None else registered_methods(made.cls)
        self._cls = None if made is None else made.cls

    # ------------------------------------------------------------------ calling

    def _perform(self, name: str, known: Registered, *args: object, **kwargs: object) -> object:
        future = self._start(name, self._plan(name, known, args, kwargs), known.materialize_futures)
        return future.get() if known.blocking else future

    def _start(self, method: str, plan: _Plan, materialize: bool = True) -> DataFuture:
        if not hasattr(self._cls, method):
            raise AttributeError(f"the workers of {self._name} have no method {method!r}")
        call = WorkerCall(self._role, method, plan.splits, materialize, self._deadline_s)
        is_coroutine = inspect.iscoroutinefunction(getattr(self._cls, method))
        calls = self._ranks.call(
            "call_coroutine" if is_coroutine else "call",
            plan.inputs,
            call,
            wanted=[rank for place, rank in enumerate(plan.inputs) if place in plan.chosen],
        )
        # The future keeps no references to the arguments, so that Ray can free them after the call.
        return DataFuture(self._ranks, calls, replace(plan, inputs={}))

    def _plan(self, name: str, known: Registered, args: Sequence[object], kwargs: Mapping[str, object]) -> _Plan:
        """Assigns arguments to ranks by the method's dispatch rule."""
        rule, every_rank = known.dispatch_mode, range(self.world_size)
        if rule in SPLITS:
            return self._split(name, rule is Dispatch.DP_COMPUTE_METRIC, args, kwargs)
        if isinstance(rule, OwnRule):
            rank_args, rank_kwargs = rule.dispatch_fn(self, *args, **kwargs)
            plan = _Plan(
                self._exactly(name, rank_args, rank_kwargs), every_rank, partial(rule.collect_fn, self), own=True
            )
        elif rule is Dispatch.DP_COMPUTE:
            plan = _Plan(self._exactly(name, args, kwargs), every_rank, _listing)
        elif rule is Dispatch.ALL_TO_ALL:
            plan = _Plan(self._distributed(args, kwargs), every_rank, _listing)
        else:
            plan = _Plan(dict.fromkeys(every_rank, put_inputs(*args, **kwargs)), every_rank, _listing)
        if known.execute_mode is Execute.RANK_ZERO or rule is Dispatch.RANK_ZERO:
            return replace(plan, inputs={0: plan.inputs[0]}, chosen=[0], collect=plan.collect if plan.own else _first)
        return plan

    def _exactly(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        lengths = [len(value) if isinstance(value, list | tuple) else -1 for value in (*args, *kwargs.values())]
        if set(lengths) - {self.world_size}:
            raise DataError(
                f"the arguments of {name} as lists with an entry for each of {self.world_size} ranks",
                f"their lengths are {lengths} (-1: no list)",
                "give one entry per rank, or choose another rule",
            )
        return self._distributed([list(value) for value in args], {key: list(value) for key, value in kwargs.items()})

    def _distributed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        values = [*args, *kwargs.values()]
        ranks = range(self.world_size)
        if not values or any(not isinstance(value, list) or len(value) != len(ranks) for value in values):
            return dict.fromkeys(ranks, put_inputs(*args, **kwargs))
        return {rank: put_inputs(*(v[rank] for v in args), **{k: v[rank] for k, v in kwargs.items()}) for rank in ranks}

    def _split(self, name: str, as_list: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Plan:
        """Splits arguments with rows by data rank. Ranks with the same data rank receive the same share."""
        places = self._places()
        size = places[0].data_size
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        common_rows({key: value for key, value in named.items() if not isinstance(value, DataFuture)})
        shares = {key: _shares(value, size) for key, value in named.items()}
        inputs = [
            put_inputs(
                *(shares[number][part] for number in range(len(args))), **{key: shares[key][part] for key in kwargs}
            )
            for part in range(size)
        ]
        collecting = {place.data_rank: rank for rank, place in enumerate(places) if place.collects}
        return _Plan(
            {rank: inputs[place.data_rank] for rank, place in enumerate(places)},
            [collecting[part] for part in range(size)],
            listed if as_list else gathered,
            splits=True,
        )

    def _places(self) -> list[Place]:
        """Returns the place of each rank, as its worker set it. The first call that splits fixes the places."""
        if self._layout is None:
            places: list[Place] = self.execute_all_sync("place")
            collecting = sorted(place.data_rank for place in places if place.collects)
            sizes = {place.data_size for place in places}
            if len(sizes) != 1 or collecting != list(range(sizes.pop())):
                raise ConfigError(
                    f"the data ranks of {self._name}",
                    ", ".join(map(str, places)),
                    "have each worker call set_data_rank so that each share is collected from one rank",
                )
            self._layout = places
        return self._layout


def _refuse_hidden(worker: type[Worker]) -> None:
    """Raises ConfigError if methods of a group would hide registered methods of its workers."""
    clash = sorted(name for name in registered_methods(worker) if hasattr(RayWorkerGroup, name))
    if clash:
        raise ConfigError(
            f"the methods {', '.join(clash)} of {worker.__name__} as methods of a worker group",
            "a group has methods of these names itself",
            "give the worker's methods other names",
        )


def _shares(value: object, size: int) -> list[Any]:
    if isinstance(value, DataFuture):
        return [value.piece(part, size) for part in range(size)]
    return [value] * size if num_rows(value) is None else split(value, size)


def _listing(values: list[T]) -> list[T]:
    return values
