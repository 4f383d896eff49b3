"""`run.mode: serve`: what stands in for `explore_loop`. Agents come with their tasks and play them over HTTP."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from trivium.checkpoint import write_aside
from trivium.config import RunConfig
from trivium.errors import ConfigError, MissingPackage
from trivium.explorer import Explorer
from trivium.loops import Explore
from trivium.protocols import Buffer
from trivium.schedule import Schedule
from trivium.serving.gateway import Gateway, Terms
from trivium.synchronizer import Synchronizer

_log = logging.getLogger("trivium")


def agents(config: RunConfig, run_dir: Path, check_columns: Callable[[Collection[str]], None]) -> Explore:
    """The coroutine that serves a stage of this config until the stage is over.

    `check_columns` raises DataError for columns that the reward functions do not get along with. Raises MissingPackage
    without the `serve` extra, ConfigError where the key is not in the environment.
    """
    try:
        from trivium.serving.http import Door, listening
    except ImportError as error:
        raise MissingPackage(error.name or "fastapi", "serve", "serve the policy (run.mode: serve)") from error
    said = config.serve
    key = _key(said.key_variable)
    terms = Terms(
        idle_s=said.idle_s, deadline_s=config.workflow.deadline_s,
        reward_names=frozenset(reward.label for reward in config.rewards), check_columns=check_columns,
    )  # fmt: skip

    async def serve(explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> None:
        if explorer.greedy_baseline:
            raise ConfigError(
                f"the algorithm {config.algorithm.kind!r} with run.mode serve",
                "it compares with a greedy playing of each task, and only agents can play theirs",
                "use another algorithm, for example rloo",
            )
        gateway = Gateway(explorer, buffer, schedule, synchronizer, terms)
        async with listening(Door(gateway, said.model, key).app, said.host, said.port) as url:
            path = run_dir / "serve.json"
            write_aside(path, json.dumps({"url": url, "pid": os.getpid(), "model": said.model}) + "\n")
            _log.info("serving %s at %s", said.model, url)
            try:
                await gateway.run()
            finally:
                path.unlink(missing_ok=True)

    return serve


def _key(variable: str | None) -> str | None:
    """What clients must present. A secret has no place in a config, which is written into the run directory."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(
            f"serve to those who know the key in ${variable}", "the environment has no such variable, or it is empty",
            f"export {variable}=..., or leave serve.key_variable out",
        )  # fmt: skip
    return os.environ[variable]
