"""The base class of workers, and the GPUs of the rollout engine of several ranks."""

from __future__ import annotations

import os
from typing import Any

import ray

from trivium.engines.section import ENGINE_GPUS
from trivium.foundation.errors import ConfigError
from trivium.training.launched import launched_ranks, this_rank


class Worker:
    """Base class of the workers of a role: one in each process of a group.

    From construction on, the environment holds the variables of torch.distributed (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Roles that share a process share its process group. Methods run in one
    thread in call order, because collective operations need the same order on all ranks. Coroutines run concurrently on
    the event loop of the process.
    """

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    @property
    def local_rank(self) -> int:
        """Index of this process's device among the visible devices."""
        return int(os.environ["LOCAL_RANK"])


def takes_gpus_of_ranks(number: int) -> bool:
    """Whether this rank hosts a rollout engine over its GPU and those of the ranks that follow on its machine, `number`
    in all. Sets `ENGINE_GPUS`. All ranks, which see one GPU each, must call it. Raises ConfigError if `number` does not
    divide the ranks of the machine."""
    if number == 1:
        return True
    import torch.distributed as dist  # torch reads the environment that the process of the rank sets

    places: list[Any] = [None] * launched_ranks()
    place = (ray.util.get_node_ip_address(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if len(places) > 1:
        dist.all_gather_object(places, place)
    else:
        places = [place]
    here = [rank for rank, (address, _) in enumerate(places) if address == place[0]]
    if len(here) % number:
        raise ConfigError(
            f"a rollout engine over {number} GPUs",
            f"{len(here)} ranks on this machine",
            "choose a divisor of the ranks of a machine (tensor_parallel_size x data_parallel_size)",
        )
    first = here.index(this_rank())
    if place[1]:
        os.environ[ENGINE_GPUS] = ",".join(places[rank][1] for rank in here[first : first + number])
    return first % number == 0
