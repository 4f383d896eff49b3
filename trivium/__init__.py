"""Trivium: reinforcement fine-tuning for language and vision-language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivium.config import RunConfig, load_config
    from trivium.foundation.errors import ConfigError, RunDirError

__version__ = "0.1.0"

__all__ = ["ConfigError", "RunConfig", "RunDirError", "__version__", "load_config", "run"]


def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    rewards: Sequence[Callable[..., object] | str | Mapping[str, Any]] | None = None,
    tasks: Iterable[object] | Callable[..., object] | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs the config, or continues the run in its run directory. Returns the summary.

    config   a RunConfig, a mapping of the same sections, or the path of a YAML file
    rewards  in place of the config's: functions `f(prompt, completion, **columns) -> float`, names, or sections such as
             `{"kind": f, "weight": 0.5}`
    tasks    in place of the config's `train`: rows (mappings from column to value; a list, a `datasets.Dataset`, any
             iterable), or a function that returns them; or several tasksets by name

    The run directory stores the rows; a continued run must be given the same ones. If an event loop is running, as in a
    notebook, the run uses a thread of its own, and this call waits for it.

    Raises ConfigError for a config that cannot run, RunDirError for a run directory of another config, and the first
    cause of a failure of the run.
    """
    from trivium.inspection.report import send_report  # imports torch and all packages
    from trivium.runtime.python_api import run_given

    return run_given(config, rewards, tasks, send_report)


def __getattr__(name: str) -> Any:
    if name in ("RunConfig", "load_config"):  # importing them here would double the time of `trivium --help`
        from trivium import config

        return getattr(config, name)
    if name in ("ConfigError", "RunDirError"):
        from trivium.foundation import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
