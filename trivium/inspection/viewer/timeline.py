"""The timeline of a run: the spans that its processes recorded (`trivium.foundation.phases`), as lanes, and as a trace
for Chrome and Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trivium.foundation.phases import SPANS
from trivium.inspection.changing_files import cached_while_unchanged, json_value

_PARTS = 1500
"""A span shorter than the shown time divided by this number is merged with its neighbours."""


@dataclass(frozen=True, slots=True)
class Span:
    """An activity with its start and stop, in seconds of `time.time`."""

    process: str
    lane: str
    name: str
    start: float
    stop: float
    about: dict[str, float] = field(default_factory=dict[str, float])


def read_spans(run_dir: Path) -> list[Span]:
    """Returns the spans that the processes of a run recorded, by start time; empty if there are none."""
    spans: list[Span] = []
    for path in sorted((run_dir / SPANS).glob("*.jsonl")):
        spans += _of_process(path)
    spans.reverse()  # an enclosing span is written after the enclosed ones, and may have the same start time
    return sorted(spans, key=lambda span: (span.start, -span.stop))


@cached_while_unchanged(maxsize=32)
def _of_process(path: Path) -> tuple[Span, ...]:
    began, spans = 0.0, list[Span]()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json_value(line)
        if isinstance(row, dict):
            began = float(row["session"])
        elif row:
            lane, name, start, stop, *about = row
            spans.append(Span(path.stem, lane, name, began + start, began + stop, *about))
    return tuple(spans)


def lanes(run_dir: Path, start: float | None, stop: float | None) -> dict[str, Any]:
    """Returns the lanes of a run between two times (by default, the whole run). Each lane has rows of spans that do not
    overlap: [start, stop, name, number, about], relative to `start`. An entry may merge `number` short spans; its name
    is the one that took most of the time. `busy` is the fraction of the time that a lane was not waiting."""
    spans = read_spans(run_dir)
    if not spans:
        return {"start": 0, "stop": 0, "first": 0, "last": 0, "lanes": []}
    first, last = spans[0].start, max(span.stop for span in spans)
    start, stop = first if start is None else start, last if stop is None else stop
    by_lane: dict[str, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, [])
        if span.stop >= start and span.start <= stop:
            by_lane[span.lane].append(span)
    lane_values = [
        {
            "name": name,
            "rows": [_joined(row, start, (stop - start) / _PARTS) for row in _rows(by_lane[name])],
            "busy": _busy(by_lane[name], start, stop),
        }
        for name in sorted(by_lane, key=_order)
    ]
    return {"start": start, "stop": stop, "first": first, "last": last, "lanes": lane_values}


def _order(lane: str) -> tuple[int, str]:
    """Sorts the trainer first, then its ranks, then explorers."""
    return (0 if lane == "trainer" else 1 if lane.startswith("trainer") else 2), lane


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Distributes spans to rows: a span that overlaps an earlier one, or lies within it, goes to the next row."""
    rows: list[list[Span]] = []
    for span in spans:
        # Numbers of the size of `time.time` are 2e-7 s apart, so a span may seem to begin before its predecessor ends.
        row = next((row for row in rows if row[-1].stop <= span.start + 1e-6), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows


def _joined(row: Sequence[Span], start: float, shortest: float) -> list[list[Any]]:
    """Returns spans relative to `start`, with short ones merged with their neighbours."""
    result: list[list[Any]] = []
    seconds: dict[str, float] = {}
    for span in row:
        length = span.stop - span.start
        begins, ends = round(span.start - start, 5), round(span.stop - start, 5)
        last = result[-1] if result else None
        if length < shortest and last is not None and last[3] and begins - last[1] < shortest:
            seconds[span.name] = seconds.get(span.name, 0.0) + length
            last[1], last[2], last[3] = ends, max(seconds, key=seconds.__getitem__), last[3] + 1
        else:
            seconds = {span.name: length}
            result.append([begins, ends, span.name, int(length < shortest), span.about])
    return [[*entry[:3], max(1, entry[3]), *([entry[4]] if entry[3] <= 1 and entry[4] else [])] for entry in result]


def _busy(spans: Iterable[Span], start: float, stop: float) -> float:
    """Returns the fraction of the time with an activity other than waiting."""
    covered, until = 0.0, start
    for span in spans:
        if span.name != "wait":
            covered += max(0.0, min(span.stop, stop) - max(span.start, until))
            until = max(until, span.stop)
    return round(covered / max(stop - start, 1e-9), 4)


def chrome_trace(run_dir: Path) -> dict[str, Any]:
    """Returns the spans in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens as well: a process for each
    process of the run, a thread for each row of its lanes."""
    return {"traceEvents": [*_events(read_spans(run_dir))], "displayTimeUnit": "ms"}


def _events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Yields the events of `chrome_trace`: names of processes and threads, and spans."""
    first = min((span.start for span in spans), default=0.0)
    processes = {name: number for number, name in enumerate(sorted({span.process for span in spans}), 1)}
    for name, number in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    thread = 0
    for process, lane in sorted(
        {(span.process, span.lane) for span in spans}, key=lambda process_and_lane: _order(process_and_lane[1])
    ):
        rows = _rows([span for span in spans if (span.process, span.lane) == (process, lane)])
        for depth, row in enumerate(rows):
            thread += 1
            place = {"pid": processes[process], "tid": thread}
            yield {
                "ph": "M",
                "name": "thread_name",
                **place,
                "args": {"name": lane + (f" ({depth + 1})" if depth else "")},
            }
            for span in row:
                times = {"ts": round((span.start - first) * 1e6), "dur": round((span.stop - span.start) * 1e6)}
                yield {"ph": "X", "name": span.name, "cat": lane, **place, **times, "args": span.about}
