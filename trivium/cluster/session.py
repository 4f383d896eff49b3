"""A Ray instance for one command or script: a private one that ends with it, or a running cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trivium.checkpoint.store import Checkpoint
from trivium.foundation.errors import ConfigError, MissingPackage
from trivium.planning.plan import Plan
from trivium.runtime.build import run_name
from trivium.runtime.stage import Stage, TrainStage

PRIVATE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the switch between all interfaces and the loopback one, on any system
    "RAY_AUTH_MODE": "token",  # Ray's default, set to avoid a warning
}
"""Environment of a private instance. Ray reads it only while it is imported."""
_FLUSH_S = 0.5
"""How long the last output of the roles takes to reach the terminal."""
_CONNECT_S = 10.0
"""How long a cluster's head may take to accept a connection."""


@contextmanager
def ray_session(plan: Plan, *_: object) -> Generator[TrainStage]:
    """Connects to Ray or starts it, trains stages there, and leaves no process behind. The processes open the run
    directory and the checkpoints themselves.

    Raises MissingPackage without Ray, and ConfigError if nothing answers at `cluster.address`.
    """
    address = plan.config.cluster.address
    if address is None and "ray" not in sys.modules:
        os.environ |= {name: os.environ.get(name, value) for name, value in PRIVATE.items()}
    try:
        import ray
    except ImportError as error:
        raise MissingPackage("ray", "ray", "cluster.kind: ray") from error
    from trivium.cluster.supervisor import Supervisor

    namespace = f"{run_name(plan.config.run)}-{uuid.uuid4().hex[:8]}"

    def run_stage(stage: Stage, resume: Checkpoint | None, record: dict[str, Any]) -> dict[str, Any]:
        supervisor = Supervisor(stage, namespace)
        try:
            return supervisor.run(record, resume is not None)
        finally:
            supervisor.close()

    if address is not None:
        _refuse_unreachable(address, ray.util.get_node_ip_address)
    local_options: dict[str, Any] = {} if address is not None else {"include_dashboard": False}
    with _graceful_sigterm() as install_handler:
        try:
            ray.init(address or "local", namespace=namespace, logging_level=logging.WARNING, **local_options)
        except ConnectionError as error:
            raise _no_cluster(address, error) from error
        install_handler()
        try:
            yield run_stage
            time.sleep(_FLUSH_S)
        finally:
            ray.shutdown()


def connect(*options: Mapping[str, Any], purpose: str = "worker groups") -> None:
    """Connects this process to Ray unless it is connected. `options` are mappings with arguments of `ray.init`, or with
    a mapping of them under `ray_init`.

    An instance that is started here ends with the process. Raises MissingPackage without Ray, which `purpose` needs.
    """
    # After its import, Ray reads only this one.
    names = ["RAY_USAGE_STATS_ENABLED"] if "ray" in sys.modules else [*PRIVATE]
    os.environ |= {name: os.environ.get(name, PRIVATE[name]) for name in names}
    try:
        import ray
    except ImportError as error:
        raise MissingPackage("ray", "ray", purpose) from error
    if ray.is_initialized():
        return
    arguments: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.WARNING}
    for option in options:
        arguments |= option.get("ray_init") or {name: v for name, v in option.items() if name != "timeline_json_file"}
    ray.init(**{name: value for name, value in arguments.items() if value is not None})


def _refuse_unreachable(address: str, own_address: Callable[[], str]) -> None:
    """Raises ConfigError if nothing listens at `host:port`. Ray itself would retry for minutes."""
    host, separator, port = address.rpartition("://")[2].rpartition(":")
    if not separator or not port.isdecimal():
        return
    # A local cluster may be addressed by loopback but listen on another interface, which Ray accepts.
    hosts = dict.fromkeys([host, own_address()] if host in ("127.0.0.1", "localhost") else [host])
    for number, candidate in enumerate(hosts, start=1):
        try:
            socket.create_connection((candidate, int(port)), timeout=_CONNECT_S).close()
            return
        except OSError as error:
            if number == len(hosts):
                raise _no_cluster(address, error) from error


def _no_cluster(address: str | None, error: Exception) -> ConfigError:
    return ConfigError(
        f"a Ray cluster at {address!r}", str(error), "check cluster.address, or leave it out to start one here"
    )


@contextmanager
def _graceful_sigterm() -> Generator[Callable[[], None]]:
    """Yields a function that installs a SIGTERM handler. The handler raises SystemExit with exit code 143 in the block.
    Ray's own handler would end Ray while the block still uses it. Restores the previous handler at the end."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous_handler = signal.getsignal(signal.SIGTERM)
    received: list[int] = []

    def exit_with(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    def install_handler() -> None:
        if in_main_thread:
            signal.signal(signal.SIGTERM, exit_with)

    try:
        yield install_handler
    except SystemExit as error:
        if received:  # Ray raises its own SystemExit if the signal arrives during a wait
            raise SystemExit(128 + received[0]) from error
        raise
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, previous_handler)
