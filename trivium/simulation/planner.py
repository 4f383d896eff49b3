"""`trivium simulate`: what a run would do on a machine of given rates, with more explorers, ranks or staleness.

Each case runs the real loops, trainer, explorers, schedule, buffer and board in one simulated process, in virtual time.
Only engines, train engine and workflow are replaced, by parts that take the time of the rates (`rated`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch

from trivium.board import MemoryBoard
from trivium.checkpoint.store import Checkpoint, CheckpointStore
from trivium.config import RunConfig, config_from_mapping
from trivium.config.resume import fingerprint
from trivium.errors import ConfigError, TriviumError, first_cause
from trivium.inspection.charts import Curve, svg_file
from trivium.inspection.run import RecordedRun
from trivium.inspection.viewer.timeline import read_spans
from trivium.loops import Parts, run
from trivium.phases import TRAINER_LANE
from trivium.runtime.build import (
    build_explorer,
    build_monitor,
    build_parts,
    build_synchronizer,
    build_trainer,
    local_endpoints,
)
from trivium.runtime.launch import run as run_command
from trivium.runtime.main_loop import run_in_loop
from trivium.runtime.stage import Stage, TrainStage
from trivium.simulation.computer import Computer, Process
from trivium.simulation.disk import Disk
from trivium.simulation.rated import DEVICE, Device, RatedEngine
from trivium.simulation.rates import Rates
from trivium.simulation.system import Conditions, installed
from trivium.types import TRAINER

_TOKENS = 64
"""Mean tokens of a simulated group: one token stands for several real ones, which keeps batches small."""
_SLOTS = 64
"""Most slots of a simulated step, if a divisor allows it: a slot of a larger step stands for several groups."""
_EXPLORERS = 16
"""Most simulated explorers, each of which stands for equally many."""
_EQUAL = 0.95
"""Cases with this part of the highest speed count as equally fast."""
_LIMIT_S = 1e9
_CALL_S = 0.001
"""Seconds of a call of another process."""
_MODEL = {"kind": "tiny", "alphabet": "0123456789+=", "layers": 1, "hidden": 16, "heads": 2, "max_position": 64}
"""The model of planned runs, for its tokenizer."""


@dataclass(frozen=True)
class Case:
    """How many processes run, and how stale groups may be."""

    explorers: int = 1
    ranks: int = 1
    staleness: int = 0


@dataclass(frozen=True)
class Forecast:
    """What a case would do."""

    case: Case
    steps_per_hour: float
    trainer_idle: float
    """Part of the time in which the trainer waits for groups."""
    explorers_idle: float
    """Part of the time in which no row of an engine is in flight, averaged over the explorers."""
    staleness: float
    """Mean versions between sampling and training of a group."""
    dropped: float
    """Groups that were rolled out in vain, for each one that was trained on."""
    gpus: float


def forecasts(config: RunConfig, rates: Rates, cases: Iterable[Case], steps: int) -> Iterator[Forecast]:
    """Runs each case for `steps` train steps in virtual time."""
    stage = config.stage_configs()[-1]
    with tempfile.TemporaryDirectory(prefix="trivium-plan-") as directory, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # the batches are small
        # A step outside of the simulation imports every module, and makes the model of all cases.
        first = planned_config(stage, Rates.instant(), Case(), 1, Path(directory) / "first", _MODEL)
        with redirect_stderr(StringIO()):
            run_command(first, partial(_session, 1))
        model = {"kind": "hf", "path": str(Path(directory) / "first" / "model")}
        for number, case in enumerate(cases):
            yield forecast(
                stage, rates, case, planned_config(stage, rates, case, steps, Path(directory) / str(number), model)
            )


def cases_of(config: RunConfig, explorers: str, trainers: str, staleness: str) -> list[Case]:
    """All combinations of three ranges (`8`, `1,2,6` or `8..512`, which doubles; staleness counts up by one). An empty
    range has the value of the config."""
    stage = config.stage_configs()[-1]
    return [
        Case(*each)
        for each in itertools.product(
            _values(explorers, stage.cluster.explorers, doubles=True),
            _values(trainers, stage.cluster.ranks, doubles=True),
            _values(staleness, stage.max_staleness, doubles=False),
        )
    ]


def _values(text: str, default: int, *, doubles: bool) -> list[int]:
    if not text:
        return [default]
    try:
        if ".." not in text:
            return [int(each) for each in text.split(",")]
        value, last = (int(each) for each in text.split(".."))
        values = list[int]()
        while value < last:
            values.append(value)
            value = max(1, value * 2) if doubles else value + 1
        return [*values, last]
    except ValueError as error:
        raise ConfigError("a range of whole numbers", repr(text), "write `4`, `1,2,8` or `1..64`") from error


def forecast(stage: RunConfig, rates: Rates, case: Case, planned: RunConfig) -> Forecast:
    """Runs the planned config of a case in virtual time."""
    is_shared = stage.cluster.kind == "local" and case.explorers == case.ranks == 1
    speed = rates.own_process_speed if getattr(stage.train, "own_process", False) else rates.shared_speed
    device = DEVICE[0] = Device(speed if is_shared else 1.0)
    computer, process = Computer(0, jitter_s=1e-6), Process("run")
    logger = logging.getLogger("trivium")
    handlers = list(logger.handlers)
    try:
        with redirect_stderr(StringIO()), installed(computer, Disk(Path(planned.run.dir)), Conditions(sync_s=0.0)):
            session = partial(_session, num_explorers(case))
            computer.spawn(process, lambda: run_command(planned, session), "main")
            computer.run(lambda: not process.alive, _LIMIT_S)
    finally:
        logger.handlers[:] = handlers
    if process.error is not None:
        cause = first_cause(process.error)
        raise cause if isinstance(cause, TriviumError) else process.error
    run_dir, warm = Path(planned.run.dir), num_warm(planned.schedule.steps, case.staleness)
    rows = [row for row in RecordedRun(run_dir).rows() if "train/version" in row][warm:]
    seconds = seconds_of_steps(run_dir, warm)
    reissued = ("rollout/evicted", "rollout/called_off", "rollout/dropped")
    return Forecast(
        case,
        steps_per_hour=3600 * len(rows) / seconds,
        trainer_idle=sum(row["time/wait"] for row in rows) / seconds,
        explorers_idle=max(0.0, 1 - device.busy_s / computer.now),
        staleness=fmean(row["rollout/staleness"] for row in rows),
        dropped=sum(row.get(name, 0.0) for row in rows for name in reissued)
        / max(1.0, sum(row["rollout/groups"] for row in rows)),
        gpus=case.explorers * rates.explorer_gpus + case.ranks * rates.rank_gpus,
    )


def num_warm(steps: int, staleness: int) -> int:
    """The first steps, which do not count: an asynchronous run begins with nothing in flight."""
    return min(steps - 1, max(1, staleness + 1, steps // 5))


def seconds_of_steps(run_dir: Path, warm: int) -> float:
    """The seconds of all train steps of a run but the first `warm` ones."""
    ends = [span.stop for span in read_spans(run_dir) if (span.lane, span.name) == (TRAINER_LANE, "train")]
    return max(ends[-1] - ends[warm - 1], 1e-9)


def planned_config(
    stage: RunConfig, rates: Rates, case: Case, steps: int, directory: Path, model: Mapping[str, Any]
) -> RunConfig:
    """The config of a stage with rated parts, a tiny model for its tokenizer, and no evaluation or files of its own."""
    schedule: dict[str, Any] = stage.schedule.model_dump(exclude_unset=True, mode="json")
    groups = _groups_of_slot(stage.schedule.groups_per_step)
    schedule |= {
        "groups_per_step": stage.schedule.groups_per_step // groups,
        "group_size": min(2, stage.schedule.group_size),
        "over_rollout": math.ceil(stage.schedule.over_rollout / groups),
        "steps": steps,
        "max_staleness": case.staleness,
        "until": None,
    }
    rollouts = groups * stage.schedule.group_size
    mean_tokens = rates.mean("prompt_tokens") + rates.mean("turns") * rates.mean("response_tokens")
    token_unit = rollouts * mean_tokens / _TOKENS
    replicas = case.explorers // num_explorers(case)
    kept: dict[str, Any] = stage.model_dump(
        include={"algorithm", "sync", "checkpoint"}, exclude_unset=True, mode="json"
    )
    parts = "trivium.simulation.rated"
    of_engine = ("start_s", "step_s", "row_s", "load_s", "max_rows", "prompt_tokens", "response_tokens", "turns")
    return config_from_mapping(
        {
            "run": {"dir": str(directory), "name": "planned", "seed": stage.run.seed, "enable_preview": False},
            "model": dict(model),
            "tasks": {"train": {"kind": "arithmetic", "max_operand": 99}},
            "engine": {
                "kind": f"{parts}:RatedEngine",
                "sampling": {"max_new_tokens": stage.engine.sampling.max_new_tokens},
                "group_size": stage.schedule.group_size,
                "groups": groups,
                "token_unit": token_unit,
                "replicas": replicas,
                **{name: getattr(rates, name) for name in (*of_engine, "environment_s", "reward_s")},
            },
            "train": {
                "kind": f"{parts}:RatedTrainEngine",
                "token_s": rates.update_token_s * token_unit,
                "score_token_s": rates.score_token_s * token_unit,
                **{name: getattr(rates, name) for name in ("update_s", "sync_s", "save_s")},
                "speedup": case.ranks * rates.rank_efficiency ** math.log2(case.ranks),
            },
            "workflow": {
                "kind": f"{parts}:RatedWorkflow",
                "equal_groups": rates.equal_groups,
                "deadline_s": _LIMIT_S,
                "max_concurrent": max(1, stage.workflow.max_concurrent * replicas // rollouts),
            },
            "algorithm": kept.get("algorithm", {}),
            "schedule": schedule,
            "sync": {**kept.get("sync", {}), "method": "memory", "offset": None, "dir": None, "deadline_s": _LIMIT_S},
            "checkpoint": {**kept.get("checkpoint", {}), "remote": None, "keep_best": None},
            "monitors": [{"kind": "jsonl"}],
        }
    )


def _groups_of_slot(groups: int) -> int:
    """How many groups a planned slot stands for."""
    slots = next((n for n in range(min(groups, _SLOTS), _SLOTS // 4, -1) if groups % n == 0), groups)
    return groups // slots


def num_explorers(case: Case) -> int:
    """The planned explorers, each of which stands for equally many."""
    return next(n for n in range(min(case.explorers, _EXPLORERS), 0, -1) if case.explorers % n == 0)


@contextmanager
def _session(
    explorers: int, config: RunConfig, run_dir: Path, store: CheckpointStore, latest: Checkpoint | None
) -> Generator[TrainStage]:
    """Trains with several explorers over one board, buffer and channel, as on Ray."""
    monitor = build_monitor(config, run_dir, latest)

    def train_stage(stage: Stage, resume: Checkpoint | None, record: dict[str, Any]) -> dict[str, Any]:
        synchronizer = build_synchronizer(stage.config, MemoryBoard(), fingerprint(config))
        endpoints = local_endpoints(stage, synchronizer, TRAINER)
        trainer = build_trainer(stage, endpoints, store, resume, monitor, record)
        roles = [build_parts(stage, endpoints, trainer)]
        remote = replace(endpoints, buffer=RemoteBuffer(endpoints.buffer) if explorers > 1 else endpoints.buffer)
        section = cast(RatedEngine.Config, stage.config.engine)
        first = build_explorer(stage, engine=RatedEngine(section))
        others = [replace(first, engine=RatedEngine(section), name=f"explorer-{n}") for n in range(1, explorers)]
        roles += [build_parts(stage, remote, explorer=explorer) for explorer in (first, *others)]
        trainer.prepare()
        run_in_loop(_run_all(roles), stage.config.workflow.deadline_s)
        return trainer.run_record

    try:
        yield train_stage
    finally:
        monitor.close()


class RemoteBuffer:
    """The buffer as explorers of other processes reach it: a slot takes a call, and explorers get slots in turn."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    async def lease(self, owner: str, *, wait: bool = True) -> Any:
        await asyncio.sleep(_CALL_S)
        return await self._buffer.lease(owner, wait=wait)


async def _run_all(roles: Sequence[Parts]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for parts in roles:
            tasks.create_task(run(parts))


# --------------------------------------------------------------------------- the table


def table(results: Sequence[Forecast]) -> str:
    """A row for each case."""
    head = ("explorers", "ranks", "GPUs", "staleness", "steps/h", "trainer idle", "explorers idle", "mean staleness")
    lines: list[tuple[str, ...]] = [(*head, "dropped")]
    for each in results:
        case = each.case
        counts = (str(case.explorers), str(case.ranks), f"{each.gpus:g}", str(case.staleness))
        shares = (
            f"{each.trainer_idle:.0%}",
            f"{each.explorers_idle:.0%}",
            f"{each.staleness:.2f}",
            f"{each.dropped:.1%}",
        )
        lines.append((*counts, f"{each.steps_per_hour:,.1f}", *shares))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def plot(results: Sequence[Forecast]) -> str:
    """An SVG of the highest speed for each number of GPUs, a curve for each staleness."""
    fastest = dict[int, dict[int, float]]()
    for each in results:
        curve = fastest.setdefault(each.case.staleness, {})
        curve[round(each.gpus)] = max(curve.get(round(each.gpus), 0.0), each.steps_per_hour)
    curves = [
        Curve("", f"max_staleness {staleness}", "steps/h", sorted(points), [points[n] for n in sorted(points)])
        for staleness, points in sorted(fastest.items())
    ]
    return svg_file("Train steps per hour by GPUs", curves)


def cheapest(results: Sequence[Forecast]) -> Forecast:
    """The case with the fewest GPUs of those that are about as fast as the fastest one."""
    fastest = max(each.steps_per_hour for each in results)
    return min(
        (each for each in results if each.steps_per_hour >= _EQUAL * fastest),
        key=lambda each: (each.gpus, each.case.staleness, -each.steps_per_hour),
    )
