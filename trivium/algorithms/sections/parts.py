"""Parts that the config sections of algorithms share, and checks for keys without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny

from trivium.algorithms.correction import Correction
from trivium.algorithms.metadata import (
    AggregationMetadata,
    EntropyMetadata,
    FunctionMetadata,
    KlMetadata,
    MetadataT,
    PolicyLossMetadata,
    TokenWeightSection,
    metadata_of,
    option_problems,
)
from trivium.algorithms.objective import TEACHER_COLUMNS
from trivium.config import AlgorithmConfig, Config, Plugin, RunConfig, changeable, plugin, plugin_path
from trivium.foundation.errors import ConfigError, Problem, TriviumError
from trivium.foundation.registry import resolve
from trivium.types import capabilities_of

AdvantagePlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("advantages"))]
PolicyLossPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("policy_losses"))]
KlPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("kl_estimators"))]
FilterPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("filters"))]
ShapingPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("shapings"))]
EntropyPlugin = Annotated[SerializeAsAny[Plugin], BeforeValidator(plugin("entropies"))]


def _aggregation(name: str) -> str:
    """A name of the registry kind `aggregations`, or the path of a function decorated for it."""
    path = plugin_path(name)
    try:
        metadata_of(resolve("aggregations", path), AggregationMetadata, name)
    except TriviumError as error:
        raise ValueError(f"{error.asked}: {error.found}; {error.do}") from error
    return path


Aggregation = Annotated[str, AfterValidator(_aggregation)]


CorrectionPlugin = Annotated[SerializeAsAny[Correction], BeforeValidator(plugin("corrections", Correction, "custom"))]
TokenWeightPlugin = Annotated[SerializeAsAny[TokenWeightSection], BeforeValidator(plugin("gates"))]


class EntropyConfig(Config):
    """A bonus for variety."""

    coef: float = changeable(0.0)
    """Its weight."""
    term: EntropyPlugin = Field(default={"kind": "exact"})  # pyright: ignore[reportAssignmentType]
    """The entropy term: a name, or a function of yours."""
    target: float | None = Field(default=None, gt=0)
    """Steers the weight: the bonus acts in steps whose tokens were sampled with an entropy of at most this, in nats;
    `coef` is the first weight. Null for a constant weight."""
    step: float = Field(default=0.005, gt=0)
    """How much a train step changes a steered weight: up below the target, down above it."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """Keys that have no effect."""
        for name in changed(self) if self.coef == 0 and self.target is None else ():
            yield Problem(f"{where}.{name}", f"an entropy bonus's {name}", "its coefficient is 0", f"set {where}.coef")
        if self.coef and self.target is None and "step" in changed(self):
            yield Problem(
                f"{where}.step", "the step of a steered weight", "the weight is constant", f"set {where}.target"
            )
        yield from section_problems(self.term, "entropies", EntropyMetadata, f"{where}.term")


class KlConfig(Config):
    """A penalty for leaving the reference model: the policy as the stage began."""

    coef: float = changeable(0.0, ge=0)
    """Its weight; 0 needs no reference model."""
    place: Literal["loss", "reward"] = "loss"
    """`loss` adds it to the objective, `reward` subtracts it from each token's reward."""
    estimator: KlPlugin = Field(default={"kind": "low_var_kl"})  # pyright: ignore[reportAssignmentType]
    """How it is estimated from the sampled tokens: a name, or a function of yours. In a loss, `kl` and `k1` have a
    gradient of mean zero: use `k1+`."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers the coefficient of a penalty in the reward towards a target."""
    target: float = Field(default=0.1, gt=0)
    """The KL per token, in nats, that `adaptive` aims at."""
    horizon: int = Field(default=10000, ge=1)
    """Sequences over which `adaptive` may change the coefficient by a fifth."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        """Keys that have no effect, and estimators that do not fit the place."""
        in_reward = self.coef > 0 and self.place == "reward"
        for name in changed(self):
            if self.coef == 0:
                yield Problem(f"{where}.{name}", f"a KL penalty's {name}", "its coefficient is 0", f"set {where}.coef")
            elif name == "controller" and not in_reward:
                yield Problem(
                    f"{where}.controller",
                    "an adaptive KL coefficient",
                    "it works on a penalty in the reward",
                    f"set {where}.place: reward",
                )
            elif name in ("target", "horizon") and self.controller == "fixed":
                yield Problem(
                    f"{where}.{name}",
                    f"an adaptive controller's {name}",
                    "the controller is fixed",
                    f"set {where}.controller: adaptive",
                )
        yield from section_problems(self.estimator, "kl_estimators", KlMetadata, f"{where}.estimator")
        metadata = metadata_or_problem(self.estimator, "kl_estimators", KlMetadata, where)
        if in_reward and isinstance(metadata, KlMetadata) and metadata.needs > {"ref_log_prob"}:
            yield Problem(
                f"{where}.estimator",
                f"the estimator {self.estimator.kind!r} in the reward",
                f"it needs {', '.join(sorted(metadata.needs - {'ref_log_prob'}))}, "
                "which is not known when rewards are computed, before the update",
                f"set {where}.place: loss, or use low_var_kl",
            )
        if self.coef and not in_reward and isinstance(metadata, KlMetadata) and metadata.gradient == "zero":
            yield Problem(
                f"{where}.estimator",
                f"the estimator {self.estimator.kind!r} in the loss",
                "its gradient has mean zero: it adds noise only",
                f"use {self.estimator.kind}+, or set {where}.place: reward",
            )
        if in_reward and isinstance(metadata, KlMetadata) and metadata.straight_through:
            yield Problem(
                f"{where}.estimator",
                f"the estimator {self.estimator.kind!r} in the reward",
                "the + changes the gradient, and a reward has none",
                f"use {self.estimator.kind[:-1]!r}",
            )


class DistillTermConfig(Config):
    """A teacher beside the rewards."""

    coef: float = changeable(0.0, ge=0, le=1)
    """The share of the distillation in the loss; the policy loss has the rest."""
    loss: PolicyLossPlugin = Field(default={"kind": "distill_student_top_k"})  # pyright: ignore[reportAssignmentType]
    """The loss of a token that follows the teacher: a name, or a function of yours."""

    def own_problems(self, run: RunConfig, where: str, updates: int) -> Iterator[Problem]:
        """Keys that have no effect, and losses that follow no teacher or are wrong for the samples of this run, whose
        steps have so many `updates`."""
        if self.coef == 0 and self.loss.kind != type(self)().loss.kind:
            yield Problem(f"{where}.loss", "a loss that follows a teacher", "its share is 0", f"set {where}.coef")
        yield from section_problems(self.loss, "policy_losses", PolicyLossMetadata, f"{where}.loss")
        metadata = metadata_or_problem(self.loss, "policy_losses", PolicyLossMetadata, where)
        if isinstance(metadata, PolicyLossMetadata) and not metadata.needs & TEACHER_COLUMNS:
            yield Problem(
                f"{where}.loss",
                f"the loss {self.loss.kind!r} as distillation",
                "it reads no teacher",
                "use distill, distill_top_k or distill_student_top_k",
            )
        if self.coef and isinstance(metadata, PolicyLossMetadata):
            yield from candidate_problems(metadata, self.loss.kind, run)
            yield from sampled_problems(metadata, self.loss.kind, updates, run, f"{where}.loss")


def sampled_problems(
    loss: PolicyLossMetadata, kind: str, updates: int, run: RunConfig, where: str
) -> Iterator[Problem]:
    """Problems of a loss that follows a teacher at the sampled token only: it is correct only for samples of the
    current weights."""
    if "teacher_log_prob" not in loss.needs:
        return
    instead = f"{where}.kind distill_top_k"
    if is_mixed(run) or not is_explored(run):
        where_from = f"strategy {run.buffer.strategy.kind!r}" if is_explored(run) else f"kind {run.buffer.kind!r}"
        yield Problem(
            where,
            f"the loss {kind!r} on buffer.{where_from}",
            "it assumes that the policy sampled each token, and an expert wrote these",
            f"use {instead}, or buffer.kind memory without such a strategy",
        )
    else:
        yield from ratio_problems(loss, kind, updates, run, where, instead)


def candidate_problems(loss: PolicyLossMetadata, kind: str, run: RunConfig) -> Iterator[Problem]:
    """Problems of a loss over candidates with a sampling that leaves tokens out."""
    for name in run.engine.sampling.changes_distribution() if loss.needs & {"teacher_top", "student_top"} else ():
        yield Problem(
            f"engine.sampling.{name}",
            f"{name} with the loss {kind!r}",
            "tokens that sampling left out have no log-probability, and they may include tokens of the teacher",
            "leave it out, or use policy_loss.kind distill",
        )


def mini_batch_problems(mini_batches: int, run: RunConfig, where: str) -> Iterator[Problem]:
    """Problems of more mini-batches than a step has groups."""
    if mini_batches > run.schedule.groups_per_step:
        yield Problem(
            where,
            f"{mini_batches} mini-batches",
            f"a step has {run.schedule.groups_per_step} group(s) (schedule.groups_per_step)",
            "use fewer mini-batches, or more groups",
        )


class CriticConfig(Config):
    """The critic's objective; read where the advantage estimator needs values."""

    clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move from the old one before its error stops improving; null for any distance."""
    aggregate: Aggregation = "token-mean"
    """How the losses of tokens are averaged."""
    epochs: int | None = Field(default=None, ge=1)
    """Its passes over a step's data; unset: `algorithm.epochs`."""
    mini_batches: int | None = Field(default=None, ge=1)
    """Its optimizer steps of a pass; unset: `algorithm.mini_batches`."""
    trunk: Literal["own", "shared"] = "own"
    """Whether the critic is a model of its own, with its own optimizer steps, or a value head on the policy's hidden
    states: one forward pass, and one step by `train.optimizer`."""
    value_coef: float = changeable(0.1, gt=0)
    """Weight of the critic's loss beside the policy's, where they share a trunk."""

    def own_problems(self, run: RunConfig, warmup: int, where: str) -> Iterator[Problem]:
        if self.mini_batches is not None:
            yield from mini_batch_problems(self.mini_batches, run, f"{where}.mini_batches")
        for name in ("epochs", "mini_batches") if self.trunk == "shared" else ():
            if getattr(self, name) is not None:
                yield Problem(
                    f"{where}.{name}",
                    f"{name} of a critic on the policy's trunk",
                    "the two take their optimizer steps together",
                    f"leave the key out, or set {where}.trunk: own",
                )
        if self.trunk == "shared" and warmup:
            yield Problem(
                f"{where}.trunk",
                f"a critic on the policy's trunk with {warmup} step(s) that update the critic alone",
                "a step of the critic changes the policy",
                "leave algorithm.critic_warmup out, or set it to own",
            )
        if self.trunk == "own" and self.value_coef != type(self).model_fields["value_coef"].default:
            yield Problem(
                f"{where}.value_coef",
                f"a weight of {self.value_coef:g} for the critic's loss",
                "a critic of its own has its own optimizer steps",
                "set algorithm.critic.trunk: shared, or train.critic_optimizer.lr",
            )


class PassesConfig(AlgorithmConfig):
    """What every algorithm has: how often a step's data are used."""

    epochs: int = Field(default=1, ge=1)
    """Passes over a step's data."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""

    @property
    def updates(self) -> int:
        """Optimizer steps per train step."""
        return self.epochs * self.mini_batches

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from mini_batch_problems(self.mini_batches, run, f"{where}.mini_batches")


class UpdateConfig(PassesConfig):
    """What algorithms with a loss per token have."""

    policy_loss: PolicyLossPlugin
    """The loss of one token: `{kind: ppo, ...}`, or a function of yours."""
    aggregate: Aggregation = "token-mean"
    """How the losses of tokens are averaged."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        yield from section_problems(self.policy_loss, "policy_losses", PolicyLossMetadata, f"{where}.policy_loss")


def section_problems(
    section: Plugin, kind: str, metadata_type: type[FunctionMetadata], where: str
) -> Iterator[Problem]:
    """Problems of a function of the wrong type for its key, and of options without effect beside its other options."""
    metadata = metadata_or_problem(section, kind, metadata_type, where)
    if isinstance(metadata, Problem):
        yield metadata
        return
    for problem in option_problems(resolve(kind, section.kind), section):
        requested = f"{section.kind!r} {problem.requested}"
        yield Problem(f"{where}.{problem.option}", requested, problem.reason, problem.remedy)


def changed(section: Config) -> list[str]:
    """The fields that differ from their default."""
    defaults = type(section)()
    return [name for name in type(section).model_fields if getattr(section, name) != getattr(defaults, name)]


def ratio_problems(
    loss: PolicyLossMetadata,
    kind: str,
    updates: int,
    run: RunConfig,
    where: str,
    instead: str,
    correction: Correction | None = None,
) -> Iterator[Problem]:
    """Problems of a loss without ratio and weights, which is correct only for samples of the current weights."""
    if "old_log_prob" in loss.needs or loss.off_policy:
        return
    weights = correction.against if correction is not None and correction.weights != "none" else "none"
    if run.max_age > 0 and weights == "none":
        yield Problem(
            where,
            f"the loss {kind!r} with groups up to {run.max_age} version(s) old",
            "it has no ratio, so samples of older weights would bias its gradient",
            f"use {instead}, or set schedule.max_staleness to 0, and replay nothing",
        )
    elif updates > 1 and weights != "current":
        yield Problem(
            where,
            f"the loss {kind!r} with {updates} updates per step",
            "it has no ratio, so later updates would treat samples of older weights as their own",
            f"use {instead}, or leave epochs and mini_batches at 1",
        )


def is_explored(run: RunConfig) -> bool:
    """Whether the policy generates the training data, with rewards."""
    return capabilities_of(resolve("buffers", run.buffer.kind)).explored


def is_mixed(run: RunConfig) -> bool:
    """Whether a step trains on expert completions beside the policy's own."""
    return capabilities_of(resolve("sample_strategies", run.buffer.strategy.kind)).mixed


def metadata_or_problem(section: Plugin, kind: str, metadata_type: type[MetadataT], where: str) -> MetadataT | Problem:
    """The metadata of the function that a section names, or its problem; `kind` as in the registry."""
    try:
        return metadata_of(resolve(kind, section.kind), metadata_type, section.kind)
    except ConfigError as error:
        return Problem(where, error.asked, error.found, error.do)
