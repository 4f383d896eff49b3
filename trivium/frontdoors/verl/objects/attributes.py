"""The attributes of RayPPOTrainer that code written for verl's trainer reads."""

from __future__ import annotations

from typing import Any, cast

from trivium.algorithms import GroupAlgorithm
from trivium.algorithms.kl import KlController
from trivium.config import RunConfig
from trivium.frontdoors.verl.objects.absent import absent
from trivium.frontdoors.verl.objects.overridable import OverridableTrainer
from trivium.frontdoors.verl.objects.resource_pools import Role
from trivium.frontdoors.verl.objects.roles import ACTORS
from trivium.frontdoors.verl.objects.workers.model_workers import RoleTrainEngine
from trivium.frontdoors.verl.objects.workers.worker_group import RayWorkerGroup
from trivium.runtime.build import algorithm_of


class Attributes:
    """The attributes of a RayPPOTrainer that change or are not always available."""

    run_config: RunConfig
    use_reference_policy: bool
    _engine: RoleTrainEngine
    _views: dict[Role, RayWorkerGroup]
    _trainer: OverridableTrainer | None
    _step: int | None
    _kl_controller: KlController | None

    @property
    def global_steps(self) -> int:
        """The current train step, counted from 1. Between two steps, the number of completed steps."""
        if self._step is not None:
            return self._step
        return self._trainer.train_step_num if self._trainer is not None else 0

    @property
    def total_training_steps(self) -> int:
        """Number of train steps of the whole run."""
        return self.run_config.schedule.steps

    @property
    def actor_rollout_wg(self) -> RayWorkerGroup:
        """The group of the policy's workers, after `init_workers()`."""
        return self._group("actor_rollout_wg", *ACTORS)

    @property
    def critic_wg(self) -> RayWorkerGroup:
        """The critic's group, if the run has a critic."""
        return self._group("critic_wg", Role.Critic)

    @property
    def ref_policy_wg(self) -> RayWorkerGroup:
        """The group that holds the reference, if a KL penalty needs one."""
        return self._group("ref_policy_wg", *((Role.RefPolicy, *ACTORS) if self.use_reference_policy else ()))

    @property
    def rm_wg(self) -> RayWorkerGroup:
        """The reward model's group, if the role is mapped."""
        return self._group("rm_wg", Role.RewardModel)

    def _group(self, name: str, *roles: Role) -> RayWorkerGroup:
        group = next((self._views[role] for role in roles if role in self._views), None)
        if group is None:
            raise absent(name)
        return group

    @property
    def kl_ctrl_in_reward(self) -> KlController:
        """Controller of the KL penalty's coefficient in the reward. Before `fit()`, it may be set to any object with
        `value` and `update(current_kl, n_steps)`. Checkpoints save the value of an AdaptiveKLController only."""
        if self._kl_controller is not None:
            return self._kl_controller
        algorithm = algorithm_of(self.run_config) if self._trainer is None else self._engine.algorithm
        estimator = cast(GroupAlgorithm, algorithm).estimator
        if estimator is None or estimator.kl_controller is None:
            raise absent("kl_ctrl_in_reward")
        return estimator.kl_controller

    @kl_ctrl_in_reward.setter
    def kl_ctrl_in_reward(self, controller: KlController) -> None:
        assert self.kl_ctrl_in_reward  # raises without a controller
        self._kl_controller = controller

    def __getattr__(self, name: str) -> Any:
        raise absent(name)
