"""`run.mode: serve`: replaces `explore_loop` by a server over which agents roll out their own tasks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from trivium.checkpoint.atomic import atomic_write
from trivium.config import RunConfig
from trivium.errors import ConfigError, MissingPackage
from trivium.explorer import Explorer
from trivium.loops import Explore
from trivium.protocols import Buffer
from trivium.schedule import Schedule
from trivium.serving.gateway import Gateway, ServingOptions
from trivium.synchronizer import Synchronizer

_log = logging.getLogger("trivium")


def serve_agents(config: RunConfig, run_dir: Path, check_columns: Callable[[Collection[str]], None]) -> Explore:
    """The coroutine that serves a stage of this config until the stage is over.

    `check_columns` raises DataError for columns that the reward functions cannot be called with. Raises MissingPackage
    without the `serve` extra, ConfigError where the key is not in the environment.
    """
    try:
        from trivium.serving.server import ChatServer, serve_app
    except ImportError as error:
        raise MissingPackage(error.name or "fastapi", "serve", "serve the policy (run.mode: serve)") from error
    section = config.serve
    key = _key(section.key_variable)
    options = ServingOptions(
        idle_s=section.idle_s,
        deadline_s=config.workflow.deadline_s,
        reward_names=frozenset(reward.label for reward in config.rewards),
        check_columns=check_columns,
    )

    async def serve(explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> None:
        if explorer.greedy_baseline:
            raise ConfigError(
                f"the algorithm {config.algorithm.kind!r} with run.mode serve",
                "it needs a greedy rollout of each task, and only agents can roll out theirs",
                "use another algorithm, for example rloo",
            )
        gateway = Gateway(explorer, buffer, schedule, synchronizer, options)
        async with serve_app(ChatServer(gateway, section.model, key).app, section.host, section.port) as url:
            path = run_dir / "serve.json"
            atomic_write(path, json.dumps({"url": url, "pid": os.getpid(), "model": section.model}) + "\n")
            _log.info("serving %s at %s", section.model, url)
            try:
                await gateway.run()
            finally:
                path.unlink(missing_ok=True)

    return serve


def _key(variable: str | None) -> str | None:
    """The key that clients must present. It is no config value, since the config is written into the run directory."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(
            f"serve clients with the key in ${variable}",
            "the environment has no such variable, or it is empty",
            f"export {variable}=..., or leave serve.key_variable out",
        )
    return os.environ[variable]
