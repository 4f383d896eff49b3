"""`trivium report`: a run as one self-contained HTML file: curves, verdict, rollouts token by token, config, machine.

The file contains everything that it shows and uses no network. Its content policy allows only its own script, so text
that a model wrote cannot run. It holds at most `_EXAMPLES` rollouts of each kind and `_TOKENS` tokens of each, for a
run of any size.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from trivium.checkpoint.atomic import atomic_write, refuse_existing
from trivium.errors import Problem, RunDirError, TriviumError
from trivium.inspection.charts import CHARTS, curves, keys_of, line_chart, marks, matching, shown
from trivium.inspection.doctor import Report, diagnose
from trivium.inspection.rollout_values import TITLES, rollout_values
from trivium.inspection.rollout_view import decoder, piecewise
from trivium.inspection.rollouts import Place
from trivium.inspection.run import RecordedRun
from trivium.metrics import graded_accuracies
from trivium.monitors.fanout import file_monitors
from trivium.monitors.identity import settings_of
from trivium.protocols import Monitor
from trivium.runtime.build import explain
from trivium.types import Group, Trajectory

_log = logging.getLogger("trivium")
_EXAMPLES = 3
"""Rollouts of each kind."""
_TOKENS = 600
"""Tokens of an example, including the prompt; later ones are omitted."""
_KEYS = 6
"""Curves of one chart."""
_FAILED_STEPS = 5
"""Number of newest steps that are searched for failed rollouts."""
_IMAGE_BYTES = 200_000
_TITLE = "<p>Trivium report</p>"
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
    for each in keeping:
        each.keep_file(path)


def report_of(run_dir: Path) -> str:
    """Returns the HTML of the report."""
    run = RecordedRun.open(run_dir)
    parts = files("trivium.inspection")
    style, script = ((parts / f"report.{kind}").read_text("utf-8") for kind in ("css", "js"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'"
    title = escape(run_dir.resolve().name)
    parts_of_page = (_summary, _verdict, _curves, _examples, _objective, _setup)
    sections = [part(run) for part in parts_of_page]
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" ',
            f'content="light dark"><title>{title}: report</title><style>{style}</style></head>',
            f"<body><header>{_TITLE}<h1>{title}</h1></header><main>{''.join(sections)}</main>",
            f"<script>{script}</script></body></html>\n",
        )
    )


# --------------------------------------------------------------------------- the run as a whole


def _summary(run: RecordedRun) -> str:
    """Returns the results of the run as a row of figures."""
    summary, rows = run.summary, run.rows()
    stages = run.config.stage_configs()
    facts = {"model": _model(run), "algorithm": " → ".join(stage.algorithm.kind for stage in stages)}
    for name in ("accuracy", "reward", "held_out"):
        before, after = (summary.get(f"{name}_{end}", value) for end, value in _ends(rows, name).items())
        if before is not None and after is not None:
            both = [f"{value:.1%}" if name == "accuracy" else shown(value) for value in (before, after)]
            facts[{"held_out": "held-out loss"}.get(name, name)] = " → ".join(both)
    facts["steps"] = f"{run.last_step} of {run.stage_bounds[-1]}"
    measured = sum(row.get("time/step", 0.0) + row.get("time/evaluate", 0.0) for row in rows)
    facts["time"] = _duration(summary.get("seconds", measured))
    facts["seed"] = str(run.config.run.seed)
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
        + "</dl>"
    )


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


def _verdict(run: RecordedRun) -> str:
    diagnosis = diagnose(run.path) if run.rows() else Report([], [], "no step was logged")
    fine = f'<li class="fine">doctor: {escape(diagnosis.no_findings)}</li>'
    items = "".join(map(_finding, diagnosis.findings)) or fine
    return f'<section><h2>Verdict</h2><p>{escape(run.verdict)}</p><ul class="findings">{items}</ul></section>'


def _finding(finding: Problem) -> str:
    return f"<li><b>{escape(finding.where)}</b> {escape(finding.found)}<br><em>do:</em> {escape(finding.do)}</li>"


def _curves(run: RecordedRun) -> str:
    rows = run.rows()
    keys, where = keys_of(rows), marks(run)
    charts = list[str]()
    for chart in CHARTS:
        chosen = curves(rows, matching(keys, chart)[:_KEYS])
        if chosen:
            charts.append(line_chart(chart.title, list(chosen.values()), where))
    listed = ", ".join(f"step {mark.step}: {escape(mark.text)}" for mark in where)
    note = f'<p class="dim">Dashed lines: {listed}.</p>' if listed else ""
    return f'<section><h2>Curves</h2>{note}<div class="charts">{"".join(charts) or "no metrics"}</div></section>'


def _objective(run: RecordedRun) -> str:
    try:
        text = explain(run.config)
    except TriviumError as error:  # the run's own code is not on this machine
        text = f"cannot be shown here: {error}"
    return f"<section><h2>Objective</h2><pre>{escape(text)}</pre></section>"


def _setup(run: RecordedRun) -> str:
    """Shows config and machine."""
    machine = next((record.machine for record in reversed([*run.steps.values()]) if record.machine), {})
    config = "".join(_table_row(key, value) for key, value in settings_of(run.path).items() if value not in (None, ""))
    return (
        f"<section><h2>Environment</h2><table>{''.join(_table_row(*item) for item in machine.items()) or 'not noted'}"
        f"</table></section><section><h2>Config</h2><details><summary>{config.count('<tr>')} values, secrets left out"
        f"</summary><table>{config}</table></details></section>"
    )


def _table_row(key: str, value: object) -> str:
    return f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>"


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


def _examples(run: RecordedRun) -> str:
    steps = run.groups.steps()
    if not steps:
        return '<section><h2>Rollouts</h2><p class="dim">None are recorded.</p></section>'
    alive = [each for each, rollout in _members(run, steps[-1]) if rollout.failure is None]
    # At equal rewards, prefer the rollouts that the step learned most from.
    alive.sort(key=lambda each: (-each.reward, -each.weight))
    best = list(islice(_of_different_tasks(alive), _EXAMPLES))
    alive.sort(key=lambda each: (each.reward, -each.weight))
    lower = (each for each in _of_different_tasks(alive) if each.reward < best[0].reward and each not in best)
    worst = list(islice(lower, _EXAMPLES))
    failed = (
        each
        for step in reversed(steps[-_FAILED_STEPS:])
        for each, rollout in _members(run, step)
        if rollout.failure is not None
    )
    kinds = (("best", best), ("worst", worst), ("failed", list(islice(failed, _EXAMPLES))))
    pieces = _pieces(run.path)
    articles = [_example(kind, each, run, pieces) for kind, examples in kinds for each in examples]
    number = f"{len(alive)} rollouts of step {steps[-1]}"
    return (
        f'<section><h2>Rollouts</h2><p class="dim">Of the {number}: the best, the worst, and those that failed lately. '
        'Tokens are shaded by <i class="p" style="--a:.6">advantage above</i> or <i class="n" style="--a:.6">below 0'
        "</i>, or by how improbable they were if the run has no advantages (run.keep: tokens).</p>"
        f"{''.join(articles)}</section>"
    )


def _members(run: RecordedRun, step: int) -> Iterator[tuple[_Example, Trajectory]]:
    """Yields the rollouts of a step, group by group."""
    advantages = run.advantages(step)
    for place in run.groups.of_step(step):
        group = run.groups.group(place)
        for index, rollout in enumerate(group.rollouts):
            weight = abs(advantages.get((group.slot, group.attempt, rollout.index), 0.0))
            yield _Example(step, place, index, group.task.task_id, rollout.reward, weight), rollout


def _of_different_tasks(examples: Sequence[_Example]) -> Iterator[_Example]:
    seen = set[str]()
    for each in examples:
        if each.task not in seen:
            seen.add(each.task)
            yield each


def _pieces(run_dir: Path) -> Callable[[Sequence[int]], list[str]]:
    """Returns a function from tokens to their texts; to their numbers if the tokenizer is missing."""
    try:
        return piecewise(decoder(run_dir))
    except RunDirError:
        return lambda tokens: [f"[{token}]" for token in tokens]


def _example(kind: str, example: _Example, run: RecordedRun, pieces: Callable[[Sequence[int]], list[str]]) -> str:
    group = run.groups.group(example.place)
    rollout = group.rollouts[example.index]
    values = rollout_values(run.rollout(example.place, group, rollout, example.step), pieces)
    body = "".join(_sequence(each, run) for each in values["sequences"])
    if not values["sequences"]:
        body = f'<p class="tokens">{escape(chr(10).join(each["content"] for each in values["messages"]))}</p>'
    return f'<article class="{kind}"><h3>{_heading(kind, example, group, rollout)}</h3>{body}</article>'


def _heading(kind: str, example: _Example, group: Group, rollout: Trajectory) -> str:
    parts = [f"step {example.step}", f"task {group.task.task_id}"]
    if (failure := rollout.failure) is not None:
        parts.append(f"{failure.side}: {failure.kind}: {failure.message[:500]}")
    else:
        components = ", ".join(f"{name} {shown(value)}" for name, value in rollout.rewards.items())
        parts.append(f"reward {shown(rollout.reward)}" + (f" ({components})" if len(rollout.rewards) > 1 else ""))
        parts += [f"{rollout.num_tokens} tokens", rollout.stop_reason.value]
    return f"<b>{kind}</b> {escape(' · '.join(parts))}"


def _sequence(sequence: Mapping[str, Any], run: RecordedRun) -> str:
    """Formats the tokens of a sequence: those of the policy are shaded and have their numbers as a tooltip."""
    values: dict[str, list[float | None]] = sequence["values"]
    name = "advantages" if "advantages" in values else "log_prob"
    largest = max((abs(value) for value in values[name] if value is not None), default=0.0) or 1.0
    images = [_image(media, run) for turn in sequence["turns"] for media in turn["media"]]
    spans = [
        _token(text, {each: numbers[t] for each, numbers in values.items()}, name, largest)
        for t, text in enumerate(sequence["text"][:_TOKENS])
    ]
    more = len(sequence["text"]) - _TOKENS
    rest = f'<span class="dim"> … {more} more tokens</span>' if more > 0 else ""
    return f'{"".join(images)}<p class="tokens">{"".join(spans)}{rest}</p>'


def _token(text: str, numbers: Mapping[str, float | None], name: str, largest: float) -> str:
    text = escape(text.replace("\n", "↵\n")) or "​"
    value = numbers[name]
    if value is None:
        return text
    title = ", ".join(
        f"{TITLES.get(key, key)} {shown(number)}"
        for key, number in numbers.items()
        if number is not None and key != "response_mask"
    )
    kind = "p" if value > 0 else "n" if name == "advantages" else "u"
    return f'<i class="{kind}" style="--a:{0.7 * abs(value) / largest:.2f}" title="{escape(title)}">{text}</i>'


def _image(media: Mapping[str, Any], run: RecordedRun) -> str:
    """Embeds an image of the prompt if it is small enough."""
    path = run.path / "rollouts" / "media" / str(media["sha256"])
    if media["mime"] not in _MIMES or not path.is_file() or path.stat().st_size > _IMAGE_BYTES:
        return f'<p class="dim">{escape(str(media["mime"]))} {escape(str(media["sha256"])[:12])}</p>'
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="" src="data:{media["mime"]};base64,{content}">'
