"""Rules that detect problems of a run from its metrics and rollouts.

The docstring of a rule is its entry in docs/doctor.md. `trivium doctor` applies the rules to a run directory.
`LiveWarnings` applies them to the metrics of a run in progress.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import fmean
from typing import Any

from trivium.config.rules import Rules, wrong
from trivium.foundation.errors import Problem
from trivium.types import Group

_log = logging.getLogger("trivium")

Row = Mapping[str, float]
WINDOW = 5
"""Number of train steps that a rule averages over."""
_REFUTABLE = ("falling reward", "generalization gap", "reward hacking")
"""The rules whose findings later evaluations, or steps, refute."""
_PAIRS = "train/preference_margin"
"""A metric of steps that learn from pairs."""
_NEAR = 3
"""Number of train steps before, and after, an evaluation that are compared with it."""
_NEWEST = 100
"""Number of newest rows that live warnings keep, in addition to the first ones."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the rules."""

    rows: Sequence[Row]
    """The metrics of the train steps that learned from rollouts, in order, each with `step`: those of the newest stage
    that has any."""
    evaluations: Sequence[Row] = ()
    """Rows with metrics of an evaluation of this stage, in order."""
    groups: Sequence[Sequence[Group]] = ()
    """Recorded groups, step by step; none while the run is in progress."""
    recorded: Sequence[Row] = ()
    """The metrics of the train steps that learned from rows of completions or pairs, in order."""
    everything: Sequence[Row] = ()
    """All rows, in order."""
    mismatched: Sequence[str] = ()
    """Descriptions of the tokens where engine and trainer differ most."""
    usual_lr: float | None = None
    """The learning rate that a config without one has; None if unknown."""
    error: str = ""
    """The error that ended the newest session, in one line, with the remedy after `do:`; empty if no error ended it."""

    def recent(self, key: str) -> float:
        """Returns the mean of a metric over the newest steps; NaN if there are too few. No comparison with NaN is
        true."""
        values = self.values(key)
        return fmean(values[-WINDOW:]) if len(values) >= WINDOW else math.nan

    def early(self, key: str) -> float:
        """Returns the mean of a metric over the first steps; NaN if the run has fewer than two windows."""
        values = self.values(key)
        return fmean(values[:WINDOW]) if len(values) >= 2 * WINDOW else math.nan

    def share(self, part: str, whole: str) -> float:
        """Returns the ratio of two metrics over the newest steps; 0 if there are too few. A step that does not log
        `part` had none."""
        rows = [row for row in self.rows if whole in row][-WINDOW:]
        total = sum(row[whole] for row in rows)
        return sum(row.get(part, 0.0) for row in rows) / total if len(rows) == WINDOW and total > 0 else 0.0

    def values(self, key: str) -> list[float]:
        """Returns the finite values of a metric, in order of steps."""
        return [row[key] for row in self.rows if key in row and math.isfinite(row[key])]

    def reward_range(self) -> float:
        """Returns the highest reward of the run minus its lowest; NaN if it has none."""
        return max(self.values("reward/max"), default=math.nan) - min(self.values("reward/min"), default=math.nan)

    def evaluated(self, pattern: str) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """Yields each metric of evaluations that matches, and its points (step, value) in order."""
        for key in sorted({key for row in self.evaluations for key in row if fnmatchcase(key, pattern)}):
            yield key, [(row["step"], row[key]) for row in self.evaluations if key in row]

    def sampled_at(self, step: float) -> list[float]:
        """Returns the mean rewards of the three train steps before an evaluation after `step`, and of the three after
        it: the weights of these steps are about those that it evaluated."""
        rewards = [(row["step"] <= step, row["reward/mean"]) for row in self.rows if "reward/mean" in row]
        before, after = ([reward for is_before, reward in rewards if is_before is side] for side in (True, False))
        return [*before[-_NEAR:], *after[:_NEAR]]


RULES = Rules[Evidence]()


@RULES.rule
def not_finite(evidence: Evidence) -> Iterator[Problem]:
    """A metric is NaN or infinite, or the run failed on a non-finite gradient norm or non-finite logits. Names the
    first such step and its first such metric, in the order reward, rollout, mismatch, train, eval."""
    for row in evidence.everything:
        keys = [key for key, value in row.items() if not math.isfinite(value)]
        if keys:
            keys.sort(key=lambda key: (_ORDER.index(area) if (area := key.partition("/")[0]) in _ORDER else 9, key))
            figures = f"{keys[0]} is {row[keys[0]]} at step {row['step']:.0f}; no earlier metric is NaN or infinite"
            yield wrong(figures, "look at the rollouts of this step (`trivium rollouts`); lower train.optimizer.lr")
            return
    if _overflowed(evidence):
        newest = ""
        for row in evidence.rows[-1:]:
            logged = [f"{key} {value:.4g}" for key, value in row.items() if key.startswith(_UPDATE)]
            newest = f"; step {row['step']:.0f}, the last one that was logged: {', '.join(logged)}"
        do = "lower train.optimizer.lr or train.max_grad_norm; `trivium replay` computes the last step again"
        yield wrong(_cause_of(evidence.error) + newest, do)


def _overflowed(evidence: Evidence) -> bool:
    """Whether non-finite numbers ended the run."""
    texts = ("the gradient norm is", "logits are NaN or infinite")
    return any(text in evidence.error for text in texts)


def _cause_of(error: str) -> str:
    """Returns the `found` part of an error, followed by its `asked` part in parentheses."""
    of, _, cause = error.partition(" do: ")[0].partition(" found: ")
    return f"{cause} ({of.removeprefix('asked: ')})" if cause else of


_UPDATE = ("train/loss/", "train/grad_norm/", "train/lr/")
"""Beginnings of the metrics that describe an update."""
_ORDER = ("reward", "rollout", "mismatch", "train", "eval")
"""Areas of metrics, from cause to effect."""


@RULES.rule
def ended_by_an_error(evidence: Evidence) -> Iterator[Problem]:
    """The newest session ended with an error. Prints the error and its remedy. Non-finite numbers are reported by the
    rule above."""
    if evidence.error and not _overflowed(evidence):
        do = evidence.error.partition(" do: ")[2]
        yield wrong(
            _cause_of(evidence.error), do or "look at log.txt; the same command continues from the last checkpoint"
        )


@RULES.rule
def entropy_collapse(evidence: Evidence) -> Iterator[Problem]:
    """`train/entropy` is below 0.02 nats and below a tenth of its first value, while the mean reward is not near its
    maximum: sampling is almost deterministic."""
    now, first = evidence.recent("train/entropy"), evidence.early("train/entropy")
    if now < 0.02 and now < 0.1 * first and not _near_maximum(evidence):
        figures = f"train/entropy is {now:.3g} nats, {first:.3g} at first; below 0.02 sampling is almost deterministic"
        yield wrong(
            figures, "raise algorithm.entropy.coef or clip_high of algorithm.policy_loss, lower train.optimizer.lr"
        )


@RULES.rule
def equal_rewards(evidence: Evidence) -> Iterator[Problem]:
    """In more than 95 % of groups all rewards are equal (`reward/equal_groups`) and the mean reward is below its
    maximum: advantages are 0, so nothing is learned."""
    part = evidence.recent("reward/equal_groups")
    if part > 0.95 and not _near_maximum(evidence):
        figures = f"in {part:.0%} of groups all rewards are equal, above 95 %: their advantages are 0"
        do = "easier tasks, a reward with partial credit, a larger schedule.group_size, or more supervised steps"
        if evidence.reward_range() == 0:
            figures = f"all rewards of the run are {evidence.recent('reward/mean'):g}: all advantages are 0"
            do = f"{do}; check the reward on completions of `trivium rollouts`, and the columns that it reads"
        elif evidence.values("reward/equal_groups")[0] < 0.5:
            figures, do = f"{figures}; most groups had unequal ones at first", f"lower train.optimizer.lr; {do}"
        yield wrong(figures, do)


@RULES.rule
def saturated_rewards(evidence: Evidence) -> Iterator[Problem]:
    """The mean reward is within 1 % of its maximum and in more than 95 % of groups all rewards are equal: the tasks are
    solved, or the reward is too easy to earn."""
    part = evidence.recent("reward/equal_groups")
    if part > 0.95 and _near_maximum(evidence):
        figures = (
            f"rewards are at {evidence.recent('reward/mean'):.4g}, their maximum, and equal in {part:.0%} of groups"
        )
        see = "read some rollouts to see whether they deserve the reward"
        yield wrong(figures, f"harder tasks, schedule.curriculum, or stop here; {see}")


def _near_maximum(evidence: Evidence) -> bool:
    """Whether the newest mean rewards differ from the highest reward by at most 1 % of the range of rewards. False
    while all rewards are equal and not above 0."""
    mean, lowest, highest = (evidence.values(f"reward/{name}") for name in ("mean", "min", "max"))
    if not (mean and highest and lowest):
        return False
    span = max(highest) - min(lowest)
    return fmean(mean[-WINDOW:]) >= max(highest) - 0.01 * span and (span > 0 or max(highest) > 0)


@RULES.rule
def falling_reward(evidence: Evidence) -> Iterator[Problem]:
    """The reward of the newest evaluation is below that of the best one by more than 30 % of the range of rewards. In a
    run without evaluations and curriculum: the mean reward is below that of the best 5 steps in a row by more than
    20 %."""
    do = "continue from an earlier step with a lower train.optimizer.lr or a smaller schedule.max_staleness"
    evaluated = [(key, points) for key, points in evidence.evaluated("eval/*/reward") if len(points) > 1]
    for key, points in evaluated:
        best, last = max(points, key=lambda point: point[1]), points[-1]
        if best[1] - last[1] > 0.3 * evidence.reward_range():
            figures = f"{key} fell from {best[1]:.3g} at step {best[0]:.0f} to {last[1]:.3g} at step {last[0]:.0f}"
            yield wrong(figures, do)
    values = evidence.values("reward/mean")
    means = [fmean(values[at : at + WINDOW]) for at in range(len(values) - WINDOW + 1)]
    compared = means and not evaluated and not evidence.values("curriculum/success")
    if compared and max(means) - means[-1] > 0.2 * evidence.reward_range():
        yield wrong(f"the mean reward of {WINDOW} steps fell from {max(means):.3g} to {means[-1]:.3g}", do)


@RULES.rule
def rising_loss(evidence: Evidence) -> Iterator[Problem]:
    """In a run that learns from rows of completions or pairs, at least 8 a step, the loss (`train/loss/policy`) is more
    than 1.5 times that of the first step."""
    rows = [row for row in evidence.recorded if (_PAIRS in row) == (_PAIRS in evidence.recorded[-1])]
    losses = [row["train/loss/policy"] for row in rows if row.get("rollout/trajectories", 0) >= 8]
    if len(losses) > WINDOW and (now := fmean(losses[-WINDOW:])) > 1.5 * losses[0] > 0:
        figures = f"train/loss/policy is {now:.3g}, {losses[0]:.3g} at first: more than 1.5 times as high"
        yield wrong(figures, "lower train.optimizer.lr; train.optimizer.warmup_steps")


@RULES.rule
def learning_rate_too_low(evidence: Evidence) -> Iterator[Problem]:
    """`train/lr/policy` has been at most 1 % of the usual rate (the default of `train.optimizer.lr`) for 10 steps or
    more, it does not rise, and the mean reward has not risen by 10 % of its range."""
    rates, usual = evidence.values("train/lr/policy"), evidence.usual_lr or 0.0
    gain = evidence.recent("reward/mean") - evidence.early("reward/mean")
    # 1e-4 / 100 is not exactly 1e-6.
    is_low = len(rates) >= 2 * WINDOW and max(rates) <= 0.0101 * usual and rates[-1] <= rates[-2]
    if is_low and gain < 0.1 * evidence.reward_range():
        figures = f"train/lr/policy is {max(rates):.3g} or less, and the reward does not rise; {usual:g} is usual here"
        yield wrong(figures, f"leave train.optimizer.lr out, or set it to {usual:g}")


@RULES.rule
def clip_fraction(evidence: Evidence) -> Iterator[Problem]:
    """More than 30 % of the trained tokens are clipped (`train/clip_fraction`)."""
    part = evidence.recent("train/clip_fraction")
    if part > 0.3:
        do = "lower train.optimizer.lr, algorithm.mini_batches or algorithm.epochs, or schedule.max_staleness"
        yield wrong(f"{part:.0%} of trained tokens are clipped, above 30 %", do)


@RULES.rule
def kl_drift(evidence: Evidence) -> Iterator[Problem]:
    """The KL divergence to the reference (`train/ref_kl`) is above 1 nat per token, or that to the policy before the
    step (`train/kl`) above 0.3, or above 1 in the newest step that trained."""
    # After one update with a rate of 0.1, every completion of a chat model was truncated, and no later step trained.
    for key, bound, now, what in (
        ("train/ref_kl", 1.0, evidence.recent("train/ref_kl"), "away from the reference"),
        ("train/kl", 0.3, evidence.recent("train/kl"), "away within a step"),
        ("train/kl", 1.0, sum(evidence.values("train/kl")[-1:]), "away within the newest step that trained"),
    ):
        if now > bound:
            figures = f"{key} is {now:.3g} nats a token {what}, above {bound:g}"
            yield wrong(figures, "raise algorithm.kl.coef, lower train.optimizer.lr")
            return


@RULES.rule
def length_explosion(evidence: Evidence) -> Iterator[Problem]:
    """`rollout/response_tokens` is more than 3 times its first value."""
    now, first = evidence.recent("rollout/response_tokens"), evidence.early("rollout/response_tokens")
    if now > 3 * first > 0:
        figures = f"completions have {now:.0f} tokens, {first:.0f} at first: more than 3 times as many"
        do = "algorithm.shaping with overlong_penalty or length_penalty; algorithm.aggregate token-mean"
        yield wrong(figures, do)


@RULES.rule
def length_collapse(evidence: Evidence) -> Iterator[Problem]:
    """`rollout/response_tokens` is below a fifth of its first value, while the mean reward is not near its maximum."""
    now, first = evidence.recent("rollout/response_tokens"), evidence.early("rollout/response_tokens")
    if now < 0.2 * first and not _near_maximum(evidence):
        figures = f"completions have {now:.1f} tokens, {first:.0f} at first: less than a fifth"
        yield wrong(
            figures, "read rollouts; lower train.optimizer.lr, raise algorithm.kl.coef; continue from an earlier step"
        )


@RULES.rule
def empty_completions(evidence: Evidence) -> Iterator[Problem]:
    """More than half of the completions have no text (`rollout/empty`)."""
    part = evidence.recent("rollout/empty")
    if part > 0.5:
        do = "continue from an earlier step with a lower train.optimizer.lr; engine.sampling.min_new_tokens"
        yield wrong(f"{part:.0%} of completions have no text, above 50 %", do)


@RULES.rule
def one_answer(evidence: Evidence) -> Iterator[Problem]:
    """More than 80 % of the completions of a step are the same text (`rollout/most_common`), in steps of at least four
    groups: the policy answers all prompts alike. It is found whether such answers earn the reward or not."""
    part = evidence.recent("rollout/most_common")
    if part > 0.8 and evidence.recent("rollout/groups") >= 4 and not evidence.recent("rollout/empty") > 0.5:
        figures = f"{part:.0%} of a step's completions are the same text, above 80 %"
        do = "read `trivium rollouts`; a reward that such an answer does not earn, or a lower train.optimizer.lr"
        yield wrong(figures, do)


@RULES.rule
def truncation(evidence: Evidence) -> Iterator[Problem]:
    """A length limit cuts more than half of the rollouts (`rollout/truncated`), after at least 10 steps; before, more
    than 95 %."""
    part = evidence.recent("rollout/truncated")
    # A policy that learns to be brief begins with many truncated completions.
    bound = 0.5 if len(evidence.values("rollout/truncated")) >= 2 * WINDOW else 0.95
    if part > bound:
        figures = f"{part:.0%} of rollouts end at the length limit, above {bound:.0%}: the rest of them is lost"
        do = "raise engine.sampling.max_new_tokens; algorithm.mask_truncated; shaping with overlong_penalty"
        yield wrong(figures, do)


@RULES.rule
def engine_mismatch(evidence: Evidence) -> Iterator[Problem]:
    """With staleness 0, the log-probabilities of engine and trainer for the same tokens differ by a KL divergence above
    0.01 nats per token (`mismatch/kl`). With `run.keep: tokens` it names the tokens that differ most."""
    kl = evidence.recent("mismatch/kl")
    if kl > 0.01 and not evidence.recent("rollout/staleness") > 0:
        worst = f"; worst at {'; '.join(evidence.mismatched)}"
        worst = worst if evidence.mismatched else " (run.keep: tokens shows where)"
        figures = f"mismatch/kl is {kl:.3g} nats a token with fresh rollouts, above 0.01{worst}"
        do = "use the same dtype in engine and train; algorithm.correction; check temperature and chat template"
        yield wrong(figures, do)


@RULES.rule
def staleness(evidence: Evidence) -> Iterator[Problem]:
    """With staleness above 0, the effective sample size is below 50 % (`mismatch/ess`) or the KL divergence between the
    policies that sampled and train the tokens above 0.5 nats (`mismatch/kl`); or more than 25 groups are evicted as too
    stale (`rollout/evicted`) for every 100 trained on."""
    age, sample, kl = (evidence.recent(key) for key in ("rollout/staleness", "mismatch/ess", "mismatch/kl"))
    evicted = evidence.share("rollout/evicted", "rollout/groups")
    if age > 0 and (sample < 0.5 or kl > 0.5):
        drift = f"{sample:.0%}, below 50 %" if sample < 0.5 else f"{sample:.0%}, and mismatch/kl {kl:.3g}, above 0.5"
        figures = f"groups are {age:.1f} versions old, and their effective sample size is {drift}"
        yield wrong(figures, "lower schedule.max_staleness, sync.interval or train.optimizer.lr; algorithm.correction")
    elif evicted > 0.25:
        figures = f"groups evicted as too stale are {evicted:.0%} of those trained on, above 25 %"
        yield wrong(figures, "raise schedule.max_staleness, shorten completions, or lower workflow.max_concurrent")


@RULES.rule
def dead_component(evidence: Evidence) -> Iterator[Problem]:
    """A component of the reward has been constant for 10 steps while others vary: it does not influence training."""
    keys = sorted({key for row in evidence.rows[-2 * WINDOW :] for key in row if key.startswith("reward/component/")})
    values = {key: evidence.values(key)[-2 * WINDOW :] for key in keys}
    dead = [key for key, series in values.items() if len(series) >= 2 * WINDOW and max(series) == min(series)]
    if dead and len(dead) < len(keys):
        constants = ", ".join(f"{key.removeprefix('reward/component/')} ({values[key][-1]:g})" for key in dead)
        figures = f"constant for {2 * WINDOW} steps: {constants}"
        yield wrong(figures, "check the reward on a few completions, or leave it out")


@RULES.rule
def failures(evidence: Evidence) -> Iterator[Problem]:
    """More than 10 % of rollouts fail (`rollout/failed`)."""
    failed = evidence.share("rollout/failed", "rollout/total")
    if failed > 0.1:
        yield wrong(f"{failed:.0%} of rollouts fail, above 10 %", "`trivium rollouts RUN --failed` shows why")


@RULES.rule
def refused_groups(evidence: Evidence) -> Iterator[Problem]:
    """More than half of the groups have no rewards or are refused by a filter (`rollout/refused`). Groups of equal
    rewards are not counted; `equal rewards` and `saturated rewards` report them."""
    equal = evidence.share("rollout/refused/zero_variance", "rollout/groups")
    refused = evidence.share("rollout/refused", "rollout/groups") - equal
    if refused > 0.5:
        do = "easier or more varied tasks; algorithm.refill; look at rollout/refused/* for the filter"
        yield wrong(f"{refused:.0%} of groups are refused, above 50 %", do)


@RULES.rule
def duplicated_rollouts(evidence: Evidence) -> Iterator[Problem]:
    """In some 3 consecutive steps, more than half of the completions of at least 8 tokens are identical to another one
    of their group. For shorter ones, see `one answer`."""
    # `counts` has (repeated, all) completions of each step, `windows` their sums over each step and the 2 before it.
    counts = [tuple(map(sum, zip((0, 0), *map(_repeated, groups), strict=True))) for groups in evidence.groups]
    windows = [tuple(map(sum, zip(*counts[max(0, end - 2) : end + 1], strict=True))) for end in range(len(counts))]
    repeating = [(number, total) for number, total in windows if total >= 16 and number > 0.5 * total]
    if repeating:
        number, total = repeating[-1]
        over = "" if windows[-1] == repeating[-1] else ", in earlier steps"
        figures = f"{number} of {total} completions repeat another one of their group, above 50 %{over}"
        yield wrong(figures, "raise engine.sampling.temperature or algorithm.entropy.coef")


def _repeated(group: Group) -> tuple[int, int]:
    """Returns (number of completions of at least 8 tokens that repeat another one, number of all of at least 8
    tokens)."""
    texts = [
        tuple(turn.tokens.tobytes() for turn in rollout.turns) for rollout in group.alive if rollout.num_tokens >= 8
    ]
    return len(texts) - len(set(texts)), len(texts)


@RULES.rule
def reward_hacking(evidence: Evidence) -> Iterator[Problem]:
    """The training reward has risen by more than 5 % of its range since the best evaluation, while the accuracy of an
    evaluation has fallen by more than 5 percentage points."""
    for key, points in evidence.evaluated("eval/*/accuracy"):
        best_step, best = max(points, key=lambda point: point[1])
        last_step, last = points[-1]
        before, after = evidence.sampled_at(best_step), evidence.sampled_at(last_step)
        if best - last <= 0.05 or not before or not after:
            continue
        then, now = fmean(before), fmean(after)
        if now - then > 0.05 * evidence.reward_range():
            figures = (
                f"{key} fell from {best:.1%} at step {best_step:.0f} to {last:.1%} at step {last_step:.0f}, "
                f"while reward/mean rose from {then:.3g} to {now:.3g}"
            )
            do = "read rollouts of high reward; correct the reward; checkpoint.keep_best; algorithm.kl.coef"
            yield wrong(figures, do)
            return


@RULES.rule
def generalization_gap(evidence: Evidence) -> Iterator[Problem]:
    """The mean training reward of at least 3 steps around the newest evaluation is above the mean reward of that
    evaluation by more than 30 % of the range of rewards. An evaluation before training shows no gap."""
    for key, points in evidence.evaluated("eval/*/reward"):
        step, held_out = points[-1]
        # All steps around an evaluation before training are later ones: by then the policy has learned more.
        trained = evidence.sampled_at(step) if any(row["step"] <= step for row in evidence.rows) else []
        if len(trained) >= _NEAR and fmean(trained) - held_out > 0.3 * evidence.reward_range():
            figures = f"reward/mean is {fmean(trained):.3g} around step {step:.0f}, and {key} {held_out:.3g} after it"
            do = "train on more tasks, or for fewer epochs; compare the two tasksets and their sampling"
            yield wrong(figures, do)
            return


@RULES.rule
def waiting(evidence: Evidence) -> Iterator[Problem]:
    """The trainer waits for rollouts for more than 90 % of a step that trains (`perf/idle`), and such a step takes over
    a second."""
    trained = replace(evidence, rows=[row for row in evidence.rows if row.get("rollout/trajectories") != 0])
    idle, seconds = trained.recent("perf/idle"), trained.recent("time/step")
    if idle > 0.9 and seconds > 1:
        figures = f"the trainer waits {idle * seconds:.1f} of the {seconds:.1f} s of a step, above 90 %"
        yield wrong(
            figures, "schedule.max_staleness, more explorers or engines (cluster.kind ray), shorter completions"
        )


class LiveWarnings:
    """A monitor that applies the rules during the run and logs each problem once."""

    def __init__(self, usual_lr: float | None = None, stage_bounds: Sequence[int] = ()) -> None:
        self._usual_lr, self._stage_bounds = usual_lr, stage_bounds
        self._first: list[Row] = []
        self._newest: deque[Row] = deque(maxlen=_NEWEST)
        self._reported: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for problem in self.problems_at({"step": float(step), **metrics}):
            if problem.where not in self._reported:
                self._reported.add(problem.where)
                _log.warning("step %d: %s", step, problem)

    def problems_at(self, row: Row) -> list[Problem]:
        """Returns the problems after one more row; the rules run every `WINDOW` steps and at a non-finite value."""
        # The first rows stay for rules that compare the run with its beginning.
        if any(self._first[-1]["step"] <= bound < row["step"] for bound in self._stage_bounds if self._first):
            self._first.clear()
            self._newest.clear()
        rows = self._first if len(self._first) < 2 * WINDOW else self._newest
        rows.append(row)
        if row["step"] % WINDOW and all(map(math.isfinite, row.values())):
            return []
        # `everything` is this row alone: a non-finite value of an earlier row was reported then.
        evidence = evidence_of([*self._first, *self._newest], self._stage_bounds, usual_lr=self._usual_lr)
        return RULES.problems(replace(evidence, everything=[row]))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def earlier_problems(
    rows: Iterable[Row],
    current: Iterable[Problem],
    usual_lr: float | None = None,
    stage_bounds: Sequence[int] = (),
) -> list[Problem]:
    """Returns the problems at earlier rows of a run that are not among its current ones, with their steps. Those of
    `_REFUTABLE` are left out."""
    warnings, held = LiveWarnings(usual_lr, stage_bounds), dict[str, tuple[float, float, Problem]]()
    for row in rows:
        for problem in warnings.problems_at(row):
            if problem.where in _REFUTABLE:
                continue
            first = held[problem.where][0] if problem.where in held else row["step"]
            held[problem.where] = first, row["step"], problem
    for problem in current:
        held.pop(problem.where, None)
    return [
        problem._replace(found=f"at step {last:.0f}, first at step {first:.0f}, no longer: {problem.found}")
        for first, last, problem in held.values()
    ]


def evidence_of(rows: Iterable[Row], stage_bounds: Sequence[int] = (), **further: Any) -> Evidence:
    """Collects the evidence in rows of metrics. Stages differ in tasks, rewards and limits, so that their steps are not
    compared with each other."""
    everything = list(rows)
    trained = [row for row in everything if "reward/mean" in row and "train/version" in row]
    newest = trained[-1]["step"] if trained else 0
    begin = max((bound for bound in stage_bounds if bound < newest), default=0)
    trained = [row for row in trained if row["step"] > begin]
    evaluations = [row for row in everything if row["step"] >= begin and any(key.startswith("eval/") for key in row)]
    recorded = [row for row in everything if "train/loss/policy" in row and ("reward/mean" not in row or _PAIRS in row)]
    return Evidence(trained, evaluations, recorded=recorded, everything=everything, **further)
