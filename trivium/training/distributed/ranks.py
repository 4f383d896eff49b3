"""The processes that train together, and the rank of this process.

FSDP spreads every parameter over all of them. A batch is cut into one share per data rank. With sequence or tensor
parallelism several ranks get the same share: `sequence_size` ranks split its tokens, and for each of those
`tensor_size` ranks split the layers.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from trivium.foundation.errors import ConfigError, RoleFailed
from trivium.models.backbone.sequence_parallel import SequenceGroup
from trivium.planning.parallel import mesh_problems
from trivium.processes.sockets import own_interface
from trivium.training.launched import launched_ranks, local_rank, ranks_here, this_rank

_T = TypeVar("_T")
CPU = torch.device("cpu")
COLLECTIVE_S = 600.0
"""Default deadline of a collective call."""
GLOO = "gloo_of_one_thread"
"""torch's name for the groups of `_gloo`."""
_POLL_S = 0.02


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. Ranks with consecutive numbers share layers, then sequences:
    rank = (data_rank * sequence_size + sequence_rank) * tensor_size + tensor_rank."""

    rank: int = 0
    size: int = 1
    sequence_size: int = 1
    device: torch.device = CPU
    mesh: DeviceMesh | None = None
    """The FSDP mesh: ("shard",), or ("replicate", "shard"). None in a single process."""
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that hold parts of the same sequences; None if each rank holds whole sequences."""
    tensor: DeviceMesh | None = None
    """The ranks that split the layers for the same tokens: ("tensor",). None if no layer is split, experts included."""
    experts: DeviceMesh | None = None
    """("expert_shard", "expert"): each row of ranks holds all experts, and each column shards the same ones by FSDP.
    With replicas of the parameters, ("replicate", "expert_shard", "expert"). None if each rank computes all experts."""

    @property
    def tensor_size(self) -> int:
        return 1 if self.tensor is None else self.tensor.size()

    @property
    def expert_shards(self) -> DeviceMesh | None:
        """The FSDP mesh of the experts that this rank holds."""
        return None if self.experts is None else self.experts[(self.experts.mesh_dim_names or ())[:-1]]

    @property
    def share_size(self) -> int:
        """The number of ranks that get the same share of a batch."""
        return self.sequence_size * self.tensor_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.share_size

    @property
    def data_size(self) -> int:
        """The number of shares of a batch."""
        return self.size // self.share_size

    @property
    def sequence_rank(self) -> int:
        return self.rank // self.tensor_size % self.sequence_size

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
        """One value per data rank, from the first of the ranks with the same share."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values[:: self.share_size]


ALONE = Ranks()


def join_ranks(
    *,
    sequence: int = 1,
    shard: int = 0,
    tensor: int = 1,
    expert: int = 1,
    device: torch.device | str = "cpu",
    deadline_s: float = COLLECTIVE_S,
) -> Ranks:
    """Joins the process group that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe.

    `sequence` ranks share each sequence, `tensor` ranks split each layer, and `expert` ranks hold different experts.
    Parameters are sharded over groups of `shard` ranks (0: all) and replicated across the groups. `deadline_s` is the
    timeout of a collective call, unless the group is open already. Without a launcher, returns a single rank. Raises
    ConfigError for sizes that do not divide.
    """
    size, kind = launched_ranks(), torch.device(device).type
    for problem in mesh_problems(size, sequence=sequence, shard=shard, tensor=tensor, expert=expert):
        raise ConfigError(f"{problem.where} {problem.asked}", problem.found, problem.do)
    if size == 1:
        return Ranks(device=torch.device(device))
    rank, local = this_rank(), local_rank()
    here = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(here)
    open_process_group(kind, deadline_s)
    replicas = size // (shard or size)
    sharded = size // replicas // tensor
    names = ("replicate", "shard") if replicas > 1 else ("shard",)
    sizes = (replicas, sharded) if replicas > 1 else (sharded,)
    if tensor == expert == 1:
        mesh, tensors = init_device_mesh(kind, sizes, mesh_dim_names=names), None
    else:
        whole = init_device_mesh(kind, (*sizes, tensor), mesh_dim_names=(*names, "tensor"))
        mesh, tensors = whole[names], whole["tensor"]
    group = experts = None
    if sequence > 1:
        sharing = (size // sequence // tensor, sequence, tensor)
        group = init_device_mesh(kind, sharing, mesh_dim_names=("data", "sequence", "layers")).get_group("sequence")
    if expert > 1:
        of_experts = (*sizes[:-1], size // replicas // expert, expert)
        experts = init_device_mesh(kind, of_experts, mesh_dim_names=(*names[:-1], "expert_shard", "expert"))
    return Ranks(rank, size, sequence, here, mesh, group, tensors, experts)


def open_process_group(kind: str, deadline_s: float = COLLECTIVE_S) -> None:
    """Opens the group of all ranks once, for CPU tensors and, if `kind` is `cuda`, for CUDA tensors too."""
    if not dist.is_initialized():
        backend = f"cpu:{GLOO},cuda:nccl" if kind.startswith("cuda") else GLOO
        # By default gloo takes the address of the host's name, which is a loopback address on many machines. Other
        # machines could not reach it.
        if ranks_here() < launched_ranks() and "GLOO_SOCKET_IFNAME" not in os.environ and (name := own_interface()):
            os.environ["GLOO_SOCKET_IFNAME"] = name
        timeout = timedelta(seconds=deadline_s)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        # The store of torchrun also holds the keys of the ranks before a restart, with addresses where none listens.
        store = PrefixStore(_agreed_prefix(store, rank, size, deadline_s), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A gloo group with one thread, otherwise as torch makes it.

    torch gives it two. Both write the name of the last operation that ended, and hold no lock then
    (ProcessGroupGloo::runLoop of torch 2.13). Names of more than 15 letters, as of the gathers of DTensor and of the
    scatters of FSDP, lie on the heap: two writes at once free the same memory twice. Ranks then abort, or wait for each
    other until the deadline. Two ranks with 64 gathers in flight abort within 15 s; with one thread they do not.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
        dist.ProcessGroupGloo.create_default_device()
    ]
    options._timeout, options._threads = timeout, 1
    return dist.ProcessGroupGloo(store, rank, size, options)


dist.Backend.register_backend(GLOO, _gloo, devices=["cpu"])


def _agreed_prefix(store: Store, rank: int, size: int, deadline_s: float) -> str:
    """A random prefix for the keys of these ranks in a store that outlives them. TORCHELASTIC_RESTART_COUNT cannot be
    the prefix: each agent of torchrun counts the failures of its own ranks.

    The first rank chooses the prefix and sends it to each nonce that another rank of this name shows, also to those of
    earlier ranks. Only a rank that runs confirms the prefix. torchrun ends all ranks before it starts any again.

    Raises RoleFailed if a rank does not answer within `deadline_s`.
    """
    mine, end = secrets.token_hex(), time.monotonic() + deadline_s
    if rank > 0:
        store.set(f"trivium/nonce/{rank}", mine)
        try:
            prefix = store.get(f"trivium/prefix for {mine}").decode()
        except dist.DistStoreError as error:
            raise RoleFailed("trainer rank 0", f"it did not connect ({error})") from error
        store.set(f"{prefix}/confirmed/{rank}", "")
        return prefix
    absent = set(range(1, size))
    while absent := {other for other in absent if not store.check([f"{mine}/confirmed/{other}"])}:
        if time.monotonic() > end:
            raise RoleFailed(f"trainer rank {min(absent)}", f"it did not connect within {deadline_s:.0f} s")
        for other in absent:
            if store.check([f"trivium/nonce/{other}"]):
                store.set(f"trivium/prefix for {store.get(f'trivium/nonce/{other}').decode()}", mine)
        time.sleep(_POLL_S)
    return mine
