"""Explains an algorithm in words and formulas, from the same objects that training uses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from typing import Any, NamedTuple

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.formulas import describe_function, with_values
from trivium.algorithms.kl import AdaptiveKLController
from trivium.algorithms.losses.value_loss import FORMULA as VALUE_FORMULA
from trivium.algorithms.losses.value_loss import SOURCE as VALUE_SOURCE
from trivium.algorithms.losses.value_loss import SharedObjective, ValueObjective
from trivium.algorithms.metadata import AggregationMetadata, format_value, metadata_of
from trivium.algorithms.objective import OBSERVATION, OBSERVATION_SOURCE, PolicyObjective, Term
from trivium.algorithms.preference.objective import PreferenceObjective, ScoreObjective
from trivium.algorithms.resampling import SOURCE as RESAMPLING
from trivium.foundation.registry import resolve

LEGEND = (
    "A advantage, R a trajectory's reward, r = exp(log_prob - old_log_prob), p = exp(log_prob), H entropy, "
    "G return, V value; l loss of a token; several w multiply"
)


class Line(NamedTuple):
    """One line of an explanation."""

    label: str
    text: str
    source: str = ""


def explain(algorithm: GroupAlgorithm, source: str) -> str:
    """The algorithm as text, from the groups to the objectives; each part with its source.

    `source` is the paper of the preset.
    """
    lines = [Line("algorithm", algorithm.name, source), *_groups(algorithm), *_advantages(algorithm)]
    for objective in algorithm.objectives:
        lines += about(objective)
    lines += _updates(algorithm)
    lines.append(Line("where", LEGEND))
    width = max(len(line.label) for line in lines) + 2
    return "\n".join(_written(line, width) for line in lines)


def _written(line: Line, width: int) -> str:
    return f"{line.label:<{width}}{line.text}" + (f"\n{'':<{width}}[{line.source}]" if line.source else "")


def _groups(algorithm: GroupAlgorithm) -> Iterator[Line]:
    """Explains which groups are trained on, and how their rewards are shaped."""
    if algorithm.pairs:
        yield Line(
            "pairs", "a file's chosen completion against its rejected one, or the best of a group against its worst"
        )
    for rule in algorithm.filters:
        yield Line(f"filter {rule.name}", describe_function(rule.keeps, rule.metadata), rule.metadata.source)
    if algorithm.refill:
        yield Line("refill", f"refused groups are replaced by newly generated ones, {algorithm.refill} time(s) at most")
    for step in algorithm.shapings:
        yield Line("R becomes", describe_function(step.function, step.metadata), step.metadata.source)
    if any("L_max" in step.metadata.formula for step in algorithm.shapings) and algorithm.max_new_tokens:
        yield Line("L_max", f"{algorithm.max_new_tokens} tokens, the longest completion, unless `limit` is set")
        yield Line("length", "of all turns; in overlong_penalty without `limit`, of the longest turn")
    if (teacher := algorithm.teacher) is not None:
        weights = f"the policy's {teacher.weights} weights"
        if teacher.weights == "average":
            weights += f", {teacher.rate:g} of the current ones after each update"
        yield Line("teacher", f"{teacher.path or weights}, the top {teacher.top_k} tokens where they are read")
        for template in teacher.context:
            yield Line("it reads", repr(template))


def _advantages(algorithm: GroupAlgorithm) -> Iterator[Line]:
    estimator, correction = algorithm.estimator, algorithm.correction
    if estimator is None:
        return
    if estimator.kl_controller is not None:
        controller = estimator.kl_controller
        coef, manner = format_value(controller.value), ""
        if isinstance(controller, AdaptiveKLController):
            manner = f", the {coef} being steered to a KL of {format_value(controller.target)}"
        yield Line("reward", f"that of each token less {coef} KL{manner}")
        yield Line("KL", describe_function(estimator.kl, estimator.kl_metadata), estimator.kl_metadata.source)
    yield Line("A", describe_function(estimator.function, estimator.metadata), estimator.metadata.source)
    if (steered := algorithm.entropy_controller) is not None:
        manner = f"changes by {steered.step:g} a step; 0 while the entropy is above {steered.target:g} nats"
        yield Line("weight of H", f"{steered.value:g} at first, {manner}", "Skywork-OR1, He et al. 2025")
    if estimator.normalise != "none":
        yield Line("A becomes", {"mean": "A - mean(A)", "std": "(A - mean(A)) / std(A)"}[estimator.normalise])
    if estimator.clip is not None:
        yield Line("A becomes", f"clip(A, -{format_value(estimator.clip)}, {format_value(estimator.clip)})")
    if correction is not None:
        yield Line("correction", f"{correction.words}; ratios of the old policy to the engine's")
    if algorithm.mask_truncated:
        yield Line("mask", "truncated completions are compared with their group, but not trained on")
    if algorithm.resample is not None:
        manner = (
            f"trajectories are drawn with replacement, with a probability proportional to {algorithm.resample.formula}"
        )
        yield Line("resample", manner, RESAMPLING)


@singledispatch
def about(objective: object) -> Iterator[Line]:
    """Explains an objective."""
    raise TypeError(f"no explanation for {type(objective).__name__}")


@about.register
def _(objective: PolicyObjective) -> Iterator[Line]:
    weights = "w " if objective.weighted or objective.token_weights or objective.correction is not None else ""
    mean = f"mean of {weights}l"
    if (distill := objective.distill) is not None:
        mean = f"{1 - distill.coef:g} mean of {weights}l + {distill.coef:g} mean of d"
    terms = f"{_signed(objective.entropy, '-', 'H')}{_signed(objective.kl, '+', 'KL')}"
    if objective.observation_coef:
        terms += f" + {format_value(objective.observation_coef)} O"
    yield Line("minimise", f"{mean}{terms}, over the tokens of the policy")
    chosen = () if objective.select_tokens is None else (objective.select_tokens,)
    yield Line("l", describe_function(objective.policy_loss, objective.metadata, *chosen), objective.metadata.source)
    if objective.select_tokens is not None and (selection := objective.metadata.selection) is not None:
        yield Line("selected", describe_function(objective.select_tokens, selection), selection.source)
    if objective.weighted:
        yield Line("w", "the importance weight of the correction")
    if objective.correction is not None:
        yield Line("w", f"{objective.correction.words}; ratios of the current policy to the engine's")
    for gate in objective.token_weights:
        counts = " (closed: not counted in the mean)" if gate.narrow else ""
        yield Line("w", describe_function(gate.function, gate.metadata) + counts, gate.metadata.source)
    for name, term in (("H", objective.entropy), ("KL", objective.kl)):
        if term is not None:
            yield Line(name, describe_function(term.function, term.metadata), term.metadata.source)
    if distill is not None:
        yield Line("d", describe_function(distill.function, distill.metadata), distill.metadata.source)
    if objective.observation_coef:
        yield Line("O", OBSERVATION, OBSERVATION_SOURCE)
    yield _mean(objective.aggregate)


@about.register
def _(objective: ValueObjective) -> Iterator[Line]:
    error = with_values(VALUE_FORMULA, {"clip": objective.clip})
    yield Line("minimise", f"mean of {error}, over the tokens of the critic", VALUE_SOURCE)
    yield _mean(objective.aggregate)


@about.register
def _(objective: SharedObjective) -> Iterator[Line]:
    yield from about(objective.policy)
    error = with_values(VALUE_FORMULA, {"clip": objective.value.clip})
    yield Line("+", f"{objective.coef:g} times the mean of {error}, by a head on the policy's trunk", VALUE_SOURCE)
    yield _mean(objective.value.aggregate)


@about.register
def _(objective: PreferenceObjective) -> Iterator[Line]:
    over = {"pair": "pairs", "completion": "completions"}[objective.metadata.mean]
    yield Line("minimise", f"mean of l over the {over} of the policy")
    yield Line("l", describe_function(objective.pair_loss, objective.metadata), objective.metadata.source)
    yield Line("c, d", "log(policy / reference) of the chosen and of the rejected completion")


@about.register
def _(objective: ScoreObjective) -> Iterator[Line]:
    yield Line("minimise", "mean of l over the pairs of the reward model")
    yield Line("l", describe_function(objective.score_loss, objective.metadata), objective.metadata.source)


def _mean(name: str) -> Line:
    metadata = metadata_of(resolve("aggregations", name), AggregationMetadata, name)
    return Line("mean", f"{name}: {metadata.formula}", metadata.source)


def _signed(term: Term[Any] | None, sign: str, name: str) -> str:
    return f" {sign} {format_value(term.coef)} {name}" if term is not None else ""


def _passes(epochs: int, mini_batches: int) -> str:
    return f"{epochs * mini_batches} per train step: {epochs} pass(es) over {mini_batches} mini-batch(es)"


def _updates(algorithm: GroupAlgorithm) -> Iterator[Line]:
    yield Line("updates", _passes(algorithm.epochs, algorithm.mini_batches))
    for critic in algorithm.objectives:
        if isinstance(critic, ValueObjective) and (critic.epochs or critic.mini_batches):
            critic_passes = _passes(critic.epochs or algorithm.epochs, critic.mini_batches or algorithm.mini_batches)
            yield Line("critic updates", critic_passes)
    if algorithm.critic_warmup:
        yield Line("warm-up", f"the first {algorithm.critic_warmup} train step(s) update the critic alone")
    where_old = "recomputed before the step" if algorithm.recompute_old else "the engine's"
    names = {"old_log_prob": f"old_log_prob ({where_old})", "ref_log_prob": "ref_log_prob (the policy as it began)"}
    yield Line("reads", ", ".join(names.get(name, name) for name in sorted(algorithm.columns)) or "nothing else")
