"""The catalogue of metrics: unit, aggregation and good direction of each, declared once.

Keys are `area/name`. `checked` refuses a key that is not declared, so every number of a monitor has a definition.
Metrics that depend on the clock or the machine are in the areas `time/` and `perf/`: two runs of the same config agree
on all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trivium.foundation.errors import DataError
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
    """The declaration of a metric key."""

    key: str
    """`area/name`; `*` stands for a user's name (a reward component, a taskset)."""
    help: str
    unit: str = ""
    aggregation: str = "mean"
    """How the values of several micro-batches, groups or turns are aggregated."""
    better: str = ""
    """`up`, `down` or nothing."""


METRICS: dict[str, Declared] = {}
_OF_USERS: dict[str, Declared] = {}
"""Metrics of user code, declared in this process alone."""
_MACHINE_AREAS = ("time", "perf")


def declare(key: str, help: str, *, unit: str = "", aggregation: str = "mean", better: str = "") -> None:
    """Adds a metric to the catalogue; twice is an error, so a key has one home."""
    if key in METRICS:
        raise DataError(f"declare metric {key!r}", "it is declared already", "choose another name")
    METRICS[key] = Declared(key, help, unit, aggregation, better)


def declare_missing(keys: Iterable[str], help: str) -> None:
    """Declares keys of user code that are not declared yet, as means without a unit."""
    for key in keys:
        if _declaration(key) is None:
            _OF_USERS[key] = Declared(key, help)


def declared(key: str) -> Declared:
    """The declaration of a key, by name or by pattern."""
    metric = _declaration(key)
    if metric is None:
        raise DataError(
            f"log metric {key!r}",
            "it is not declared",
            "declare it with trivium.foundation.metrics.declare, or return it from a workflow (area `workflow/`)",
        )
    return metric


def _declaration(key: str) -> Declared | None:
    named = METRICS.get(key) or _OF_USERS.get(key)
    return named or next((d for pattern, d in METRICS.items() if "*" in pattern and fnmatchcase(key, pattern)), None)


def aggregate(rows: Iterable[Mapping[str, float]]) -> Metrics:
    """Aggregates many measurements of the same keys, each as declared."""
    collected: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            collected.setdefault(key, []).append(float(value))
    return {key: _AGGREGATIONS[declared(key).aggregation](values) for key, values in collected.items()}


def checked(metrics: Mapping[str, float]) -> Metrics:
    """The metrics as plain floats in a fixed order; an undeclared key is an error."""
    return {key: float(metrics[key]) for key in sorted(metrics) if declared(key)}


def depends_on_machine(key: str) -> bool:
    """Whether the metric may differ between two runs of one config."""
    return key.partition("/")[0] in _MACHINE_AREAS


def same(a: float, b: float) -> bool:
    """Equality of logged values: NaN equals NaN."""
    return a == b or (math.isnan(a) and math.isnan(b))


def graded_accuracies(rows: Iterable[Mapping[str, float]]) -> set[str]:
    """The accuracies of evaluations with partial rewards (`eval/*/partial`): they count full marks alone, so charts and
    reports leave them out."""
    partial = {key for row in rows for key, value in row.items() if fnmatchcase(key, "eval/*/partial") and value}
    return {f"{key.removesuffix('partial')}accuracy" for key in partial}


# Curricula that learn.
declare("curriculum/success", "mean success rate of the tasks of a step, as the curriculum counts it", better="up")
declare("curriculum/expected_success", "mean success rate of all tasks that the curriculum expects", better="up")
declare("curriculum/seen", "fraction of the tasks that were trained on")
declare("curriculum/retired", "fraction of the tasks that are not drawn any more")

# Rollouts and their rewards.
declare(
    "reward/mean", "mean total reward of all rollouts, refused groups included, failed members excluded", better="up"
)
declare("reward/trained_mean", "mean total reward of the groups trained on, before shaping", better="up")
declare("reward/shaped_mean", "mean reward of the trajectories trained on, after shaping")
declare("reward/greedy", "mean total reward of the greedy completions that serve as a baseline", better="up")
declare("reward/std", "standard deviation of the total reward over trajectories")
declare("reward/min", "lowest total reward", aggregation="min")
declare("reward/max", "highest total reward", aggregation="max")
declare("reward/equal_groups", "fraction of groups whose members all got the same reward", better="down")
declare("reward/component/*", "mean of one reward component, weight applied", better="up")
declare("rollout/groups", "groups taken from the buffer", aggregation="sum")
declare("rollout/refused", "groups left out: no rewards, or a filter refused them", aggregation="sum", better="down")
declare(
    "rollout/refused/*",
    "refused groups by the rule that refused them: a filter's name, too_few_alive, no_pair, greedy_failed",
    aggregation="sum",
    better="down",
)
declare("rollout/trajectories", "trajectories trained on", aggregation="sum")
declare("rollout/total", "all trajectories of the step, failed and greedy ones included", aggregation="sum")
declare(
    "rollout/failed",
    "trajectories that failed and were left out, greedy ones included",
    aggregation="sum",
    better="down",
)
declare("rollout/failed/*", "failed trajectories by the part that failed", aggregation="sum", better="down")
declare("rollout/response_tokens", "mean number of tokens that the policy sampled per trajectory", unit="tokens")
declare("rollout/response_tokens_max", "longest completion", unit="tokens", aggregation="max")
declare("rollout/response_tokens_min", "shortest completion", unit="tokens", aggregation="min")
declare("rollout/prompt_tokens", "mean tokens of the first prompt of a trajectory", unit="tokens")
declare("rollout/prompt_tokens_max", "longest first prompt", unit="tokens", aggregation="max")
declare("rollout/prompt_tokens_min", "shortest first prompt", unit="tokens", aggregation="min")
declare("rollout/aborted", "fraction of trajectories that sampled nothing or were aborted", better="down")
declare("rollout/truncated", "fraction of trajectories cut by a length limit", better="down")
declare("rollout/empty", "fraction of trajectories whose last completion has no text", better="down")
declare("rollout/most_common", "fraction of trajectories that end with the step's most frequent completion")
declare("rollout/turns", "mean turns per trajectory")
declare("rollout/turns_max", "most turns", aggregation="max")
declare("rollout/turns_min", "fewest turns", aggregation="min")
declare(
    "rollout/forked",
    "mean number of turns per trajectory that start another token sequence, because the history was edited or another "
    "conversation began; `trivium rollouts` has the reasons",
    better="down",
)
declare("rollout/staleness", "mean of trainer version minus the oldest version in a group", unit="versions")
declare("rollout/staleness_max", "largest staleness trained on", unit="versions", aggregation="max")
declare(
    "rollout/called_off",
    "groups cancelled in progress, because they would have become too stale",
    aggregation="sum",
    better="down",
)
declare("rollout/given_up", "slots given up after `schedule.max_attempts`", aggregation="sum", better="down")
declare(
    "rollout/dropped",
    "groups dropped before they were stored: by an operator, or by `workflow.min_members`",
    aggregation="sum",
)
declare(
    "rollout/discarded",
    "groups of an earlier session that are rolled out again, because this session does not have the weights that "
    "sampled them",
    aggregation="sum",
    better="down",
)
declare(
    "rollout/evicted",
    "finished groups removed because they became too stale; their slots are issued again",
    aggregation="sum",
    better="down",
)
declare(
    "workflow/retries",
    "number of times that a trajectory failed and was rolled out again (if `workflow.max_retries` is set)",
    better="down",
)
declare("workflow/*", "a number that the workflow, or an operator, reported, averaged over trajectories")

# The origin of a step's groups.
declare("sample/task_count", "different tasks among a step's groups")
declare(
    "sample/model_version/mean",
    "mean version that sampled a group, by its oldest token; groups of an expert are left out",
)
declare("sample/model_version/min", "oldest of these versions", aggregation="min")
declare("sample/model_version/max", "newest of these versions", aggregation="max")
declare(
    "sample/left_out", "groups taken and left out, because they are older than the strategy's bound", aggregation="sum"
)
declare("sample/expert", "groups that an expert wrote", aggregation="sum")
declare("sample/replayed", "replayed groups: earlier steps trained on them too", aggregation="sum")
declare("sample/use_count", "mean number of earlier steps that trained on a replayed group")
declare("sample/stored", "groups kept for replay after this step", aggregation="last")
declare("sample/fresh_reward", "mean total reward of the rollouts of this step, replayed groups left out", better="up")

# The update. `*` is the objective: policy, value or reward.
declare("train/changed_fields", "config fields that were changed before this step, with `--change`")
declare("train/loss/*", "loss of one objective, normalised over the whole optimizer step")
declare(
    "train/loss_term/*",
    "one term of the policy's loss without its coefficient, if there are several: policy_gradient, distillation, "
    "entropy, kl, observation",
)
declare("train/grad_norm/*", "gradient norm before clipping")
declare("train/lr/*", "learning rate", aggregation="last")
declare("train/entropy", "mean entropy per trained token", unit="nats")
declare("train/advantage_mean", "mean advantage over trained tokens")
declare("train/advantage_abs", "mean absolute advantage over trained tokens")
declare("train/advantage_max", "largest advantage of a trained token", aggregation="max")
declare("train/advantage_min", "smallest advantage of a trained token", aggregation="min")
declare("train/return_mean", "mean return over trained tokens")
declare("train/return_max", "largest return of a trained token", aggregation="max")
declare("train/return_min", "smallest return of a trained token", aggregation="min")
declare("train/value_mean", "mean value over trained tokens, by the critic before the step")
declare("train/value_max", "largest value of a trained token", aggregation="max")
declare("train/value_min", "smallest value of a trained token", aggregation="min")
declare("train/advantage_clipped", "fraction of trained tokens whose advantage was clipped")
declare("train/clip_fraction", "fraction of trained tokens whose ratio was clipped")
declare("train/clip_fraction_lower", "fraction of trained tokens whose loss the dual clip bounds")
declare(
    "train/clip_fraction_up", "fraction of trained tokens with a positive advantage and a ratio outside the clip range"
)
declare(
    "train/clip_fraction_down",
    "fraction of trained tokens with a negative advantage and a ratio outside the clip range",
)
declare("train/score_weight", "mean weight of the score function over trained tokens, if the loss has one")
declare("train/expert_fraction", "fraction of trained tokens that an expert wrote")
declare("train/expert_share", "weight of the expert's loss in a mixed loss")
declare("train/left_out", "fraction of trained tokens that the policy loss leaves out")
declare("train/ratio", "mean ratio of current and old policy over trained tokens")
declare("train/log_ratio_abs", "mean distance of current and old log-probability over trained tokens", unit="nats")
declare("train/gate_closed", "fraction of trained tokens with a gate of 0 in the policy loss")
declare("train/kl", "estimate of KL(old, current) over trained tokens", unit="nats")
declare("train/ref_kl", "estimate of KL(current, reference) over trained tokens", unit="nats", better="down")
declare("train/taught", "fraction of sequences that a teacher with a context teaches: a template fits them")
declare("train/teacher_kl", "estimate of KL(current, teacher) over trained tokens", unit="nats", better="down")
declare(
    "train/teacher_mass", "mean total probability of the teacher's top_k tokens under the teacher, over trained tokens"
)
declare(
    "train/observation_loss",
    "mean cross-entropy of the environment's tokens, before the first update that of unseen rollouts",
    unit="nats",
    better="down",
)
declare("train/kl_coef", "coefficient of the reference KL", aggregation="last")
declare("train/entropy_coef", "coefficient of a steered entropy bonus in this step", aggregation="last")
declare("train/preference_accuracy", "fraction of pairs whose preferred completion has the higher score", better="up")
declare("train/preference_margin", "mean score of preferred minus rejected completions", better="up")
declare(
    "train/preference_chosen",
    "mean score of preferred completions: of a reward model, or the implicit reward of the policy",
)
declare("train/preference_rejected", "mean score of rejected completions")
declare("train/reference_point", "KTO's estimate of KL(current, reference) from mismatched pairs", unit="nats")
declare("train/value_predicted", "mean value over trained tokens, by the critic as it is updated")
declare("train/value_clip_fraction", "fraction of values that were clipped")
declare("train/value_explained", "explained variance of the returns by the values", better="up")
declare("train/tokens", "tokens trained on", unit="tokens", aggregation="sum")
declare("train/version", "policy version after this step", aggregation="last")
declare(
    "mismatch/log_prob_max",
    "largest gap between engine and trainer log-probability before the update",
    unit="nats",
    aggregation="max",
    better="down",
)
declare("mismatch/kl", "k3 estimate of KL(engine, trainer) before the update", unit="nats", better="down")
declare("mismatch/kl_k1", "k1 estimate of KL(engine, trainer): unbiased, may be negative", unit="nats")
declare("mismatch/ess", "effective sample size of the tokens as a fraction: mean(r)^2 / mean(r^2)", better="up")
declare("mismatch/ratio", "mean ratio r of trainer and engine probability of a token; 1 where they agree")
declare("mismatch/ratio_square", "mean of r^2", better="down")
declare("mismatch/chi2", "mean of r^2 - 1: estimate of the chi-square divergence of trainer and engine", better="down")
declare("mismatch/sequence_ess", "effective sample size of sequences, by the product of their ratios", better="up")
declare("mismatch/sequence_ratio", "mean product of the ratios over a sequence")
declare("mismatch/sequence_ratio_square", "mean square of this product", better="down")
declare("mismatch/sequence_chi2", "mean square of this product, minus 1", better="down")
declare(
    "mismatch/log_perplexity",
    "mean over sequences of the trainer's mean negative log-probability of a token",
    unit="nats",
)
declare("mismatch/log_perplexity_engine", "the same for the engine", unit="nats")
declare("mismatch/perplexity", "mean over sequences of the trainer's perplexity")
declare("mismatch/perplexity_engine", "the same for the engine")
declare("mismatch/perplexity_ratio", "mean over sequences of the trainer's perplexity divided by the engine's")
declare("mismatch/log_perplexity_gap", "mean over sequences of trainer minus engine log-perplexity", unit="nats")
declare(
    "mismatch/log_perplexity_gap_abs",
    "mean over sequences of the absolute difference of trainer and engine log-perplexity",
    unit="nats",
    better="down",
)
declare(
    "mismatch/log_perplexity_gap_above",
    "largest difference of a sequence, trainer minus engine log-perplexity",
    unit="nats",
    aggregation="max",
    better="down",
)
declare(
    "mismatch/log_perplexity_gap_below",
    "largest difference of a sequence, engine minus trainer log-perplexity",
    unit="nats",
    aggregation="max",
    better="down",
)

# Off-policy correction. `sequence_` metrics are over the means of sequences; `below` and `above` refer to the
# configured interval; a single number u stands for [1/u, u].
declare("mismatch/weight/mean", "mean importance weight before normalisation, over tokens")
declare("mismatch/weight/std", "standard deviation of the weights over tokens", better="down")
declare("mismatch/weight/max", "largest weight", aggregation="max")
declare("mismatch/weight/min", "smallest weight", aggregation="min")
declare("mismatch/weight/ess", "effective sample size of the weights over tokens, as a fraction", better="up")
declare("mismatch/weight/outside", "fraction of tokens whose weight was truncated or set to zero", better="down")
declare(
    "mismatch/weight/above",
    "fraction of tokens (sequences, for sequence weights) with a ratio above the bounds",
    better="down",
)
declare(
    "mismatch/weight/below",
    "fraction of tokens (sequences, for sequence weights) with a ratio below the bounds",
    better="down",
)
declare("mismatch/weight/ratio_max", "largest ratio before truncation", aggregation="max", better="down")
declare("mismatch/weight/ratio_min", "smallest ratio before truncation", aggregation="min", better="up")
declare("mismatch/weight/sequence_mean", "mean over sequences of the mean weight of a sequence")
declare("mismatch/weight/sequence_std", "standard deviation over sequences of the mean weight of a sequence")
declare("mismatch/weight/sequence_max", "largest mean weight of a sequence", aggregation="max")
declare("mismatch/weight/sequence_min", "smallest mean weight of a sequence", aggregation="min")
declare(
    "mismatch/weight/sequence_deviation",
    "largest distance of the mean weight of a sequence from 1",
    aggregation="max",
    better="down",
)
declare(
    "mismatch/weight/sequence_above",
    "fraction of sequences with a mean ratio above the bounds",
    better="down",
)
declare(
    "mismatch/weight/sequence_below",
    "fraction of sequences with a mean ratio below the bounds",
    better="down",
)
declare("mismatch/rejected_tokens", "fraction of tokens that were rejected", better="down")
declare("mismatch/rejected_sequences", "fraction of sequences with at least one rejected token", better="down")
declare(
    "mismatch/rejected_length",
    "mean length of wholly rejected sequences, relative to all sequences; 1 means no length bias",
)
declare("mismatch/rejection/*/tokens", "fraction of tokens that one option of `rejection` rejected", better="down")
declare("mismatch/rejection/*/sequences", "fraction of sequences with a token that one option rejected", better="down")
declare("mismatch/rejection/*/mean", "mean of the option's statistic over tokens", unit="nats")
declare(
    "mismatch/rejection/*/std", "standard deviation over tokens of the statistic, clipped to its bounds", unit="nats"
)
declare("mismatch/rejection/*/max", "largest value of the statistic", unit="nats", aggregation="max")
declare("mismatch/rejection/*/min", "smallest value of the statistic", unit="nats", aggregation="min")
declare(
    "mismatch/rejection/*/above", "fraction of tokens (sequences, for seq_ options) above the bounds", better="down"
)
declare(
    "mismatch/rejection/*/below", "fraction of tokens (sequences, for seq_ options) below the bounds", better="down"
)
declare("mismatch/rejection/*/sequence_mean", "mean over sequences of the statistic's mean", unit="nats")
declare("mismatch/rejection/*/sequence_std", "standard deviation over sequences of the statistic's mean", unit="nats")
declare("mismatch/rejection/*/sequence_max", "largest mean of a sequence", unit="nats", aggregation="max")
declare("mismatch/rejection/*/sequence_min", "smallest mean of a sequence", unit="nats", aggregation="min")
declare(
    "mismatch/rejection/*/sequence_deviation",
    "largest distance of a sequence's mean from 0",
    unit="nats",
    aggregation="max",
    better="down",
)
declare("mismatch/rejection/*/sequence_above", "fraction of sequences whose mean is above the bounds", better="down")
declare("mismatch/rejection/*/sequence_below", "fraction of sequences whose mean is below the bounds", better="down")

# Evaluation: `*` is the taskset.
declare("eval/*/accuracy", "mean over tasks of the fraction of samples that got the full reward", better="up")
declare(
    "eval/*/partial",
    "rollouts whose reward is not -1, 0 or 1, if evaluation.threshold is unset: accuracy is no good measure of these",
    aggregation="sum",
)
declare("eval/*/reward", "mean total reward", better="up")
declare("eval/*/loss", "loss over rows that are not trained on (`evaluation.held_out`)", better="down")
declare(
    "eval/*/preference_accuracy",
    "fraction of the pairs of `evaluation.held_out` whose preferred completion ranks higher",
    better="up",
)
declare(
    "eval/*/preference_margin", "mean over the same pairs of reward or score, preferred minus rejected", better="up"
)
declare("eval/*/pass@*", "probability that k samples contain a correct one (unbiased; Chen et al. 2021)", better="up")
declare("eval/*/best@*", "expected highest reward of k samples, failed ones left out", better="up")
declare("eval/*/worst@*", "expected lowest reward of k samples, failed ones left out", better="up")
declare("eval/*/maj@*", "probability that the most frequent answer of k samples is correct", better="up")
declare("eval/*/response_tokens", "mean length of the answers", unit="tokens")
declare(
    "eval/*/observation_loss",
    "mean cross-entropy of the environment's tokens in the evaluation's rollouts, at temperature 1 "
    "(`evaluation.observations`)",
    unit="nats",
    better="down",
)
declare("eval/*/observation_tokens", "the number of these tokens", unit="tokens", aggregation="sum")
declare("eval/*/failed", "evaluation rollouts that failed", aggregation="sum", better="down")
declare("eval/*/version", "policy version that was evaluated", aggregation="last")

# Clock and machine: may differ between two runs of one config.
declare(
    "time/step", "a train step, from the request for groups to the row in metrics.jsonl", unit="s", aggregation="sum"
)
declare("time/wait", "waiting for groups: rollouts and their rewards", unit="s", aggregation="sum", better="down")
declare("time/train", "scores, advantages and updates of a train step", unit="s", aggregation="sum")
declare("time/score/*", "one score of the batch, such as `old`, `ref` or `values`", unit="s", aggregation="sum")
declare("time/advantage", "shaping, advantages and corrections", unit="s", aggregation="sum")
declare("time/update/*", "the updates of one role", unit="s", aggregation="sum")
declare("time/sync", "publishing weights, since the previous step", unit="s", aggregation="sum")
declare(
    "time/checkpoint",
    "the part of saving that training waited for, since the previous step",
    unit="s",
    aggregation="sum",
)
declare("time/evaluate", "an evaluation, without the rollouts for training meanwhile", unit="s", aggregation="sum")
declare("time/*", "seconds", unit="s", aggregation="sum")
declare("perf/idle", "fraction of the step in which the trainer waited for groups", better="down")
declare("perf/engine_s", "mean time of a rollout's completions in the engine", unit="s")
declare("perf/rollout_s", "mean time of a rollout, its reward excluded", unit="s")
declare("perf/reward_s", "mean time of a rollout's reward", unit="s")
declare(
    "perf/rollout_tokens_per_second",
    "tokens sampled for this step, per second of the step",
    unit="tokens/s",
    better="up",
)
declare(
    "perf/train_tokens_per_second",
    "tokens trained on, context included, per second of scores, advantages and updates",
    unit="tokens/s",
    better="up",
)
declare(
    "perf/mfu",
    "model FLOPs per second of scores and updates, as a fraction of the peak of all ranks (`train.peak_flops`)",
    better="up",
)
declare("perf/mfu/*", "the same of `score` or `update` alone", better="up")
declare(
    "perf/model_flops_per_second",
    "model FLOPs of scores and updates, per second of their time",
    unit="1/s",
    better="up",
)
declare("perf/*", "a rate or a size that depends on the machine")
