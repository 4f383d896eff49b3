"""What a user can say about an algorithm, and the algorithm that follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from trivium.algorithms.aggregation import AggregateMode
from trivium.algorithms.algorithm import Estimator, GroupAlgorithm
from trivium.algorithms.kl import KlController, KlEstimator, get_kl_controller
from trivium.algorithms.objective import PolicyObjective, SftObjective, ValueObjective
from trivium.algorithms.registered import EstimatorLaw, LawT, PolicyLossLaw, chosen
from trivium.config import AlgorithmConfig, Config, Plugin, RunConfig, plugin
from trivium.errors import ConfigError, Problem
from trivium.registry import resolve

AdvantagePlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("advantages"))]
PolicyLossPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("policy_losses"))]


class KlConfig(Config):
    """A penalty for leaving the reference model: the policy as the stage began."""

    coef: float = Field(default=0.0, ge=0)
    """Its weight; 0 needs no reference model."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds it to the objective, `reward` takes it off each token's reward."""
    estimator: KlEstimator = "low_var_kl"
    """How it is estimated from the sampled tokens. In a loss, `kl` and `k1` have a gradient of mean zero: use `k1+`."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers the coefficient of a penalty in the reward towards a target."""
    target: float = Field(default=0.1, gt=0)
    """The KL per token, in nats, that `adaptive` aims at."""
    horizon: int = Field(default=10000, ge=1)
    """Sequences over which `adaptive` may change the coefficient by a fifth."""


class CriticConfig(Config):
    """The critic's objective; read where the advantage estimator needs values."""

    clip: float = Field(default=0.5, gt=0)
    """How far a value may move from the old one before its error stops improving."""
    aggregate: AggregateMode = "token-mean"
    """How token losses become one number."""


class UpdateConfig(AlgorithmConfig):
    """What every algorithm has: a policy loss, and how often a step's data are used."""

    policy_loss: PolicyLossPlugin
    """The loss of one token: `{kind: ppo, ...}`, or a function of yours."""
    aggregate: AggregateMode = "token-mean"
    """How token losses become one number."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's data."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        if self.mini_batches > run.schedule.groups_per_step:
            yield Problem(
                f"{where}.mini_batches", f"{self.mini_batches} mini-batches",
                f"a step has {run.schedule.groups_per_step} group(s) (schedule.groups_per_step)",
                "use fewer mini-batches, or more groups",
            )  # fmt: skip


class SupervisedConfig(UpdateConfig):
    """Imitation: a policy loss that reads nothing but the policy's own log-probabilities."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if not _explored(run) and run.schedule.group_size != 1:
            yield Problem(
                "schedule.group_size", f"{run.schedule.group_size} trajectories per task",
                f"buffer.kind {run.buffer.kind!r} has one reply per task, so it would have no effect", "set it to 1",
            )  # fmt: skip
        loss = _law(self.policy_loss, "policy_losses", PolicyLossLaw, f"{where}.policy_loss")
        if isinstance(loss, Problem):
            yield loss
        elif loss.needs:
            yield Problem(
                f"{where}.policy_loss", f"the loss {self.policy_loss.kind!r} on expert data",
                f"it needs {', '.join(sorted(loss.needs))}, and nothing is judged here",
                "use kind: sft, or an algorithm with an advantage estimator",
            )  # fmt: skip


class PolicyGradientConfig(UpdateConfig):
    """Reinforcement: rewards become advantages, advantages weigh a policy loss."""

    advantage: AdvantagePlugin
    """What a token was worth: `{kind: grpo, ...}`, or a function of yours."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl: KlConfig = KlConfig()
    critic: CriticConfig = CriticConfig()
    old_log_prob: Literal["rollout", "recompute"] = "rollout"
    """Where the ratio's denominator comes from: the engine that sampled the token, or a pass of the trainer before the
    step. The first costs nothing and stays exact for stale groups."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if not _explored(run):
            yield Problem(
                f"{where}.kind", f"the algorithm {self.kind!r} on buffer.kind {run.buffer.kind!r}",
                "the policy did not sample these replies and nothing judged them: there is no reward to learn from",
                "use algorithm.kind sft, or buffer.kind memory",
            )  # fmt: skip
        yield from _kl_problems(self.kl, f"{where}.kl")
        loss = _law(self.policy_loss, "policy_losses", PolicyLossLaw, f"{where}.policy_loss")
        if isinstance(loss, Problem):
            yield loss
        else:
            yield from self._loss_problems(loss, run, where)
        estimator = _law(self.advantage, "advantages", EstimatorLaw, f"{where}.advantage")
        if isinstance(estimator, Problem):
            yield estimator
        else:
            yield from self._estimator_problems(estimator, run, where)

    def _loss_problems(self, loss: PolicyLossLaw, run: RunConfig, where: str) -> Iterator[Problem]:
        if "advantages" not in loss.needs:
            yield Problem(
                f"{where}.policy_loss", f"the loss {self.policy_loss.kind!r} with an advantage estimator",
                "it reads no advantages, so rewards would have no effect", "use algorithm.kind sft, or another loss",
            )  # fmt: skip
        elif "old_log_prob" not in loss.needs and run.max_staleness > 0:
            yield Problem(
                f"{where}.policy_loss",
                f"the loss {self.policy_loss.kind!r} with groups up to {run.max_staleness} version(s) old",
                "it has no ratio, so samples of older weights would bias its gradient",
                "use algorithm.kind rloo or grpo, or set schedule.max_staleness to 0",
            )  # fmt: skip
        elif "old_log_prob" not in loss.needs and self.epochs * self.mini_batches > 1:
            yield Problem(
                f"{where}.policy_loss",
                f"the loss {self.policy_loss.kind!r} with {self.epochs * self.mini_batches} updates per step",
                "it has no ratio, so the later ones would take samples of older weights for their own",
                "use algorithm.kind rloo or grpo, or leave epochs and mini_batches at 1",
            )  # fmt: skip
        penalty = self.kl.coef and self.kl.place == "reward"
        if self.old_log_prob == "recompute" and "old_log_prob" not in loss.needs and not penalty:
            yield Problem(
                f"{where}.old_log_prob", "old log-probabilities recomputed",
                f"the loss {self.policy_loss.kind!r} does not read them", "leave the key out",
            )  # fmt: skip

    def _estimator_problems(self, estimator: EstimatorLaw, run: RunConfig, where: str) -> Iterator[Problem]:
        if run.schedule.group_size < estimator.min_group:
            yield Problem(
                "schedule.group_size", f"{run.schedule.group_size} trajectory per task",
                f"the estimator {self.advantage.kind!r} compares the members of a group",
                f"use at least {estimator.min_group}, or an estimator without a group",
            )  # fmt: skip
        for name in _changed(self.critic) if "values" not in estimator.needs else ():
            yield Problem(
                f"{where}.critic.{name}", f"a critic's {name}",
                f"the estimator {self.advantage.kind!r} reads no values, so there is no critic",
                "leave the key out, or use advantage.kind gae",
            )  # fmt: skip


def policy_gradient(config: PolicyGradientConfig) -> GroupAlgorithm:
    """The algorithm a policy-gradient section describes; a critic is there where the estimator reads values."""
    loss, loss_law = chosen("policy_losses", config.policy_loss, PolicyLossLaw)
    estimator, estimator_law = chosen("advantages", config.advantage, EstimatorLaw)
    kl = config.kl
    in_loss = kl.coef if kl.place == "loss" else 0.0
    policy = PolicyObjective(loss, loss_law, config.aggregate, config.entropy_coef, in_loss, kl.estimator)
    critic = ValueObjective(config.critic.clip, config.critic.aggregate)
    return GroupAlgorithm(
        name=config.kind,
        objectives=(critic, policy) if "values" in estimator_law.needs else (policy,),
        estimator=Estimator(estimator, estimator_law, kl.estimator, _controller(kl)),
        recompute_old=config.old_log_prob == "recompute",
        kl_coef=in_loss,
        epochs=config.epochs,
        mini_batches=config.mini_batches,
    )


def supervised(config: SupervisedConfig) -> GroupAlgorithm:
    """The algorithm a supervised section describes."""
    loss, law = chosen("policy_losses", config.policy_loss, PolicyLossLaw)
    objective = SftObjective(loss, law, config.aggregate)
    return GroupAlgorithm(config.kind, (objective,), epochs=config.epochs, mini_batches=config.mini_batches)


def _controller(kl: KlConfig) -> KlController | None:
    if not kl.coef or kl.place == "loss":
        return None
    return get_kl_controller({"type": kl.controller, "kl_coef": kl.coef, "target_kl": kl.target, "horizon": kl.horizon})


def _changed(section: Config) -> list[str]:
    """The fields that differ from their default."""
    return [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]


def _kl_problems(kl: KlConfig, where: str) -> Iterator[Problem]:
    """Keys that have no effect."""
    in_reward = kl.coef > 0 and kl.place == "reward"
    for name in _changed(kl):
        if kl.coef == 0:
            yield Problem(f"{where}.{name}", f"a KL penalty's {name}", "its coefficient is 0", f"set {where}.coef")
        elif name == "controller" and not in_reward:
            yield Problem(
                f"{where}.controller", "an adaptive KL coefficient", "it works on a penalty in the reward",
                f"set {where}.place: reward",
            )  # fmt: skip
        elif name in ("target", "horizon") and kl.controller == "fixed":
            yield Problem(
                f"{where}.{name}", f"an adaptive controller's {name}", "the controller is fixed",
                f"set {where}.controller: adaptive",
            )  # fmt: skip
    if in_reward and kl.estimator.endswith("+"):
        yield Problem(
            f"{where}.estimator", f"the estimator {kl.estimator!r} in the reward",
            "the + changes the gradient, and a reward has none", f"use {kl.estimator[:-1]!r}",
        )  # fmt: skip


def _explored(run: RunConfig) -> bool:
    """Whether the policy itself plays what it is trained on."""
    return resolve("buffers", run.buffer.kind).explored


def _law(section: Plugin, room: str, kind: type[LawT], where: str) -> LawT | Problem:
    """The law of the function a section names, or what is wrong with it."""
    try:
        return chosen(room, section, kind)[1]
    except ConfigError as error:
        return Problem(where, error.asked, error.found, error.do)
