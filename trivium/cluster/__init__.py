"""The roles of a run as Ray actors, on one machine or many. The only room that imports Ray.

remote        things that live in processes of their own: called, cancelled, their errors carried home whole
hub           what the synchronizer's process keeps: the board, and where the weights of each version are
weights       the object store as a channel
engines       several replicas of a rollout engine as one engine
directory     roles found by name
orders        what a role in another process is told, and where roles meet
roles         what runs in the trainer's and in an explorer's process
crew          starts the roles of a stage, watches over them, replaces explorers that died
session       a Ray instance for one command
pools         places for groups of processes, reserved on the machines
dispatch      what a worker class says about its methods
rows          values that are split among ranks and gathered again
worker        what runs in the process of a rank
worker_group  several processes called as one
ranks         the processes that train together, as the train engine's driver sees them
workers       the worker classes that RayPPOTrainer maps roles to
instance      a Ray instance for one script
backends      what is refused by name
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trivium.cluster.pools import ResourcePoolManager, Role
    from trivium.cluster.worker_group import RayWorkerGroup
    from trivium.cluster.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

__all__ = [
    "ActorRolloutRefWorker", "CriticWorker", "RayWorkerGroup", "ResourcePoolManager", "RewardModelWorker", "Role",
]  # fmt: skip

_HOMES = {
    "RayWorkerGroup": "worker_group", "ResourcePoolManager": "pools", "Role": "pools",
    "ActorRolloutRefWorker": "workers", "CriticWorker": "workers", "RewardModelWorker": "workers",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """The names that the seeds promise, imported when they are asked for: Ray comes with them."""
    if name not in _HOMES:
        raise AttributeError(name)
    from trivium.errors import MissingPackage

    try:
        return getattr(importlib.import_module(f"trivium.cluster.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingPackage("ray", "ray", f"trivium.cluster.{name}") from error
