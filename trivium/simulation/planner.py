"""`trivium simulate`: what a run would do on a machine of given rates, with more explorers, ranks or staleness.

Each case runs the real loops, trainer, explorers, schedule, buffer and board in one simulated process, in virtual time.
Only engines, train engine and workflow are replaced, by parts that take the time of the rates (`rated`).
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from trivium.config import RunConfig, config_from_mapping
from trivium.errors import ConfigError, first_cause
from trivium.inspection.charts import Curve, svg_file
from trivium.inspection.run import RecordedRun
from trivium.inspection.viewer.timeline import read_spans
from trivium.phases import TRAINER_LANE
from trivium.runtime.launch import run as run_command
from trivium.simulation.computer import Computer, Process
from trivium.simulation.disk import Disk
from trivium.simulation.rated import RatedEngine
from trivium.simulation.rates import Rates
from trivium.simulation.system import Conditions, installed

_TOKENS = 64
"""Mean tokens of a simulated group: one token stands for several real ones, which keeps batches small."""
_SLOTS = 64
"""Most slots of a simulated step, if a divisor allows it: a slot of a larger step stands for several groups."""
_EQUAL = 0.95
"""Cases with this part of the highest speed count as equally fast."""
_LIMIT_S = 1e9
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
    """Runs each case for `steps` train steps, and as many more as its staleness, in virtual time."""
    stage = config.stage_configs()[-1]
    with tempfile.TemporaryDirectory(prefix="trivium-plan-") as directory, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # the batches are small
        # A step outside of the simulation imports every module, and makes the model of all cases.
        first = planned_config(stage, Rates.instant(), Case(), 1, Path(directory) / "first", _MODEL)
        with redirect_stderr(StringIO()):
            run_command(first)
        model = {"kind": "hf", "path": str(Path(directory) / "first" / "model")}
        for number, case in enumerate(cases):
            yield forecast(
                stage, rates, case, planned_config(stage, rates, case, steps, Path(directory) / str(number), model)
            )


def cases_of(config: RunConfig, explorers: str, trainers: str, staleness: str) -> list[Case]:
    """All combinations of three ranges (`8`, `1,2,6` or `8..512`, which doubles). An empty range has the value of the
    config."""
    stage = config.stage_configs()[-1]
    ranges = (explorers, stage.cluster.explorers), (trainers, stage.cluster.ranks), (staleness, stage.max_staleness)
    return [Case(*each) for each in itertools.product(*itertools.starmap(_values, ranges))]


def _values(text: str, default: int) -> list[int]:
    try:
        if ".." not in text:
            return [int(each) for each in text.split(",")] if text else [default]
        value, last = map(int, text.split(".."))
        values = list[int]()
        while value < last:
            values.append(value)
            value = max(1, 2 * value)
        return [*values, last]
    except ValueError as error:
        raise ConfigError("a range of whole numbers", repr(text), "write `4`, `1,2,8` or `1..64`") from error


def forecast(stage: RunConfig, rates: Rates, case: Case, planned: RunConfig) -> Forecast:
    """Runs the planned config of a case in virtual time."""
    total_s, run_dir = virtual_run(planned), Path(planned.run.dir)
    counted = counted_steps(planned.schedule.steps, case.staleness)
    rows = [row for row in RecordedRun(run_dir).rows() if "train/version" in row][counted]
    seconds = seconds_of(run_dir, counted)
    reissued = sum(row.get(f"rollout/{name}", 0.0) for row in rows for name in ("evicted", "called_off", "dropped"))
    assert RatedEngine.latest is not None
    return Forecast(
        case,
        steps_per_hour=3600 * len(rows) / seconds,
        trainer_idle=sum(row["time/wait"] for row in rows) / seconds,
        explorers_idle=max(0.0, 1 - RatedEngine.latest.busy_s / total_s),
        staleness=fmean(row["rollout/staleness"] for row in rows),
        dropped=reissued / max(1.0, sum(row["rollout/groups"] for row in rows)),
        gpus=case.explorers * rates.explorer_gpus + case.ranks * rates.rank_gpus,
    )


def virtual_run(config: RunConfig) -> float:
    """Runs a config with rated parts in virtual time. Returns its seconds."""
    computer, process = Computer(0, jitter_s=1e-6), Process("run")
    with redirect_stderr(StringIO()), installed(computer, Disk(Path(config.run.dir)), Conditions(sync_s=0.0)):
        computer.spawn(process, lambda: run_command(config), "main")
        computer.run(lambda: not process.alive, _LIMIT_S)
    if process.error is not None:
        raise first_cause(process.error)
    return computer.now


def counted_steps(steps: int, staleness: int) -> slice:
    """The steps of a run that count. At first nothing is in flight, and during the last ones nothing is sampled."""
    warm = min(steps - 1, max(1, staleness + 1, steps // 5))
    return slice(warm, max(warm + 1, steps - staleness))


def seconds_of(run_dir: Path, counted: slice) -> float:
    """The seconds of these train steps of a run."""
    ends = [span.stop for span in read_spans(run_dir) if (span.lane, span.name) == (TRAINER_LANE, "train")]
    return max(ends[counted.stop - 1] - ends[counted.start - 1], 1e-9)


def planned_config(
    stage: RunConfig, rates: Rates, case: Case, steps: int, directory: Path, model: Mapping[str, Any]
) -> RunConfig:
    """The config of a stage with rated parts, a tiny model for its tokenizer, and no evaluation or files of its own."""
    kept: dict[str, Any] = stage.model_dump(
        include={"algorithm", "sync", "checkpoint", "schedule"}, exclude_unset=True, mode="json"
    )
    slots = _slots(stage.schedule.groups_per_step)
    groups = stage.schedule.groups_per_step // slots
    rollouts = groups * stage.schedule.group_size
    mean_tokens = rates.mean("prompt_tokens") + rates.mean("turns") * rates.mean("response_tokens")
    rated = {"rates": rates.model_dump(), "token_unit": rollouts * mean_tokens / _TOKENS}
    is_shared = stage.cluster.kind == "local" and case.explorers == case.ranks == 1
    speed = rates.own_process_speed if getattr(stage.train, "own_process", False) else rates.shared_speed
    parts = "trivium.simulation.rated"
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
                "replicas": case.explorers,
                **rated,
            },
            "train": {
                "kind": f"{parts}:RatedTrainEngine",
                "ranks": case.ranks,
                "save_s": rates.save_s,
                "shared_speed": speed if is_shared else 1.0,
                **rated,
            },
            "workflow": {
                "kind": f"{parts}:RatedWorkflow",
                "deadline_s": _LIMIT_S,
                "max_concurrent": max(1, stage.workflow.max_concurrent * case.explorers // rollouts),
            },
            "algorithm": kept.get("algorithm", {}),
            "schedule": {
                **kept["schedule"],
                "groups_per_step": slots,
                "group_size": min(2, stage.schedule.group_size),
                "over_rollout": math.ceil(stage.schedule.over_rollout / groups),
                "steps": steps + case.staleness,
                "max_staleness": case.staleness,
                "until": None,
            },
            "sync": {**kept.get("sync", {}), "method": "memory", "offset": None, "dir": None, "deadline_s": _LIMIT_S},
            "checkpoint": {**kept.get("checkpoint", {}), "remote": None, "keep_best": None},
            "monitors": [{"kind": "jsonl"}],
        }
    )


def _slots(groups: int) -> int:
    """The slots of a simulated step, each of which stands for equally many groups."""
    return next((n for n in range(min(groups, _SLOTS), _SLOTS // 4, -1) if groups % n == 0), groups)


# --------------------------------------------------------------------------- the table


_COLUMNS = {
    "explorers": "{0.case.explorers}",
    "ranks": "{0.case.ranks}",
    "GPUs": "{0.gpus:g}",
    "staleness": "{0.case.staleness}",
    "steps/h": "{0.steps_per_hour:,.1f}",
    "trainer idle": "{0.trainer_idle:.0%}",
    "explorers idle": "{0.explorers_idle:.0%}",
    "mean staleness": "{0.staleness:.2f}",
    "dropped": "{0.dropped:.1%}",
}


def table(results: Sequence[Forecast]) -> str:
    """A row for each case."""
    lines = [[*_COLUMNS], *([shown.format(each) for shown in _COLUMNS.values()] for each in results)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


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
