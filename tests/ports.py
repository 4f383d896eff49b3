"""Ports for servers that listen after their port is known, or that leave it and come back."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def port_below_ephemeral() -> int:
    """A port that no system gives away by itself. One that the system gave away and that was released may be another
    process's by the time the server listens."""
    start = os.getpid() * 7 % 10_000
    for number in range(10_000):
        port = 20_000 + (start + number) % 10_000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")
