"""Several processes, on one machine or many, that do the same: called as one, dead as one.

A group has the registered methods of its worker class. The first rank that fails or dies ends every call that waits for
the group at once, and names the rank; then nothing is left but to shut the group down.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trivium.cluster.dispatch import SPLITS, Dispatch, Execute, OwnRule, Registered, registered_methods
from trivium.cluster.pools import ResourcePool
from trivium.cluster.remote import Answer, Gone, blame
from trivium.cluster.rows import Piece, common_rows, gathered, listed, num_rows, share, split
from trivium.cluster.worker import Ask, Part, Pending, Place, Rank, Worker
from trivium.errors import ConfigError, DataError, RoleFailed, TriviumError

_AT_ONCE = 100_000
"""Calls that a rank takes at once; all but coroutines wait for their turn."""
_LOOK_S = 1.0
"""How often one who waits looks up, so that signals reach the process."""
_GRACE_S = 3.0
"""Where a rank fails, another one may have died: how long to listen for that before saying which it was."""
_END_S = 20.0
"""How long processes may take to end."""


class RayClassWithInitArgs:
    """A worker class and what its instances are built with, on every rank."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        """`cls` is a subclass of Worker, or what `ray.remote` makes of one."""
        remote = getattr(cls, "__ray_metadata__", None)
        self.cls: type[Worker] = remote.modified_class if remote is not None else cls
        self.args, self.kwargs = args, kwargs
        if not (isinstance(self.cls, type) and issubclass(self.cls, Worker)):
            raise ConfigError(f"{cls!r} as the class of workers", "it is no Worker", "derive it from Worker")

    @property
    def roles(self) -> dict[str, RayClassWithInitArgs]:
        """What is built in each process, by role."""
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
    """Several roles (their names, or `Role`) in each process. `RayWorkerGroup.spawn` gives each its own view."""
    return ColocatedClasses({str(role): made for role, made in class_dict.items()})


class DataFuture:
    """What a call will return. `get()` it, `await` it, or pass it on: a method of any group takes it in place of the
    value, which then goes from rank to rank."""

    def __init__(self, ranks: _Ranks, asked: Sequence[Part], call: _Call) -> None:
        self._ranks, self._asked, self._call = ranks, tuple(asked), call

    def get(self, timeout_s: float | None = None) -> Any:
        """Waits for the value. Raises what a rank raised, Gone where one died, RoleFailed after `timeout_s`."""
        answers = self._ranks.answers(self._asked, timeout_s)
        return self._call.collect([answers[number] for number in self._call.chosen])

    def done(self) -> bool:
        """Whether every rank has answered, or died."""
        refs = [part.ref for part in self._asked]
        return not ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[1]

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        await self._ranks.settled(self._asked)
        return await asyncio.to_thread(self.get)

    def travelling(self) -> Any:
        """The value as it goes to other ranks: they get it from those who make it."""
        if self._call.own:
            return self.get()  # what a user's function makes of the answers, it makes here
        return Pending(tuple(self._asked[number] for number in self._call.chosen), self._call.collect)

    def piece(self, part: int, parts: int) -> Any:
        """The share of data rank `part` of `parts`, as it goes there."""
        whole = self.travelling()
        if not isinstance(whole, Pending):
            return share(whole, part, parts)
        if self._call.collect is gathered and len(whole.parts) == parts:
            return Pending(whole.parts[part : part + 1], _passed_on)
        return Pending(whole.parts, partial(_share_of, whole.collect, part, parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.travelling(),)


def _itself(value: Any) -> Any:
    return value


def _first(values: list[Any]) -> Any:
    return values[0]


def _passed_on(pieces: list[Piece]) -> Piece:
    return pieces[0].passed_on()


def _share_of(collect: Callable[[list[Any]], Any], part: int, parts: int, values: list[Any]) -> Piece:
    return share(collect(values), part, parts)


Inputs = tuple[Sequence[Any], Mapping[str, Any]]
"""Arguments and named arguments of one call of a worker's method."""


@dataclass(frozen=True)
class _Call:
    """One call of a group's method, as calls of its ranks."""

    inputs: Mapping[int, Any]
    """What each rank that is called is given, where it lies in the object store."""
    chosen: Sequence[int]
    """The places, among those that are called, of those whose answers are collected."""
    collect: Callable[[list[Any]], Any]
    splits: bool = False
    own: bool = False
    """Whether `collect` is a user's, and stays in this process."""


class _Ranks:
    """The processes of a group, whatever roles they have."""

    def __init__(self, names: Sequence[str], actors: Sequence[Any], deadline_s: float) -> None:
        self.names, self.actors, self.deadline_s = list(names), list(actors), deadline_s
        self.ended = False
        self._caller = uuid.uuid4().hex
        self._numbers = [0] * len(actors)
        self._lock = threading.Lock()
        """All ranks hear of calls in one order, whichever thread makes them."""
        self._lives = [Part(actor.live.remote(), name) for actor, name in zip(actors, names, strict=True)]
        """Calls that only the death of a process ends."""

    def ask(self, ask: Ask, call: _Call) -> list[Part]:
        """Makes the calls; the answers to come."""
        if self.ended:
            raise TriviumError(f"{ask.method} of {self.names[0]}", "the group was shut down", "build a new group")
        parts: list[Part] = []
        with self._lock:
            for number, (rank, inputs) in enumerate(call.inputs.items()):
                this = replace(ask, keeps=number in call.chosen)
                ref = self.actors[rank].call.remote(self._caller, self._numbers[rank], this, inputs)
                self._numbers[rank] += 1
                parts.append(Part(ref, self.names[rank]))
        return parts

    def answers(self, parts: Sequence[Part], timeout_s: float | None = None) -> list[Any]:
        """What the ranks answer. Raises the likeliest first cause as soon as one of them failed, or any rank died."""
        patience_s = self.deadline_s if timeout_s is None else timeout_s
        end = time.monotonic() + patience_s
        waiting = {part.ref: number for number, part in enumerate(parts)}
        answers: list[Any] = [None] * len(parts)
        while waiting:
            refs = [*waiting, *(life.ref for life in self._lives)]
            look_s = min(_LOOK_S, max(end - time.monotonic(), 0.0))
            done, _ = ray.wait(refs, num_returns=1, timeout=look_s, fetch_local=False)
            if failures := [self._died(life) for life in self._lives if life.ref in done]:
                raise failures[0]
            for ref in done:
                number = waiting.pop(ref)
                answer = parts[number].answer()
                if answer.error is not None:
                    raise self._first_cause(answer.error, [parts[other] for other in waiting.values()])
                answers[number] = answer.value
            if not done and time.monotonic() >= end:
                silent = ", ".join(parts[number].owner for number in waiting.values())
                raise RoleFailed(silent, f"no answer after {patience_s:.0f} s")
        return answers

    async def settled(self, parts: Sequence[Part]) -> None:
        """Returns once all have answered, one of them failed, or any rank died."""
        waiting = {asyncio.ensure_future(_answered(part)) for part in parts}
        while waiting and not self._dead(0):
            done, waiting = await asyncio.wait(waiting, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() is not None for task in done):
                break
        for task in waiting:
            task.cancel()

    async def first_death(self) -> None:
        """Returns never. Raises what ended the first process that ends."""
        waiting = {asyncio.ensure_future(_answered(life)): life for life in self._lives}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            raise self._died(waiting[done.pop()])
        finally:
            for task in waiting:
                task.cancel()

    def end(self) -> None:
        """Ends the processes; returns once none is left."""
        self.ended = True
        for actor in self.actors:
            ray.kill(actor)
        refs = [life.ref for life in self._lives]
        ray.wait(refs, num_returns=len(refs), timeout=_END_S, fetch_local=False)

    def _first_cause(self, error: BaseException, others: Sequence[Part]) -> BaseException:
        """Of the error and those that the other ranks have or will have in a moment, the one that explains the rest."""
        end, errors = time.monotonic() + _GRACE_S, [error]
        waiting = {part.ref: part for part in others}
        while waiting and (patience_s := end - time.monotonic()) > 0:
            refs = [*waiting, *(life.ref for life in self._lives)]
            done, _ = ray.wait(refs, num_returns=1, timeout=patience_s, fetch_local=False)
            if dead := [self._died(life) for life in self._lives if life.ref in done]:
                return dead[0]
            errors += [found for ref in done if (found := waiting.pop(ref).answer().error) is not None]
        return min(errors, key=blame)

    def _dead(self, patience_s: float) -> list[Part]:
        lives = {life.ref: life for life in self._lives}
        done, _ = ray.wait(list(lives), num_returns=1, timeout=patience_s, fetch_local=False)
        return [lives[ref] for ref in done]

    def _died(self, life: Part) -> BaseException:
        if self.ended:
            return TriviumError(f"an answer of {life.owner}", "the group was shut down", "wait for calls before that")
        return life.answer().error or Gone(life.owner, "its process has ended")


async def _answered(part: Part) -> BaseException | None:
    """Waits for an answer; what was wrong with it."""
    try:
        answer: Answer = await part.ref
    except RayError as error:
        return error
    return answer.error


class RayWorkerGroup:
    """A process per place of a pool, each with a worker; its methods are the registered ones of the worker class."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedClasses,
        *,
        name: str | None = None,
        run_dir: Path | None = None,
        threads: int = 1,
        deadline_s: float = 3600.0,
    ) -> None:
        """Returns once every worker is built. Raises what building one raises, and RoleFailed where one does not come.

        `name` is what errors and logs call the group (unsaid: its classes or roles); rank 1 is `<name>-rank-1`. Its
        processes write to `log.txt` in `run_dir`, else to the terminal. `threads` are for model work of each; no call
        takes longer than `deadline_s`.
        """
        self._name = ray_cls_with_init.name if name is None else name
        self._pool, self._releases = resource_pool, not resource_pool.seats
        self._classes, self._layout = dict(ray_cls_with_init.roles), None
        for made in self._classes.values():
            _refuse_hidden(made.cls)
        cpus, gpus = resource_pool.admit()
        names = [f"{self._name}-rank-{rank}" for rank in range(resource_pool.world_size)]
        actors = [
            ray.remote(Rank).options(
                num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0, max_concurrency=_AT_ONCE,
                scheduling_strategy=PlacementGroupSchedulingStrategy(seat.group, seat.bundle),
            ).remote(each, run_dir, threads)
            for each, seat in zip(names, resource_pool.seats, strict=True)
        ]  # fmt: skip
        self._ranks = _Ranks(names, actors, deadline_s)
        try:
            self._build()
        except BaseException:
            self.shutdown()
            raise
        self._become("", self._classes.get(""))

    @property
    def world_size(self) -> int:
        """How many ranks it has."""
        return len(self._ranks.names)

    @property
    def data_size(self) -> int:
        """How many shares values with rows are split into."""
        return self._places()[0].data_size

    @property
    def names(self) -> list[str]:
        """The names of the processes, by rank."""
        return list(self._ranks.names)

    def spawn(self, prefix_set: Iterable[Any]) -> dict[str, Any]:
        """A view of the group for each of these roles: the same processes, with the methods of that role's worker."""
        views: dict[str, Any] = {}
        for role in map(str, prefix_set):
            if role not in self._classes:
                raise ConfigError(
                    f"the role {role!r} of {self._name}", f"its roles are {', '.join(self._classes)}",
                    "name it in create_colocated_worker_cls",
                )  # fmt: skip
            views[role] = copy.copy(self)
            views[role]._become(role, self._classes[role])
        return views

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """What a method returns on each rank. Where all arguments are lists with an entry per rank, they are dealt out;
        else every rank is given the same."""
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> DataFuture:
        """The same, to come."""
        return self._start(method_name, _Call(self._dealt(args, kwargs), range(self.world_size), _listing))

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """What a method returns on rank 0, which alone runs it."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> DataFuture:
        """The same, to come."""
        return self.execute_rank_async(0, method_name, *args, **kwargs)

    def execute_rank_async(self, rank: int, method_name: str, *args: Any, **kwargs: Any) -> DataFuture:
        """What a method returns on one rank, which alone runs it, to come."""
        return self._start(method_name, _Call({rank: _put(args, kwargs)}, [0], _first))

    async def watch(self) -> None:
        """Waits until a rank dies, and raises Gone, which names it."""
        await self._ranks.first_death()

    def shutdown(self) -> None:
        """Ends every process of the group, whatever it does, and all views of it with them. Once is enough."""
        if self._ranks.ended:
            return
        self._ranks.end()
        self._pool.leave()
        if self._releases:
            self._pool.release()

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

    # ------------------------------------------------------------------ building

    def _build(self) -> None:
        """Tells the ranks where they meet, and builds their workers, all at a time: they may meet while they do."""
        ranks, seats = self._ranks, self._pool.seats
        (address, port), *_ = ranks.answers([Part(ranks.actors[0].open_store.remote(), ranks.names[0])])
        building: list[Part] = []
        for rank, seat in enumerate(seats):
            environment = {
                "RANK": rank, "WORLD_SIZE": len(seats), "LOCAL_RANK": seat.bundle, "LOCAL_WORLD_SIZE": seat.local_size,
                "MASTER_ADDR": address, "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 has opened the port already, and keeps it open
            }  # fmt: skip
            texts = {name: str(value) for name, value in environment.items()}
            building.append(Part(ranks.actors[rank].build.remote(texts, self._classes), ranks.names[rank]))
        ranks.answers(building)

    def _become(self, role: str, made: RayClassWithInitArgs | None) -> None:
        """The view of one role; of none, where each has its own."""
        self._role, self._layout = role, None
        self._methods = {} if made is None else registered_methods(made.cls)
        self._cls = None if made is None else made.cls

    # ------------------------------------------------------------------ calling

    def _perform(self, name: str, known: Registered, *args: Any, **kwargs: Any) -> Any:
        future = self._start(name, self._plan(name, known, args, kwargs), known.materialize_futures)
        return future.get() if known.blocking else future

    def _start(self, method: str, call: _Call, materialize: bool = True) -> DataFuture:
        if not hasattr(self._cls, method):
            raise AttributeError(f"the workers of {self._name} have no method {method!r}")
        ask = Ask(
            self._role, method, splits=call.splits, materialize=materialize, deadline_s=self._ranks.deadline_s
        )  # fmt: skip
        # The arguments may go once they were used, however long the future is kept.
        return DataFuture(self._ranks, self._ranks.ask(ask, call), replace(call, inputs={}))

    def _plan(self, name: str, known: Registered, args: Any, kwargs: Any) -> _Call:
        """Who is given what, by the rule of the method."""
        rule, everybody = known.dispatch_mode, range(self.world_size)
        if rule in SPLITS:
            return self._split(name, rule is Dispatch.DP_COMPUTE_METRIC, args, kwargs)
        if isinstance(rule, OwnRule):
            dealt_args, dealt_kwargs = rule.dispatch_fn(self, *args, **kwargs)
            call = _Call(
                self._exactly(name, dealt_args, dealt_kwargs), everybody, partial(rule.collect_fn, self), own=True
            )
        elif rule is Dispatch.DP_COMPUTE:
            call = _Call(self._exactly(name, args, kwargs), everybody, _listing)
        elif rule is Dispatch.ALL_TO_ALL:
            call = _Call(self._dealt(args, kwargs), everybody, _listing)
        else:
            call = _Call(dict.fromkeys(everybody, _put(args, kwargs)), everybody, _listing)
        if known.execute_mode is Execute.RANK_ZERO or rule is Dispatch.RANK_ZERO:
            return replace(call, inputs={0: call.inputs[0]}, chosen=[0], collect=call.collect if call.own else _first)
        return call

    def _exactly(self, name: str, args: Any, kwargs: Any) -> dict[int, Any]:
        lengths = [len(value) if isinstance(value, list | tuple) else -1 for value in (*args, *kwargs.values())]
        if set(lengths) - {self.world_size}:
            raise DataError(
                f"the arguments of {name} as lists with an entry for each of {self.world_size} ranks",
                f"their lengths are {lengths} (-1: no list)", "give one entry per rank, or choose another rule",
            )  # fmt: skip
        return self._dealt([list(value) for value in args], {key: list(value) for key, value in kwargs.items()})

    def _dealt(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        values = [*args, *kwargs.values()]
        ranks = range(self.world_size)
        if not values or any(not isinstance(value, list) or len(value) != len(ranks) for value in values):
            return dict.fromkeys(ranks, _put(args, kwargs))
        return {rank: _put([v[rank] for v in args], {k: v[rank] for k, v in kwargs.items()}) for rank in ranks}

    def _split(self, name: str, as_list: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        """Shares of whatever has rows, by data rank; those who share a share are given the same."""
        places = self._places()
        size = places[0].data_size
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        common_rows({key: value for key, value in named.items() if not isinstance(value, DataFuture)})
        shares = {key: _shares(value, size) for key, value in named.items()}
        inputs = [
            _put([shares[number][part] for number in range(len(args))], {key: shares[key][part] for key in kwargs})
            for part in range(size)
        ]
        collecting = {place.data_rank: rank for rank, place in enumerate(places) if place.collects}
        return _Call(
            {rank: inputs[place.data_rank] for rank, place in enumerate(places)},
            [collecting[part] for part in range(size)], listed if as_list else gathered, splits=True,
        )  # fmt: skip

    def _places(self) -> list[Place]:
        """Which share each rank is given: as the workers say, when they are first asked."""
        if self._layout is None:
            places: list[Place] = self.execute_all_sync("place")
            collecting = sorted(place.data_rank for place in places if place.collects)
            sizes = {place.data_size for place in places}
            if len(sizes) != 1 or collecting != list(range(sizes.pop())):
                raise ConfigError(
                    f"the data ranks of {self._name}", ", ".join(map(str, places)),
                    "have each worker call set_data_rank so that each share is collected from one rank",
                )  # fmt: skip
            self._layout = places
        return self._layout


def _refuse_hidden(worker: type[Worker]) -> None:
    """Raises where methods of a group would hide those of its workers."""
    clash = sorted(name for name in registered_methods(worker) if hasattr(RayWorkerGroup, name))
    if clash:
        raise ConfigError(
            f"the methods {', '.join(clash)} of {worker.__name__} as methods of a worker group",
            "a group has methods of these names itself", "give the worker's methods other names",
        )  # fmt: skip


def _shares(value: Any, size: int) -> list[Any]:
    if isinstance(value, DataFuture):
        return [value.piece(part, size) for part in range(size)]
    return [value] * size if num_rows(value) is None else split(value, size)


def _listing(values: list[Any]) -> list[Any]:
    return values


def _put(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Arguments in the object store: once, however many ranks are given them."""
    return ray.put((list(args), dict(kwargs)))
