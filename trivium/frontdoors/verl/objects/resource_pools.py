"""Resource pools, and the assignment of a trainer's roles to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

import ray

from trivium.cluster.pools import ResourcePool, reserve_all
from trivium.foundation.errors import ConfigError, TriviumError, UnknownName
from trivium.foundation.registry import suggest


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
        for role, group in _ROLE_NAMES.items():
            if group == name.lower():
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


class ResourcePoolManager:
    """Manages pools by name, and the assignment of roles to pools."""

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role, str],
        *,
        device_name: str | None = None,
        cpus_per_process: float = 1.0,
        # verl's default: CPUs for three groups in a pool.
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
