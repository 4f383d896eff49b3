"""Selects the worker groups that a run needs, and starts their processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trivium.foundation.errors import ConfigError
from trivium.frontdoors.verl.objects.resource_pools import ResourcePoolManager, Role
from trivium.frontdoors.verl.objects.workers.model_workers import WorkerConfig
from trivium.frontdoors.verl.objects.workers.worker_group import RayWorkerGroup, RoleWorker

ACTORS = (Role.ActorRolloutRef, Role.ActorRollout)
_ORDER = (Role.Critic, Role.RefPolicy, Role.RewardModel, *ACTORS)
"""Load order of the models. The actor is last, so that its rollout engine sees the remaining memory."""


@dataclass(frozen=True)
class Needs:
    """The models that an algorithm uses in addition to the policy."""

    critic: bool = False
    reference: bool = False
    reference_in_actor: bool = False
    """Whether the policy with its adapter switched off is the reference."""
    reward_model: bool = False


def chosen_roles(mapping: Mapping[Role, Any], needs: Needs) -> dict[Role, Any]:
    """Returns the roles that get workers, with their classes, in load order.

    Raises ConfigError for a needed role that is not mapped, and for an unsupported role.
    """
    for role in (Role.Actor, Role.Rollout, Role.Env):
        if role in mapping:
            raise ConfigError(
                f"the role {role.name}",
                "actor and rollout share their workers here; a separate one is not supported",
                "map Role.ActorRollout, or Role.ActorRolloutRef",
            )
    actors = [role for role in ACTORS if role in mapping]
    if len(actors) != 1:
        raise ConfigError(
            "one worker class for the policy",
            f"{len(actors)} of ActorRollout and ActorRolloutRef are mapped",
            "map Role.ActorRollout, or Role.ActorRolloutRef if it also holds the reference",
        )
    chosen = {actors[0]: mapping[actors[0]]}
    apart = needs.reference and not needs.reference_in_actor and actors[0] is Role.ActorRollout
    for role, needed, what in (
        (Role.Critic, needs.critic, "the advantage estimator reads values"),
        (Role.RefPolicy, apart, "the KL penalty compares with the reference"),
        (Role.RewardModel, needs.reward_model, "reward_model.enable"),
    ):
        if needed and role not in mapping:
            raise ConfigError(
                f"a worker class for {role.name}, because {what}",
                f"mapped are {', '.join(r.name for r in mapping)}",
                "add the role to role_worker_mapping",
            )
        # verl runs a reward model whenever its role is mapped.
        if needed or (role is Role.RewardModel and role in mapping):
            chosen[role] = mapping[role]
    return {role: chosen[role] for role in _ORDER if role in chosen}


def role_name(role: Role, needs: Needs) -> str:
    """Returns the name of a worker's role. The actor holds a needed reference if it is mapped as ActorRolloutRef, or if
    its adapter can be switched off."""
    if role not in ACTORS:
        return str(role)
    holds = needs.reference and (needs.reference_in_actor or role is Role.ActorRolloutRef)
    return str(Role.ActorRolloutRef if holds else Role.ActorRollout)


def start_groups(
    roles: Mapping[Role, Any],
    pools: ResourcePoolManager,
    group_class: Callable[..., RayWorkerGroup],
    config: WorkerConfig,
    needs: Needs,
    **options: object,
) -> tuple[dict[Role, RayWorkerGroup], list[RayWorkerGroup]]:
    """Starts the groups. Returns (a view of its group per role, the groups). The roles of a pool share its processes.

    No model is loaded yet. If building a worker raises, all processes are stopped.
    """
    by_pool: dict[int, tuple[Any, dict[Role, Any]]] = {}
    for role, worker in roles.items():
        pool = pools.get_resource_pool(role)
        by_pool.setdefault(id(pool), (pool, {}))[1][role] = worker
    views: dict[Role, RayWorkerGroup] = {}
    groups: list[RayWorkerGroup] = []
    try:
        for pool, members in by_pool.values():
            workers = {
                str(role): RoleWorker.of(worker, config, role_name(role, needs)) for role, worker in members.items()
            }
            group = group_class(pool, workers, **options)
            groups.append(group)
            views |= {role: group.of_role(str(role)) for role in members}
    except BaseException:
        for group in groups:
            group.shutdown()
        raise
    return views, groups


def by_model(views: Mapping[Role, Any], needs: Needs) -> dict[str, Any]:
    """Returns the group that holds each model of the algorithm."""
    actor = next(views[role] for role in ACTORS if role in views)
    models = {"policy": actor}
    if needs.critic:
        models["critic"] = views[Role.Critic]
    if needs.reference:
        models["reference"] = views.get(Role.RefPolicy, actor)
    return models
