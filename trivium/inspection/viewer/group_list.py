"""Lists the groups of a train step, with sorting, filters, search and paging."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from trivium.inspection.rollout_values import Means, group_row
from trivium.inspection.rollouts import Place
from trivium.inspection.run import RecordedRun

Row = Mapping[str, Any]
_CACHED_ROWS = 20_000
_LARGEST_PAGE = 200
SORTS: dict[str, Callable[[Row], float]] = {
    "reward": lambda row: _mean(row, "reward"),
    "spread": lambda row: _largest(row, "reward") + _largest(row, "reward", -1),
    "advantage": lambda row: max(_largest(row, "advantage"), _largest(row, "advantage", -1)),
    "length": lambda row: _mean(row, "tokens"),
    "failures": lambda row: sum(member["failure"] is not None for member in row["members"]),
}
"""Sort keys of groups; the default is the order of the batch."""
FILTERS: dict[str, Callable[[Row], bool]] = {
    "failed": lambda row: any(member["failure"] is not None for member in row["members"]),
    "truncated": lambda row: any(member["stop"] == "length" for member in row["members"]),
    "mixed": lambda row: len({member["reward"] for member in row["members"] if member["failure"] is None}) > 1,
    "equal": lambda row: not FILTERS["mixed"](row),
    "dropped": lambda row: bool(row["dropped"]),
    "replayed": lambda row: len(row["steps"]) > 1,
}


@dataclass(frozen=True, slots=True)
class Query:
    """A selection of groups of a step."""

    sort: str = ""
    descending: bool = True
    text: str = ""
    """Searched in prompts, completions and task ids, ignoring case."""
    show: str = ""
    least: float | None = None
    most: float | None = None
    """Bounds of a reward that at least one member must have."""
    first: int = 0
    count: int = 50


class GroupList:
    """Lists the groups of a run. Caches the rows."""

    def __init__(self, run: RecordedRun) -> None:
        self._run = run
        self._rows: OrderedDict[tuple[Path, int, int], Row] = OrderedDict()
        self._lock = Lock()

    def page(self, step: int, query: Query) -> dict[str, Any]:
        """Returns the rows of a query, with the numbers of groups in the step (`total`) and of groups that match
        (`matching`)."""
        places, means = self._run.groups.of_step(step), self._run.advantages(step)
        total = len(places)
        if query.text:
            wanted = query.text.casefold()
            places = [place for place in places if self._holds(place, wanted)]
        if query.sort in SORTS or query.show in FILTERS or query.least is not None or query.most is not None:
            rows = [(self.row(place, means), place) for place in places]
            rows = [(row, place) for row, place in rows if _matches(row, query)]
            if query.sort in SORTS:
                rows.sort(key=lambda row_and_place: SORTS[query.sort](row_and_place[0]), reverse=query.descending)
            places = [place for _, place in rows]
        first = max(0, query.first)
        page = places[first : first + min(max(1, query.count), _LARGEST_PAGE)]
        rows = [self.row(place, means) for place in page]
        return {"total": total, "matching": len(places), "first": first, "rows": rows}

    def row(self, place: Place, means: Means) -> dict[str, Any]:
        """Returns the row of a group, with the advantages that a step computed."""
        with self._lock:
            row = self._rows.get(place.record)
        if row is None:
            # Read outside the lock, so that other requests do not wait for the file.
            row = group_row(place, self._run.groups.group(place), {})
            with self._lock:
                self._rows[place.record] = row
                while len(self._rows) > _CACHED_ROWS:
                    self._rows.popitem(last=False)
        members = [
            member if member["greedy"] else {**member, "advantage": means.get((place.slot, place.attempt, n))}
            for member in row["members"]
            for n in (member["index"],)
        ]
        return {**row, "steps": list(place.takers), "members": members}

    def tasks(self, step: int) -> list[str]:
        """Returns the ids of the tasks of a step, sorted."""
        return sorted({self.row(place, {})["task"] for place in self._run.groups.of_step(step)})

    def _holds(self, place: Place, wanted: str) -> bool:
        group = self._run.groups.group(place)
        texts = [group.task.task_id, *(message.content for message in group.task.prompt)]
        texts += [turn.text for turn in group.turns()]
        return any(wanted in text.casefold() for text in texts)


def _matches(row: Row, query: Query) -> bool:
    if query.show in FILTERS and not FILTERS[query.show](row):
        return False
    least, most = (-float("inf") if query.least is None else query.least), query.most
    if query.least is None and most is None:
        return True
    rewards = _numbers(row, "reward")
    return any(least <= reward and (most is None or reward <= most) for reward in rewards)


def _numbers(row: Row, name: str) -> Sequence[float]:
    return [member[name] for member in row["members"] if member[name] is not None and not member["greedy"]]


def _mean(row: Row, name: str) -> float:
    numbers = _numbers(row, name)
    return sum(numbers) / len(numbers) if numbers else -float("inf")


def _largest(row: Row, name: str, sign: int = 1) -> float:
    return max((sign * value for value in _numbers(row, name)), default=-float("inf"))
