"""A Ray instance for one command: started on this machine and ended with the command, or one that runs already."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trivium.assemble import Stage, run_name
from trivium.checkpoint import Checkpoint
from trivium.config import RunConfig
from trivium.errors import ConfigError, MissingPackage

PRIVATE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the switch between all interfaces and the loopback one, on any system
    "RAY_AUTH_MODE": "token",  # as Ray would decide by itself, without a warning that it did
}
"""What a private instance is started with. Ray reads it while it is imported, and not again."""
_LAST_WORDS_S = 0.5
"""What roles printed last needs so long to reach the terminal."""
_REACH_S = 10.0
"""How long a cluster's head may take to accept a connection."""

PlayStage = Callable[[Stage, Checkpoint | None, dict[str, Any]], dict[str, Any]]
"""(stage, checkpoint to continue from, record of the run) -> record: plays one stage to its end."""


@contextmanager
def cluster_of(config: RunConfig) -> Generator[PlayStage]:
    """Connects to Ray, or starts it, as the config says; plays stages there; leaves no process behind.

    Raises MissingPackage without Ray, ConfigError where nothing answers at `cluster.address`.
    """
    address = config.cluster.address
    if address is None and "ray" not in sys.modules:
        os.environ |= {name: os.environ.get(name, value) for name, value in PRIVATE.items()}
    try:
        import ray
    except ImportError as error:
        raise MissingPackage("ray", "ray", "cluster.kind: ray") from error
    from trivium.cluster.crew import Crew

    namespace = f"{run_name(config)}-{uuid.uuid4().hex[:8]}"

    def play(stage: Stage, resume: Checkpoint | None, record: dict[str, Any]) -> dict[str, Any]:
        crew = Crew(stage, namespace)
        try:
            return crew.work(record, resume is not None)
        finally:
            crew.dismiss()

    if address is not None:
        _refuse_unreachable(address, ray.util.get_node_ip_address)
    own: dict[str, Any] = {} if address is not None else {"include_dashboard": False}
    with _leaving_in_order() as take_over:
        try:
            ray.init(address or "local", namespace=namespace, logging_level=logging.WARNING, **own)
        except ConnectionError as error:
            raise _no_cluster(address, error) from error
        take_over()
        try:
            yield play
            time.sleep(_LAST_WORDS_S)
        finally:
            ray.shutdown()


def _refuse_unreachable(address: str, own_address: Callable[[], str]) -> None:
    """Raises ConfigError where nothing listens at `host:port`: Ray itself would ask again for minutes."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if not separator or not port.isdecimal():
        return
    # A cluster on this machine may be known by the loopback address and listen on another one; Ray knows that.
    hosts = dict.fromkeys([host, own_address()] if host in ("127.0.0.1", "localhost") else [host])
    for number, each in enumerate(hosts, start=1):
        try:
            socket.create_connection((each, int(port)), timeout=_REACH_S).close()
            return
        except OSError as error:
            if number == len(hosts):
                raise _no_cluster(address, error) from error


def _no_cluster(address: str | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"a Ray cluster at {address!r}", str(error), "check cluster.address, or leave it out to start one here"
    )


@contextmanager
def _leaving_in_order() -> Generator[Callable[[], None]]:
    """Once what it yields was called, SIGTERM ends the block as an error would, with exit code 143. Ray's own handler
    would end Ray first, under our feet. Afterwards the signal does what it did before."""
    here, before = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGTERM)
    asked: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        raise SystemExit(128 + number)

    def take_over() -> None:
        if here:
            signal.signal(signal.SIGTERM, leave)

    try:
        yield take_over
    except SystemExit as error:
        if asked:  # Ray raises an exit of its own where the signal came while it waited
            raise SystemExit(128 + asked[0]) from error
        raise
    finally:
        if here:
            signal.signal(signal.SIGTERM, before)
