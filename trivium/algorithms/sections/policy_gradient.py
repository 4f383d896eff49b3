"""The config section of an algorithm, and the algorithm built from it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Literal, cast

from pydantic import Field

from trivium.algorithms.algorithm import AnyObjective, Estimator, GroupAlgorithm
from trivium.algorithms.correction import Correction
from trivium.algorithms.entropy import EntropyController
from trivium.algorithms.estimators.finishing import Normalise
from trivium.algorithms.filters import Filter
from trivium.algorithms.kl import KlController, get_kl_controller
from trivium.algorithms.losses.value_loss import SharedObjective, ValueObjective
from trivium.algorithms.metadata import (
    EntropyMetadata,
    EstimatorMetadata,
    FilterMetadata,
    FunctionMetadata,
    KlMetadata,
    PolicyLossMetadata,
    ShapingMetadata,
    TokenWeightMetadata,
    When,
    bind_options,
    resolve_function,
)
from trivium.algorithms.objective import PolicyObjective, Term, TermMetadataT, TokenWeight
from trivium.algorithms.resampling import Resampling
from trivium.algorithms.sections.parts import (
    AdvantagePlugin,
    CorrectionPlugin,
    CriticConfig,
    DistillTermConfig,
    EntropyConfig,
    FilterPlugin,
    KlConfig,
    ShapingPlugin,
    TokenWeightPlugin,
    UpdateConfig,
    changed,
    is_explored,
    is_mixed,
    metadata_or_problem,
    ratio_problems,
    section_problems,
)
from trivium.algorithms.sections.teacher import TeacherConfig, teacher_problems
from trivium.algorithms.shaping import Moments, Shaping
from trivium.config import Plugin, RunConfig, changeable
from trivium.config.checks import WITH_FIXED_VERSIONS
from trivium.foundation.errors import Problem
from trivium.foundation.registry import describe, resolve
from trivium.types import capabilities_of


class SupervisedConfig(UpdateConfig):
    """Imitation: a policy loss that reads only the policy's own log-probabilities."""

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if is_explored(run):
            yield Problem(
                f"{where}.kind",
                f"the algorithm {self.kind!r} on buffer.kind {run.buffer.kind!r}",
                "it would imitate all samples of the policy, good or bad",
                "use buffer.kind files, or algorithm.kind raft to imitate rewarded completions",
            )
        elif run.schedule.group_size != 1:
            yield Problem(
                "schedule.group_size",
                f"{run.schedule.group_size} trajectories per task",
                f"imitation learns from one completion per task, the expert's in buffer.kind {run.buffer.kind!r}",
                "set it to 1",
            )
        loss = metadata_or_problem(self.policy_loss, "policy_losses", PolicyLossMetadata, where)
        if isinstance(loss, PolicyLossMetadata) and loss.needs:
            yield Problem(
                f"{where}.policy_loss",
                f"the loss {self.policy_loss.kind!r} on expert data",
                f"it needs {', '.join(sorted(loss.needs))}, and no advantages are estimated here",
                "use kind: sft, or an algorithm with an advantage estimator",
            )


class PolicyGradientConfig(UpdateConfig):
    """Reinforcement: rewards become advantages, advantages weigh a policy loss."""

    advantage: AdvantagePlugin
    """The advantage estimator: `{kind: grpo, ...}`, or a function of yours."""
    normalise_advantages: Normalise = "none"
    """`mean` subtracts from all advantages of a step their mean over its tokens; `std` also divides by their standard
    deviation."""
    clip_advantages: float | None = Field(default=None, gt=0)
    """Largest absolute value of an advantage, after normalisation; null for no limit."""
    entropy: EntropyConfig = EntropyConfig()
    gates: tuple[TokenWeightPlugin, ...] = ()
    """Factors of each token's policy loss: names, or functions of yours."""
    kl: KlConfig = KlConfig()
    observation_coef: float = changeable(0.0, ge=0)
    """Weight of the cross-entropy of what the environment answered between the policy's turns; 0 reads these tokens as
    context only."""
    critic: CriticConfig = CriticConfig()
    critic_warmup: int = Field(default=0, ge=0)
    """Train steps at the start of the stage that update the critic alone: the policy stays as it is, and its version
    counts on."""
    old_log_prob: Literal["auto", "rollout", "recompute"] = "auto"
    """Where the ratio's denominator comes from: the engine that sampled the token, or a pass of the trainer before the
    step. The first costs nothing and stays exact for stale groups; `auto` takes it unless the correction compares the
    two."""
    correction: CorrectionPlugin = Field(default={"kind": "auto"})  # pyright: ignore[reportAssignmentType]
    """The off-policy correction, for tokens that the trainer's current weights did not sample: a name, or its keys
    (`{weights: token}`). `auto` corrects nothing if groups are fresh and the engine computes the trainer's
    log-probabilities; it uses truncated token weights if groups may be stale or the engine differs (vLLM)."""
    filters: tuple[FilterPlugin, ...] = ()
    """Rules that refuse groups, applied in this order: names, or functions of yours. They see the rewards before
    shaping."""
    refill: int = Field(default=0, ge=0)
    """How often the refused groups of a step are replaced by newly generated ones before it continues with fewer."""
    shaping: tuple[ShapingPlugin, ...] = ()
    """Functions that change a trajectory's reward, in this order, before any KL penalty and the estimator: names, or
    functions of yours."""
    mask_truncated: bool = False
    """Whether truncated completions are left out of the loss and of the counts it is divided by. Their rewards still
    count in their group."""
    resample: Resampling | None = None
    """Draws the trajectories of a step anew, by their rewards, once their advantages are known; null trains on each
    once."""
    teacher: TeacherConfig | None = None
    """The teacher, if the estimator or a loss needs one."""
    distill: DistillTermConfig = DistillTermConfig()

    @property
    def reads_rewards(self) -> bool:
        metadata = metadata_or_problem(self.advantage, "advantages", EstimatorMetadata, "advantage")
        taught = self.teacher is not None and self.teacher.reads_rewards
        return taught or isinstance(metadata, Problem) or metadata.judged

    @property
    def has_critic(self) -> bool:
        metadata = metadata_or_problem(self.advantage, "advantages", EstimatorMetadata, "advantage")
        return isinstance(metadata, EstimatorMetadata) and "values" in metadata.needs

    @property
    def shares_trunk(self) -> bool:
        """Whether there is a critic on the policy's trunk."""
        return self.has_critic and self.critic.trunk == "shared"

    def for_run(self, run: RunConfig) -> PolicyGradientConfig:
        if self.correction.kind != "auto" or (run.max_age == 0 and _samples_exactly(run)):
            return self
        metadata = metadata_or_problem(self.policy_loss, "policy_losses", PolicyLossMetadata, "policy_loss")
        has_ratio = isinstance(metadata, Problem) or "old_log_prob" in metadata.needs
        if (has_ratio and self.old_log_prob == "rollout") or self._made_for_stale_groups:
            return self
        name = "decoupled_token_is" if has_ratio else "bypass_token_is"
        correction = resolve("corrections", name).configure({"kind": name})
        return self.model_copy(update={"correction": correction})

    @property
    def _made_for_stale_groups(self) -> list[str]:
        """The loss and the gates with a ratio against the policy that sampled: a correction would disable them."""
        sections = [(self.policy_loss, "policy_losses"), *((gate, "gates") for gate in self.gates)]
        all_metadata = [
            (section, metadata_or_problem(section, kind, FunctionMetadata, "")) for section, kind in sections
        ]
        return [
            repr(section.kind)
            for section, metadata in all_metadata
            if isinstance(metadata, PolicyLossMetadata | TokenWeightMetadata) and metadata.off_policy
        ]

    def describe(self, run: RunConfig) -> dict[str, str]:
        correction = self.for_run(run).correction
        recomputed = ", old log-probabilities recomputed" if correction.decoupled else ""
        if self.correction.kind != "auto":
            why = f"algorithm.correction: {self.correction.kind}"
        elif run.max_age == 0 and _samples_exactly(run):
            why = "default: groups are fresh"
        else:
            inexact = f"engine.kind {run.engine.kind} computes log-probabilities differently"
            why = f"default: {f'groups may be {run.max_age} version(s) old' if run.max_age else inexact}"
            by_ratio = ", and old_log_prob: rollout takes the ratio against the engine"
            made_for = f", and {' and '.join(self._made_for_stale_groups)} are designed for them"
            why += "" if correction.active else by_ratio if self.old_log_prob == "rollout" else made_for
        entries = {"correction": f"{correction.words}{recomputed} ({why})"}
        for step in cast("tuple[Any, ...]", self.shaping):
            if step.kind == "overlong_penalty":
                longest = f"{run.engine.sampling.max_new_tokens} tokens in the longest turn"
                entries["lengths"] = longest if step.limit is None else f"{step.limit} tokens in all turns"
        return {**super().describe(run), **entries}

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        yield from super().problems(run, where)
        if not is_explored(run):
            yield Problem(
                f"{where}.kind",
                f"the algorithm {self.kind!r} on buffer.kind {run.buffer.kind!r}",
                "the policy did not sample these completions and they have no rewards",
                "use algorithm.kind sft, or buffer.kind memory",
            )
        yield from self.kl.problems(run, f"{where}.kl")
        yield from self.critic.own_problems(run, self.critic_warmup, f"{where}.critic")
        yield from self.entropy.problems(run, f"{where}.entropy")
        yield from self.correction.problems(run, f"{where}.correction")
        yield from self.distill.own_problems(run, f"{where}.distill", self.updates)
        for number, gate in enumerate(self.gates):
            yield from section_problems(gate, "gates", TokenWeightMetadata, f"{where}.gates[{number}]")
        for number, step in enumerate(self.shaping):
            yield from section_problems(step, "shapings", ShapingMetadata, f"{where}.shaping[{number}]")
        for number, rule in enumerate(self.filters):
            yield from section_problems(rule, "filters", FilterMetadata, f"{where}.filters[{number}]")
        yield from section_problems(self.advantage, "advantages", EstimatorMetadata, f"{where}.advantage")
        yield from self._filter_problems(run, where)
        yield from self._resample_problems(run, f"{where}.resample")
        loss, estimator = (
            metadata_or_problem(self.policy_loss, "policy_losses", PolicyLossMetadata, where),
            metadata_or_problem(self.advantage, "advantages", EstimatorMetadata, where),
        )
        if isinstance(loss, PolicyLossMetadata):
            yield from self._loss_problems(loss, run, where)
        if isinstance(estimator, EstimatorMetadata):
            yield from self._estimator_problems(estimator, run, where)
        if isinstance(loss, PolicyLossMetadata) and isinstance(estimator, EstimatorMetadata):
            needs = loss.needs | estimator.needs | self._distilled
            yield from teacher_problems(self.teacher, needs, f"{where}.teacher", run)

    def warnings(self, run: RunConfig, where: str) -> Iterator[Problem]:
        if self.observation_coef and not capabilities_of(resolve("workflows", run.workflow.kind)).observes:
            yield Problem(
                f"{where}.observation_coef",
                f"the cross-entropy of observations with workflow.kind {run.workflow.kind!r}",
                "its rollouts have one turn, and nothing follows it",
                "use a workflow with an environment or tools, or set it to 0",
            )
        preset = resolve("algorithms", self.kind)
        named = self.model_copy(update={"advantage": preset.configure({"kind": self.kind}).advantage})
        if named.has_critic and not self.has_critic:
            yield Problem(
                f"{where}.advantage",
                f"the estimator {self.advantage.kind!r} under algorithm.kind {self.kind!r}",
                f"{self.kind} uses {named.advantage.kind!r} and a critic; with this estimator no critic is trained",
                f"write algorithm.kind: grpo, or leave algorithm.advantage out for {named.advantage.kind!r}",
            )

    def _filter_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        for number, rule in enumerate(self.filters):
            metadata = metadata_or_problem(rule, "filters", FilterMetadata, f"{where}.filters[{number}]")
            if isinstance(metadata, FilterMetadata) and metadata.judged and not self.reads_rewards and not run.rewards:
                yield Problem(
                    f"{where}.filters[{number}]",
                    f"the filter {rule.kind!r}, which reads rewards",
                    f"no reward is configured, and the estimator {self.advantage.kind!r} needs none",
                    "leave the filter out, or name a reward",
                )
            if isinstance(metadata, FilterMetadata) and run.schedule.group_size < metadata.min_group:
                yield Problem(
                    f"{where}.filters[{number}]",
                    f"the filter {rule.kind!r}",
                    f"it refuses no group of {run.schedule.group_size} (schedule.group_size)",
                    f"use groups of at least {metadata.min_group}, or leave the filter out",
                )
        if self.refill and run.has_fixed_versions:
            yield Problem(
                f"{where}.refill",
                f"refused groups replaced {WITH_FIXED_VERSIONS}",
                "the version that samples a slot would depend on groups refused later",
                "set refill, schedule.max_staleness or schedule.deterministic back",
            )

    def _resample_problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        if self.resample is None:
            return
        yield from self.resample.problems(run, where)
        reasons = {
            f"buffer.strategy {run.buffer.strategy.kind!r} mixes in expert completions, which have none": is_mixed(run),
            "no reward is configured": not self.reads_rewards and not run.rewards,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            yield Problem(where, "trajectories drawn by their rewards", reason, "leave the key out")

    def _loss_problems(self, loss: PolicyLossMetadata, run: RunConfig, where: str) -> Iterator[Problem]:
        if "advantages" not in loss.needs:
            yield Problem(
                f"{where}.policy_loss",
                f"the loss {self.policy_loss.kind!r} with an advantage estimator",
                "it reads no advantages, so rewards would have no effect",
                "use algorithm.kind sft, or another loss",
            )
        else:
            instead = f"algorithm.kind rloo or grpo, {where}.correction bypass_token_is"
            key, correction = f"{where}.policy_loss", self.for_run(run).correction
            yield from ratio_problems(loss, self.policy_loss.kind, self.updates, run, key, instead, correction)
        yield from self._correction_problems(loss, self.for_run(run).correction, where)
        yield from self._sequence_problems(loss, where)
        entropy = metadata_or_problem(self.entropy.term, "entropies", EntropyMetadata, where)
        about_experts = [f"the loss {self.policy_loss.kind!r}"] if loss.split else []
        if self.entropy.coef and isinstance(entropy, EntropyMetadata) and entropy.sampled:
            about_experts.append(f"the entropy term {self.entropy.term.kind!r}")
        for what in about_experts if not is_mixed(run) else ():
            yield Problem(
                f"{where}.{'policy_loss' if 'loss' in what else 'entropy.term'}",
                f"{what}, which tells an expert's tokens from the policy's own",
                f"buffer.strategy {run.buffer.strategy.kind!r} never gives a step both",
                "use another one, or a strategy that mixes the two (buffer.strategy.kind mix)",
            )
        if is_mixed(run) and not loss.split:
            yield Problem(
                f"{where}.policy_loss",
                f"the loss {self.policy_loss.kind!r} with buffer.strategy {run.buffer.strategy.kind!r}",
                "it would treat an expert's tokens as the policy's own, and they have no rewards",
                "use policy_loss.kind mix or mix_chord, or leave buffer.strategy out",
            )

    def _correction_problems(self, loss: PolicyLossMetadata, correction: Correction, where: str) -> Iterator[Problem]:
        if self.old_log_prob != "auto" and not (self._reads_old(loss) or correction.decoupled):
            yield Problem(
                f"{where}.old_log_prob",
                f"old log-probabilities by {self.old_log_prob}",
                f"neither the loss {self.policy_loss.kind!r} nor anything else here reads them",
                "leave the key out",
            )
        if correction.decoupled and self.old_log_prob == "rollout":
            yield Problem(
                f"{where}.old_log_prob",
                "the engine's log-probabilities as the old ones",
                f"the correction {correction.kind!r} compares the two, which would be equal",
                f"leave the key out, or set {where}.correction.against: current",
            )
        if correction.weights != "none" and correction.against == "current" and "old_log_prob" in loss.needs:
            yield Problem(
                f"{where}.correction",
                "importance weights of the current policy",
                f"the ratio of the loss {self.policy_loss.kind!r} is one already: it would count twice",
                f"set {where}.correction.against: old, or leave the weights out",
            )

    @property
    def _distilled(self) -> AbstractSet[str]:
        """The columns that the distillation reads."""
        metadata = metadata_or_problem(self.distill.loss, "policy_losses", PolicyLossMetadata, "distill")
        return metadata.needs if self.distill.coef and isinstance(metadata, PolicyLossMetadata) else frozenset()

    def _reads_old(self, loss: PolicyLossMetadata) -> bool:
        """Whether anything reads the log-probabilities from before the step."""
        further = [(self.advantage, "advantages"), *((gate, "gates") for gate in self.gates)]
        if self.kl.coef:
            further.append((self.kl.estimator, "kl_estimators"))
        all_metadata = [metadata_or_problem(section, kind, FunctionMetadata, "") for section, kind in further]
        penalised = self.kl.coef > 0 and self.kl.place == "reward"
        return penalised or any(
            "old_log_prob" in metadata.needs
            for metadata in (loss, *all_metadata)
            if isinstance(metadata, FunctionMetadata)
        )

    def _sequence_problems(self, loss: PolicyLossMetadata, where: str) -> Iterator[Problem]:
        """Problems of token gates with a loss over sequences, and of `narrow` gates with a loss that splits."""
        for number, gate in enumerate(self.gates):
            metadata = metadata_or_problem(gate, "gates", TokenWeightMetadata, where)
            if isinstance(metadata, TokenWeightMetadata) and loss.per_sequence and not metadata.per_sequence:
                yield Problem(
                    f"{where}.gates[{number}]",
                    f"the gate {gate.kind!r} on single tokens",
                    f"the loss {self.policy_loss.kind!r} has one ratio for a whole sequence",
                    "use the gate sequence_drift, or another loss (gspo instead of gspo_sequence)",
                )
            if loss.split and gate.narrow:
                yield Problem(
                    f"{where}.gates[{number}].narrow",
                    "counts without the tokens of weight zero",
                    f"the loss {self.policy_loss.kind!r} divides by counts of its own",
                    "leave the key out",
                )

    def _whitens(self, estimator: EstimatorMetadata) -> bool:
        condition = estimator.whitens
        return condition.holds(dict(self.advantage)) if isinstance(condition, When) else condition

    def _reward_problems(self, estimator: EstimatorMetadata, where: str) -> Iterator[Problem]:
        """Problems of changes to the reward that the estimator does not read or cannot use."""
        name = f"the estimator {self.advantage.kind!r}"
        other = "use another estimator"
        unread = (not estimator.reads_total, "reads no total reward", other)
        greedy = (estimator.baseline, "compares them with that of a greedy completion, before shaping", other)
        recorded = (estimator.unshaped, "compares them with recorded rewards of the reference, before shaping", other)
        by_turn = ("turn_reward" in estimator.needs, "reads the reward of each turn, before shaping")
        for applies, reason, remedy in (unread, greedy, recorded, (*by_turn, "use advantage.kind step_wise_grpo")):
            if self.shaping and applies:
                yield Problem(
                    f"{where}.shaping", "shaped rewards", f"{name} {reason}", f"leave the key out, or {remedy}"
                )
        negative = (estimator.nonnegative, "is not defined for rewards below 0")
        for applies, reason in (negative, unread[:2], recorded[:2]):
            if self.kl.coef and self.kl.place == "reward" and applies:
                remedy = f"set {where}.kl.place: loss"
                yield Problem(f"{where}.kl.place", "a KL penalty in the reward", f"{name} {reason}", remedy)

    def _estimator_problems(self, estimator: EstimatorMetadata, run: RunConfig, where: str) -> Iterator[Problem]:
        if run.schedule.group_size < estimator.min_group:
            yield Problem(
                "schedule.group_size",
                f"{run.schedule.group_size} trajectory per task",
                f"the estimator {self.advantage.kind!r} compares the members of a group",
                f"use at least {estimator.min_group}, or an estimator without a group",
            )
        yield from self._reward_problems(estimator, where)
        if self.normalise_advantages != "none" and self._whitens(estimator):
            yield Problem(
                f"{where}.normalise_advantages",
                "normalised advantages",
                f"the estimator {self.advantage.kind!r} whitens them already",
                "leave the key out",
            )
        if "values" in estimator.needs and is_mixed(run):
            yield Problem(
                f"{where}.advantage",
                f"the estimator {self.advantage.kind!r}, which needs a critic",
                f"with buffer.strategy {run.buffer.strategy.kind!r} it would learn from completions without rewards",
                "use an estimator without a critic, advantage.kind grpo for example",
            )
        for name in changed(self.critic) if "values" not in estimator.needs else ():
            yield Problem(
                f"{where}.critic.{name}",
                f"a critic's {name}",
                f"the estimator {self.advantage.kind!r} reads no values, so there is no critic",
                "leave the key out, or use advantage.kind gae",
            )
        if self.critic_warmup and "values" not in estimator.needs:
            yield Problem(
                f"{where}.critic_warmup",
                f"{self.critic_warmup} step(s) that update the critic alone",
                f"the estimator {self.advantage.kind!r} reads no values, so there is no critic",
                "leave the key out, or use advantage.kind gae",
            )


def _samples_exactly(run: RunConfig) -> bool:
    """Whether the engine's log-probabilities equal the trainer's for the same weights."""
    return capabilities_of(describe("engines", run.engine.kind)).exact_log_prob


def policy_gradient(config: PolicyGradientConfig, seed: int) -> GroupAlgorithm:
    """Builds the algorithm of a policy-gradient section, with a critic if the estimator reads values.

    `for_run` replaces the correction `auto` before this; an `auto` that remains means no correction.
    """
    estimator, estimator_metadata = resolve_function("advantages", config.advantage, EstimatorMetadata)
    kl = config.kl
    correction = config.correction
    policy = PolicyObjective(
        **_loss_of(config),
        weighted=correction.decoupled and correction.weights != "none",
        correction=correction if correction.active and not correction.decoupled else None,
        entropy=_term(config.entropy.coef, "entropies", config.entropy.term, EntropyMetadata, config.entropy.target),
        kl=_term(kl.coef if kl.place == "loss" else 0.0, "kl_estimators", kl.estimator, KlMetadata),
        observation_coef=config.observation_coef,
        distill=_term(config.distill.coef, "policy_losses", config.distill.loss, PolicyLossMetadata),
        taught=config.teacher is not None and bool(config.teacher.context),
        token_weights=tuple(
            TokenWeight(*resolve_function("gates", gate, TokenWeightMetadata), narrow=gate.narrow)
            for gate in config.gates
        ),
        seed=seed,
    )
    return GroupAlgorithm(
        name=config.kind,
        objectives=_with_critic(policy, config.critic) if "values" in estimator_metadata.needs else (policy,),
        estimator=Estimator(
            estimator,
            estimator_metadata,
            *resolve_function("kl_estimators", kl.estimator, KlMetadata),
            _controller(kl),
            normalise=config.normalise_advantages,
            clip=config.clip_advantages,
            seed=seed,
        ),
        recompute_old=config.old_log_prob == "recompute" or correction.decoupled,
        correction=correction if correction.decoupled else None,
        filters=tuple(
            Filter(rule.short_name, *resolve_function("filters", rule, FilterMetadata)) for rule in config.filters
        ),
        refill=config.refill,
        shapings=tuple(_shaping(section) for section in config.shaping),
        mask_truncated=config.mask_truncated,
        resample=config.resample,
        kl_coef=policy.kl.coef if policy.kl else 0.0,
        entropy_controller=None
        if config.entropy.target is None
        else EntropyController(config.entropy.coef, config.entropy.target, config.entropy.step),
        epochs=config.epochs,
        mini_batches=config.mini_batches,
        teacher=config.teacher.teacher() if config.teacher is not None else None,
        critic_warmup=config.critic_warmup,
    )


def _with_critic(policy: PolicyObjective, config: CriticConfig) -> tuple[AnyObjective, ...]:
    """The objectives of the policy and its critic, in the order they are minimised."""
    critic = ValueObjective(config.clip, config.aggregate, config.epochs, config.mini_batches)
    return (critic, policy) if config.trunk == "own" else (SharedObjective(policy, critic, config.value_coef),)


def supervised(config: UpdateConfig, seed: int) -> GroupAlgorithm:
    """Builds the algorithm of a section with a policy loss and without advantages."""
    objective = PolicyObjective(**_loss_of(config), seed=seed)
    return GroupAlgorithm(config.kind, (objective,), epochs=config.epochs, mini_batches=config.mini_batches)


def _loss_of(config: UpdateConfig) -> dict[str, Any]:
    """The policy loss of a section with its metadata, selection and aggregation."""
    loss, metadata = resolve_function("policy_losses", config.policy_loss, PolicyLossMetadata)
    select = bind_options(metadata.select, config.policy_loss) if metadata.select is not None else None
    return {"policy_loss": loss, "metadata": metadata, "aggregate": config.aggregate, "select_tokens": select}


def _term(
    coef: float, kind: str, section: Plugin, metadata_type: type[TermMetadataT], steered: float | None = None
) -> Term[TermMetadataT] | None:
    return Term(coef, *resolve_function(kind, section, metadata_type)) if coef or steered is not None else None


def _shaping(section: Plugin) -> Shaping:
    function, metadata = resolve_function("shapings", section, ShapingMetadata)
    moments = Moments() if "moments" in metadata.needs else None
    return Shaping(function, metadata, moments, {} if "role_mean" in metadata.needs else None)


def _controller(kl: KlConfig) -> KlController | None:
    if not kl.coef or kl.place == "loss":
        return None
    return get_kl_controller({"type": kl.controller, "kl_coef": kl.coef, "target_kl": kl.target, "horizon": kl.horizon})
