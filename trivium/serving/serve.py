"""`run.mode: serve`: a server instead of `explore_loop`, with which agents roll out their own tasks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trivium.config import RunConfig
from trivium.explorer import Explorer
from trivium.foundation.atomic import atomic_write
from trivium.foundation.errors import ConfigError, MissingPackage
from trivium.foundation.phases import announce
from trivium.loops import Explore
from trivium.protocols import Buffer
from trivium.rewards.recipe import parts_of
from trivium.schedule import Schedule
from trivium.serving.gateway import Gateway
from trivium.serving.sessions import ServingOptions
from trivium.synchronizer import Synchronizer


def serve_agents(
    config: RunConfig, run_dir: Path, check_columns: Callable[[Mapping[str, Any]], None], *, is_last: bool
) -> Explore:
    """The coroutine that serves a stage of this config until the stage is over, and for `serve.linger_s` after the
    last one.

    `check_columns` raises DataError for columns that the reward functions cannot be called with. Raises MissingPackage
    without the `serve` extra, ConfigError if the environment does not have the key.
    """
    try:
        from trivium.serving.connections import serve_app
        from trivium.serving.server import ChatServer
    except ImportError as error:
        raise MissingPackage(error.name or "fastapi", "serve", "serve the policy (run.mode: serve)") from error
    section = config.serve
    key = read_key(section.key_variable)
    options = ServingOptions(
        idle_s=section.idle_s,
        unstarted_idle_s=section.unstarted_idle_s,
        deadline_s=config.workflow.deadline_s,
        reward_names=frozenset(part.reward.label for part in parts_of(config.rewards)),
        check_columns=check_columns,
        require_secret=section.require_secret,
        linger_s=section.linger_s if is_last else 0.0,
    )

    async def serve(explorer: Explorer, buffer: Buffer, schedule: Schedule, synchronizer: Synchronizer) -> None:
        if explorer.greedy_baseline:
            raise ConfigError(
                f"the algorithm {config.algorithm.kind!r} with run.mode serve",
                "it needs a greedy rollout of each task, and only agents can roll out theirs",
                "use another algorithm, for example rloo",
            )
        gateway = Gateway(explorer, buffer, schedule, synchronizer, options)
        app = ChatServer(gateway, section.model, key, section.max_body_bytes).app
        async with serve_app(app, section.host, section.port, section.max_connections) as url:
            # Servers of one run directory have names of their own; two would write one file at the same time.
            path = run_dir / (f"serve-{config.run.explorer}.json" if config.run.explorer else "serve.json")
            atomic_write(path, json.dumps({"url": url, "pid": os.getpid(), "model": section.model}) + "\n")
            try:
                await gateway.run(lambda: announce(f"serving {section.model} at {url}"))
                await gateway.say_goodbye()
            finally:
                path.unlink(missing_ok=True)

    return serve


def read_key(variable: str | None) -> str | None:
    """The key that clients must present. It is not a config value, since the config is written into the run directory.

    Raises ConfigError if the environment does not have it.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(
            f"serve clients with the key in ${variable}",
            "the environment has no such variable, or it is empty",
            f"export {variable}=..., or leave serve.key_variable out",
        )
    return os.environ[variable]
