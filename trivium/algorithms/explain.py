"""What an algorithm minimises, in words and formulas: read off the very values that training runs with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from typing import NamedTuple

from trivium.algorithms.algorithm import GroupAlgorithm
from trivium.algorithms.formulas import line_of, shown, written
from trivium.algorithms.kl import AdaptiveKLController
from trivium.algorithms.objective import PolicyObjective, Term, ValueObjective
from trivium.algorithms.preference_objective import PreferenceObjective, ScoreObjective
from trivium.algorithms.registered import AggregationLaw, Law, law_of
from trivium.algorithms.value_loss import FORMULA as VALUE_FORMULA
from trivium.algorithms.value_loss import SOURCE as VALUE_SOURCE
from trivium.registry import resolve

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
    """The algorithm as text, from the groups that are played to what is minimised; each part with its source.

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
    """Which groups are trained on, and what becomes of their rewards."""
    if algorithm.pairs:
        yield Line("pairs", "a file's chosen reply against its rejected one, or the best of a group against its worst")
    for rule in algorithm.filters:
        yield Line(f"filter {rule.name}", line_of(rule.keeps, rule.law), rule.law.source)
    if algorithm.refill:
        yield Line("refill", f"refused groups are replaced by freshly played ones, {algorithm.refill} time(s) at most")
    for step in algorithm.shapings:
        yield Line("R becomes", line_of(step.function, step.law), step.law.source)
    if any("L_max" in step.law.formula for step in algorithm.shapings) and algorithm.max_new_tokens:
        yield Line("L_max", f"{algorithm.max_new_tokens} tokens, the longest reply, unless said otherwise")
    if algorithm.teacher is not None:
        yield Line("teacher", f"{algorithm.teacher.path}, its {algorithm.teacher.top_k} likeliest tokens where asked")


def _advantages(algorithm: GroupAlgorithm) -> Iterator[Line]:
    estimator, correction = algorithm.estimator, algorithm.correction
    if estimator is None:
        return
    if estimator.kl_controller is not None:
        controller = estimator.kl_controller
        coef, how = shown(controller.value), ""
        if isinstance(controller, AdaptiveKLController):
            how = f", the {coef} being steered to a KL of {shown(controller.target)}"
        yield Line("reward", f"that of each token less {coef} KL{how}")
        yield Line("KL", line_of(estimator.kl, estimator.kl_law), estimator.kl_law.source)
    yield Line("A", line_of(estimator.function, estimator.law), estimator.law.source)
    if estimator.normalise != "none":
        yield Line("A becomes", {"mean": "A - mean(A)", "std": "(A - mean(A)) / std(A)"}[estimator.normalise])
    if estimator.clip is not None:
        yield Line("A becomes", f"clip(A, -{shown(estimator.clip)}, {shown(estimator.clip)})")
    if correction is not None:
        yield Line("correction", f"{correction.words}; ratios of the old policy to the engine's")
    if algorithm.mask_truncated:
        yield Line("mask", "replies that a length limit cut are judged with their group, but not trained on")


@singledispatch
def about(objective: object) -> Iterator[Line]:
    """What an objective minimises."""
    raise TypeError(f"no explanation for {type(objective).__name__}")


@about.register
def _(objective: PolicyObjective) -> Iterator[Line]:
    weights = "w " if objective.weighted or objective.gates or objective.correction is not None else ""
    terms = f"{_signed(objective.entropy, '-', 'H')}{_signed(objective.kl, '+', 'KL')}"
    yield Line("minimise", f"mean of {weights}l{terms}, over the tokens of the policy")
    chosen = () if objective.select_tokens is None else (objective.select_tokens,)
    yield Line("l", line_of(objective.policy_loss, objective.law, *chosen), objective.law.source)
    for function in chosen:
        law: Law = vars(objective.law.select)["law"]
        yield Line("selected", line_of(function, law), law.source)
    if objective.weighted:
        yield Line("w", "the importance weight of the correction")
    if objective.correction is not None:
        yield Line("w", f"{objective.correction.words}; ratios of the current policy to the engine's")
    for gate in objective.gates:
        counts = " (closed: not counted in the mean)" if gate.narrow else ""
        yield Line("w", line_of(gate.function, gate.law) + counts, gate.law.source)
    for name, term in (("H", objective.entropy), ("KL", objective.kl)):
        if term is not None:
            yield Line(name, line_of(term.function, term.law), term.law.source)
    yield _mean(objective.aggregate)


@about.register
def _(objective: ValueObjective) -> Iterator[Line]:
    error = written(VALUE_FORMULA, {"clip": objective.clip})
    yield Line("minimise", f"mean of {error}, over the tokens of the critic", VALUE_SOURCE)
    yield _mean(objective.aggregate)


@about.register
def _(objective: PreferenceObjective) -> Iterator[Line]:
    over = {"pair": "pairs", "reply": "replies"}[objective.law.mean]
    yield Line("minimise", f"mean of l over the {over} of the policy")
    yield Line("l", line_of(objective.pair_loss, objective.law), objective.law.source)
    yield Line("c, d", "log(policy / reference) of the chosen and of the rejected reply")


@about.register
def _(objective: ScoreObjective) -> Iterator[Line]:
    yield Line("minimise", "mean of l over the pairs of the reward model")
    yield Line("l", line_of(objective.score_loss, objective.law), objective.law.source)


def _mean(name: str) -> Line:
    law: Law = law_of(resolve("aggregations", name), AggregationLaw, name)
    return Line("mean", f"{name}: {law.formula}", law.source)


def _signed(term: Term | None, sign: str, name: str) -> str:
    return f" {sign} {shown(term.coef)} {name}" if term is not None else ""


def _updates(algorithm: GroupAlgorithm) -> Iterator[Line]:
    updates = algorithm.epochs * algorithm.mini_batches
    passes = f"{algorithm.epochs} pass(es) over {algorithm.mini_batches} mini-batch(es)"
    yield Line("updates", f"{updates} per train step: {passes}")
    if algorithm.critic_warmup:
        yield Line("warm-up", f"the first {algorithm.critic_warmup} train step(s) update the critic alone")
    where_old = "recomputed before the step" if algorithm.recompute_old else "the engine's"
    names = {"old_log_prob": f"old_log_prob ({where_old})", "ref_log_prob": "ref_log_prob (the policy as it began)"}
    yield Line("reads", ", ".join(names.get(name, name) for name in sorted(algorithm.columns)) or "nothing else")
