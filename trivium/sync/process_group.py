"""A process group for one exchange of weights, separate from torch.distributed's default group, which belongs to
training.

Every wait checks the board at intervals. It ends when a member of the exchange has died, when the trainer has begun
another exchange, or after `deadline_s`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trivium.foundation.concurrency import ProgressDeadline
from trivium.processes.sockets import LOOPBACK, own_address
from trivium.synchronizer import Exchange, Synchronizer
from trivium.types import TRAINER

CONNECT_S = 15.0
"""Timeout for two live processes to connect."""
RENDEZVOUS_S = 60.0
"""Timeout for all members of an exchange to reach the trainer's store."""
PIECE_BYTES = 2**28
"""The largest size of one broadcast."""
_CHECK_S = 0.25
"""The interval at which a wait checks the board."""
_POLL_S = 0.001
_OK = "well"
"""The answer of a member that has the whole version."""


class ExchangeAborted(Exception):
    """An exchange cannot complete. The text says why."""


class ExchangeGroup:
    """The group of an exchange. Ranks: the trainer is 0, member i is i + 1."""

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        store: Store,
        synchronizer: Synchronizer,
        device: torch.device,
    ) -> None:
        """Connects to the other members. `device` is the device of this process's model.

        Raises ExchangeAborted, or RuntimeError from torch, if the connection fails.
        """
        self._exchange, self._rank, self._synchronizer = exchange, rank, synchronizer
        self._deadline = timedelta(seconds=synchronizer.deadline_s)
        self._store = PrefixStore(f"exchange-{exchange.number}", store)
        everyone = self._rendezvous({"host": own_address(), "gpu": _gpu_name(device)})
        self._members = dict(enumerate(exchange.members, start=1))
        names = [TRAINER, *exchange.members]
        self.backend, self.by_host = backend_of({name: info["gpu"] for name, info in zip(names, everyone, strict=True)})
        """The backend, and why GPUs send weights through the host if they do."""
        self.device = device if self.backend == "nccl" else torch.device("cpu")
        here = all(info["host"] == everyone[0]["host"] for info in everyone)
        store = PrefixStore("group", self._store)
        host = LOOPBACK if here else own_address()
        self._backend: Any = self._connected(
            partial(self._nccl, store) if self.backend == "nccl" else partial(self._gloo, store, host)
        )

    def broadcast_async(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Starts to broadcast the bytes of a tensor (on `device`) from the trainer. Call the result to wait for it."""
        options = dist.BroadcastOptions()
        options.timeout = self._deadline
        flat = tensor.view(-1).view(torch.uint8)
        works = [self._backend.broadcast([piece], options) for piece in flat.split(PIECE_BYTES)]

        def finish() -> None:
            for work in works:
                self._finish(work)

        return finish

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcasts from the trainer to every member, in place."""
        self.broadcast_async(tensor)()

    def broadcast_object(self, value: object) -> None:
        """Sends a JSON value from the trainer to every member."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self.broadcast(torch.tensor([len(data)]).to(self.device))
        self.broadcast(data.to(self.device))

    def receive_object(self) -> Any:
        """The value of the trainer's `broadcast_object`."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.broadcast(length)
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.broadcast(data)
        return json.loads(data.cpu().numpy().tobytes())

    def acknowledge(self, problem: str = "") -> None:
        """A member tells the trainer that it has the whole version, or why it rejects it."""
        self._store.set(f"answer-{self._rank}", problem or _OK)

    def problems(self) -> dict[str, str]:
        """Waits until all live members have answered. Returns those without the whole version, and why they lack it."""
        problems: dict[str, str] = {}
        for rank, name in self._members.items():
            try:
                self._wait(lambda rank=rank: self._answer(rank) != "", [name])
            except ExchangeAborted as error:
                problems[name] = str(error)
        return problems | self.rejections()

    def rejections(self) -> dict[str, str]:
        """The members that have rejected the version, and why."""
        answers = {name: self._answer(rank) for rank, name in self._members.items()}
        return {name: answer for name, answer in answers.items() if answer not in ("", _OK)}

    def delivered(self) -> bool:
        """Whether a member has the whole version."""
        return any(self._answer(rank) == _OK for rank in self._members)

    def close(self) -> None:
        """Drops the connections, which ends the waits of other members at once."""
        self._backend = None

    def _answer(self, rank: int) -> str:
        key = f"answer-{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    # ------------------------------------------------------------------ connecting

    def _rendezvous(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """Publishes `info` of this rank and waits for that of every rank. Returns all of them. After it, all ranks are
        ready to connect."""
        ranks = range(len(self._exchange.members) + 1)
        self._store.set(f"here-{self._rank}", json.dumps(info))
        self._wait(
            lambda: self._store.check([f"here-{rank}" for rank in ranks]),
            self._exchange.members,
            RENDEZVOUS_S,
            f"not all of the trainer and {', '.join(self._exchange.members)} came to {self._exchange.address} within "
            f"{RENDEZVOUS_S:.0f} s: do all machines reach that address? (GLOO_SOCKET_IFNAME names another interface)",
        )
        return [json.loads(self._store.get(f"here-{rank}")) for rank in ranks]

    def _gloo(self, store: Store, host: str) -> dist.ProcessGroupGloo:
        options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout, options._threads = timedelta(seconds=CONNECT_S), 1  # as on ranks: two threads race
        return dist.ProcessGroupGloo(store, self._rank, len(self._members) + 1, options)

    def _nccl(self, store: Store) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._deadline
        group: Any = dist.ProcessGroupNCCL(store, self._rank, len(self._members) + 1, options)
        # The first operation connects, which may take long.
        group.broadcast([torch.zeros(1, device=self.device)], dist.BroadcastOptions())
        return group

    def _connected(self, make: Callable[[], Any]) -> Any:
        """Calls `make` in another thread, so that the wait for it ends if a member dies."""
        connected: Future[Any] = Future()

        def connect() -> None:
            try:
                connected.set_result(make())
            except BaseException as error:  # `result` raises it
                connected.set_exception(error)

        threading.Thread(target=connect, name="connecting-exchange", daemon=True).start()
        overdue = f"{self.backend} did not connect within {RENDEZVOUS_S:.0f} s (NCCL_DEBUG=INFO logs its details)"
        self._wait(connected.done, [*self._members.values()], RENDEZVOUS_S, overdue)
        return connected.result()

    # ------------------------------------------------------------------ waiting

    def _finish(self, work: dist.Work) -> None:
        try:
            self._wait(work.is_completed, [*self._members.values()], sends=self._rank == 0)
        except BaseException:
            self._abandon(work)
            raise
        work.wait()  # raises the error of the operation

    def _wait(
        self,
        condition: Callable[[], bool],
        waited_for: Sequence[str],
        timeout_s: float | None = None,
        overdue: str = "",
        *,
        sends: bool = False,
    ) -> None:
        """Waits until `condition` holds. Raises ExchangeAborted if it no longer can, or with the text `overdue` at the
        deadline. One that `sends` ends its wait for a member that has rejected what was sent: nccl does not notice
        that a member left."""
        deadline = ProgressDeadline(timeout_s or self._deadline.total_seconds())
        check = time.monotonic() + _CHECK_S
        while not condition():
            if time.monotonic() > check:
                check = time.monotonic() + _CHECK_S
                if reason := self._synchronizer.abort_reason(self._exchange, waited_for):
                    raise ExchangeAborted(reason)
                if sends and (rejections := self.rejections()):
                    raise ExchangeAborted(", ".join(f"{name}: {why}" for name, why in rejections.items()))
            if not deadline.left_s:
                raise ExchangeAborted(overdue or f"nothing arrived for {deadline.seconds:.0f} s")
            time.sleep(_POLL_S)

    def _abandon(self, work: dist.Work) -> None:
        """Keeps an operation and its group in another thread until the operation ends. gloo ends one only at its
        timeout, and dropping the group would wait for that."""
        self._backend.abort()
        threading.Thread(target=_hold, args=(work, self._backend), name="abandoned-exchange", daemon=True).start()


def _hold(work: dist.Work, backend: object) -> None:
    """Keeps the references until the operation ends."""
    while not work.is_completed():
        time.sleep(_CHECK_S)
    del backend


def open_store() -> TCPStore:
    """The trainer's rendezvous store, on a free port of every interface."""
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))


def join_store(address: str) -> TCPStore:
    """A member's client of the trainer's store."""
    host, port = endpoint(address)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))


def endpoint(address: str) -> tuple[str, int]:
    """Host and port of an `address`: the loopback address for this machine."""
    host, _, port = address.rpartition(":")
    return LOOPBACK if host == own_address() else host, int(port)


def refuses_connections(address: str, within_s: float = 0.0) -> bool:
    """Whether no process listens at an address, now or within `within_s`."""
    end = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(endpoint(address), timeout=CONNECT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # a network failure proves nothing; the heartbeat detects a dead process
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)


def _gpu_name(device: torch.device) -> str:
    """A unique name of the GPU; empty for the CPU, or without nccl."""
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    return str(torch.cuda.get_device_properties(device).uuid) if has_nccl else ""


def backend_of(gpus: Mapping[str, str]) -> tuple[Literal["nccl", "gloo"], str]:
    """(the backend for these processes, why it is not nccl although some have a GPU). `gpus` has the GPU of each
    process, empty for none. nccl needs one GPU for each process."""
    owners: dict[str, list[str]] = {}
    for name, gpu in gpus.items():
        owners.setdefault(gpu, []).append(name)
    without, shared = owners.pop("", []), [names for names in owners.values() if len(names) > 1]
    if not without and not shared:
        return "nccl", ""
    reasons = [f"{' and '.join(names)} share a GPU" for names in shared]
    reasons += [f"{', '.join(without)} have no GPU, or no nccl"] * bool(without)
    return "gloo", "; ".join(reasons) if owners else ""
