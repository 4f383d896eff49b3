"""`trivium run`: opens the run directory and runs the configured mode, stage by stage."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.config import RunConfig, build
from trivium.config.resume import fingerprint
from trivium.foundation.atomic import atomic_write
from trivium.foundation.concurrency import usable_cores
from trivium.foundation.errors import ConfigError, ProcessDied, RoleFailed, RunDirError, first_cause
from trivium.foundation.phases import GROUPS, activity, announce
from trivium.foundation.registry import is_unnamed, resolve
from trivium.loops import run as run_parts
from trivium.monitors.console import logged_activities
from trivium.monitors.verdict import verdict
from trivium.planning.machine import Machine
from trivium.planning.plan import Plan, plan_run
from trivium.protocols import Monitor, RestingEngine
from trivium.rewards.recipe import parts_of
from trivium.runtime.adapter_service import serve_tinker
from trivium.runtime.build import (
    build_explorer,
    build_monitor,
    build_parts,
    build_synchronizer,
    build_trainer,
    claim_name,
    explorer_name,
    local_endpoints,
    open_board,
    open_store,
    run_name,
    shares_buffer,
)
from trivium.runtime.checkpoint_eval import evaluate
from trivium.runtime.logs import BEGINS, logging_to
from trivium.runtime.main_loop import run_in_loop
from trivium.runtime.preflight import Findings, preflight
from trivium.runtime.run_dir import as_saved, hold_with, on_day, open_run_dir, recorded_changes, refuse_another_run
from trivium.runtime.sampling_ranks import engine_over_ranks, samples_here, serve_train_rank
from trivium.runtime.stage import Stage, TrainStage, evaluates_alike
from trivium.runtime.stage_models import located_rewards, stage_ends
from trivium.runtime.train_engines import collective_deadline, train_device
from trivium.synchronizer import Synchronizer
from trivium.training.device import machine, peaks, training_ranks
from trivium.training.launched import launched_ranks, ranks_here, this_rank
from trivium.types import DAY, TRAINER

_log = logging.getLogger("trivium")
_CARRIED = (
    "accuracy_before",
    "accuracy_after",
    "reward_before",
    "reward_after",
    "rewards",
    "held_out_before",
    "held_out_after",
    "failures",
    "seconds",
    "time",
)
"""Keys of the record that are carried from stage to stage and shown in the summary."""


def run(config: RunConfig, open_session: OpenSession | None = None, report: SendReport | None = None) -> dict[str, Any]:
    """Runs the mode `run.mode` and returns a summary; for training, the one written to `summary.json`. `open_session`
    replaces the session of the config. A session in this process calls `report` after the last stage.

    Raises ConfigError for a config that cannot run, RunDirError for a run directory of another config, and the first
    cause of an error that stops the run.
    """
    if launched_ranks() > 1:
        _connect_ranks(config)
        if this_rank() > 0:
            return train_as_rank(as_saved(config))
    if config.run.mode == "bench":
        return bench(config)
    if config.run.mode == "explore" or (config.run.mode == "serve" and shares_buffer(config.buffers)):
        return explore(plan_run(config, usable_cores(), machine()))
    kind = config.cluster.kind
    session = open_session or (partial(_local_session, report) if kind == "local" else resolve("sessions", kind))
    plan, findings = prepared(as_saved(config))
    restarts = _restarts(plan) if open_session is None else 0  # a caller's processes are not started again here
    return _train_planned(plan, findings, session, restarts)


def _train_planned(plan: Plan, findings: Findings, session: OpenSession, restarts: int) -> dict[str, Any]:
    """Trains in the run directory, which it opens, and writes the summary."""
    config = plan.config
    with open_run_dir(config, findings.rows, plan) as run_dir:
        for note in findings.warnings:
            _log.warning("%s", note)
        if config.run.mode == "tinker":
            serve_tinker(config, run_dir)
            return {"run_dir": str(run_dir)}
        claim_name(plan.buffers, run_name(config.run), run_dir)
        store = open_store(config.checkpoint, run_dir, config.sync.deadline_s)
        record = _train_with_restarts(partial(_train, plan, run_dir, store, session), restarts)
        if launched_ranks() > 1:
            from trivium.training.distributed.torchrun import stop_ranks

            stop_ranks(train_device(config.train))
        asyncio.run(store.copied())  # the last chance to copy checkpoints that could not be copied earlier
        summary = {name: record[name] for name in (*_CARRIED, "changes") if record.get(name) is not None}
        summary = {"steps": store.steps()[-1], **summary}
        summary["verdict"] = verdict(record.get("time", {}), record.get("seconds", 0.0), config)
        _log.info(summary["verdict"])
        summary["memory"] = {"planned": plan.needed, "measured": peaks(), "unit": "MiB"}
        _log.info("peak memory in MiB: planned %(planned)s, measured %(measured)s", summary["memory"])
        atomic_write(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        return {**summary, "run_dir": str(run_dir)}


def _restarts(plan: Plan) -> int:
    """How often this command may start processes again that died. The ranks of torchrun are started by torchrun. With
    run.mode train or serve, other commands and clients see the failure and end."""
    return plan.config.cluster.max_restarts if plan.config.run.mode == "both" and launched_ranks() == 1 else 0


def _train_with_restarts(train: Callable[[], dict[str, Any]], restarts: int) -> dict[str, Any]:
    """Calls `train`, and up to `restarts` times again after the death of a process that it started. `train` continues
    from the last checkpoint."""
    while True:
        try:
            return train()
        except Exception as error:
            died = first_cause(error)
            if not (isinstance(died, ProcessDied) and restarts):
                raise
            role, cause = died.role, died.cause
            del died
        restarts -= 1
        _log.warning(
            "%s died (%s); the run continues from the last checkpoint (%d restarts left)", role, cause, restarts
        )
        # The frames of the error held the models of the attempt, which the next attempt has no memory for.
        gc.collect()


def _train(plan: Plan, run_dir: Path, store: CheckpointStore, session: OpenSession) -> dict[str, Any]:
    """Trains the remaining stages from the last checkpoint. Returns the record of the run."""
    latest = store.recover()
    if latest is not None:
        _log.info("continuing from %s", latest.path.name)
        for reward in (part.reward for part in parts_of(plan.config.rewards)):
            if is_unnamed(reward.kind):
                _log.warning(
                    "the reward %s has no importable name: it is unknown whether it is the same as before", reward.kind
                )
    changes = recorded_changes(run_dir)
    record: dict[str, Any] = {"changes": changes} if changes else {}
    trained = False
    with session(plan, run_dir, store, latest) as train_stage:
        for stage, resume in _remaining_stages(plan, run_dir, store, latest, record):
            if plan.config.stages:
                what = f"{stage.config.algorithm.kind}, {stage.config.schedule.steps} steps"
                announce(f"stage {stage.number + 1} of {len(plan.stages)}: {what}")
            record.update(train_stage(stage, resume, record))
            trained = True
        if not trained:
            announce(f"already complete: {store.steps()[-1]} steps; a larger schedule.steps continues it")
    return record


def prepared(config: RunConfig, here: Machine | None = None) -> tuple[Plan, Findings]:
    """Checks a run before it starts (`ready`), and plans it for this machine, or the given one."""
    findings = ready(config, here)
    ranks = training_ranks(config.cluster, here)
    return plan_run(config, usable_cores(), here or machine(), ranks, findings.tasks), findings


def ready(config: RunConfig, here: Machine | None = None) -> Findings:
    """Checks a run before it starts. Returns the warnings and the rows that it reads. Raises ConfigError with all
    problems on this machine, or the given one, and the errors of `run` for a directory of another run."""
    all_ranks = training_ranks(config.cluster, here)
    ranks = all_ranks if here is not None or config.cluster.kind == "ray" else ranks_here()
    findings = preflight(config, here or machine(), ranks, all_ranks)
    findings.refuse()
    refuse_another_run(config, Path(config.run.dir), findings.rows)
    return findings


def _connect_ranks(config: RunConfig) -> None:
    """Connects the ranks. Raises ConfigError, on every rank, for a mode that several ranks of one command cannot
    run."""
    from trivium.training.distributed.torchrun import connect_ranks

    mode = config.run.mode
    is_alone = mode in ("explore", "bench") or (mode == "serve" and shares_buffer(config.buffers))
    if is_alone or config.cluster.kind == "ray":
        raise ConfigError(
            f"run.mode {mode!r} with cluster.kind {config.cluster.kind!r} on {launched_ranks()} ranks of torchrun",
            "ranks of torchrun can only train together",
            "start one process; on Ray, cluster.ranks sets the number of ranks",
        )
    connect_ranks(train_device(config.train), collective_deadline(stage.sync for stage in config.stage_configs()))


def train_as_rank(config: RunConfig) -> dict[str, Any]:
    """Trains as a rank that torchrun started; rank 0 drives the ranks."""
    from trivium.training.distributed.torchrun import life_of_rank

    run_dir, rank = Path(config.run.dir), this_rank()
    with logging_to(run_dir, f"log-rank-{rank}.txt"):
        at_end = hold_with(life_of_rank(0), run_dir)
        serve_train_rank(config, at_end)
    return {"rank": rank, "run_dir": str(run_dir)}


OpenSession = Callable[[Plan, Path, CheckpointStore, Checkpoint | None], AbstractContextManager[TrainStage]]
"""(plan, run directory, its checkpoints, the latest checkpoint) -> a context manager of the function that trains a
stage."""
SendReport = Callable[[Monitor, Path], None]
"""(monitor, run directory): sends a report of the run to the monitor."""


@contextmanager
def _local_session(
    report: SendReport | None, plan: Plan, run_dir: Path, store: CheckpointStore, latest: Checkpoint | None
) -> Generator[TrainStage]:
    """Trains stages in this process, with an explorer beside the trainer unless other processes explore (`run.mode:
    train`)."""
    config, settings = plan.config, fingerprint(plan.config)
    monitor = build_monitor(config, run_dir, latest)
    board = open_board(plan.buffers, run_name(config.run))

    def train_stage(stage: Stage, resume: Checkpoint | None, record: dict[str, Any]) -> dict[str, Any]:
        synchronizer = build_synchronizer(stage.config.sync, board, settings)
        endpoints = local_endpoints(stage, synchronizer, TRAINER)
        trainer = build_trainer(stage, endpoints, store, resume, monitor, record)
        try:
            explorer = None
            if samples_here(stage):
                name, engine = config.run.explorer or "explorer-0", engine_over_ranks(stage, trainer.engine)
                explorer = build_explorer(stage, name, engine)
                if isinstance(engine, RestingEngine):
                    trainer.before_learning = engine.rest
            parts = build_parts(stage, endpoints, trainer, explorer)
            trainer.prepare()
            run_in_loop(run_parts(parts), stage.config.workflow.deadline_s)
            return trainer.run_record
        finally:
            trainer.engine.close()

    try:
        yield train_stage
        build_synchronizer(config.sync, board, settings).finish_run(len(plan.stages) - 1)
        if report is not None:
            report(monitor, run_dir)
    finally:
        monitor.close()


def carried(resume: Checkpoint | None) -> dict[str, Any]:
    """Returns the record of a run at a checkpoint, for the run that continues from it."""
    if resume is None:
        return {}
    # A checkpoint lacks the time of its own save, which the summary has if the run finished with this step.
    file = resume.path.parents[1] / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    times = {name: summary[name] for name in ("seconds", "time")} if summary.get("steps") == resume.step else {}
    record = {**resume.state, **times}
    return {name: record[name] for name in _CARRIED if name in record}


def _remaining_stages(
    plan: Plan, run_dir: Path, store: CheckpointStore, latest: Checkpoint | None, record: dict[str, Any]
) -> Iterator[tuple[Stage, Checkpoint | None]]:
    """Yields each unfinished stage and the checkpoint to continue it from, after updating `record`. A stage starts from
    the weights that the previous stage saved, with a fresh optimizer."""
    config = plan.config
    model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
    # The last step of each ended stage, which is earlier than planned if the data ended.
    ends: list[int] = list(latest.state["pinned"]) if latest is not None else []
    for number, planned in enumerate(plan.stages):
        first_version = planned.first_version
        if number >= len(ends):
            resume = latest if latest is not None and latest.step > first_version else None
            if resume is not None:
                record.update(carried(resume))
            if resume is None or resume.step < planned.last_version:
                before = plan.stages[number - 1].config
                is_evaluated = resume is None and number > 0 and evaluates_alike(before, planned.config)
                evaluated = store.open(ends[number - 1]).state["evaluated"] if is_evaluated else None
                record |= {"stage": number, "pinned": list(ends), "evaluated": evaluated}
                _log.info("stage %d %s %d", number, BEGINS, resume.step if resume else first_version)
                (run_dir / "summary.json").unlink(missing_ok=True)  # the summary marks a finished run
                stage = Stage.of(planned, run_dir, model_dir)
                rewards = located_rewards(stage.config.rewards, config.stage_names, ends, store)
                yield stage.judged_by(rewards), resume
                latest = None
            ends.append(store.steps()[-1])
        if not planned.is_last:
            model_dir = store.open(ends[number]).path / "policy"


def explore(plan: Plan) -> dict[str, Any]:
    """Explores (or serves) and evaluates, stage by stage, for a trainer in another process (`run.mode: train`)."""
    config, stages = plan.config, plan.stages
    name, run_dir = explorer_name(config.run), Path(config.run.dir)
    board = open_board(plan.buffers, run_name(config.run))
    waiting = build_synchronizer(config.sync, board, fingerprint(config))
    # An explorer has no monitor.
    with logging_to(run_dir, f"log-{name}.txt", shown=logging.INFO), logged_activities():
        # An explorer that was killed while it wrote its address writes it again only if a stage remains.
        (run_dir / f".serve-{name}.json.writing").unlink(missing_ok=True)
        model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / f"model-{name}")
        number: int | None = -1
        explored = 0
        while number != len(stages) - 1 and (number := _stage_of_trainer(waiting, name)) is not None:
            _log.info("stage %d: explorer %s begins", number, name)
            if day := waiting.settings.get(DAY):
                stages = [
                    replace(planned, config=on_day(planned.config, date.fromisoformat(day))) for planned in stages
                ]
            explored += 1
            store = CheckpointStore(run_dir / "checkpoints")
            stage = Stage.of(stages[number], run_dir, model_dir)
            rewards = located_rewards(stage.config.rewards, config.stage_names, stage_ends(store), store)
            stage = stage.judged_by(rewards)
            synchronizer = build_synchronizer(stage.config.sync, board).attach(waiting)
            endpoints = local_endpoints(stage, synchronizer, name)
            try:
                if stage.num_explorers:
                    parts = build_parts(stage, endpoints, explorer=build_explorer(stage, name))
                    with activity(f"stage {number}: rollouts", unit=GROUPS):
                        run_in_loop(run_parts(parts), stage.config.workflow.deadline_s)
                else:
                    asyncio.run(_wait_for_stage_end(synchronizer, name))
            except Exception as error:
                lost = first_cause(error)
                returns = isinstance(lost, RoleFailed) and lost.role == TRAINER and synchronizer.may_return(TRAINER)
                if not returns or synchronizer.collective:  # a process joins a collective exchange once
                    raise
                number = -1
                _log.warning("%s; waiting up to %.0f s until it is started again", lost, waiting.deadline_s)
        if not explored:
            _log.warning("the run %r is finished: no task is left to explore", run_name(config.run))
    return {"explorer": name, "stages_explored": explored, "run_dir": str(run_dir)}


def _stage_of_trainer(waiting: Synchronizer, name: str) -> int | None:
    """Waits until a trainer runs. Returns its stage; None if the run is finished."""
    with activity("waiting for the trainer"):
        return asyncio.run(waiting.wait_for_trainer(name))


async def _wait_for_stage_end(synchronizer: Synchronizer, name: str) -> None:
    """Waits until a stage without explorers ends, or until its trainer dies."""
    async with asyncio.TaskGroup() as tasks:
        monitoring = tasks.create_task(synchronizer.monitor(name))
        await synchronizer.wait_finished(name)
        monitoring.cancel()


# --------------------------------------------------------------------------- after the run


def bench(config: RunConfig) -> dict[str, Any]:
    """Evaluates every checkpoint of the run directory in order; one row each in `bench.jsonl`."""
    run_dir = Path(config.run.dir)
    rows = [{"step": step, **evaluate(config, step)} for step in CheckpointStore(run_dir / "checkpoints").steps()]
    if not rows:
        raise RunDirError(f"bench the checkpoints of {run_dir}", "it has none", "train first")
    atomic_write(run_dir / "bench.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return {"checkpoints": len(rows), "bench": str(run_dir / "bench.jsonl")}
