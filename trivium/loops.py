"""The system, on two screens: one train step, four coroutines, two halves, one run.

explore_loop    waits for a free slot in the buffer        task -> workflow x group_size -> rewards -> Group -> buffer
train_loop      waits for `groups_per_step` groups         buffer -> train_step -> publish -> evaluate, log, checkpoint
follow_weights  waits for the next published version       channel -> engine -> the buffer may admit more slots
evaluate_loop   waits for the trainer to ask               version -> Evaluator -> metrics

Synchronous, one-step-off and asynchronous runs are this file with another `max_staleness`; one process, Ray actors and
separate commands are this file with another buffer, board and channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trivium.errors import VersionGone
from trivium.metrics import aggregate
from trivium.phases import phase
from trivium.types import SCORES

if TYPE_CHECKING:
    from trivium.evaluate import Evaluator
    from trivium.explorer import Explorer
    from trivium.protocols import Algorithm, Buffer, Objective, TrainEngine, WeightChannel
    from trivium.schedule import Schedule
    from trivium.synchronizer import Synchronizer
    from trivium.trainer import Trainer
    from trivium.types import Batch, Group, Lease, Metrics


def train_step(engine: TrainEngine, groups: Sequence[Group], algorithm: Algorithm) -> Metrics:
    """Groups in, one new policy version out. The only place where a step is composed.

    groups -> filter -> experiences -> the scores the algorithm needs -> advantages -> updates -> version + 1
    """
    kept, metrics = algorithm.filter(groups)
    batch = scored(engine, algorithm.batch(kept), algorithm.needs)
    with phase("advantage"):
        batch, learned = algorithm.advantages(batch)
    updates = [
        updated(engine, mini_batch, objective, epoch)
        for epoch in range(algorithm.epochs)
        for mini_batch in mini_batches(batch, algorithm.mini_batches)
        for objective in algorithm.objectives_at(engine.version)
    ]
    engine.version += 1
    # Engine and trainer are compared before the first update, not after it; best over the whole step, where `learned`
    # holds it.
    before: Metrics = {}
    for row in reversed(updates):
        before |= {key: value for key, value in row.items() if key.startswith("mismatch/")}
    return {**metrics, **aggregate(updates), **before, **learned, "train/version": engine.version}


def scored(engine: TrainEngine, batch: Batch, needs: Iterable[str]) -> Batch:
    """The batch with these scores of the current models."""
    for what in sorted(needs):
        with phase(f"score/{what}", batch):
            batch = batch.with_columns(**{SCORES[what]: engine.score(batch, what)})
    return batch


def updated(engine: TrainEngine, mini_batch: Batch, objective: Objective, epoch: int) -> Metrics:
    """One update of one role, and what was measured before it."""
    ready = selected(engine, mini_batch, objective, epoch)
    with phase(f"update/{objective.role}", ready):
        return {**engine.update(objective.role, ready, objective), **ready.metrics}


def selected(engine: TrainEngine, mini_batch: Batch, objective: Objective, epoch: int) -> Batch:
    """The mini-batch with what the objective decides over all of it, under the current weights, before it is cut."""
    return objective.select(scored(engine, mini_batch, objective.looks_at), engine.version, epoch)


def mini_batches(batch: Batch, number: int) -> Iterator[Batch]:
    """The batch in `number` consecutive parts of whole groups, as equal as they can be; fewer if groups are fewer."""
    ids = list(dict.fromkeys(experience.group_id for experience in batch.experiences))
    place = {group_id: rank * min(number, len(ids)) // len(ids) for rank, group_id in enumerate(ids)}
    for part in range(min(number, len(ids))):
        yield batch.select([row for row, e in enumerate(batch.experiences) if place[e.group_id] == part])


async def explore_loop(explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> None:
    """Plays slot after slot, as many at once as the buffer admits.

    Consumes: slots. Waits for: the buffer's admission. Unblocked by: `take`, `advance`.
    """
    playing: dict[Lease, asyncio.Task[None]] = {}

    async def play(lease: Lease) -> None:
        await buffer.put(explorer.name, await explorer.fill(schedule, lease))

    async def call_off() -> None:
        while True:
            for lease in await buffer.called_off(explorer.name):
                if lease in playing:  # else it finished in the same moment
                    playing[lease].cancel()

    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(call_off(), name="call_off")
        while True:
            try:
                lease = await next_lease(explorer, buffer, schedule, synchronizer)
            except StopAsyncIteration:
                break
            task = playing[lease] = tasks.create_task(play(lease), name=f"slot-{lease.slot}")
            task.add_done_callback(lambda _, lease=lease: playing.pop(lease, None))
        for task in (calling, *playing.values()):  # the stage is over: what is still being played has no use
            task.cancel()


async def next_lease(explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> Lease:
    """Waits for a slot; tells the trainer whether newer weights are wanted: by who has nothing to play, or has played
    enough with these. Raises StopAsyncIteration once the buffer is closed."""

    def ask() -> None:
        wants = explorer.idle or synchronizer.interval_over(explorer.leased / schedule.fresh_per_step)
        if wants != explorer.asking:
            explorer.asking = wants
            synchronizer.ask(explorer.name, wants)

    lease = await buffer.lease(explorer.name, wait=False)
    if lease is None:
        explorer.idle = True
        ask()
        lease = await buffer.lease(explorer.name)
    assert lease is not None
    explorer.idle = False
    explorer.leased += 1
    ask()
    return lease


async def follow_weights(
    explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer, channel: WeightChannel
) -> None:
    """Adopts version after version.

    Consumes: published versions. Waits for: the trainer's `publish`; in a deterministic run also for the slots of the
    version it leaves. Unblocked by: `publish`, `put`.
    """
    loaded: int | None = None
    while True:
        version = await synchronizer.next_version(explorer.name, loaded, newest=not schedule.ordered)
        if schedule.ordered and loaded is not None:
            try:
                await buffer.drained(loaded)
            except StopAsyncIteration:  # the stage is over
                return
        try:
            await explorer.adopt(version, channel)
        except VersionGone:
            # Newer ones took its place, or the exchange broke off: what is offered now will do. A version that is no
            # longer kept has no slots left to play: other explorers have played them.
            if not synchronizer.collective:
                if synchronizer.published[-1:] == (version,):
                    raise  # there is nothing newer to ask for
                loaded = version
            continue
        loaded = version
        explorer.leased, explorer.asking = 0, explorer.idle
        synchronizer.adopted(explorer.name, version, wants=explorer.idle)
        await buffer.advance(explorer.name, version)


async def evaluate_loop(explorer: Explorer, evaluator: Evaluator, synchronizer: Synchronizer) -> None:
    """Plays the evaluations that the trainer asks for.

    Consumes: requests. Waits for: a request for the version it has loaded. Unblocked by: `Synchronizer.evaluation`.
    """
    answered = 0
    while True:
        answered, version = await synchronizer.next_evaluation(explorer.name, answered)
        synchronizer.answer_evaluation(answered, await evaluator.run(version))


async def train_loop(trainer: Trainer) -> None:
    """Trains step after step until the stage, or the data, is over.

    Consumes: groups. Waits for: the buffer, and for an explorer where an evaluation is due. Unblocked by: `put`.
    """
    try:
        await trainer.begin()
        while trainer.train_continue:
            await trainer.train_step()
            if trainer.need_sync():
                await asyncio.to_thread(trainer.sync_weight)
            await trainer.conclude_step()
        await trainer.finish()
    finally:
        await trainer.saved()  # whatever ends the run, the checkpoint that is being written is worth waiting for


Explore = Callable[["Explorer", "Buffer", "Schedule", "Synchronizer"], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Parts:
    """What one stage of a run consists of, or one half of it."""

    buffer: Buffer
    schedule: Schedule
    synchronizer: Synchronizer
    channel: WeightChannel
    trainer: Trainer | None = None
    """None in a process that only explores."""
    explorer: Explorer | None = None
    """None where nothing is explored and nothing evaluated, or somebody else does it."""
    evaluator: Evaluator | None = None
    """None where nothing is evaluated, or somebody else does it."""
    stage: int = 0
    is_last: bool = True
    explore: Explore = explore_loop
    """What fills the buffer: the schedule's tasks, or agents that come with their own."""


async def run(parts: Parts) -> None:
    """Both halves in one task group: the first failure cancels the rest and is raised."""
    if parts.trainer is not None:
        parts.synchronizer.open(parts.stage, last=parts.is_last)
    async with asyncio.TaskGroup() as halves:
        if parts.explorer is not None:
            halves.create_task(explore_half(parts, parts.explorer), name=parts.explorer.name)
        if parts.trainer is not None:
            halves.create_task(train_half(parts, parts.trainer), name=parts.trainer.name)


async def train_half(parts: Parts, trainer: Trainer) -> None:
    """Trains to the end of the stage, beside whoever explores."""
    with parts.synchronizer.obituary(trainer.name), parts.synchronizer.heart(trainer.name):
        async with asyncio.TaskGroup() as tasks:
            tending = tasks.create_task(parts.synchronizer.tend(trainer.name, parts.buffer.release), name="tend")
            await train_loop(trainer)
            await parts.buffer.close()
            parts.synchronizer.finish()
            tending.cancel()


async def explore_half(parts: Parts, explorer: Explorer) -> None:
    """Explores and evaluates until the trainer is done with the stage."""
    synchronizer = parts.synchronizer
    if not await synchronizer.join(explorer.name):
        return
    with synchronizer.obituary(explorer.name), synchronizer.heart(explorer.name):
        async with asyncio.TaskGroup() as tasks:
            following = follow_weights(explorer, parts.buffer, parts.schedule, synchronizer, parts.channel)
            roles: dict[str, Coroutine[Any, Any, None]] = {
                "tend": synchronizer.tend(explorer.name), "follow_weights": following
            }  # fmt: skip
            if parts.buffer.explored:
                roles["explore"] = parts.explore(explorer, parts.buffer, parts.schedule, synchronizer)
            if parts.evaluator is not None:
                roles["evaluate_loop"] = evaluate_loop(explorer, parts.evaluator, synchronizer)
            helpers = [tasks.create_task(role, name=name) for name, role in roles.items()]
            await synchronizer.finished(explorer.name)
            for helper in helpers:
                helper.cancel()
