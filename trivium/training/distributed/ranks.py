"""The processes that train together, and the rank of this process.

FSDP spreads every parameter over all of them. A batch is cut into one share per data rank; with sequence parallelism,
`sequence_size` ranks get the same share and split its tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from trivium.errors import ConfigError
from trivium.models.backbone.sequence_parallel import SequenceGroup
from trivium.processes.sockets import own_interface
from trivium.training.launched import launched_ranks, this_rank

_T = TypeVar("_T")
CPU = torch.device("cpu")
COLLECTIVE_S = 600.0
"""Default deadline of a collective call."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. Ranks with consecutive numbers share a sequence group:
    rank = data_rank * sequence_size + sequence_rank."""

    rank: int = 0
    size: int = 1
    sequence_size: int = 1
    device: torch.device = CPU
    mesh: DeviceMesh | None = None
    """The FSDP mesh: ("shard",), or ("replicate", "shard"). None in a single process."""
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that hold parts of the same sequences; None if each rank holds whole sequences."""

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_size

    @property
    def data_size(self) -> int:
        """The number of shares of a batch."""
        return self.size // self.sequence_size

    @property
    def sequence_rank(self) -> int:
        return self.rank % self.sequence_size

    @property
    def sequence(self) -> SequenceGroup | None:
        """The position of this process among the ranks that share its sequences."""
        if self.sequence_group is None:
            return None
        return SequenceGroup(self.sequence_rank, self.sequence_size, self.sequence_group)

    def all_reduce_max(self, number: int) -> int:
        """The maximum over all ranks."""
        if self.size == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def all_gather(self, value: _T) -> list[_T]:
        """One value per data rank, from the first rank of each sequence group."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values[:: self.sequence_size]


ALONE = Ranks()


def join_ranks(
    *, sequence: int = 1, shard: int = 0, device: torch.device | str = "cpu", deadline_s: float = COLLECTIVE_S
) -> Ranks:
    """Joins the process group that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe.

    `sequence` ranks share each sequence; parameters are sharded over groups of `shard` ranks (0: all) and replicated
    across the groups. `deadline_s` is the timeout of a collective call, unless the group is open already. Without a
    launcher, returns a single rank. Raises ConfigError for sizes that do not divide.
    """
    size, kind = launched_ranks(), torch.device(device).type
    for name, number in (("sequence_parallel", sequence), ("shard", shard)):
        if number and size % number:
            raise ConfigError(
                f"train.{name} {number} on {size} ranks",
                "the one does not divide the other",
                f"choose a divisor of {size}, or another number of ranks",
            )
    if size == 1:
        return Ranks(device=torch.device(device))
    rank, local = this_rank(), int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(here)
    open_process_group(kind, deadline_s)
    shard = shard or size
    if shard == size:
        mesh = init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(kind, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
    group = None
    if sequence > 1:
        group = init_device_mesh(kind, (size // sequence, sequence), mesh_dim_names=("data", "sequence")).get_group(
            "sequence"
        )
    return Ranks(rank, size, sequence, here, mesh, group)


def open_process_group(kind: str, deadline_s: float = COLLECTIVE_S) -> None:
    """Opens the group of all ranks once, for CPU tensors and, if `kind` is `cuda`, for CUDA tensors too."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind.startswith("cuda") else "gloo"
        # By default gloo takes the address of the host's name, which is a loopback address on many machines.
        if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := own_interface()):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        timeout = timedelta(seconds=deadline_s)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        # The store of torchrun also holds the keys of the ranks before a restart, with addresses where none listens.
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
