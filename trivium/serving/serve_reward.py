"""`trivium serve-reward`: serves the rewards of a config, or a reward model, until a signal stops it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from trivium.clients.http import read_token
from trivium.config.checks import is_loopback
from trivium.config.fields import paths_relative_to
from trivium.config.merging import merged
from trivium.config.reading import flatten, parse_override, read_yaml
from trivium.config.schema import Config, RewardConfig, RewardPlugin
from trivium.errors import ConfigError, MissingPackage

_STOP_S = 30.0
"""Longest wait for requests in progress after the signal, in seconds."""


@dataclass(frozen=True)
class RewardAddress:
    """Where a reward is served, who may use it, and its limits."""

    host: str = "127.0.0.1"
    port: int = 5000
    token_variable: str | None = None
    token_file: str | None = None
    max_batch: int = 32
    """The most samples in a batch."""
    batch_tokens: int = 8192
    """Tokens in a batch of a reward model. 1: one sequence at a time, so no score depends on other samples."""
    max_waiting: int = 1024
    """Samples that may wait."""
    deadline_s: float = 300.0
    """Longest time from a request to its response, in seconds."""
    max_body_bytes: int = 2**26

    def token(self) -> str | None:
        """The token that clients must send. Raises ConfigError if other machines reach the server without one."""
        token = read_token(self.token_variable, self.token_file)
        if token is None and not is_loopback(self.host):
            raise ConfigError(
                f"serve a reward at {self.host!r} without a token",
                "other machines can reach it",
                "name an environment variable with a token (--token-variable), or listen on 127.0.0.1",
            )
        return token


class _Rewards(Config):
    """The part of a config that the server reads."""

    rewards: tuple[RewardPlugin, ...] = Field(min_length=1)


def read_rewards(source: Path, overrides: Sequence[str] = ()) -> tuple[RewardConfig, ...]:
    """The section `rewards` of a YAML file, which may be the config of a run, or the reward model in a directory.

    Raises ConfigError.
    """
    model = {"rewards": [{"kind": "model", "path": str(source.resolve())}]}
    data = model if source.is_dir() else read_yaml(source)
    for override in overrides:
        data = merged(data, parse_override(override))
    base = source.resolve().parent
    try:
        with paths_relative_to(base):
            return _Rewards.model_validate({"rewards": data.get("rewards", ())}).rewards
    except ValidationError as error:
        problems = list(flatten(error, _Rewards, ""))
        raise ConfigError(f"the rewards in {source}", f"{len(problems)} problem(s)", "fix them:", problems) from error


def serve_reward(rewards: Sequence[RewardConfig], address: RewardAddress, announce: Callable[[str], object]) -> None:
    """Serves until SIGTERM or SIGINT. Answers requests in progress first. `announce` gets lines for people: first the
    URL.

    Raises ConfigError, ListenError if the address is taken, MissingPackage without the extra `serve`.
    """
    token = address.token()
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackage(error.name or "fastapi", "serve", "serve a reward") from error
    asyncio.run(_serve(rewards, address, token, announce))


async def _serve(
    rewards: Sequence[RewardConfig], address: RewardAddress, token: str | None, announce: Callable[[str], object]
) -> None:
    from trivium.serving.connections import serve_app
    from trivium.serving.reward_scorers import ModelScorer, scorer_of
    from trivium.serving.reward_server import RewardServer, RewardServing

    scorer = scorer_of(rewards, address.deadline_s, address.batch_tokens)
    serving = RewardServing(
        scorer.name,
        address.max_batch,
        max_concurrent=1 if isinstance(scorer, ModelScorer) else 8,  # a model scores one batch at a time
        max_waiting=address.max_waiting,
        deadline_s=address.deadline_s,
        max_body_bytes=address.max_body_bytes,
        whole=scorer.whole,
    )
    server = RewardServer(scorer, scorer.lacking, serving, token)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve_app(server.app, address.host, address.port) as url:
        announce(f"serving the reward {scorer.name} at {url}/get_reward (health: {url}/health)")
        await stop.wait()
        announce("stopping: requests in progress are answered first")
        if not await server.stop(_STOP_S):
            announce(f"requests that take more than {_STOP_S:g} s get no answer")
