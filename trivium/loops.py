"""The system, on two screens: one train step, four loops, one run.

explore_loop    waits for a free slot in the buffer        task -> workflow x group_size -> rewards -> Group -> buffer
train_loop      waits for `groups_per_step` groups         buffer -> train_step -> publish -> evaluate, log, checkpoint
follow_weights  waits for the next published version       channel -> engine -> the buffer may admit more slots
evaluate_loop   waits for the trainer to ask               version -> Evaluator -> metrics

Synchronous, one-step-off and asynchronous runs use this file with different values of `max_staleness`. One process, Ray
actors and separate commands use it with different buffers, boards and channels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trivium.foundation.errors import ConfigError, RoleFailed, RolloutsFailing, VersionGone
from trivium.foundation.metrics import aggregate
from trivium.foundation.phases import TRAINING_S, collecting, group_in_progress, measured, phase
from trivium.protocols import MeasuringEngine, MeteredEngine, PacedObjective
from trivium.types import SCORES, TRAINER, Batch, capabilities_of

if TYPE_CHECKING:
    from trivium.evaluate import Evaluator
    from trivium.explorer import Explorer
    from trivium.protocols import Algorithm, Buffer, Objective, TrainEngine, TrainerProtocol, WeightChannel
    from trivium.schedule import Schedule
    from trivium.synchronizer import Synchronizer
    from trivium.types import Group, Lease, Metrics


def train_step(
    engine: TrainEngine,
    groups: Sequence[Group] | Batch,
    algorithm: Algorithm,
    keep: Callable[[Batch], None] | None = None,
) -> Metrics:
    """Trains on groups and returns the metrics. Each call makes one new policy version.

    groups -> filter -> experiences -> the scores the algorithm needs -> advantages -> updates -> version + 1

    `groups` may be the experiences of groups that were filtered before. Calls `keep` with the experiences and all their
    columns before the first update.
    """
    batch, filter_metrics = (groups, {}) if isinstance(groups, Batch) else experiences(groups, algorithm)
    with collecting() as phases:
        batch = add_scores(engine, batch, algorithm.needs)
        with phase("advantage"):
            batch, advantage_metrics = algorithm.advantages(batch)
        if keep is not None:
            keep(batch)
        updates: list[Metrics] = []
        for objectives, epoch, mini_batch in passes(batch, algorithm, engine.version):
            for objective in objectives:
                prepared = prepare_mini_batch(engine, mini_batch, objective, epoch)
                engine.holds_version = False
                with phase(f"update/{objective.role}", prepared):
                    updates.append({**engine.update(objective.role, prepared, objective), **prepared.metrics})
    engine.version, engine.holds_version = engine.version + 1, True
    # The mismatch between engine and trainer is measured before the first update: over the whole step if `advantages`
    # computed it, else over the first mini-batch.
    mismatch: Metrics = {}
    for row in reversed(updates):
        mismatch |= {key: value for key, value in row.items() if key.startswith("mismatch/")}
    metrics = {**filter_metrics, **aggregate(updates), **mismatch, **advantage_metrics}
    used = engine.utilisation(phases) if isinstance(engine, MeteredEngine) else {}
    return {**metrics, **measured(phases), **used, "train/version": engine.version}


def experiences(groups: Sequence[Group], algorithm: Algorithm) -> tuple[Batch, Metrics]:
    """(the experiences to train on, the filter's metrics of all groups)."""
    filtered, metrics = algorithm.filter(groups)
    return algorithm.batch(filtered), metrics


def held_out_loss(engine: TrainEngine, groups: Sequence[Group], algorithm: Algorithm) -> Metrics:
    """The metrics of the updates of a step over these groups with the current weights. Updates nothing."""
    if not isinstance(engine, MeasuringEngine):
        raise ConfigError(
            "the loss over held-out rows",
            f"{type(engine).__name__} has no method `measure`",
            "leave evaluation.held_out out, or write the method",
        )
    batch = add_scores(engine, experiences(groups, algorithm)[0], algorithm.needs)
    batch, _ = algorithm.advantages(batch)
    rows = [
        engine.measure(objective.role, prepare_mini_batch(engine, batch, objective, 0), objective)
        for objective in algorithm.objectives_at(engine.version)
    ]
    return aggregate(rows)


def add_scores(engine: TrainEngine, batch: Batch, needs: Iterable[str]) -> Batch:
    """Adds these scores of the current models to the batch as columns."""
    # A set of names has another order in each process: runs that are repeated compute their scores in one order.
    for what in sorted(needs):
        with phase(f"score/{what}", batch):
            batch = batch.with_columns(**{SCORES[what]: engine.score(batch, what)})
    return batch


def prepare_mini_batch(engine: TrainEngine, mini_batch: Batch, objective: Objective, epoch: int) -> Batch:
    """Applies `objective.select` to the whole mini-batch with the current weights, before the engine cuts it into
    micro-batches."""
    return objective.select(add_scores(engine, mini_batch, objective.looks_at), engine.version, epoch)


def passes(batch: Batch, algorithm: Algorithm, version: int) -> Iterator[tuple[list[Objective], int, Batch]]:
    """Yields (objectives, epoch, mini-batch) of a train step. Objectives with equal numbers of passes and mini-batches
    take turns; one that sets its own (`PacedObjective`) makes its passes apart from the others."""
    paced: dict[tuple[int, int], list[Objective]] = {}
    for objective in algorithm.objectives_at(version):
        pace = (objective.epochs, objective.mini_batches) if isinstance(objective, PacedObjective) else (None, None)
        paced.setdefault((pace[0] or algorithm.epochs, pace[1] or algorithm.mini_batches), []).append(objective)
    for (epochs, number), objectives in paced.items():
        for epoch in range(epochs):
            for mini_batch in mini_batches(batch, number):
                yield objectives, epoch, mini_batch


def mini_batches(batch: Batch, number: int) -> Iterator[Batch]:
    """Splits the batch into `number` consecutive parts of whole groups, as equal as possible; fewer if there are fewer
    groups."""
    ids = list(dict.fromkeys(experience.group_id for experience in batch.experiences))
    place = {group_id: rank * min(number, len(ids)) // len(ids) for rank, group_id in enumerate(ids)}
    for part in range(min(number, len(ids))):
        yield batch.select([row for row, e in enumerate(batch.experiences) if place[e.group_id] == part])


async def explore_loop(explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> None:
    """Rolls out slots, as many concurrently as the buffer admits.

    Consumes: slots. Waits for: the buffer's admission. Unblocked by: `take`, `advance`.
    """
    rollouts: dict[Lease, asyncio.Task[None]] = {}

    async def rollout(lease: Lease) -> None:
        with group_in_progress():
            try:
                group = await explorer.rollout_slot(schedule, lease)
            except RolloutsFailing as error:
                await buffer.retry_on_resume(error.slots)
                raise
            await buffer.put(explorer.name, group)

    async def cancel_rollouts() -> None:
        while True:
            for lease in await buffer.cancelled_leases(explorer.name):
                if lease in rollouts:  # otherwise it has just finished
                    rollouts[lease].cancel()

    async with asyncio.TaskGroup() as tasks:
        cancelling = tasks.create_task(cancel_rollouts(), name="cancel_rollouts")
        while True:
            try:
                lease = await next_lease(explorer, buffer, schedule, synchronizer)
            except StopAsyncIteration:
                break
            task = rollouts[lease] = tasks.create_task(rollout(lease), name=f"slot-{lease.slot}")
            task.add_done_callback(lambda _, lease=lease: rollouts.pop(lease, None))
        for task in (cancelling, *rollouts.values()):  # the stage has ended: no step trains on the remaining rollouts
            task.cancel()


async def next_lease(explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> Lease:
    """Waits for a slot. Requests newer weights from the trainer if no slot is free, or once the explorer has rolled out
    the groups of `sync.interval` steps with the current ones. Raises StopAsyncIteration once the buffer is closed."""

    demand = explorer.demand

    def report() -> None:
        over = synchronizer.interval_over(demand.leased / schedule.fresh_per_step)
        request = "now" if over else "idle" if demand.idle else ""
        if request != demand.request:
            demand.request = request
            synchronizer.request_weights(explorer.name, request != "", idle=request == "idle")

    lease = await buffer.lease(explorer.name, wait=False)
    if lease is None:
        demand.idle = True
        report()
        lease = await buffer.lease(explorer.name)
    assert lease is not None
    if schedule.adaptive is not None:
        # The trainer publishes draws before the version that admits their slots: the board has those of this slot.
        schedule.adaptive.follow(synchronizer.draws)
    demand.idle = False
    demand.leased += 1
    report()
    return lease


async def follow_weights(
    explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer, channel: WeightChannel
) -> None:
    """Loads each published version into the explorer.

    Consumes: published versions. Waits for: the trainer's `publish`; in an ordered run also for the slots of the
    current version. Unblocked by: `publish`, `put`.
    """
    loaded: int | None = None
    while True:
        version = await synchronizer.next_version(explorer.name, loaded, newest=not schedule.ordered)
        if schedule.ordered and loaded is not None:
            try:
                await buffer.drain(loaded)
            except StopAsyncIteration:  # the stage has ended
                return
        try:
            await explorer.adopt(version, channel)
        except VersionGone:
            # Newer versions replaced it, or the exchange was aborted: adopts the version that is offered next. A
            # version that the channel no longer keeps has no slots left, since other explorers have rolled them out.
            if not synchronizer.collective:
                if synchronizer.published[-1:] == (version,):
                    raise  # no newer version exists
                loaded = version
            continue
        loaded = version
        explorer.demand.adopted()
        synchronizer.adopted(explorer.name, version, wants=explorer.demand.idle)
        await buffer.advance(explorer.name, version)


async def evaluate_loop(explorer: Explorer, evaluator: Evaluator, synchronizer: Synchronizer) -> None:
    """Runs the evaluations that the trainer requests.

    Consumes: requests. Waits for: a request for the version it has loaded. Unblocked by:
    `Synchronizer.request_evaluation`.
    """
    request = 0
    while True:
        request, version = await synchronizer.next_evaluation(explorer.name, request)
        synchronizer.answer_evaluation(request, {**await evaluator.run(version), TRAINING_S: evaluator.training_s})


async def train_loop(trainer: TrainerProtocol) -> None:
    """Trains until the stage or the data ends. Then closes the buffer, which ends the explorers.

    Consumes: groups. Waits for: the buffer, and for an explorer if an evaluation is due. Unblocked by: `put`.
    """
    synchronizer, buffer = trainer.synchronizer, trainer.buffer
    with synchronizer.report_failure(TRAINER), synchronizer.heartbeat(TRAINER):
        async with asyncio.TaskGroup() as tasks:
            monitoring = tasks.create_task(synchronizer.monitor(TRAINER, buffer.release), name="monitor")
            try:
                await trainer.start()
                while trainer.train_continue:
                    async with trainer.step_in_progress():
                        await trainer.train_step()
                    if trainer.need_sync():
                        await asyncio.to_thread(trainer.sync_weight)
                    await trainer.end_step()
                await trainer.finish()
            except BaseException:
                await trainer.save_before_end()
                await trainer.wait_for_save()  # always completes the checkpoint in progress
                raise
            await buffer.close()
            synchronizer.finish()
            monitoring.cancel()


Explore = Callable[["Explorer", "Buffer", "Schedule", "Synchronizer"], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Parts:
    """The parts of a stage that one process runs."""

    buffer: Buffer
    schedule: Schedule
    synchronizer: Synchronizer
    channel: WeightChannel
    trainer: TrainerProtocol | None = None
    """None in a process that only explores."""
    explorer: Explorer | None = None
    """None if this process neither rolls out nor evaluates."""
    evaluator: Evaluator | None = None
    """None if this process does not evaluate."""
    stage: int = 0
    is_last: bool = True
    explore: Explore = explore_loop
    """Fills the buffer from the tasks of the schedule, or from agents with their own tasks (`run.mode: serve`)."""
    lingers: bool = False
    """Whether `explore` continues for a while after the stage and ends by itself (`serve.linger_s`)."""
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Runs concurrently with the trainer. Raises when a process that the trainer depends on dies."""


async def run(parts: Parts) -> None:
    """Runs trainer and explorer in one task group. The first failure cancels the rest and is raised. Closes the rollout
    engine at the end."""
    try:
        if parts.trainer is not None and not parts.synchronizer.joined:
            parts.synchronizer.open(parts.stage, last=parts.is_last)
        async with asyncio.TaskGroup() as roles:
            if parts.explorer is not None:
                roles.create_task(run_explorer(parts, parts.explorer), name=parts.explorer.name)
            if parts.trainer is not None:
                training = roles.create_task(train_loop(parts.trainer), name=parts.trainer.name)
                if parts.watch is not None:
                    watching = roles.create_task(parts.watch(), name="watch")
                    training.add_done_callback(lambda _: watching.cancel())
        if parts.trainer is not None and parts.trainer.train_continue:
            # A TaskGroup ends without an error if something else cancels one of its tasks.
            raise RoleFailed(parts.trainer.name, "its task was cancelled, but not by this run")
    finally:
        if parts.explorer is not None:
            await parts.explorer.engine.close()


async def run_explorer(parts: Parts, explorer: Explorer) -> None:
    """Explores and evaluates until the trainer has finished the stage."""
    synchronizer = parts.synchronizer
    if not await synchronizer.join(explorer.name):
        return
    with synchronizer.report_failure(explorer.name), synchronizer.heartbeat(explorer.name):
        loops: dict[str, Coroutine[Any, Any, None]] = {
            "monitor": synchronizer.monitor(explorer.name),
            "follow_weights": follow_weights(explorer, parts.buffer, parts.schedule, synchronizer, parts.channel),
        }
        if capabilities_of(parts.buffer).explored:
            loops["explore"] = parts.explore(explorer, parts.buffer, parts.schedule, synchronizer)
        if parts.evaluator is not None:
            loops["evaluate_loop"] = evaluate_loop(explorer, parts.evaluator, synchronizer)
        async with asyncio.TaskGroup() as tasks:
            running = {name: tasks.create_task(loop, name=name) for name, loop in loops.items()}
            await synchronizer.wait_finished(explorer.name)
            if parts.lingers and "explore" in running:
                await asyncio.wait({running["explore"]})
            for task in running.values():
                task.cancel()
