"""A process group for one exchange of weights: formed, used and watched beside torch.distributed's default group, which
belongs to training.

Nothing here waits for the dead: every wait looks at the board now and then, and ends when a member of the exchange is
gone, when the trainer has begun another one, and at the latest after `deadline_s` without progress.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trivium.errors import SyncError
from trivium.synchronizer import Exchange, Synchronizer

CONNECT_S = 15.0
"""Longest time for two processes, both known to be alive, to connect."""
MEET_S = 60.0
"""Longest time in which all who agreed to an exchange come to the trainer's store."""
PIECE_BYTES = 2**28
"""One broadcast carries so much."""
_LOOK_S = 0.25
_POLL_S = 0.001
_LOOPBACK = "127.0.0.1"
_WELL = "well"
WHOLE = "whole"
"""What a member has at the end, after every bucket."""


class BrokenOff(Exception):
    """An exchange that will not be finished, and why."""


class Forsaken(BrokenOff):
    """Of those who came, nobody has what went before."""


class Wire:
    """This process's end of an exchange, as rank `rank`: the trainer is 0, member i is i + 1."""

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        store: Store,
        synchronizer: Synchronizer,
        device: torch.device,
        *,
        stream: str = "",
        has: int = 0,
    ) -> None:
        """Meets the other members and connects with them; `device` is where this process has its model.

        `has` is how many buckets of `stream` the trainer will not send again, or a member need not get. A member that
        lacks one of the former takes no part.

        Raises BrokenOff, or RuntimeError from torch, where that fails.
        """
        self._exchange, self._rank, self._synchronizer = exchange, rank, synchronizer
        self._deadline = timedelta(seconds=synchronizer.deadline_s)
        self._store = PrefixStore(f"exchange-{exchange.number}", store)
        came = self._meet({"host": own_address(), "gpu": _gpu_name(device), "stream": stream, "has": has})
        self.stream: str = came[0]["stream"]
        """Which of the trainer's offers this is."""
        taking_part = [number for number, each in enumerate(came) if _follows(each, came[0])]
        if rank not in taking_part or taking_part == [0]:
            raise (Forsaken if rank == 0 else BrokenOff)(
                f"it goes on with bucket {came[0]['has']}, and of those before it some never came here"
            )
        self._members = {number: exchange.members[number - 1] for number in taking_part[1:]}
        everyone = [came[number] for number in taking_part]
        self._place, self._size = taking_part.index(rank), len(taking_part)
        gpus = [each["gpu"] for each in everyone]
        # nccl wants a GPU for each; whoever shares one, or has none, is served by the CPU.
        by_gpu = all(gpus) and len({*gpus}) == len(gpus) and dist.is_nccl_available()
        self.device = device if by_gpu else torch.device("cpu")
        here = all(each["host"] == everyone[0]["host"] for each in everyone)
        store = PrefixStore("group", self._store)
        self._backend: Any = self._nccl(store) if by_gpu else self._gloo(store, _LOOPBACK if here else own_address())

    def start(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begins to carry the bytes of a tensor (on `device`) from the trainer to everybody; call the result to end."""
        options = dist.BroadcastOptions()
        options.timeout = self._deadline
        flat = tensor.view(-1).view(torch.uint8)
        works = [self._backend.broadcast([piece], options) for piece in flat.split(PIECE_BYTES)]

        def finish() -> None:
            for work in works:
                self._finish(work)

        return finish

    def carry(self, tensor: torch.Tensor) -> None:
        """From the trainer to everybody, in place."""
        self.start(tensor)()

    def tell(self, said: Any) -> None:
        """The trainer says something (JSON) to everybody."""
        data = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        self.carry(torch.tensor([len(data)]).to(self.device))
        self.carry(data.to(self.device))

    def hear(self) -> Any:
        """What the trainer tells."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.carry(length)
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.carry(data)
        return json.loads(data.cpu().numpy().tobytes())

    def answer(self, part: int | str, trouble: str = "") -> None:
        """A member tells the trainer that it has a bucket, or the `WHOLE`; or what it has against it."""
        self._store.set(f"answer-{self._rank}-{part}", trouble or _WELL)

    def done(self) -> None:
        """A member tells the trainer that it has everything."""
        self.answer(WHOLE)

    def troubles(self, part: int | str) -> dict[str, str]:
        """The members that do not have it, and why, once all who live have answered."""
        troubles: dict[str, str] = {}
        for rank, name in self._members.items():
            try:
                self._until(lambda rank=rank: self._answer(rank, part) != "", [name])
                troubles[name] = self._answer(rank, part)
            except BrokenOff as error:
                troubles[name] = str(error)
        return {name: trouble for name, trouble in troubles.items() if trouble != _WELL}

    def delivered(self) -> bool:
        """Whether a member has said by now that it has everything."""
        return any(self._answer(rank, WHOLE) == _WELL for rank in self._members)

    def close(self) -> None:
        """Lets go of the connections: whoever waits on the other end of one hears of it at once."""
        self._backend = None

    def _answer(self, rank: int, part: int | str) -> str:
        key = f"answer-{rank}-{part}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    # ------------------------------------------------------------------ coming together

    def _meet(self, about: dict[str, Any]) -> list[dict[str, Any]]:
        """What every member says about itself, once all have come: from here on connecting takes no time."""
        ranks = range(len(self._exchange.members) + 1)
        self._store.set(f"here-{self._rank}", json.dumps(about))
        self._until(
            lambda: self._store.check([f"here-{rank}" for rank in ranks]), self._exchange.members, MEET_S,
            f"not all of the trainer and {', '.join(self._exchange.members)} came to {self._exchange.address} within "
            f"{MEET_S:.0f} s: do all machines reach that address? (GLOO_SOCKET_IFNAME names another interface)",
        )  # fmt: skip
        return [json.loads(self._store.get(f"here-{rank}")) for rank in ranks]

    def _gloo(self, store: Store, host: str) -> Any:
        options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=CONNECT_S)
        return dist.ProcessGroupGloo(store, self._place, self._size, options)

    def _nccl(self, store: Store) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._deadline
        return dist.ProcessGroupNCCL(store, self._place, self._size, options)

    # ------------------------------------------------------------------ waiting

    def _finish(self, work: Any) -> None:
        try:
            self._until(work.is_completed, [*self._members.values()])
        except BaseException:
            self._abandon(work)
            raise
        work.wait()  # raises what went wrong

    def _until(
        self, done: Callable[[], bool], waited_for: Sequence[str], patience_s: float | None = None, overdue: str = ""
    ) -> None:
        """Returns once `done`. Raises BrokenOff as soon as that cannot come about any more, or with `overdue`."""
        now = time.monotonic()
        patience_s = patience_s or self._deadline.total_seconds()
        end, look = now + patience_s, now + _LOOK_S
        while not done():
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_S
                if why := self._synchronizer.broken(self._exchange, waited_for):
                    raise BrokenOff(why)
            if now > end:
                raise BrokenOff(overdue or f"nothing came for {patience_s:.0f} s")
            time.sleep(_POLL_S)

    def _abandon(self, work: Any) -> None:
        """gloo ends an operation at its timeout and not before, and whoever drops its group waits for that. So a thread
        holds on to both, and this one goes on."""
        self._backend.abort()
        threading.Thread(target=_hold, args=(work, self._backend), name="abandoned-exchange", daemon=True).start()


def _follows(member: dict[str, Any], trainer: dict[str, Any]) -> bool:
    """Whether it has everything that the trainer will not send again."""
    return (member["has"] if member["stream"] == trainer["stream"] else 0) >= trainer["has"]


def _hold(work: Any, backend: Any) -> None:
    while not work.is_completed():
        time.sleep(_LOOK_S)
    del backend


def open_store() -> TCPStore:
    """The trainer's rendezvous store, on a free port of every interface."""
    return TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))


def join_store(address: str) -> TCPStore:
    """A member's end of the trainer's store."""
    host, port = reach(address)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))


def reach(address: str) -> tuple[str, int]:
    """Host and port of an `address` as seen from here: what is on this machine is reached through the loopback."""
    host, _, port = address.rpartition(":")
    return _LOOPBACK if host == own_address() else host, int(port)


def refuses(address: str) -> bool:
    """Whether nobody listens there any more: the process that did is gone."""
    try:
        socket.create_connection(reach(address), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # a network in trouble proves nothing; the heartbeat will tell
    return False


def own_address() -> str:
    """The address under which other machines reach this one: that of the interface that GLOO_SOCKET_IFNAME names, else
    that of the default route; the loopback where there is neither."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            return _address_of(interface, probe)
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; connecting a datagram socket sends nothing
        except OSError:
            return _LOOPBACK
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


def _gpu_name(device: torch.device) -> str:
    """A name no other GPU has; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
