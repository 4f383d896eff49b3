"""What a user can say about an algorithm, and the algorithm that follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny

from trivium.algorithms.advantages.finishing import Normalise
from trivium.algorithms.algorithm import Estimator, GroupAlgorithm
from trivium.algorithms.correction import Correction
from trivium.algorithms.filters import Filter
from trivium.algorithms.kl import KlController, get_kl_controller
from trivium.algorithms.objective import Gate, PolicyObjective, Term, ValueObjective
from trivium.algorithms.registered import (
    AggregationLaw,
    EntropyLaw,
    EstimatorLaw,
    FilterLaw,
    GateLaw,
    GateSection,
    KlLaw,
    Law,
    LawT,
    PolicyLossLaw,
    ShapingLaw,
    bound,
    chosen,
    law_of,
)
from trivium.algorithms.shaping import Moments, Shaping
from trivium.algorithms.teacher import TeacherConfig, teacher_problems
from trivium.config import AlgorithmConfig, Config, Plugin, RunConfig, plugin, plugin_path
from trivium.errors import ConfigError, Problem, TriviumError
from trivium.registry import resolve

AdvantagePlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("advantages"))]
PolicyLossPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("policy_losses"))]
KlPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("kl_estimators"))]
FilterPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("filters"))]
ShapingPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("shapings"))]
EntropyPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("entropies"))]


def _aggregation(name: str) -> str:
    """A name of the room `aggregations`, or the path of a function decorated for it."""
    path = plugin_path(name)
    try:
        law_of(resolve("aggregations", path), AggregationLaw, name)
    except TriviumError as error:
        raise ValueError(f"{error.asked}: {error.found}; {error.do}") from error
    return path


Aggregation = Annotated[str, AfterValidator(_aggregation)]


CorrectionPlugin = Annotated[SerializeAsAny[Correction], BeforeValidator(plugin("corrections", Correction, "custom"))]
GatePlugin = Annotated[SerializeAsAny[GateSection], BeforeValidator(plugin("gates"))]


class EntropyConfig(Config):
    """A bonus for variety."""

    coef: float = 0.0
    """Its weight."""
    term: EntropyPlugin = Field(default={"kind": "exact"})  # pyright: ignore[reportAssignmentType]
    """Whose entropy: a name, or a function of yours."""


class KlConfig(Config):
    """A penalty for leaving the reference model: the policy as the stage began."""

    coef: float = Field(default=0.0, ge=0)
    """Its weight; 0 needs no reference model."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds it to the objective, `reward` takes it off each token's reward."""
    estimator: KlPlugin = Field(default={"kind": "low_var_kl"})  # pyright: ignore[reportAssignmentType]
    """How it is estimated from the sampled tokens: a name, or a function of yours. In a loss, `kl` and `k1` have a
    gradient of mean zero: use `k1+`."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers the coefficient of a penalty in the reward towards a target."""
    target: float = Field(default=0.1, gt=0)
    """The KL per token, in nats, that `adaptive` aims at."""
    horizon: int = Field(default=10000, ge=1)
    """Sequences over which `adaptive` may change the coefficient by a fifth."""


class CriticConfig(Config):
    """The critic's objective; read where the advantage estimator needs values."""

    clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move from the old one before its error stops improving; null for any distance."""
    aggregate: Aggregation = "token-mean"
    """How token losses become one number."""


class PassesConfig(AlgorithmConfig):
    """What every algorithm has: how often a step's data are used."""

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


class UpdateConfig(PassesConfig):
    """What algorithms with a loss per token have."""

    policy_loss: PolicyLossPlugin
    """The loss of one token: `{kind: ppo, ...}`, or a function of yours."""
    aggregate: Aggregation = "token-mean"
    """How token losses become one number."""


class SupervisedConfig(UpdateConfig):
    """Imitation: a policy loss that reads nothing but the policy's own log-probabilities."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if not is_explored(run) and run.schedule.group_size != 1:
            yield Problem(
                "schedule.group_size", f"{run.schedule.group_size} trajectories per task",
                f"imitation learns from one reply per task, the expert's in buffer.kind {run.buffer.kind!r}",
                "set it to 1",
            )  # fmt: skip
        loss = law_or_problem(self.policy_loss, "policy_losses", PolicyLossLaw, f"{where}.policy_loss")
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
    normalise_advantages: Normalise = "none"
    """What is taken off all advantages of a step: `mean` their mean over its tokens, `std` also their scale."""
    clip_advantages: float | None = Field(default=None, gt=0)
    """The largest advantage of either sign, after that; null for any."""
    entropy: EntropyConfig = EntropyConfig()
    gates: tuple[GatePlugin, ...] = ()
    """What else decides how much of a token's policy loss counts: names, or functions of yours."""
    kl: KlConfig = KlConfig()
    critic: CriticConfig = CriticConfig()
    old_log_prob: Literal["auto", "rollout", "recompute"] = "auto"
    """Where the ratio's denominator comes from: the engine that sampled the token, or a pass of the trainer before the
    step. The first costs nothing and stays exact for stale groups; `auto` takes it unless the correction compares the
    two."""
    correction: CorrectionPlugin = Field(default={"kind": "auto"})  # pyright: ignore[reportAssignmentType]
    """What is done about tokens that the trainer's weights did not sample: a name, or what to do (`{weights: token}`).
    `auto` does nothing for fresh groups and takes truncated token weights where groups may be stale."""
    filters: tuple[FilterPlugin, ...] = ()
    """Which groups are not worth a train step, asked in this order: names, or functions of yours. They see the rewards
    as they were given."""
    refill: int = Field(default=0, ge=0)
    """How many times the refused groups of a step are replaced by freshly played ones before it goes on with fewer."""
    shaping: tuple[ShapingPlugin, ...] = ()
    """What happens to a trajectory's reward before any KL penalty and the estimator, in this order: names, or functions
    of yours."""
    mask_truncated: bool = False
    """Whether replies that a length limit cut are left out of the loss. Their group is judged with them all the
    same."""
    teacher: TeacherConfig | None = None
    """Whom the estimator or the loss asks, where one of them asks a teacher."""

    @property
    def reads_rewards(self) -> bool:
        law = law_or_problem(self.advantage, "advantages", EstimatorLaw, "advantage")
        return isinstance(law, Problem) or law.judged

    def settled(self, run: RunConfig) -> PolicyGradientConfig:
        if self.correction.kind != "auto" or run.max_staleness == 0:
            return self
        law = law_or_problem(self.policy_loss, "policy_losses", PolicyLossLaw, "policy_loss")
        has_ratio = isinstance(law, Problem) or "old_log_prob" in law.needs
        if has_ratio and self.old_log_prob == "rollout":
            return self
        name = "decoupled_token_is" if has_ratio else "bypass_token_is"
        correction = resolve("corrections", name).configure({"kind": name})
        return self.model_copy(update={"correction": correction})

    def describe(self, run: RunConfig) -> dict[str, str]:
        correction = self.settled(run).correction
        recomputed = ", old log-probabilities recomputed" if correction.decoupled else ""
        if self.correction.kind != "auto":
            why = f"algorithm.correction: {self.correction.kind}"
        elif run.max_staleness == 0:
            why = "default: groups are fresh"
        else:
            why = f"default: groups may be {run.max_staleness} version(s) old"
            why += "" if correction.active else ", and old_log_prob: rollout takes the ratio against the engine"
        return {"correction": f"{correction.words}{recomputed} ({why})"}

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if not is_explored(run):
            yield Problem(
                f"{where}.kind", f"the algorithm {self.kind!r} on buffer.kind {run.buffer.kind!r}",
                "the policy did not sample these replies and nothing judged them: there is no reward to learn from",
                "use algorithm.kind sft, or buffer.kind memory",
            )  # fmt: skip
        yield from _kl_problems(self.kl, f"{where}.kl")
        if self.entropy.coef == 0:
            for name in _changed(self.entropy):
                yield Problem(
                    f"{where}.entropy.{name}", f"an entropy bonus's {name}", "its coefficient is 0",
                    f"set {where}.entropy.coef",
                )  # fmt: skip
        yield from _law_problems(
            (self.kl.estimator, "kl_estimators", KlLaw, f"{where}.kl.estimator"),
            (self.entropy.term, "entropies", EntropyLaw, f"{where}.entropy.term"),
            *((gate, "gates", GateLaw, f"{where}.gates[{i}]") for i, gate in enumerate(self.gates)),
            *((step, "shapings", ShapingLaw, f"{where}.shaping[{i}]") for i, step in enumerate(self.shaping)),
        )
        yield from self._filter_problems(run, where)
        yield from self.correction.problems(run, f"{where}.correction")
        loss = law_or_problem(self.policy_loss, "policy_losses", PolicyLossLaw, f"{where}.policy_loss")
        if isinstance(loss, Problem):
            yield loss
        else:
            yield from self._loss_problems(loss, run, where)
        estimator = law_or_problem(self.advantage, "advantages", EstimatorLaw, f"{where}.advantage")
        if isinstance(estimator, Problem):
            yield estimator
        else:
            yield from self._estimator_problems(estimator, run, where)
        if isinstance(loss, PolicyLossLaw) and isinstance(estimator, EstimatorLaw):
            yield from teacher_problems(self.teacher, loss.needs | estimator.needs, f"{where}.teacher")

    def _filter_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        for number, rule in enumerate(self.filters):
            law = law_or_problem(rule, "filters", FilterLaw, f"{where}.filters[{number}]")
            if isinstance(law, Problem):
                yield law
            elif run.schedule.group_size < law.min_group:
                yield Problem(
                    f"{where}.filters[{number}]", f"the filter {rule.kind!r}",
                    f"it refuses no group of {run.schedule.group_size} (schedule.group_size)",
                    f"use groups of at least {law.min_group}, or leave the filter out",
                )  # fmt: skip
        if self.refill and run.schedule.deterministic and run.max_staleness > 0:
            yield Problem(
                f"{where}.refill", "refused groups replaced in a deterministic run that is ahead of its trainer",
                "which version plays a slot would depend on what is refused later",
                "set refill, schedule.max_staleness or schedule.deterministic back",
            )  # fmt: skip

    def _loss_problems(self, loss: PolicyLossLaw, run: RunConfig, where: str) -> Iterator[Problem]:
        if "advantages" not in loss.needs:
            yield Problem(
                f"{where}.policy_loss", f"the loss {self.policy_loss.kind!r} with an advantage estimator",
                "it reads no advantages, so rewards would have no effect", "use algorithm.kind sft, or another loss",
            )  # fmt: skip
        else:
            instead = f"algorithm.kind rloo or grpo, {where}.correction bypass_token_is"
            yield from ratio_problems(self, loss, run, where, instead, self.settled(run).correction)
        yield from self._correction_problems(loss, self.settled(run).correction, where)

    def _correction_problems(self, loss: PolicyLossLaw, correction: Correction, where: str) -> Iterator[Problem]:
        penalty = self.kl.coef > 0 and self.kl.place == "reward"
        if self.old_log_prob != "auto" and not ("old_log_prob" in loss.needs or penalty or correction.decoupled):
            yield Problem(
                f"{where}.old_log_prob", f"old log-probabilities by {self.old_log_prob}",
                f"the loss {self.policy_loss.kind!r} does not read them", "leave the key out",
            )  # fmt: skip
        if correction.decoupled and self.old_log_prob == "rollout":
            yield Problem(
                f"{where}.old_log_prob", "the engine's log-probabilities as the old ones",
                f"the correction {correction.kind!r} compares the two, and would find them equal",
                f"leave the key out, or set {where}.correction.against: current",
            )  # fmt: skip
        if correction.weights != "none" and correction.against == "current" and "old_log_prob" in loss.needs:
            yield Problem(
                f"{where}.correction", "importance weights of the current policy",
                f"the ratio of the loss {self.policy_loss.kind!r} is one already: it would count twice",
                f"set {where}.correction.against: old, or leave the weights out",
            )  # fmt: skip

    def _estimator_problems(self, estimator: EstimatorLaw, run: RunConfig, where: str) -> Iterator[Problem]:
        if run.schedule.group_size < estimator.min_group:
            yield Problem(
                "schedule.group_size", f"{run.schedule.group_size} trajectory per task",
                f"the estimator {self.advantage.kind!r} compares the members of a group",
                f"use at least {estimator.min_group}, or an estimator without a group",
            )  # fmt: skip
        if self.shaping and not estimator.reads_total:
            yield Problem(
                f"{where}.shaping", "shaped rewards", f"the estimator {self.advantage.kind!r} reads no total reward",
                "leave the key out, or use another estimator",
            )  # fmt: skip
        if self.kl.coef and self.kl.place == "reward" and not estimator.reads_total:
            yield Problem(
                f"{where}.kl.place", "a KL penalty in the reward",
                f"the estimator {self.advantage.kind!r} reads no total reward", f"set {where}.kl.place: loss",
            )  # fmt: skip
        if self.normalise_advantages != "none" and estimator.whitens and getattr(self.advantage, "whiten", True):
            yield Problem(
                f"{where}.normalise_advantages", "normalised advantages",
                f"the estimator {self.advantage.kind!r} whitens them already", "leave the key out",
            )  # fmt: skip
        for name in _changed(self.critic) if "values" not in estimator.needs else ():
            yield Problem(
                f"{where}.critic.{name}", f"a critic's {name}",
                f"the estimator {self.advantage.kind!r} reads no values, so there is no critic",
                "leave the key out, or use advantage.kind gae",
            )  # fmt: skip


def policy_gradient(config: PolicyGradientConfig, seed: int) -> GroupAlgorithm:
    """The algorithm a policy-gradient section describes; a critic is there where the estimator reads values.

    A correction that follows from the run (`auto`) must have been settled; else there is none.
    """
    estimator, estimator_law = chosen("advantages", config.advantage, EstimatorLaw)
    kl = config.kl
    correction = config.correction
    policy = PolicyObjective(
        **_loss_of(config),
        weighted=correction.decoupled and correction.weights != "none",
        correction=correction if correction.active and not correction.decoupled else None,
        entropy=_term(config.entropy.coef, "entropies", config.entropy.term, EntropyLaw),
        kl=_term(kl.coef if kl.place == "loss" else 0.0, "kl_estimators", kl.estimator, KlLaw),
        gates=tuple(Gate(*chosen("gates", gate, GateLaw), narrow=gate.narrow) for gate in config.gates),
        seed=seed,
    )
    critic = ValueObjective(config.critic.clip, config.critic.aggregate)
    return GroupAlgorithm(
        name=config.kind,
        objectives=(critic, policy) if "values" in estimator_law.needs else (policy,),
        estimator=Estimator(
            estimator,
            estimator_law,
            *chosen("kl_estimators", kl.estimator, KlLaw),
            _controller(kl),
            normalise=config.normalise_advantages,
            clip=config.clip_advantages,
            seed=seed,
        ),
        recompute_old=config.old_log_prob == "recompute" or correction.decoupled,
        correction=correction if correction.decoupled else None,
        filters=tuple(Filter(rule.short_name, *chosen("filters", rule, FilterLaw)) for rule in config.filters),
        refill=config.refill,
        shapings=tuple(_shaping(section) for section in config.shaping),
        mask_truncated=config.mask_truncated,
        kl_coef=policy.kl.coef if policy.kl else 0.0,
        epochs=config.epochs,
        mini_batches=config.mini_batches,
        teacher=config.teacher.teacher() if config.teacher is not None else None,
    )


def supervised(config: UpdateConfig, seed: int) -> GroupAlgorithm:
    """The algorithm of a section that has a policy loss and judges nothing."""
    objective = PolicyObjective(**_loss_of(config), seed=seed)
    return GroupAlgorithm(config.kind, (objective,), epochs=config.epochs, mini_batches=config.mini_batches)


def _loss_of(config: UpdateConfig) -> dict[str, Any]:
    """The policy loss of a section with its law, selection and aggregation."""
    loss, law = chosen("policy_losses", config.policy_loss, PolicyLossLaw)
    select = bound(law.select, config.policy_loss) if law.select is not None else None
    return {"policy_loss": loss, "law": law, "aggregate": config.aggregate, "select_tokens": select}


def _term(coef: float, room: str, section: Plugin, kind: type[EntropyLaw] | type[KlLaw]) -> Term | None:
    return Term(coef, *chosen(room, section, kind)) if coef else None


def _shaping(section: Plugin) -> Shaping:
    function, law = chosen("shapings", section, ShapingLaw)
    return Shaping(function, law, Moments() if "moments" in law.needs else None)


def _controller(kl: KlConfig) -> KlController | None:
    if not kl.coef or kl.place == "loss":
        return None
    return get_kl_controller({"type": kl.controller, "kl_coef": kl.coef, "target_kl": kl.target, "horizon": kl.horizon})


def _changed(section: Config) -> list[str]:
    """The fields that differ from their default."""
    defaults = type(section)()
    return [name for name in type(section).model_fields if getattr(section, name) != getattr(defaults, name)]


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
    law = law_or_problem(kl.estimator, "kl_estimators", KlLaw, f"{where}.estimator")
    if in_reward and isinstance(law, KlLaw) and law.needs > {"ref_log_prob"}:
        yield Problem(
            f"{where}.estimator", f"the estimator {kl.estimator.kind!r} in the reward",
            f"it needs {', '.join(sorted(law.needs - {'ref_log_prob'}))}, and rewards are judged before the update",
            f"set {where}.place: loss, or use low_var_kl",
        )  # fmt: skip
    if in_reward and kl.estimator.kind.endswith("+"):
        yield Problem(
            f"{where}.estimator", f"the estimator {kl.estimator.kind!r} in the reward",
            "the + changes the gradient, and a reward has none", f"use {kl.estimator.kind[:-1]!r}",
        )  # fmt: skip


def ratio_problems(
    config: UpdateConfig,
    loss: PolicyLossLaw,
    run: RunConfig,
    where: str,
    instead: str,
    correction: Correction | None = None,
) -> Iterator[Problem]:
    """A loss over samples without ratio and weights is right for samples of the current weights alone."""
    updates = config.epochs * config.mini_batches
    if "old_log_prob" in loss.needs:
        return
    weights = correction.against if correction is not None and correction.weights != "none" else "none"
    if run.max_staleness > 0 and weights == "none":
        yield Problem(
            f"{where}.policy_loss",
            f"the loss {config.policy_loss.kind!r} with groups up to {run.max_staleness} version(s) old",
            "it has no ratio, so samples of older weights would bias its gradient",
            f"use {instead}, or set schedule.max_staleness to 0",
        )  # fmt: skip
    elif updates > 1 and weights != "current":
        yield Problem(
            f"{where}.policy_loss", f"the loss {config.policy_loss.kind!r} with {updates} updates per step",
            "it has no ratio, so the later ones would take samples of older weights for their own",
            f"use {instead}, or leave epochs and mini_batches at 1",
        )  # fmt: skip


def _law_problems(*sections: tuple[Plugin, str, type[Law], str]) -> Iterator[Problem]:
    """The functions that were not made for the place where they are named."""
    for section, room, kind, where in sections:
        law = law_or_problem(section, room, kind, where)
        if isinstance(law, Problem):
            yield law


def is_explored(run: RunConfig) -> bool:
    """Whether the policy itself plays what it is trained on."""
    return resolve("buffers", run.buffer.kind).explored


def law_or_problem(section: Plugin, room: str, kind: type[LawT], where: str) -> LawT | Problem:
    """The law of the function a section names, or what is wrong with it."""
    try:
        return chosen(room, section, kind)[1]
    except ConfigError as error:
        return Problem(where, error.asked, error.found, error.do)
