"""Every metric, declared once: unit, how several values become one, and which direction is good.

Keys are `area/name`. A key that is not declared is refused by `checked`, so a monitor never shows a number that nobody
defined. Whatever depends on the clock or the machine lives in the areas `time/` and `perf/`: two runs of the same
config agree on everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trivium.errors import DataError
from trivium.types import Metrics

_AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
    "last": lambda values: values[-1],
}


@dataclass(frozen=True, slots=True)
class Declared:
    """What a metric key means."""

    key: str
    """`area/name`; `*` stands for a user's name (a reward component, a taskset)."""
    help: str
    unit: str = ""
    aggregation: str = "mean"
    """How values of several micro-batches, groups or turns become the one that is logged."""
    better: str = ""
    """`up`, `down` or nothing."""


METRICS: dict[str, Declared] = {}


def declare(key: str, help: str, *, unit: str = "", aggregation: str = "mean", better: str = "") -> None:
    """Adds a metric to the catalogue; twice is an error, so a key has one home."""
    if key in METRICS:
        raise DataError(f"declare metric {key!r}", "it is declared already", "choose another name")
    METRICS[key] = Declared(key, help, unit, aggregation, better)


def declared(key: str) -> Declared:
    """The declaration of a key, by name or by pattern."""
    found = METRICS.get(key) or next(
        (d for pattern, d in METRICS.items() if "*" in pattern and fnmatchcase(key, pattern)), None
    )
    if found is None:
        raise DataError(
            f"log metric {key!r}",
            "it is not declared",
            "declare it with trivium.metrics.declare, or return it from a workflow (area `workflow/`)",
        )
    return found


def aggregate(rows: Iterable[Mapping[str, float]]) -> Metrics:
    """Many measurements of the same keys as one, each by its declared aggregation."""
    collected: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            collected.setdefault(key, []).append(float(value))
    return {key: _AGGREGATIONS[declared(key).aggregation](values) for key, values in collected.items()}


def checked(metrics: Mapping[str, float]) -> Metrics:
    """The metrics as plain floats in a fixed order; an undeclared key is an error."""
    return {key: float(metrics[key]) for key in sorted(metrics) if declared(key)}


def depends_on_machine(key: str) -> bool:
    """Whether two runs of one config may differ in it."""
    return key.startswith(("time/", "perf/"))


def same(a: float, b: float) -> bool:
    """Equality of logged values: NaN equals NaN."""
    return a == b or (math.isnan(a) and math.isnan(b))


# What the policy did.
declare("reward/mean", "mean total reward of the groups trained on, failed members left out", better="up")
declare("reward/std", "standard deviation of the total reward over trajectories")
declare("reward/min", "lowest total reward", aggregation="min")
declare("reward/max", "highest total reward", aggregation="max")
declare("reward/equal_groups", "fraction of groups whose members all got the same reward", better="down")  # fmt: skip
declare("reward/component/*", "mean of one reward component, weight applied", better="up")
declare("rollout/groups", "groups taken from the buffer", aggregation="sum")
declare(
    "rollout/refused",
    "groups left out: too few living members, or a pair wanted and none is better",
    aggregation="sum",
    better="down",
)
declare("rollout/trajectories", "trajectories trained on", aggregation="sum")
declare("rollout/failed", "trajectories that failed and were left out", aggregation="sum", better="down")
declare("rollout/failed/*", "failed trajectories by the side that failed", aggregation="sum", better="down")
declare("rollout/response_tokens", "mean tokens the policy sampled per trajectory", unit="tokens")
declare("rollout/response_tokens_max", "longest response", unit="tokens", aggregation="max")
declare("rollout/truncated", "fraction of trajectories cut by a length limit", better="down")
declare("rollout/turns", "mean turns per trajectory")
declare("rollout/staleness", "mean of trainer version minus the oldest version in a group", unit="versions")
declare("rollout/staleness_max", "largest staleness trained on", unit="versions", aggregation="max")
declare("rollout/evicted", "groups given up because they became too stale", aggregation="sum", better="down")
declare("workflow/*", "a number that the workflow reported, averaged over trajectories")

# What the update did. `*` is the objective: policy or value.
declare("train/loss/*", "loss of one objective, normalised over the whole optimizer step")
declare("train/grad_norm/*", "gradient norm before clipping")
declare("train/lr/*", "learning rate", aggregation="last")
declare("train/entropy", "mean entropy per trained token", unit="nats")
declare("train/advantage_mean", "mean advantage over trained tokens")
declare("train/advantage_abs", "mean absolute advantage over trained tokens")
declare("train/clip_fraction", "fraction of trained tokens whose ratio was clipped")
declare("train/clip_fraction_lower", "fraction of trained tokens held by the dual clip")
declare(
    "train/clip_fraction_up", "fraction of trained tokens with a positive advantage and a ratio outside the clip range"
)
declare(
    "train/clip_fraction_down",
    "fraction of trained tokens with a negative advantage and a ratio outside the clip range",
)
declare("train/score_weight", "mean weight of the score function over trained tokens, where the loss gives it one")
declare("train/expert_fraction", "fraction of trained tokens that an expert wrote")
declare("train/expert_share", "weight of the expert's loss in a mixed one")
declare("train/left_out", "fraction of trained tokens that the policy loss itself leaves out")
declare("train/ratio", "mean ratio of current and old policy over trained tokens")
declare("train/log_ratio_abs", "mean distance of current and old log-probability over trained tokens", unit="nats")
declare("train/gate_closed", "fraction of trained tokens that a gate shut out of the policy loss")
declare("train/kl", "estimate of KL(old, current) over trained tokens", unit="nats")
declare("train/ref_kl", "estimate of KL(current, reference) over trained tokens", unit="nats", better="down")
declare("train/teacher_kl", "estimate of KL(current, teacher) over trained tokens", unit="nats", better="down")
declare("train/teacher_mass", "probability that the teacher's candidates have, by the teacher, over trained tokens")
declare("train/kl_coef", "coefficient of the reference KL", aggregation="last")
declare("train/preference_accuracy", "fraction of pairs whose preferred reply has the higher score", better="up")
declare("train/preference_margin", "mean score of preferred minus rejected replies", better="up")
declare("train/preference_chosen", "mean score of preferred replies: a reward model's, or what the policy implies")
declare("train/preference_rejected", "mean score of rejected replies")
declare("train/value_clip_fraction", "fraction of values that were clipped")
declare("train/value_explained", "explained variance of the returns by the values", better="up")
declare("train/tokens", "tokens trained on", unit="tokens", aggregation="sum")
declare("train/version", "policy version after this step", aggregation="last")
declare(
    "mismatch/log_prob_max", "largest gap between engine and trainer log-probability before the update",
    unit="nats", aggregation="max", better="down",
)  # fmt: skip
declare("mismatch/kl", "k3 estimate of KL(engine, trainer) before the update", unit="nats", better="down")

# Evaluation: `*` is the taskset.
declare("eval/*/accuracy", "mean over tasks of the fraction of samples that got the full reward", better="up")
declare("eval/*/reward", "mean total reward", better="up")
declare("eval/*/pass@*", "probability that k samples contain a right one (unbiased; Chen et al. 2021)", better="up")
declare("eval/*/maj@*", "probability that the most frequent answer of k samples is right", better="up")
declare("eval/*/response_tokens", "mean length of the answers", unit="tokens")
declare("eval/*/failed", "evaluation rollouts that failed", aggregation="sum", better="down")
declare("eval/*/version", "policy version that was evaluated", aggregation="last")

# Clock and machine: never part of what two runs must agree on.
declare("time/*", "seconds", unit="s", aggregation="sum")
declare("perf/*", "a rate or a size that depends on the machine")
