"""The system, on two screens: one train step, three coroutines, one run.

explore_loop    waits for a free slot in the buffer        task -> workflow x group_size -> rewards -> Group -> buffer
train_loop      waits for `groups_per_step` groups         buffer -> train_step -> publish -> evaluate, log, checkpoint
follow_weights  waits for the next published version       channel -> engine -> the buffer may admit more slots

Synchronous, one-step-off and asynchronous runs are this file with another `max_staleness`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trivium.metrics import aggregate
from trivium.types import SCORES

if TYPE_CHECKING:
    from trivium.explorer import Explorer
    from trivium.protocols import Algorithm, Buffer, Objective, TrainEngine, WeightChannel
    from trivium.schedule import Schedule
    from trivium.synchronizer import Synchronizer
    from trivium.trainer import Trainer
    from trivium.types import Batch, Group, Metrics


def train_step(engine: TrainEngine, groups: Sequence[Group], algorithm: Algorithm) -> Metrics:
    """Groups in, one new policy version out. The only place where a step is composed.

    groups -> filter -> experiences -> the scores the algorithm needs -> advantages -> updates -> version + 1
    """
    kept, metrics = algorithm.filter(groups)
    batch = algorithm.batch(kept)
    batch, learned = algorithm.advantages(scored(engine, batch, algorithm.needs))
    updates = [
        updated(engine, mini_batch, objective, epoch)
        for epoch in range(algorithm.epochs)
        for mini_batch in mini_batches(batch, algorithm.mini_batches)
        for objective in algorithm.objectives
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
        batch = batch.with_columns(**{SCORES[what]: engine.score(batch, what)})
    return batch


def updated(engine: TrainEngine, mini_batch: Batch, objective: Objective, epoch: int) -> Metrics:
    """One update of one role, and what was measured before it."""
    ready = selected(engine, mini_batch, objective, epoch)
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


async def explore_loop(explorer: Explorer, buffer: Buffer, schedule: Schedule) -> None:
    """Plays slot after slot, as many at once as the buffer admits.

    Consumes: slots. Waits for: the buffer's admission. Unblocked by: `take`, `advance`.
    """

    async def play(slot: int) -> None:
        assignment = schedule.at(slot)
        keys = [schedule.key(assignment, index) for index in range(schedule.group_size)]
        greedy = schedule.key(assignment, schedule.group_size) if explorer.greedy_baseline else None
        group = await explorer.play(
            assignment.task, keys, slot=slot, epoch=assignment.epoch, attempt=buffer.attempt(slot), greedy=greedy
        )
        await buffer.put(explorer.name, group)

    async with asyncio.TaskGroup() as playing:
        while True:
            try:
                slot = await buffer.lease(explorer.name)
            except StopAsyncIteration:
                return
            playing.create_task(play(slot), name=f"slot-{slot}")


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
            await buffer.drained(loaded)
        await explorer.adopt(version, channel)
        loaded = version
        synchronizer.adopted(explorer.name, version)
        await buffer.advance(explorer.name, version)


async def train_loop(trainer: Trainer) -> None:
    """Trains step after step until the stage is done.

    Consumes: groups. Waits for: the buffer, and for adoption where an evaluation is due. Unblocked by: `put`.
    """
    await trainer.begin()
    while trainer.train_continue:
        await trainer.train_step()
        if trainer.need_sync():
            await asyncio.to_thread(trainer.sync_weight)
        await trainer.conclude_step()
    await trainer.finish()


@dataclass(frozen=True)
class Parts:
    """What one stage of a run consists of."""

    trainer: Trainer
    buffer: Buffer
    schedule: Schedule
    synchronizer: Synchronizer
    channel: WeightChannel
    explorer: Explorer | None
    """None where nothing is explored and nothing evaluated."""


async def run(parts: Parts) -> None:
    """Both halves in one task group: the first failure cancels the rest and is raised."""
    async with asyncio.TaskGroup() as roles:
        helpers: list[asyncio.Task[None]] = []
        if parts.explorer is not None:
            following = follow_weights(parts.explorer, parts.buffer, parts.schedule, parts.synchronizer, parts.channel)
            helpers.append(roles.create_task(following, name="follow_weights"))
        if parts.explorer is not None and parts.buffer.explored:
            helpers.append(
                roles.create_task(explore_loop(parts.explorer, parts.buffer, parts.schedule), name="explore_loop")
            )
        await train_loop(parts.trainer)
        await parts.buffer.close()
        for helper in helpers:
            helper.cancel()
