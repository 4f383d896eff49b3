"""What `trivium run` does: opens the run directory and plays stage after stage, in the mode the config says."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trivium.assemble import (
    Stage,
    build_explorer,
    build_monitor,
    build_synchronizer,
    build_trainer,
    claim_name,
    collective_deadline,
    evaluate,
    explorer_name,
    explorer_parts,
    follow_train_engine,
    meet_here,
    open_board,
    open_store,
    run_name,
    shares_buffer,
    train_device,
    trainer_parts,
)  # fmt: skip
from trivium.checkpoint import Checkpoint, CheckpointStore, write_aside
from trivium.checkpoint import export as export_checkpoint
from trivium.config import RunConfig, build, usable_cores
from trivium.errors import ConfigError, RunDirError
from trivium.logs import logging_to
from trivium.loops import Parts
from trivium.loops import run as run_parts
from trivium.phases import verdict
from trivium.plan import plan_run
from trivium.protocols import Monitor
from trivium.sameness import fingerprint, resume_differences, to_yaml
from trivium.synchronizer import TRAINER, Synchronizer
from trivium.training.device import machine, training_ranks
from trivium.training.ranks import launched_ranks, this_rank

_log = logging.getLogger("trivium")
_CARRIED = ("accuracy_before", "accuracy_after", "seconds", "time")
"""What belongs to the run as a whole: carried from stage to stage, and shown in the summary."""


def run(config: RunConfig) -> dict[str, Any]:
    """Does what `run.mode` says and returns a summary; of a training mode, that written to `summary.json`.

    Raises ConfigError for a config that cannot run, RunDirError for a run directory of another config, and the first
    cause of whatever stopped the run.
    """
    if launched_ranks() > 1:
        _meet_ranks(config)
        if this_rank() > 0:
            return follow(config)
    match config.run.mode:
        case "bench":
            return bench(config)
        case "explore":
            return explore(config)
        case "serve" if shares_buffer(config):
            return explore(config)
        case "serve":  # alone with its buffer, so it trains as well
            return train(config)
        case _:
            return train(config)


def train(config: RunConfig, place: Place | None = None) -> dict[str, Any]:
    """Trains every stage that is not done yet; explores or serves too, unless others do (`run.mode: train`). `place` is
    where stages are played, unless the config says."""
    with _open_run_dir(config) as run_dir:
        claim_name(config, run_dir)
        store = open_store(config, run_dir)
        store.discard_unfinished()
        latest = store.latest()
        if latest is not None:
            _log.info("continuing from %s", latest.path.name)
        with (place or _stage)(config, run_dir, store, latest) as play_stage:
            summary = _train_stages(config, run_dir, store, latest, play_stage)
        if launched_ranks() > 1:
            from trivium.training.torchrun import dismiss

            dismiss(train_device(config))
        asyncio.run(store.copied())  # what could not be copied on the way has to be now
        write_aside(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        return {**summary, "run_dir": str(run_dir)}


def _meet_ranks(config: RunConfig) -> None:
    """Raises ConfigError, on every rank, for what several processes of one command cannot do."""
    from trivium.training.torchrun import open_lines

    mode = config.run.mode
    if mode in ("explore", "bench") or (mode == "serve" and shares_buffer(config)) or config.cluster.kind == "ray":
        raise ConfigError(
            f"run.mode {mode!r} with cluster.kind {config.cluster.kind!r} on {launched_ranks()} ranks of torchrun",
            "torchrun's ranks train together, and nothing else",
            "start one process; on Ray, cluster.ranks says how many train",
        )  # fmt: skip
    open_lines(train_device(config), collective_deadline(config))


def follow(config: RunConfig) -> dict[str, Any]:
    """Trains as one of the ranks that torchrun started, led by the first."""
    run_dir, rank = Path(config.run.dir), this_rank()
    with logging_to(run_dir, f"log-rank-{rank}.txt"):
        follow_train_engine(config)
    return {"rank": rank, "run_dir": str(run_dir)}


PlayStage = Callable[[Stage, Checkpoint | None, dict[str, Any]], dict[str, Any]]
"""(stage, checkpoint to continue from, record of the run) -> record: plays one stage to its end."""
Place = Callable[[RunConfig, Path, CheckpointStore, Checkpoint | None], AbstractContextManager[PlayStage]]
"""(config, run directory, its checkpoints, the latest of them) -> where stages are played."""


@contextmanager
def _stage(config: RunConfig, run_dir: Path, store: CheckpointStore, latest: Checkpoint | None) -> Generator[PlayStage]:
    """Where stages are played: in this process, or on a cluster."""
    if config.cluster.kind == "ray":
        from trivium.cluster.session import cluster_of

        with cluster_of(config) as play_stage:
            yield play_stage
        return
    monitor, board = build_monitor(config, run_dir, latest), open_board(config)

    def here(stage: Stage, resume: Checkpoint | None, record: dict[str, Any]) -> dict[str, Any]:
        synchronizer = build_synchronizer(stage.config, board, fingerprint(config))
        return _train_stage(stage, store, resume, monitor, record, synchronizer)

    try:
        yield here
    finally:
        monitor.close()


def _train_stages(
    config: RunConfig, run_dir: Path, store: CheckpointStore, latest: Checkpoint | None, play_stage: PlayStage
) -> dict[str, Any]:
    """Each stage starts from the weights that the one before it left on disk, with a fresh optimizer."""
    stages = config.stage_configs()
    model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
    record: dict[str, Any] = {}
    # The steps that stages ended at; earlier than planned where their data did.
    ends: list[int] = list(latest.state["pinned"]) if latest is not None else []
    first_version = 0
    for number, stage_config in enumerate(stages):
        last_version = first_version + stage_config.schedule.steps
        if number >= len(ends):
            resume = latest if latest is not None and latest.step > first_version else None
            if resume is not None:
                record = {name: resume.state[name] for name in _CARRIED if name in resume.state}
            if resume is None or resume.step < last_version:
                record |= {"stage": number, "pinned": list(ends)}
                stage = Stage(stage_config, number, first_version, number == len(stages) - 1, run_dir, model_dir)
                _log.info("stage %d begins at step %d", number, resume.step if resume else first_version)
                record = play_stage(stage, resume, record)
                latest = None
            ends.append(store.steps()[-1])
        first_version = last_version
        model_dir = store.directory / f"step-{ends[number]:06d}" / "policy"
    summary = {"steps": ends[-1], **{name: record[name] for name in _CARRIED if record.get(name) is not None}}
    summary["verdict"] = verdict(record.get("time", {}), record.get("seconds", 0.0))
    _log.info(summary["verdict"])
    return summary


def _train_stage(
    stage: Stage, store: CheckpointStore, resume: Checkpoint | None, monitor: Monitor, record: dict[str, Any],
    synchronizer: Synchronizer,
) -> dict[str, Any]:  # fmt: skip
    meeting = meet_here(stage, synchronizer, TRAINER)
    trainer = build_trainer(stage, meeting, store, resume, monitor, record)
    parts = trainer_parts(stage, meeting, trainer)
    try:
        if stage.config.run.mode in ("both", "serve") and (meeting.buffer.explored or stage.evaluated):
            name = stage.config.run.explorer or "explorer-0"
            parts = both_halves(parts, explorer_parts(stage, meeting, build_explorer(stage, name)))
        trainer.prepare()
        asyncio.run(play(parts))
        return {**trainer.record, "seconds": trainer.seconds}
    finally:
        trainer.engine.close()


def both_halves(training: Parts, exploring: Parts) -> Parts:
    """A run in one process."""
    return replace(training, explorer=exploring.explorer, evaluator=exploring.evaluator, explore=exploring.explore)


async def play(parts: Parts) -> None:
    """Runs the parts and frees the rollout engine, whatever happens."""
    try:
        await run_parts(parts)
    finally:
        if parts.explorer is not None:
            await parts.explorer.engine.close()


def explore(config: RunConfig) -> dict[str, Any]:
    """Explores (or serves) and evaluates, stage after stage, for a trainer elsewhere (`run.mode: train`)."""
    name, run_dir = explorer_name(config), Path(config.run.dir)
    stages = config.stage_configs()
    steps = [sum(stage.schedule.steps for stage in stages[:number]) for number in range(len(stages))]
    board = open_board(config)
    lookout = build_synchronizer(config, board, fingerprint(config))
    with logging_to(run_dir, f"log-{name}.txt"):
        model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / f"model-{name}")
        number: int | None = -1
        played = 0
        while number != len(stages) - 1 and (number := asyncio.run(lookout.meet(name))) is not None:
            _log.info("stage %d: explorer %s begins", number, name)
            played += 1
            stage = Stage(stages[number], number, steps[number], number == len(stages) - 1, run_dir, model_dir)
            synchronizer = build_synchronizer(stage.config, board).beside(lookout)
            meeting = meet_here(stage, synchronizer, name)
            if meeting.buffer.explored or stage.evaluated:
                asyncio.run(play(explorer_parts(stage, meeting, build_explorer(stage, name))))
            else:
                asyncio.run(_sit_out(synchronizer, name))
        if not played:
            _log.warning("the run %r is finished: there is nothing to explore", run_name(config))
    return {"explorer": name, "stages_explored": played, "run_dir": str(run_dir)}


async def _sit_out(synchronizer: Synchronizer, name: str) -> None:
    """Waits until a stage that has no use for explorers is over, for as long as its trainer lives."""
    async with asyncio.TaskGroup() as tasks:
        tending = tasks.create_task(synchronizer.tend(name))
        await synchronizer.finished(name)
        tending.cancel()


# --------------------------------------------------------------------------- run directory


@contextmanager
def _open_run_dir(config: RunConfig) -> Generator[Path]:
    """The run directory, held by this process alone, with config.yaml, plan.yaml and log.txt in place."""
    run_dir = Path(config.run.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirError(
                f"run in {run_dir}", "another process runs there", "wait for it, or choose another run.dir"
            ) from error
        _claim(config, run_dir)
        with logging_to(run_dir, "log.txt"):
            yield run_dir


def _claim(config: RunConfig, run_dir: Path) -> None:
    """Writes the config into a new run directory; in an old one, checks that the run is the same."""
    path = run_dir / "config.yaml"
    if path.is_file():
        if not config.run.resume:
            raise RunDirError(
                f"a new run in {run_dir}", "it holds a run", "choose another run.dir, or allow run.resume"
            )
        problems = resume_differences(yaml.safe_load(path.read_text(encoding="utf-8")), config)
        if problems:
            raise ConfigError(
                f"continue the run in {run_dir}", "it began with another config",
                "choose another run.dir, or put these back:", problems,
            )  # fmt: skip
    write_aside(path, to_yaml(config))
    write_aside(run_dir / "plan.yaml", plan_run(config, usable_cores(), machine(), training_ranks(config)).to_yaml())


# --------------------------------------------------------------------------- after the run


def bench(config: RunConfig) -> dict[str, Any]:
    """Evaluates every checkpoint of the run directory in order; one row each in `bench.jsonl`."""
    run_dir = Path(config.run.dir)
    rows = [{"step": step, **evaluate(config, step)} for step in CheckpointStore(run_dir / "checkpoints").steps()]
    if not rows:
        raise RunDirError(f"bench the checkpoints of {run_dir}", "it has none", "train first")
    write_aside(run_dir / "bench.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return {"checkpoints": len(rows), "bench": str(run_dir / "bench.jsonl")}


def export(run_dir: Path, step: int | None, out: Path) -> Path:
    """Writes the policy of a checkpoint (None: the latest) as a plain Hugging Face directory."""
    store = CheckpointStore(run_dir / "checkpoints")
    checkpoint = store.latest() if step is None else store.open(step)
    if checkpoint is None:
        raise RunDirError(f"export the latest checkpoint of {run_dir}", "it has none", "train first")
    return export_checkpoint(checkpoint, out)
