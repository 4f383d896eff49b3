"""Weights & Biases: online, or into files that `wandb sync` uploads later."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from trivium.config import Plugin, RunConfig
from trivium.foundation.errors import ConfigError, MissingPackage, Problem
from trivium.monitors.identity import failing, new_id, remembered, settings_of

_log = logging.getLogger("trivium")


class WandbMonitor:
    """One W&B run per run directory; a resumed run continues it.

    W&B cannot remove rows: those that a killed session logged after its last checkpoint stay, beside the rows of the
    session that repeats those steps. Rows carry our step as `step`, which charts use as their axis, because
    W&B's own counter cannot go back.
    """

    class Config(Plugin):
        kind: str = "wandb"
        project: str = "trivium"
        """The W&B project."""
        name: str = ""
        """Name of the run; empty means the last part of `run.dir`."""
        group: str | None = None
        """Group of the run."""
        entity: str | None = None
        """User or team that owns the run; unset means the default of the account."""
        base_url: str | None = None
        """A W&B server of your own; unset means the one of `wandb login`."""
        tags: tuple[str, ...] = ()
        """Tags of the run."""
        mode: Literal["online", "offline"] = "online"
        """`offline` writes files under `wandb` in the run directory only; `wandb sync` uploads them later. So does
        the environment variable WANDB_MODE=offline."""

        @property
        def effective_mode(self) -> str:
            """Returns the configured mode, or that of the environment."""
            return self.mode if self.mode == "offline" else os.environ.get("WANDB_MODE") or self.mode

        def machine_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            if self.effective_mode == "online" and importlib.util.find_spec("wandb") and not _logged_in(self.base_url):
                do = "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
                yield Problem(where, "log to Weights & Biases", "no API key on this machine", do)

    def __init__(self, config: Config, *, run_dir: Path, resume_step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingPackage("wandb", "wandb", "log to Weights & Biases") from error
        self._wandb = wandb
        # Trivium writes the console output and log.txt itself.
        settings = wandb.Settings(console="off", silent=True)
        if config.base_url is not None:
            settings.base_url = config.base_url
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                name=config.name or run_dir.resolve().name,
                group=config.group,
                tags=list(config.tags),
                mode=cast(Any, config.effective_mode),
                dir=run_dir,
                config=settings_of(run_dir),
                id=remembered(run_dir / "wandb" / "run-id", resume_step, new_id),
                resume="allow",
                # A process may train several runs: by default, `init` would return the one before.
                reinit="create_new",
                settings=settings,
            )
        except wandb.Error as error:
            raise ConfigError(
                "log to Weights & Biases", str(error), "run `wandb login`, or set mode: offline"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        _log.info("Weights & Biases run %s", self._run.url if config.effective_mode == "online" else self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        cells: list[Any] = [[_cell(row.get(column)) for column in columns] for row in rows]
        table = self._wandb.Table(columns=columns, data=cells, allow_mixed_types=True)
        self._run.log({"step": step, name: table})

    def keep_file(self, path: Path) -> None:
        """Adds the file to the run's pages and files."""
        self._run.log({path.stem: self._wandb.Html(str(path), inject=False)})

    def state(self) -> dict[str, Any]:
        """Returns an empty state: W&B cannot remove rows, and the run directory stores the run's id."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Does nothing: W&B cannot remove rows."""

    def close(self) -> None:
        """Ends the session; marks it as failed if an error ends the run."""
        self._run.finish(exit_code=int(failing()))


def _logged_in(host: str | None) -> bool:
    """Whether this machine has an API key. Does not prompt for one."""
    import wandb

    wandb.setup(settings=wandb.Settings(silent=True))
    return wandb.login(host=host, prompt=False, verify=False)


def _cell(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, ensure_ascii=False)
