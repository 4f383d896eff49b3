"""Presets against each other on three tiny tasks, with equal rollouts and equal optimizer steps.

    python benchmarks/arena.py [--minutes 10] [--parts 1/2] [--only grpo,ppo] [--tasks sums,code] [--plan] [--page]

A *cell* is one run: a preset on a task, with a seed and a learning rate. All cells of a task begin with the same start
policy, which supervised steps make once, and take the same number of steps, rollouts and optimizer steps. The learning
rate of a preset on a task is the one of the grid whose runs with the seeds of `SELECTION` have the best accuracy. Only
runs with the seeds of `REPORTED`, which are others, are reported.

Each finished cell is a line of the results file, and the next call skips it. So the table can be made in parts of
minutes: `--minutes` starts no cell after that time, and `--parts 1/2` takes every second pair of preset and task, for
two calls that share the work. The presets of `ESSENTIAL` come first, and the first three seeds before the others. A
cell of other settings (a changed task, another number of steps) does not count.

`--plan` prints how many cells are left and how long they may take. `--page` writes the tables of arena.md and the
plot arena.svg beside this file from the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from arena_page import Layout, write_page
from arena_tasks import ARENAS, Arena

import trivium
from trivium.checkpoint.store import CheckpointStore
from trivium.config import merged
from trivium.foundation.errors import TriviumError
from trivium.foundation.registry import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "arena.jsonl"
SELECTION, REPORTED = (100,), (0, 1, 2, 3, 4)
FIRST_SEEDS = 3
"""So many reported seeds of every pair come before the others."""
STEPS, GROUPS, MEMBERS = 12, 16, 8
"""Train steps of a cell, groups of each of them, rollouts of a group."""

TEACHERS = ("sdpo", "sdft", "opsd", "distill_top_k", "distill_student_top_k", "iw_opd")
ESSENTIAL = (
    "grpo",
    "sdpo",
    "sdft",
    "opsd",
    "echo",
    "ppo",
    "reinforce_plus_plus",
    "rloo",
    "dapo",
    "gspo",
    "dr_grpo",
    "cispo",
    "remax",
    "reinforce",
    "sft",
    "dpo",
)
EXCLUDED = ("reward_model", "distill", "a_star_po")
"""The first trains no policy, the second takes one optimizer step per train step, and the third needs the optimal value
of each task, which other runs estimate."""
WITHOUT_RATIO = ("reinforce", "gpg", "raft")
"""Losses that are correct for samples of the current weights alone."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    preset: str
    seed: int
    lr: float


# --------------------------------------------------------------------------- which cells


def presets() -> list[str]:
    """The presets that train a policy, the essential ones first."""
    others = [name for name in CATALOGUE["algorithms"] if name not in (*ESSENTIAL, *EXCLUDED)]
    return [*ESSENTIAL, *others]


def refusal(preset: str, task: str) -> str:
    """Why a preset does not take part in a task; empty if it does."""
    arena = ARENAS[task]
    if preset in TEACHERS and not arena.shows_solution:
        return "no teacher that knows more than the policy"
    if preset == "sft" and not arena.expert:
        return "no computed completion to imitate"
    if preset == "echo" and "workflow" not in arena.config:
        return "no observations"
    return ""


def pairs(only: Sequence[str], tasks: Sequence[str]) -> list[tuple[str, str]]:
    """(preset, task) of the table, in the order of the work. Where all rewards are equal, presets that learn from
    rewards alone come last, except `grpo`, which is the control."""
    found = [(preset, task) for preset in presets() for task in ARENAS if not refusal(preset, task)]
    others = ("grpo", "echo", "sft", *TEACHERS)
    found.sort(key=lambda pair: ARENAS[pair[1]].shows_solution and pair[0] not in others)
    return [(preset, task) for preset, task in found if preset in only and task in tasks]


@cache
def settings(task: str) -> str:
    """A hash of what all cells of a task share, without paths."""
    arena = ARENAS[task]
    rows = None if arena.start_rows is None else arena.start_rows()
    shared = [arena.config, arena.start, rows, STEPS, GROUPS, MEMBERS, arena.mini_batches]
    text = json.dumps(shared, sort_keys=True)
    return hashlib.blake2b(text.replace(str(ROOT), "").encode(), digest_size=4).hexdigest()


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results with the present settings. A line that a killed process left unfinished is skipped,
    and a cell that two processes ran counts once."""
    rows: dict[tuple[object, ...], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[tuple(row[name] for name in ("task", "preset", "seed", "lr", "settings"))] = row
    return [row for row in rows.values() if row["settings"] == settings(row["task"])]


def best_lr(rows: Sequence[Mapping[str, Any]], preset: str, task: str) -> float | None:
    """The rate with the best mean accuracy on the seeds of the selection, the lower one of equals; None until every
    cell of the selection has run, or if all failed."""
    means: dict[float, float] = {}
    for lr in ARENAS[task].grid:
        found = [r for r in rows if (r["preset"], r["task"], r["lr"]) == (preset, task, lr) and r["seed"] in SELECTION]
        if len(found) < len(SELECTION):
            return None
        if not any("error" in row for row in found):
            means[lr] = sum(row["accuracy"] for row in found) / len(found)
    return max(means, key=lambda lr: (means[lr], -lr)) if means else None


def wanted(rows: Sequence[Mapping[str, Any]], chosen: Sequence[tuple[str, str]]) -> Iterator[Cell]:
    """The cells that are missing, as far as they are known: reported ones follow once the learning rate is chosen."""
    done = {Cell(row["task"], row["preset"], row["seed"], row["lr"]) for row in rows}
    for seeds in (REPORTED[:FIRST_SEEDS], REPORTED[FIRST_SEEDS:]):
        for preset, task in chosen:
            lr = best_lr(rows, preset, task)
            cells = [Cell(task, preset, seed, rate) for seed in SELECTION for rate in ARENAS[task].grid]
            cells += [] if lr is None else [Cell(task, preset, seed, lr) for seed in seeds]
            yield from (cell for cell in cells if cell not in done)


# --------------------------------------------------------------------------- one cell


def base(task: str, run_dir: Path, seed: int) -> dict[str, Any]:
    """What every run of a task has."""
    shared = {
        "run": {"dir": str(run_dir), "seed": seed, "keep": "tokens"},
        "cluster": {"threads": 1},
        "monitors": [{"kind": "jsonl"}],
        "checkpoint": {"save_every": 0, "keep": 1},
        "engine": {"max_rows": 1024},
        "evaluation": {"sampling": {"temperature": 1.0}},
    }
    return merged(shared, ARENAS[task].config)


def start_policy(task: str, work: Path) -> Path:
    """The policy that every cell of the task begins with; trains it if it is missing."""
    arena, folder = ARENAS[task], work / f"{task}-{settings(task)}"
    schedule = {"group_size": 1, **arena.start}
    optimizer = {"lr": 4e-3, "warmup_steps": 10, "schedule": "linear"}
    own = {"algorithm": {"kind": "sft"}, "buffer": {"kind": "files"}, "schedule": schedule}
    config = merged(base(task, folder, 0), {**own, "train": {"optimizer": optimizer}})
    config["evaluation"] = {**config["evaluation"], "every": 2} if "until" in schedule else None
    trivium.run(config, tasks=None if arena.start_rows is None else arena.start_rows())
    return policy_of(folder)


def policy_of(run_dir: Path) -> Path:
    last = CheckpointStore(run_dir / "checkpoints").latest()
    assert last is not None
    return last.path / "policy"


def algorithm_of(preset: str, arena: Arena) -> dict[str, Any]:
    """The preset, with what makes rollouts and optimizer steps equal."""
    says: dict[str, Any] = {"kind": preset, "mini_batches": arena.mini_batches}
    if preset in TEACHERS:
        field = "{feedback}" if preset == "sdpo" else "{answer}"
        says["teacher"] = {"context": "{prompt}" + field}
        if preset not in ("sdpo", "sdft", "opsd"):  # these say which weights
            says["teacher"]["weights"] = "initial"
    if preset in WITHOUT_RATIO:
        says["correction"] = "bypass_token_is"
    if preset == "dapo":  # the answers have nearly the length of the limit, which its shaping would penalise
        says |= {"refill": 0, "shaping": []}
    return says


def sections_of(cell: Cell, start: Path) -> dict[str, Any]:
    """The config of a cell without what all cells share."""
    arena = ARENAS[cell.task]
    schedule = {"steps": STEPS, "groups_per_step": GROUPS, "group_size": MEMBERS}
    sections: dict[str, Any] = {
        "model": {"kind": "hf", "path": str(start)},
        "algorithm": algorithm_of(cell.preset, arena),
        "train": {"optimizer": {"lr": cell.lr, "schedule": "constant"}},
        "schedule": schedule,
    }
    if cell.preset == "sft":
        sections["buffer"] = {"kind": "files"}
        schedule.update(groups_per_step=GROUPS * MEMBERS, group_size=1)
    if cell.preset == "remax":  # rolls out each task once more, greedily
        schedule["group_size"] = MEMBERS - 1
    return sections


def run_cell(cell: Cell, start: Path) -> dict[str, Any]:
    """The result of a run."""
    began, clock = time.process_time(), time.monotonic()
    row = {**asdict(cell), "settings": settings(cell.task)}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = base(cell.task, run_dir, cell.seed) | sections_of(cell, start)
        try:
            summary = trivium.run(config)
        except TriviumError as error:
            return {**row, "error": f"{type(error).__name__}: {error.found}"}
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        row |= {
            key: round(summary[f"{name}_after"], 5) for key, name in (("accuracy", "accuracy"), ("reward", "reward"))
        }
        row |= {
            "start": round(summary["accuracy_before"], 5),
            "tokens": int(sum(step.get("train/tokens", 0) for step in steps)),
        }
        if ARENAS[cell.task].shows_solution:
            row["observation_loss"] = round(steps[-1]["eval/test/observation_loss"], 5)
    return {**row, "cpu_s": round(time.process_time() - began, 2), "seconds": round(time.monotonic() - clock, 2)}


# --------------------------------------------------------------------------- the work


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Adds a line; one that a killed process left unfinished is ended first."""
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(row) + "\n")


def work_through(chosen: Sequence[tuple[str, str]], results: Path, work: Path, minutes: float) -> None:
    """Runs missing cells until none is left or the time is over."""
    ends, starts = time.monotonic() + 60 * minutes, dict[str, Path]()
    while time.monotonic() < ends:
        cell = next(wanted(read_results(results), chosen), None)
        if cell is None:
            return
        if cell.task not in starts:
            starts[cell.task] = start_policy(cell.task, work)
        row = run_cell(cell, starts[cell.task])
        append(results, row)
        print(json.dumps(row), flush=True)


def print_plan(chosen: Sequence[tuple[str, str]], results: Path) -> None:
    rows = read_results(results)
    per_cell = {task: [row["cpu_s"] for row in rows if row["task"] == task and "cpu_s" in row] for task in ARENAS}
    total = {task: sum(each == task for _, each in chosen) for task in ARENAS}
    done = {(row["preset"], row["task"], row["seed"], row["lr"]) for row in rows}
    for task, seconds in per_cell.items():
        cells = total[task] * (len(ARENAS[task].grid) * len(SELECTION) + len(REPORTED))
        left = cells - sum(each == task for _, each, _, _ in done)
        mean = sum(seconds) / len(seconds) if seconds else float("nan")
        print(f"{task}: {left} of {cells} cells left, {mean:.1f} s of one core each: {left * mean / 60:.0f} minutes")


def layout(rows: Sequence[Mapping[str, Any]]) -> Layout:
    """What the page shows."""
    titles = {task: arena.title for task, arena in ARENAS.items()}
    absent = {(preset, task): refusal(preset, task) for preset in presets() for task in ARENAS}
    start = {row["task"]: row["start"] for row in rows if "error" not in row}
    return Layout(presets(), titles, REPORTED, {pair: why for pair, why in absent.items() if why}, start)


def part(text: str) -> tuple[int, int]:
    """`1/2`."""
    number, _, of = text.partition("/")
    return int(number) - 1, int(of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after this time")
    parser.add_argument("--parts", type=part, default=(0, 1), help="1/2: the first of two shares of the work")
    parser.add_argument("--only", type=lambda text: text.split(","), help="presets, with commas between them")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(ARENAS), help=f"of {list(ARENAS)}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "arena", help="where the start policies are kept")
    parser.add_argument("--plan", action="store_true", help="print what is left, run nothing")
    parser.add_argument("--page", action="store_true", help="write the page and the plot, run nothing")
    parser.add_argument("--page-file", type=Path, default=Path(__file__).with_name("arena.md"))
    options = parser.parse_args()
    own, of = options.parts
    chosen = pairs(options.only or presets(), options.tasks)[own::of]
    if options.plan:
        print_plan(chosen, options.results)
    elif options.page:
        rows = read_results(options.results)
        write_page(rows, layout(rows), "code", options.page_file)
    else:
        torch.set_num_threads(1)
        work_through(chosen, options.results, options.work, options.minutes)


if __name__ == "__main__":
    main()
