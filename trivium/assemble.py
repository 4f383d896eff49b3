"""RunConfig -> the parts, stage by stage. The one file that knows every department."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers.utils.logging import disable_progress_bar

from trivium.algorithms import GroupAlgorithm, build_algorithm
from trivium.algorithms.explain import explain as explain_algorithm
from trivium.checkpoint import Checkpoint, CheckpointStore, write_aside
from trivium.checkpoint import export as export_checkpoint
from trivium.config import RunConfig, build, plan_run, resume_differences, to_yaml, usable_cores
from trivium.errors import ConfigError, RunDirError
from trivium.evaluate import Evaluator
from trivium.explorer import Explorer
from trivium.loops import Parts
from trivium.loops import run as run_parts
from trivium.monitors.fanout import FanOut
from trivium.protocols import Monitor, TaskSource
from trivium.registry import resolve
from trivium.rewards.calling import make_judge
from trivium.schedule import Curriculum, Schedule
from trivium.synchronizer import MemoryBoard, Synchronizer
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.trainer import Cadence, Trainer
from trivium.types import Metrics

_log = logging.getLogger("trivium")
_CARRIED = ("accuracy_before", "accuracy_after", "seconds")
"""What belongs to the run as a whole: carried from stage to stage, and shown in the summary."""


disable_progress_bar()  # transformers' own bars would break into the console's table


def run(config: RunConfig) -> dict[str, Any]:
    """Trains every stage that is not done yet and returns the summary, as written to `summary.json`.

    Raises ConfigError for a config that cannot run, RunDirError for a run directory of another config, and the first
    cause of whatever stopped the run.
    """
    if config.run.mode == "bench":
        return bench(config)
    with _open_run_dir(config) as run_dir:
        store = CheckpointStore(
            run_dir / "checkpoints", keep=config.checkpoint.keep, keep_best=config.checkpoint.keep_best
        )
        store.discard_unfinished()
        latest = store.latest()
        monitor = _build_monitor(config, run_dir, latest)
        try:
            summary = _run_stages(config, run_dir, store, latest, monitor)
        finally:
            monitor.close()
        write_aside(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
        return {**summary, "run_dir": str(run_dir)}


def _run_stages(
    config: RunConfig, run_dir: Path, store: CheckpointStore, latest: Checkpoint | None, monitor: Monitor
) -> dict[str, Any]:
    """Each stage starts from the weights that the one before it left on disk, with a fresh optimizer."""
    stages = config.stage_configs()
    model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
    record: dict[str, Any] = {}
    pinned: list[int] = []
    first_version = 0
    for number, stage_config in enumerate(stages):
        last_version = first_version + stage_config.schedule.steps
        resume = latest if latest is not None and latest.step > first_version else None
        if resume is not None:
            record = {name: resume.state[name] for name in _CARRIED if name in resume.state}
        if resume is None or resume.step < last_version:
            record |= {"stage": number, "pinned": list(pinned)}
            stage = Stage(stage_config, number, first_version, number == len(stages) - 1, run_dir, model_dir)
            _run_stage(stage, store, resume, monitor, record)
            latest = None
        first_version = last_version
        pinned.append(last_version)
        model_dir = store.directory / f"step-{last_version:06d}" / "policy"
    return {"steps": first_version, **{name: record[name] for name in _CARRIED if record.get(name) is not None}}


@dataclass(frozen=True)
class Stage:
    """One stage of a run and where it stands in it."""

    config: RunConfig
    number: int
    first_version: int
    is_last: bool
    run_dir: Path
    model_dir: Path
    """The weights it starts from; also the frozen reference, where one is needed."""

    @property
    def evaluated(self) -> bool:
        evaluation = self.config.evaluation
        return evaluation.taskset is not None and (self.is_last or evaluation.every > 0)

    @property
    def threads(self) -> int:
        return self.config.cluster.threads or usable_cores()


def _run_stage(
    stage: Stage, store: CheckpointStore, resume: Checkpoint | None, monitor: Monitor, record: dict[str, Any]
) -> None:
    _log.info("stage %d begins at step %d", stage.number, resume.step if resume else stage.first_version)
    parts = _build_parts(stage, store, resume, monitor, record)
    try:
        parts.trainer.prepare()
        asyncio.run(_play(parts))
        record["seconds"] = parts.trainer.seconds
    finally:
        parts.trainer.engine.close()


async def _play(parts: Parts) -> None:
    try:
        await run_parts(parts)
    finally:
        if parts.explorer is not None:
            await parts.explorer.engine.close()


def _build_parts(
    stage: Stage, store: CheckpointStore, resume: Checkpoint | None, monitor: Monitor, record: dict[str, Any]
) -> Parts:
    config = stage.config
    renderer = ChatRenderer(hf_tokenizer(str(stage.model_dir)))
    schedule = _build_schedule(stage)
    buffer = build(
        "buffers", config.buffer, schedule=schedule, rollouts=stage.run_dir / "rollouts" / f"stage-{stage.number}",
        renderer=renderer, deadline_s=config.sync.deadline_s,
    )  # fmt: skip
    # Explorers of a resumed run may need every version published since the oldest one a pending slot is played with.
    channel = resolve("channels", config.sync.method)(keep=config.max_staleness // config.sync.interval + 2)
    synchronizer = Synchronizer(MemoryBoard(), deadline_s=config.sync.deadline_s)
    algorithm = algorithm_of(config)
    explored = buffer.explored or stage.evaluated
    explorer = _build_explorer(stage, renderer, algorithm.greedy_baseline) if explored else None
    trainer = Trainer(
        engine=_build_train_engine(stage, algorithm, channel, explored=buffer.explored),
        buffer=buffer, channel=channel, synchronizer=synchronizer, schedule=schedule, monitor=monitor,
        checkpoints=store,
        cadence=Cadence(config.checkpoint.save_every, config.evaluation.every, stage.is_last),
        evaluator=_build_evaluator(stage, explorer) if explorer is not None and stage.evaluated else None,
        resume=resume, max_failed_fraction=config.workflow.max_failed_fraction, record=record,
    )  # fmt: skip
    return Parts(trainer, buffer, schedule, synchronizer, channel, explorer)


def algorithm_of(config: RunConfig) -> GroupAlgorithm:
    """The algorithm of a stage's config, with what follows from the rest of the config settled."""
    section = config.algorithm.settled(config)
    return build_algorithm(section, config.run.seed, config.engine.sampling.max_new_tokens)


def _build_schedule(stage: Stage) -> Schedule:
    config, schedule = stage.config, stage.config.schedule
    tasks, said = _build_tasks(config, "train"), schedule.curriculum
    return Schedule(
        tasks=tasks, seed=config.run.seed, stage=stage.number,
        first_version=stage.first_version, groups_per_step=schedule.groups_per_step,
        group_size=schedule.group_size, max_staleness=config.max_staleness, sync_interval=config.sync.interval,
        deterministic=schedule.deterministic, shuffle=schedule.shuffle,
        curriculum=None if said is None else Curriculum.of(tasks, said.column, said.easy_first, said.spread),
        max_attempts=schedule.max_attempts,
        steps=schedule.steps,
    )  # fmt: skip


def _build_tasks(config: RunConfig, name: str) -> TaskSource:
    return build("tasks", config.tasks[name], name=name, seed=config.run.seed)


def _build_explorer(stage: Stage, renderer: ChatRenderer, greedy_baseline: bool = False) -> Explorer:
    config, judge = stage.config, make_judge(stage.config.rewards)
    for name in {"train", stage.config.evaluation.taskset or "train"}:
        judge.check_columns(_build_tasks(config, name)[0].columns)
    engine = build(
        "engines", config.engine, model_dir=stage.model_dir, eos_token_ids=renderer.eos_token_ids,
        decode=renderer.decode, threads=stage.threads,
    )  # fmt: skip
    return Explorer(
        engine=engine, renderer=renderer, workflow=build("workflows", config.workflow),
        judge=judge, sampling=config.engine.sampling.sampling(),
        max_context=engine.max_context, deadline_s=config.workflow.deadline_s,
        max_concurrent=config.workflow.max_concurrent, greedy_baseline=greedy_baseline,
        must_judge=config.algorithm.reads_rewards or stage.evaluated,
    )  # fmt: skip


def _build_evaluator(stage: Stage, explorer: Explorer) -> Evaluator:
    config, evaluation = stage.config, stage.config.evaluation
    assert evaluation.taskset is not None
    return Evaluator(
        explorer=explorer, tasks=_build_tasks(config, evaluation.taskset), taskset=evaluation.taskset,
        seed=config.run.seed, samples=evaluation.samples, k=evaluation.k,
        sampling=evaluation.sampling.sampling(), threshold=evaluation.threshold,
        max_failed_fraction=config.workflow.max_failed_fraction,
    )  # fmt: skip


def _build_train_engine(stage: Stage, algorithm: GroupAlgorithm, channel: Any, *, explored: bool) -> Any:
    config = stage.config
    if algorithm.teacher is not None:
        _check_vocabulary(algorithm.teacher.path, stage.model_dir)
    engine = build(
        "train", config.train, model_dir=stage.model_dir, algorithm=algorithm,
        # Expert data was not sampled at any temperature.
        temperature=config.engine.sampling.temperature if explored else 1.0,
        max_response_length=config.engine.sampling.max_new_tokens, total_steps=config.schedule.steps,
        first_version=stage.first_version, seed=config.run.seed, threads=stage.threads,
    )  # fmt: skip
    engine.channel, engine.checkpoint_dir = channel, stage.run_dir / "weights"
    return engine


def _check_vocabulary(teacher: Path, policy: Path) -> None:
    """Raises ConfigError where a token id means one thing to the teacher and another to the policy."""
    if hf_tokenizer(teacher).get_vocab() != hf_tokenizer(policy).get_vocab():
        raise ConfigError(
            f"learn from the teacher {teacher}", f"its tokenizer is not the one of {policy}",
            "use a teacher with the policy's tokenizer",
        )  # fmt: skip


def _build_monitor(config: RunConfig, run_dir: Path, latest: Checkpoint | None) -> FanOut:
    step = latest.step if latest is not None else 0
    monitor = FanOut([build("monitors", section, run_dir=run_dir, resume_step=step) for section in config.monitors])
    if latest is not None:
        monitor.restore(latest.state["monitor"])
        _log.info("continuing from %s", latest.path.name)
    return monitor


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
        handler = logging.FileHandler(run_dir / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        terminal = logging.StreamHandler()  # stderr: what a user should not have to look for
        terminal.setLevel(logging.WARNING)
        _log.setLevel(logging.INFO)
        for each in (handler, terminal):
            _log.addHandler(each)
        try:
            yield run_dir
        finally:
            for each in (handler, terminal):
                _log.removeHandler(each)
                each.close()


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
    write_aside(run_dir / "plan.yaml", plan_run(config, usable_cores()).to_yaml())


# --------------------------------------------------------------------------- before and after the run


def explain(config: RunConfig) -> str:
    """What each stage of a config minimises, as formulas with the config's values, each part with its source."""
    stages = config.stage_configs()
    texts = [
        explain_algorithm(algorithm_of(stage), getattr(resolve("algorithms", stage.algorithm.kind), "source", ""))
        for stage in stages
    ]
    heads = [f"stage {number}\n" if len(stages) > 1 else "" for number in range(len(stages))]
    return "\n\n".join(head + text for head, text in zip(heads, texts, strict=True)) + "\n"


def evaluate(config: RunConfig, step: int) -> Metrics:
    """Evaluates the policy of a checkpoint (0: the model before training) on `evaluation.taskset` of the last stage."""
    run_dir = Path(config.run.dir)
    last = config.stage_configs()[-1]
    if last.evaluation.taskset is None:
        raise ConfigError("evaluate a checkpoint", "evaluation.taskset names nothing", "set evaluation.taskset")
    if step == 0:
        model_dir = build("models", config.model, seed=config.run.seed).materialize(run_dir / "model")
    else:
        model_dir = CheckpointStore(run_dir / "checkpoints").open(step).path / "policy"
    metrics = asyncio.run(_evaluate(Stage(last, 0, step, True, run_dir, model_dir)))
    return {**metrics, f"eval/{last.evaluation.taskset}/version": float(step)}  # a fresh engine counts from 0


async def _evaluate(stage: Stage) -> Metrics:
    explorer = _build_explorer(stage, ChatRenderer(hf_tokenizer(str(stage.model_dir))))
    try:
        return await _build_evaluator(stage, explorer).run(explorer.version)
    finally:
        await explorer.engine.close()


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
