"""The worker groups that an algorithm needs, and the role names of their workers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.failing import refused
from trivium.foundation.errors import ConfigError

pytest.importorskip("ray")

from trivium.frontdoors.verl import Role
from trivium.frontdoors.verl.objects.roles import Needs, by_model, chosen_roles, role_name

ALL: dict[Role, Any] = dict.fromkeys([Role.ActorRollout, Role.RefPolicy, Role.Critic, Role.RewardModel], object)


def test_the_actor_comes_last_and_nobody_comes_for_nothing() -> None:
    full = Needs(critic=True, reference=True, reward_model=True)
    assert [*chosen_roles(ALL, full)] == [Role.Critic, Role.RefPolicy, Role.RewardModel, Role.ActorRollout]
    assert [*chosen_roles(ALL, Needs())] == [Role.RewardModel, Role.ActorRollout]


@pytest.mark.parametrize(
    ("actor", "needs", "told"),
    [
        (Role.ActorRollout, Needs(), "actor_rollout"),
        (Role.ActorRollout, Needs(reference=True), "actor_rollout"),
        (Role.ActorRollout, Needs(reference=True, reference_in_actor=True), "actor_rollout_ref"),
        (Role.ActorRolloutRef, Needs(), "actor_rollout"),
        (Role.ActorRolloutRef, Needs(reference=True), "actor_rollout_ref"),
        (Role.Critic, Needs(critic=True), "critic"),
    ],
)
def test_an_actor_holds_the_reference_where_that_is_its_place(actor: Role, needs: Needs, told: str) -> None:
    assert role_name(actor, needs) == told


def test_who_holds_which_model() -> None:
    views = {Role.ActorRollout: "a", Role.RefPolicy: "r", Role.Critic: "c"}
    assert by_model(views, Needs(critic=True, reference=True)) == {"policy": "a", "reference": "r", "critic": "c"}
    del views[Role.RefPolicy]
    assert by_model(views, Needs(reference=True, reference_in_actor=True)) == {"policy": "a", "reference": "a"}


@pytest.mark.parametrize(
    ("roles", "needs", "names"),
    [
        ([Role.ActorRollout], Needs(critic=True), ["Critic"]),
        ([Role.ActorRollout], Needs(reference=True), ["RefPolicy"]),
        ([Role.ActorRollout], Needs(reward_model=True), ["RewardModel"]),
        ([Role.ActorRollout, Role.ActorRolloutRef], Needs(), [2, "ActorRollout", "ActorRolloutRef"]),
        ([Role.Critic], Needs(), [0, "ActorRollout", "ActorRolloutRef"]),
        ([Role.Rollout, Role.Actor], Needs(), ["Actor"]),
    ],
)
def test_roles_that_are_missing_or_unsupported(roles: list[Role], needs: Needs, names: list[Any]) -> None:
    with refused(ConfigError, *names):
        chosen_roles(dict.fromkeys(roles, object), needs)


def test_an_adapters_reference_needs_no_worker() -> None:
    needs = Needs(reference=True, reference_in_actor=True)
    assert [*chosen_roles({Role.ActorRollout: object}, needs)] == [Role.ActorRollout]
