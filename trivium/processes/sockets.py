"""Connections between the processes of a run, which a key authenticates, and the address of this machine."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from trivium.foundation.errors import SyncError

_log = logging.getLogger("trivium")
LOOPBACK = "127.0.0.1"
_CONNECT_S = 60.0
"""Deadline for a TCP connection to a listening process."""
_CHALLENGE_S = 10
"""Deadline for each message with which two processes show each other that they have the key."""


class Listening:
    """A socket that accepts connections from processes that have the key."""

    def __init__(self, host: str, key: bytes) -> None:
        """`host` is the address of this machine for the other processes."""
        self._socket, self._key = socket.create_server((host, 0)), key
        self.address: tuple[str, int] = self._socket.getsockname()

    def accept(self, timeout_s: float | None = None) -> Connection:
        """Waits for the connection of a process that has the key, and closes all others. Raises TimeoutError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Above 0, which would mean a socket that never waits.
            self._socket.settimeout(None if end is None else max(end - time.monotonic(), 0.001))
            accepted, sender = self._socket.accept()
            connection = _connection(accepted)
            try:
                with _limited(connection):
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                return connection
            except (AuthenticationError, EOFError, OSError) as error:
                connection.close()
                _log.warning("a connection from %s did not show the key (%s); it is closed", sender[0], error)

    def close(self) -> None:
        self._socket.close()


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connects to a `Listening` socket. Raises OSError, and AuthenticationError if it has another key."""
    connection = _connection(socket.create_connection(address, timeout=_CONNECT_S))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


@contextmanager
def _limited(connection: Connection) -> Generator[None]:
    """Each read and each write in this block fails after `_CHALLENGE_S`."""
    _set_limit(connection, _CHALLENGE_S)
    yield
    _set_limit(connection, 0)  # none


def _set_limit(connection: Connection, seconds: int) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    # Nagle's algorithm would delay each tensor by 40 ms.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


def own_address() -> str:
    """The address at which other machines reach this one: that of the interface GLOO_SOCKET_IFNAME, else of the route
    to torchrun's MASTER_ADDR, else of the default route, else the loopback address."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        return _address_of(interface)
    for peer in (os.environ.get("MASTER_ADDR"), "192.0.2.1"):  # the second is reserved for documentation
        if peer and not (address := _address_towards(peer)).startswith("127."):  # as for a master that runs here
            return address
    return LOOPBACK


def own_interface() -> str:
    """The network interface with this machine's `own_address`; empty for the loopback address."""
    address = own_address()
    if address == LOOPBACK:
        return ""
    for _, name in socket.if_nameindex():
        with suppress(SyncError):  # an interface without an IPv4 address
            if _address_of(name) == address:
                return name
    return ""


def _address_towards(peer: str) -> str:
    """The address of this machine on the route to another one; the loopback address if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # connecting a datagram socket sends nothing
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]


def _address_of(interface: str) -> str:
    get_address = 0x8915  # SIOCGIFADDR
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
    except OSError as error:
        raise SyncError(
            f"the address of GLOO_SOCKET_IFNAME={interface}", str(error), "name an interface with an IPv4 address"
        ) from error
    return socket.inet_ntoa(answer[20:24])
