"""Builds the parts of a stage from a RunConfig. Only this module depends on every package."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trivium.algorithms import GroupAlgorithm, build_algorithm
from trivium.algorithms.explain import explain as explain_algorithm
from trivium.algorithms.teachers.teacher_prompts import TeacherPrompts
from trivium.buffers.pipeline import Pipeline
from trivium.buffers.step_log import StepLog
from trivium.buffers.step_tokens import StepFiles
from trivium.checkpoint.background import BackgroundSaver
from trivium.checkpoint.run_record import RunRecord
from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.config import RunConfig, build
from trivium.config.recording import recorded, scores_observations
from trivium.config.schema import BufferConfig, RunSection
from trivium.config.sections import CheckpointSection, SyncSection
from trivium.evaluate import Evaluator, HeldOut, Measurements, RemoteEvaluator
from trivium.explorer import Explorer, RolloutLimits
from trivium.foundation.atomic import made_directory
from trivium.foundation.board import Board, MemoryBoard
from trivium.foundation.errors import ConfigError, described
from trivium.foundation.phases import activity
from trivium.foundation.registry import resolve
from trivium.loops import Explore, Parts, explore_loop
from trivium.models.backbone.shape import positions_in
from trivium.monitors.fanout import FanOut, file_monitors
from trivium.monitors.health import LiveWarnings
from trivium.planning.memory_estimate import kept_versions
from trivium.protocols import Buffer, Monitor, RolloutEngine, TaskSource, TrainEngine, WeightChannel
from trivium.publisher import Publisher
from trivium.rewards.judge import make_judge
from trivium.runtime.row_lengths import fit
from trivium.runtime.stage import Stage
from trivium.runtime.train_engines import build_train_engine
from trivium.schedule import Cadence, Schedule
from trivium.synchronizer import Synchronizer
from trivium.tasks.curricula import curriculum_of
from trivium.tasks.rows import RowTasks
from trivium.trainer import GroupSource, Preview, Trainer
from trivium.training.device import described_machine
from trivium.types import SERVED, capabilities_of


@dataclass(frozen=True)
class Endpoints:
    """The connections of one process to the buffer, board and channel that the roles of a stage share."""

    buffer: Buffer
    synchronizer: Synchronizer
    channel: WeightChannel


def run_name(run: RunSection) -> str:
    """Returns the name by which separate commands find the run in a shared buffer."""
    return run.name or Path(run.dir).name


def explorer_name(run: RunSection) -> str:
    """Returns the name of this process's explorer, unique among the processes of the run."""
    return run.explorer or f"{socket.gethostname()}-{os.getpid()}"


def shares_buffer(buffers: Iterable[BufferConfig]) -> bool:
    """Whether processes share the buffer of a stage; a shared buffer also provides the board."""
    return any(capabilities_of(resolve("buffers", section.kind)).shared for section in buffers)


def open_board(buffers: Iterable[BufferConfig], name: str) -> Board:
    """Returns the board of a run with these buffers: that of the first shared one, else one in the memory of this
    process."""
    for section in buffers:
        buffer = resolve("buffers", section.kind)
        if capabilities_of(buffer).shared:
            return buffer.open_board(section, name=name)
    return MemoryBoard()


def claim_name(buffers: Iterable[BufferConfig], name: str, run_dir: Path) -> None:
    """Reserves the run's name in the shared buffers of its stages, before a board of that name is opened. Raises
    ConfigError if the name belongs to another run."""
    for section in buffers:
        buffer = resolve("buffers", section.kind)
        if capabilities_of(buffer).shared:
            buffer.claim(section, name=name, run_dir=run_dir)


def build_synchronizer(
    sync: SyncSection, board: Board, settings: Mapping[str, str] | None = None, *, apart: bool | None = None
) -> Synchronizer:
    """Builds the Synchronizer of one role. `settings` are digests of the sections that separate commands must agree on.

    `apart`: roles may be processes without a handle, so that heartbeats detect their death; None: if the board is
    shared. On Ray, where every board is shared and actor handles detect it, the caller decides.
    """
    apart = not isinstance(board, MemoryBoard) if apart is None else apart
    return Synchronizer(
        board,
        deadline_s=sync.deadline_s,
        style=sync.style,
        interval=sync.interval,
        collective=capabilities_of(resolve("channels", sync.method)).collective,
        heartbeat_s=sync.heartbeat_s if apart else None,
        settings=settings,
    )


def build_buffer(stage: Stage, schedule: Schedule) -> Buffer:
    config = stage.config
    return build(
        "buffers",
        config.buffer,
        schedule=schedule,
        rollouts=stage.run_dir / "rollouts" / f"stage-{stage.number}",
        renderer=stage.renderer,
        deadline_s=config.sync.deadline_s,
        name=f"{run_name(config.run)}/stage-{stage.number}",
    )


def build_channel(stage: Stage, synchronizer: Synchronizer, role: str) -> WeightChannel:
    """Builds the weight channel of `role`."""
    config = stage.config
    channel = resolve("channels", config.sync.method)
    differences = {"full_every": config.sync.full_every} if capabilities_of(channel).sends_differences else {}
    return channel(
        **differences,
        keep=kept_versions(config),
        directory=made_directory(Path(config.sync.dir), "sync.dir") if config.sync.dir else stage.run_dir / "sync",
        synchronizer=synchronizer,
        role=role,
    )


def local_endpoints(stage: Stage, synchronizer: Synchronizer, role: str) -> Endpoints:
    """Returns endpoints with a buffer and a channel in this process."""
    return Endpoints(build_buffer(stage, build_schedule(stage)), synchronizer, build_channel(stage, synchronizer, role))


def open_store(checkpoint: CheckpointSection, run_dir: Path, deadline_s: float) -> CheckpointStore:
    """Opens the checkpoints of a run directory. `deadline_s` limits each copy to the remote store."""
    return CheckpointStore(
        run_dir / "checkpoints",
        keep=checkpoint.keep,
        keep_best=checkpoint.keep_best,
        remote=checkpoint.remote,
        deadline_s=deadline_s,
    )


def _held_out(stage: Stage, schedule: Schedule) -> HeldOut | None:
    """Builds `evaluation.held_out`, whose rows are read like those of the buffer."""
    taskset = stage.config.evaluation.held_out
    if taskset is None:
        return None
    tasks = tasks_of(stage, taskset)
    in_order = replace(schedule, tasks=tasks, shuffle=False, curriculum=None)
    return HeldOut(taskset, build_buffer(stage, in_order), len(tasks))


BuildTrainEngine = Callable[[Stage, GroupAlgorithm, WeightChannel], TrainEngine]


def build_trainer(
    stage: Stage,
    endpoints: Endpoints,
    store: CheckpointStore,
    resume: Checkpoint | None,
    monitor: Monitor,
    record: dict[str, Any],
    make_engine: BuildTrainEngine | None = None,
    make: Callable[..., Trainer] = Trainer,
) -> Trainer:
    """Builds the trainer of a stage, without loading weights. `make_engine` builds a train engine of several processes;
    `make` is the Trainer, or a user's subclass of it."""
    config, buffer = stage.config, endpoints.buffer
    algorithm = algorithm_of(config, stage)
    schedule = build_schedule(stage)
    strategy = build(
        "sample_strategies",
        config.buffer.strategy,
        buffer=buffer,
        schedule=schedule,
        renderer=stage.renderer,
        tasks=partial(tasks_of, stage),
        algorithm=algorithm,
    )
    explored, preview = capabilities_of(buffer).explored, config.run.enable_preview
    engine = (make_engine or build_train_engine)(stage, algorithm, endpoints.channel)
    log = StepLog(stage.run_dir, schedule, described_machine(config, stage.threads))
    keep = StepFiles(stage.run_dir, log, keeps_updates=config.run.keep == "tokens")
    publisher = Publisher(
        engine,
        buffer,
        endpoints.channel,
        endpoints.synchronizer,
        schedule,
        keeps_versions=capabilities_of(resolve("channels", config.sync.method)).uses_directory,
        note=log.published,
        recorded=log.recorded_weights if explored else None,
    )
    save = config.checkpoint
    return make(
        engine=engine,
        groups=GroupSource(buffer, strategy, config.workflow.max_failed_fraction),
        publisher=publisher,
        schedule=schedule,
        monitor=monitor,
        saver=BackgroundSaver(store, engine, asynchronous=save.asynchronous, every=save.save_every),
        measurements=Measurements(
            RemoteEvaluator(endpoints.synchronizer, str(config.evaluation.taskset)) if stage.evaluated else None,
            _held_out(stage, schedule),
            Cadence(config.evaluation.every, stage.is_last),
            evaluated=record.get("evaluated"),
        ),
        record=RunRecord(record),
        resume=resume,
        keep=keep if explored and not capabilities_of(buffer).shared else None,
        preview=Preview(bool(file_monitors(monitor)) if preview is None else preview),
    )


def build_parts(
    stage: Stage, endpoints: Endpoints, trainer: Trainer | None = None, explorer: Explorer | None = None
) -> Parts:
    """Builds the roles of a stage that this process runs: the trainer, an explorer, or both."""
    return Parts(
        endpoints.buffer,
        build_schedule(stage) if trainer is None else trainer.schedule,
        endpoints.synchronizer,
        endpoints.channel,
        trainer,
        explorer,
        evaluator=build_evaluator(stage, explorer) if explorer is not None and stage.evaluated else None,
        stage=stage.number,
        is_last=stage.is_last,
        explore=explore_loop if explorer is None else _explore_function(stage),
        lingers=stage.config.run.mode == "serve",
    )


def _explore_function(stage: Stage) -> Explore:
    """Returns the loop that fills the buffer."""
    if stage.config.run.mode != "serve":
        return explore_loop
    from trivium.serving.serve import serve_agents  # the packages of this loop are optional

    judge = make_judge(stage.config.rewards)
    return serve_agents(stage.config, stage.run_dir, judge.check_columns, is_last=stage.is_last)


def algorithm_of(config: RunConfig, stage: Stage | None = None) -> GroupAlgorithm:
    """Builds the algorithm of a stage's config, with the values that follow from other sections filled in. With the
    `stage` it is complete for training: it knows the first version, and what a teacher reads."""
    section = config.algorithm.for_run(config)
    algorithm = build_algorithm(section, config.run.seed, config.engine.sampling.max_new_tokens)
    if stage is None:
        return algorithm
    algorithm = replace(algorithm, first_version=stage.first_version)
    if algorithm.teacher is None or not algorithm.teacher.context:
        return algorithm
    system = getattr(config.workflow, "system", None)
    limit = positions_in(algorithm.teacher.path or stage.model_dir)
    prompts = TeacherPrompts(stage.renderer, algorithm.teacher.context, system, limit)
    return replace(algorithm, teacher_prompts=prompts)


def build_schedule(stage: Stage) -> Schedule:
    config, schedule, tasks = stage.config, stage.config.schedule, tasks_of(stage, "train")
    stored = config.buffer.strategy.num_stored(schedule.groups_per_step)
    curriculum = None
    if schedule.curriculum is not None:
        curriculum = curriculum_of(schedule.curriculum, tasks, seed=config.run.seed, stage=stage.number)
    return Schedule(
        tasks=tasks,
        seed=config.run.seed,
        stage=stage.number,
        first_version=stage.first_version,
        groups_per_step=schedule.groups_per_step,
        stored_per_step=stored,
        group_size=schedule.group_size,
        max_staleness=config.max_staleness,
        sync_interval=config.sync.interval,
        deterministic=schedule.deterministic,
        shuffle=schedule.shuffle,
        curriculum=curriculum,
        max_attempts=schedule.max_attempts,
        over_rollout=math.ceil(schedule.over_rollout * (schedule.groups_per_step - stored)),
        steps=schedule.steps,
        served=config.run.mode == "serve",
        until=None if (end := schedule.until) is None else (end.metric, *_bounds(end.below, end.above)),
    )


def _bounds(least: float | None, most: float | None) -> tuple[float, float]:
    return -math.inf if least is None else least, math.inf if most is None else most


def tasks_of(stage: Stage, name: str) -> TaskSource:
    """Returns the tasks of `tasks.<name>`, which this process builds once for the stage."""
    if name not in stage.sources:
        stage.sources[name] = build_tasks(stage.config, name)
    return stage.sources[name]


def build_tasks(config: RunConfig, name: str) -> TaskSource:
    """Builds the tasks of `tasks.<name>`."""
    source = build("tasks", config.tasks[name], name=name, seed=config.run.seed)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        found = f"{config.tasks[name].kind} makes {described(source)}"
        raise ConfigError(f"tasks of tasks.{name}", found, "name a class with __len__ and __getitem__")
    fit(source, config, name)
    return source


def digest_of(tasks: TaskSource) -> str:
    """Returns the number and hash of the rows of the source; empty if the source generates its tasks on access."""
    return tasks.digest if isinstance(tasks, RowTasks) else ""


def build_engine(stage: Stage) -> RolloutEngine:
    """Builds the rollout engine and loads its model."""
    renderer = stage.renderer
    with activity("loading the engine's model"):
        return build(
            "engines",
            stage.config.engine.for_run(stage.config),
            model_dir=stage.model_dir,
            eos_token_ids=renderer.eos_token_ids,
            decode=renderer.decode,
            threads=stage.threads,
        )


def build_explorer(stage: Stage, name: str = "explorer-0", engine: RolloutEngine | None = None) -> Explorer:
    """Builds an explorer over `engine`, or over a new engine."""
    config, workflow = stage.config, stage.config.workflow
    engine = engine or build_engine(stage)
    explored, evaluated = stage.explored, config.evaluation.taskset
    # A stage that learns from rows and has no evaluation judges nothing: a reward may hold a model.
    rewards = config.rewards if explored or evaluated is not None else ()
    judge = make_judge(rewards, workflow.deadline_s, stage.renderer.decode)
    judged = ([] if evaluated is None else [evaluated]) + (["train"] if explored else [])
    for taskset in dict.fromkeys(judged):
        if config.tasks[taskset].kind != SERVED:  # `serve`: the requests of agents are checked on arrival
            judge.check_columns(tasks_of(stage, taskset)[0].columns)
    return Explorer(
        engine=engine,
        renderer=stage.renderer,
        workflow=build("workflows", workflow),
        judge=judge,
        sampling=replace(config.engine.sampling.sampling(), extra=recorded(config)),
        limits=RolloutLimits(
            workflow.deadline_s,
            workflow.max_concurrent,
            workflow.max_retries,
            workflow.min_members,
            workflow.max_failed_fraction,
            failure_window=max(16, config.schedule.groups_per_step),
        ),
        greedy_baseline=algorithm_of(config).greedy_baseline,
        must_judge=config.algorithm.reads_rewards or (stage.evaluated and config.evaluation.taskset is not None),
        name=name,
        in_flight=config.sync.in_flight,
        operators=(Pipeline(config.buffer),) if config.buffer.operators else (),
    )


def build_evaluator(stage: Stage, explorer: Explorer) -> Evaluator:
    config, evaluation = stage.config, stage.config.evaluation
    assert evaluation.taskset is not None
    return Evaluator(
        explorer=explorer,
        tasks=tasks_of(stage, evaluation.taskset),
        taskset=evaluation.taskset,
        seed=config.run.seed,
        samples=evaluation.samples,
        k=evaluation.k,
        sampling=evaluation.sampling.sampling(config.engine.sampling, evaluation.samples),
        threshold=evaluation.threshold,
        observations=scores_observations(config),
        max_failed_fraction=config.workflow.max_failed_fraction,
    )


def build_monitor(config: RunConfig, run_dir: Path, latest: Checkpoint | None) -> FanOut:
    """Builds the monitors of a run, or of one of its stages, and the warnings during it."""
    step = latest.step if latest is not None else 0
    shown_by = [build("monitors", section, run_dir=run_dir, resume_step=step) for section in config.monitors]
    monitor = FanOut([*shown_by, LiveWarnings(config.usual_lr(), config.stage_bounds)])
    if latest is not None:
        monitor.restore(latest.state["monitor"])
    return monitor


# --------------------------------------------------------------------------- before and after the run


def explain(config: RunConfig) -> str:
    """Describes the curriculum and the objective of each stage of a config, as formulas with the config's values and
    the source of each part."""
    stages, texts = config.stage_configs(), list[str]()
    for number, stage in enumerate(stages):
        head = f"stage {number}\n" if len(stages) > 1 else ""
        source = getattr(resolve("algorithms", stage.algorithm.kind), "source", "")
        texts.append(head + _curriculum(stage) + explain_algorithm(algorithm_of(stage), source))
    return "\n\n".join(texts) + "\n"


def _curriculum(config: RunConfig) -> str:
    """Describes the order of the tasks; empty for a random order."""
    section = config.schedule.curriculum
    if section is None:
        return ""
    options = {name: value for name, value in section.model_dump(exclude={"kind"}).items() if value is not None}
    values = ", ".join(f"{name} {value}" for name, value in options.items())
    return f"curriculum {section.short_name}: {values}\n"
