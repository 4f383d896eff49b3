"""Connections between the processes of a run, which a key authenticates, and the address of this machine."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from trivium.errors import SyncError

LOOPBACK = "127.0.0.1"
_CONNECT_S = 60.0
"""Deadline for a TCP connection to a listening process."""


class Listening:
    """A socket that accepts connections from processes that have the key."""

    def __init__(self, host: str, key: bytes) -> None:
        """`host` is the address of this machine for the other processes."""
        self._socket, self._key = socket.create_server((host, 0)), key
        self.address: tuple[str, int] = self._socket.getsockname()

    def accept(self, timeout_s: float | None = None) -> Connection:
        """Waits for a connection. Raises TimeoutError, and AuthenticationError if the other process has another key.

        `timeout_s` limits the wait for a connection, not that for the answer to the challenge.
        """
        self._socket.settimeout(timeout_s)
        connection = _connection(self._socket.accept()[0])
        deliver_challenge(connection, self._key)
        answer_challenge(connection, self._key)
        return connection

    def close(self) -> None:
        self._socket.close()


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connects to a `Listening` socket. Raises OSError, and AuthenticationError if it has another key."""
    connection = _connection(socket.create_connection(address, timeout=_CONNECT_S))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    # Nagle's algorithm would delay each tensor by 40 ms.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())


def own_address() -> str:
    """The address at which other machines reach this one: that of the interface GLOO_SOCKET_IFNAME, else of the
    default route, else the loopback address."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            return _address_of(interface, probe)
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; connecting a datagram socket sends nothing
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]


def _address_of(interface: str, probe: socket.socket) -> str:
    get_address = 0x8915  # SIOCGIFADDR
    try:
        answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
    except OSError as error:
        raise SyncError(
            f"the address of GLOO_SOCKET_IFNAME={interface}", str(error), "name an interface with an IPv4 address"
        ) from error
    return socket.inet_ntoa(answer[20:24])
