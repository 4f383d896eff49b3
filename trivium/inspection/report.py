"""`trivium report`: a run as one self-contained HTML file: curves, verdict, rollouts token by token, config, machine.

It consists of pages of `trivium view`, with the values that they would ask a server for.

The file contains everything that it shows and uses no network. Its content policy allows only its own scripts, so text
that a model wrote cannot run. It holds at most `_EXAMPLES` rollouts of each kind and `_TOKENS` tokens of each, for a
run of any size.
"""

from __future__ import annotations

import json
import logging
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from trivium.foundation.atomic import atomic_write, refuse_existing
from trivium.foundation.errors import RunDirError, TriviumError
from trivium.foundation.metrics import graded_accuracies
from trivium.inspection.charts import curves, thinned
from trivium.inspection.rollout_values import member_row, rollout_values
from trivium.inspection.rollout_view import decoder, piecewise
from trivium.inspection.rollouts import Place
from trivium.inspection.run import RecordedRun
from trivium.inspection.viewer.watched_run import WatchedRun, curve_values
from trivium.monitors.fanout import file_monitors
from trivium.protocols import Monitor
from trivium.types import Trajectory

_log = logging.getLogger("trivium")
_EXAMPLES = 3
"""Rollouts of each kind."""
_TOKENS = 600
"""Tokens of an example, including the prompt; later ones are omitted."""
_KEYS = 6
"""Curves of one chart."""
_FAILED_STEPS = 5
"""Number of newest steps that are searched for failed rollouts."""
_FAILURE = 500
"""Characters of the error of a failed rollout."""
_IMAGE_BYTES = 200_000
_TITLE = "<p>Trivium report</p>"
_MODULES = ("lib", "tokens", "overview", "report")
"""The modules of the page; each after those that it imports."""
_IMPORT = re.compile(r'^import \{ (.*) \} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)
_MIMES = ("image/png", "image/jpeg", "image/webp", "image/gif")


def write_report(run_dir: Path, out: Path) -> Path:
    """Writes the report of the directory of a finished or running run. Raises RunDirError if it holds no run, and
    ConfigError if `out` is a file of another kind."""
    refuse_existing(out, "--out", is_own=lambda content: _TITLE.encode() in content)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, report_of(run_dir))
    return out


def send_report(monitor: Monitor, run_dir: Path) -> None:
    """Sends the report of a run to the monitors that keep files. Logs errors instead of raising them, because the run
    is complete."""
    keeping = file_monitors(monitor)
    if not keeping:
        return
    try:
        path = write_report(run_dir, run_dir / "report.html")
    except (TriviumError, OSError) as error:
        _log.error("no report was written: %s", error)
        return
    for file_monitor in keeping:
        file_monitor.keep_file(path)


def report_of(run_dir: Path) -> str:
    """Returns the HTML of the report."""
    RecordedRun.open(run_dir)
    watched = WatchedRun(run_dir, run_dir.resolve().name)
    scripts = (_page("uPlot.iife.min.js"), _script(_MODULES))
    style, title = _page("uPlot.min.css") + _page("style.css"), escape(watched.name)
    # By their hashes, so that no other script in the file can run.
    allowed = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
    # No text of the run can end the element.
    values = json.dumps(_values(watched), allow_nan=False).replace("<", "\\u003c")
    return "".join(
        (
            '<!doctype html><html lang="en" class="report" data-theme="light"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}: report</title><style>{style}</style></head>",
            f'<body><header>{_TITLE}<strong class="brand">{title}</strong></header><main id="main"></main>',
            f'<div id="tip" role="tooltip" hidden></div><script id="values" type="application/json">{values}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        )
    )


def _page(name: str) -> str:
    """Returns a file of the pages of `trivium view`."""
    return (files("trivium.inspection.viewer") / "pages" / name).read_text("utf-8")


def _script(modules: Sequence[str]) -> str:
    """Returns modules as one script, each as a function that returns its exports: a file has no addresses from which
    they could import one another. Each module follows those that it imports."""
    parts = list[str]()
    for name in modules:
        source = _page(f"{name}.js")
        exports = ", ".join(_EXPORT.findall(source))
        body = _IMPORT.sub(r"const { \1 } = of_\2;", source).replace("\nexport ", "\n")
        parts.append(f'const of_{name} = (() => {{\n"use strict";\n{body}return {{ {exports} }};\n}})();\n')
    return "".join(parts)


def _values(watched: WatchedRun) -> dict[str, Any]:
    """Returns the values that the page shows."""
    run, about = watched.run, watched.about()
    settings = {key: str(value) for key, value in about.pop("settings").items() if value not in (None, "")}
    machine = next((record.machine for record in reversed([*run.steps.values()]) if record.machine), {})
    charts = [{**chart, "keys": chart["keys"][:_KEYS]} for chart in about["charts"]]
    drawn = curves(run.rows(), {key for chart in charts for key in chart["keys"]})
    about |= {"path": "", "config": "", "charts": charts, "keys": [*drawn]}
    chosen, of = _chosen(run)
    examples, media = list[dict[str, Any]](), dict[str, str]()
    pieces = _pieces(run.path)
    for kind, example in chosen:
        examples.append(_example(kind, example, run, pieces))
        media |= _images(examples[-1], run)
    return {
        "runs": [about],
        "curves": {**watched.state(), "curves": {key: curve_values(thinned(curve)) for key, curve in drawn.items()}},
        "verdict": watched.verdict(),
        "facts": _facts(run),
        "examples": examples,
        "of": of,
        "media": media,
        "machine": {key: str(value) for key, value in machine.items()},
        "settings": settings,
    }


# --------------------------------------------------------------------------- the run as a whole


def _facts(run: RecordedRun) -> dict[str, str]:
    """Returns the results of the run."""
    summary, rows = run.summary, run.rows()
    stages = run.config.stage_configs()
    facts = {"model": _model(run), "algorithm": " → ".join(stage.algorithm.kind for stage in stages)}
    for name in ("accuracy", "reward", "held_out"):
        before, after = (summary.get(f"{name}_{end}", value) for end, value in _ends(rows, name).items())
        if before is not None and after is not None:
            both = [f"{value:.1%}" if name == "accuracy" else f"{value:.4g}" for value in (before, after)]
            facts[{"held_out": "held-out loss"}.get(name, name)] = " → ".join(both)
    facts["steps"] = f"{run.last_step} of {run.stage_bounds[-1]}"
    measured = sum(row.get("time/step", 0.0) + row.get("time/evaluate", 0.0) for row in rows)
    facts["time"] = _duration(summary.get("seconds", measured))
    return {**facts, "seed": str(run.config.run.seed)}


def _ends(rows: Sequence[Mapping[str, float]], name: str) -> dict[str, float | None]:
    """Returns the first and the last evaluation result, for a run without a summary."""
    keys, graded = (f"/{name}",) if name != "held_out" else (), graded_accuracies(rows)
    values = [row[k] for row in rows for k in row.keys() - graded if k.startswith("eval/") and k.endswith(keys)]
    return {"before": values[0] if values else None, "after": values[-1] if values else None}


def _model(run: RecordedRun) -> str:
    path = getattr(run.config.model, "path", None)
    return Path(str(path)).name if path else run.config.model.kind


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} h" if hours >= 2 else f"{minutes:.1f} min" if minutes >= 2 else f"{seconds:.0f} s"


# --------------------------------------------------------------------------- examples


@dataclass(frozen=True, slots=True)
class _Example:
    """A rollout in the report."""

    step: int
    place: Place
    index: int
    """The index of the rollout in its group."""
    task: str
    reward: float
    weight: float
    """The magnitude of its mean advantage; 0 if it was not kept."""


def _chosen(run: RecordedRun) -> tuple[list[tuple[str, _Example]], str]:
    """Returns (the rollouts of the report, each with its kind, those from which the best and the worst are chosen)."""
    steps = run.groups.steps()
    if not steps:
        return [], ""
    alive = [example for example, rollout in _members(run, steps[-1]) if rollout.failure is None]
    # At equal rewards, prefer the rollouts that the step learned most from.
    alive.sort(key=lambda example: (-example.reward, -example.weight))
    best = list(islice(_of_different_tasks(alive), _EXAMPLES))
    alive.sort(key=lambda example: (example.reward, -example.weight))
    lower = (
        example for example in _of_different_tasks(alive) if example.reward < best[0].reward and example not in best
    )
    worst = list(islice(lower, _EXAMPLES))
    failed = (
        example
        for step in reversed(steps[-_FAILED_STEPS:])
        for example, rollout in _members(run, step)
        if rollout.failure is not None
    )
    kinds = (("best", best), ("worst", worst), ("failed", list(islice(failed, _EXAMPLES))))
    chosen = [(kind, example) for kind, examples in kinds for example in examples]
    return chosen, f"{len(alive)} rollouts of step {steps[-1]}"


def _members(run: RecordedRun, step: int) -> Iterator[tuple[_Example, Trajectory]]:
    """Yields the rollouts of a step, group by group."""
    advantages = run.advantages(step)
    for place in run.groups.of_step(step):
        group = run.groups.group(place)
        for index, rollout in enumerate(group.rollouts):
            weight = abs(advantages.get((group.slot, group.attempt, rollout.index), 0.0))
            yield _Example(step, place, index, group.task.task_id, rollout.reward, weight), rollout


def _of_different_tasks(examples: Sequence[_Example]) -> Iterator[_Example]:
    tasks = set[str]()
    for example in examples:
        if example.task not in tasks:
            tasks.add(example.task)
            yield example


def _pieces(run_dir: Path) -> Callable[[Sequence[int]], list[str]]:
    """Returns a function from tokens to their texts; to their numbers if the tokenizer is missing."""
    try:
        return piecewise(decoder(run_dir))
    except RunDirError:
        return lambda tokens: [f"[{token}]" for token in tokens]


def _example(
    kind: str, example: _Example, run: RecordedRun, pieces: Callable[[Sequence[int]], list[str]]
) -> dict[str, Any]:
    """Returns a rollout token by token, with at most `_TOKENS` tokens."""
    group = run.groups.group(example.place)
    rollout = group.rollouts[example.index]
    values = rollout_values(run.rollout(example.place, group, rollout, example.step), pieces)
    sequences, remaining = list[dict[str, Any]](), _TOKENS
    for sequence in values["sequences"]:
        if remaining:
            sequences.append(_cut(sequence, remaining))
            remaining -= len(sequences[-1]["tokens"])
    row = member_row(group, rollout, {})
    return {
        **row,
        "kind": kind,
        "step": example.step,
        "task": example.task,
        "failure": row["failure"] and row["failure"][:_FAILURE],
        "messages": [] if sequences else values["messages"],
        "sequences": sequences,
        "omitted": sum(len(sequence["tokens"]) for sequence in values["sequences"]) - (_TOKENS - remaining),
    }


def _cut(sequence: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Returns the first tokens of a sequence."""
    parts = {name: sequence[name][:length] for name in ("tokens", "text")}
    values = {name: numbers[:length] for name, numbers in sequence["values"].items()}
    turns = [
        {**turn, "stop": min(turn["stop"], length), "text": turn["text"] if turn["stop"] <= length else ""}
        for turn in sequence["turns"]
        if turn["start"] < length
    ]
    if not turns and sequence["turns"]:  # the prompt alone is longer
        first = sequence["turns"][0]
        turns = [{**first, "start": length, "stop": length, "text": ""}]
    return {**sequence, **parts, "values": values, "turns": turns}


def _images(example: Mapping[str, Any], run: RecordedRun) -> dict[str, str]:
    """Returns the images of an example that are small enough, by their hashes, as data URLs."""
    images = dict[str, str]()
    for media in (item for sequence in example["sequences"] for turn in sequence["turns"] for item in turn["media"]):
        path = run.path / "rollouts" / "media" / str(media["sha256"])
        if media["mime"] in _MIMES and path.is_file() and path.stat().st_size <= _IMAGE_BYTES:
            images[media["sha256"]] = f"data:{media['mime']};base64,{b64encode(path.read_bytes()).decode()}"
    return images
