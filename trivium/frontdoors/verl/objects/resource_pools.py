"""Resource pools, and the assignment of a trainer's roles to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import accumulate

import ray

from trivium.cluster.pools import ResourcePool, reserve_all
from trivium.errors import ConfigError, TriviumError, UnknownName
from trivium.registry import suggest


class Role(Enum):
    """The role of a worker group in a trainer. `str` returns the name of the group."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6
    Env = 7

    def __str__(self) -> str:
        return _ROLE_NAMES[self]

    @classmethod
    def from_string(cls, name: str) -> Role:
        """Returns the role of a group's name. Raises UnknownName."""
        for role, known in _ROLE_NAMES.items():
            if known == name.lower():
                return role
        raise UnknownName(f"the role {name!r}", "no such role", suggest(name, _ROLE_NAMES.values()))


_ROLE_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
    Role.Env: "env",
}


class RayResourcePool(ResourcePool):
    """A pool of places with verl's arguments. Each place has a GPU with `use_gpu`, else only a CPU."""

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        """Raises ConfigError for a detached pool, and for a type of accelerators."""
        if detached or accelerator_type is not None:
            found = f"detached={detached}, accelerator_type={accelerator_type!r}"
            raise ConfigError("a pool that ends with its script, on any GPU", found, "leave both out")
        count = max_colocate_count
        super().__init__(process_on_nodes, name_prefix or "pool", 1.0, float(use_gpu), max_colocate_count=count)


class SubRayResourcePool(ResourcePool):
    """Places of other pools. They stay reserved until those pools are released."""

    def __init__(self, name: str, parts: Sequence[tuple[ResourcePool, int, int]]) -> None:
        """`parts` are (pool, first rank, the rank after the last one). Reserves the pools. Raises ConfigError for pools
        whose processes have different resources."""
        first = parts[0][0]
        if len({(pool.cpus, pool.gpus, pool.max_colocate_count) for pool, _, _ in parts}) > 1:
            found = "the resources of their processes, or max_colocate_count, differ"
            raise ConfigError(f"one pool of {', '.join(pool.name for pool, _, _ in parts)}", found, "make them equal")
        for pool, _, _ in parts:
            pool.reserve()
        places = [place for pool, start, stop in parts for place in pool.placements[start:stop]]
        counts = Counter(place.address for place in places)
        super().__init__(list(counts.values()), name, first.cpus, first.gpus, first.max_colocate_count)
        self.placements = tuple(replace(place, local_size=counts[place.address]) for place in places)


def split_resource_pool(resource_pool: ResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Splits a pool into pools of `split_size` consecutive ranks each, or of the sizes in a list. Raises ConfigError
    unless the sizes add up to the pool's."""
    total = resource_pool.world_size
    sizes = [split_size] * (total // split_size) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != total or min(sizes) < 1:
        raise ConfigError(
            f"the pool {resource_pool.name!r} in parts of {split_size}", f"it has {total}", "fit the sizes"
        )
    ends = list(accumulate(sizes))
    return [
        SubRayResourcePool(f"{resource_pool.name}_split_{number}", [(resource_pool, end - size, end)])
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def merge_resource_pool(rp1: ResourcePool, rp2: ResourcePool) -> SubRayResourcePool:
    """Returns a pool of the places of both, those of the first one before those of the second."""
    return SubRayResourcePool(f"{rp1.name}_{rp2.name}", [(rp1, 0, rp1.world_size), (rp2, 0, rp2.world_size)])


class ResourcePoolManager:
    """Manages pools by name, and the assignment of roles to pools."""

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role, str],
        *,
        device_name: str | None = None,
        cpus_per_process: float = 1.0,
        max_colocate_count: int = 3,
        deadline_s: float = 120.0,
    ) -> None:
        """`resource_pool_spec` maps each pool to its processes on each machine. Each process has its own GPU, or none
        with `device_name="cpu"`; None uses GPUs if the cluster has any. Several worker groups may share a pool.
        """
        unknown = {role.name: pool for role, pool in mapping.items() if pool not in resource_pool_spec}
        if unknown:
            raise ConfigError(
                f"roles in pools: {unknown}",
                f"the pools are {', '.join(resource_pool_spec) or 'none'}",
                "name each pool of the mapping in resource_pool_spec",
            )
        self.resource_pool_spec, self.mapping = dict(resource_pool_spec), dict(mapping)
        self.resource_pool_dict: dict[str, ResourcePool] = {}
        """The pools by name; empty before `create_resource_pool()`."""
        self._device_name, self._cpus, self._deadline_s = device_name, cpus_per_process, deadline_s
        self._max_colocate_count = max_colocate_count

    def create_resource_pool(self) -> None:
        """Reserves all pools, or none.

        Raises ConfigError with the number of missing CPUs or GPUs and the pool: immediately if the cluster is too
        small, after `deadline_s` if other users do not free resources.
        """
        on_gpus = self._device_name != "cpu" and (
            self._device_name is not None or ray.cluster_resources().get("GPU", 0) > 0
        )
        pools = {
            name: ResourcePool(
                counts,
                name=name,
                cpus=self._cpus,
                gpus=float(on_gpus),
                max_colocate_count=self._max_colocate_count,
                deadline_s=self._deadline_s,
            )
            for name, counts in self.resource_pool_spec.items()
        }
        reserve_all(list(pools.values()))
        self.resource_pool_dict = pools

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """Returns the pool of a role. Raises ConfigError for a role without one, TriviumError before creation."""
        if role not in self.mapping:
            raise ConfigError(
                f"the pool of the role {role.name}",
                f"mapped are {', '.join(r.name for r in self.mapping) or 'none'}",
                "give the role a pool in the mapping",
            )
        if not self.resource_pool_dict:
            raise TriviumError(f"the pool of the role {role.name}", "no pools yet", "call create_resource_pool() first")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Returns the number of processes of all pools. With GPUs, it equals the number of GPUs."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())

    def release(self) -> None:
        """Releases every pool."""
        for pool in self.resource_pool_dict.values():
            pool.release()
        self.resource_pool_dict = {}
