"""A monitor that feeds several monitors and refuses undeclared metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from trivium.foundation.metrics import checked
from trivium.protocols import FileMonitor, Monitor


def file_monitors(monitor: Monitor) -> list[FileMonitor]:
    """Returns the monitors behind a monitor that keep files."""
    behind = monitor.monitors if isinstance(monitor, FanOut) else (monitor,)
    return [inner for inner in behind if isinstance(inner, FileMonitor)]


class FanOut:
    """Forwards to every monitor, in order. The first error is raised, so that no log misses rows silently."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self.monitors = tuple(monitors)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row of metrics; raises DataError for an undeclared key before any monitor gets the row."""
        row = checked(metrics)
        for monitor in self.monitors:
            monitor.log(step, row)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        for monitor in self.monitors:
            monitor.table(step, name, rows)

    def state(self) -> dict[str, Any]:
        """Returns the state of each monitor by class, with a number if a class occurs several times."""
        return {name: monitor.state() for name, monitor in self._named()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the monitors that existed when `state` was taken; a resumed run may have others."""
        for name, monitor in self._named():
            if name in state:
                monitor.restore(state[name])

    def close(self) -> None:
        """Closes all monitors, even if closing one fails."""
        with ExitStack() as stack:
            for monitor in self.monitors:
                stack.callback(monitor.close)

    def _named(self) -> list[tuple[str, Monitor]]:
        counts: dict[str, int] = {}
        named: list[tuple[str, Monitor]] = []
        for monitor in self.monitors:
            name = f"{type(monitor).__module__}:{type(monitor).__qualname__}"
            number = counts[name] = counts.get(name, 0) + 1
            named.append((name if number == 1 else f"{name}#{number}", monitor))
        return named
