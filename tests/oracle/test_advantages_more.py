"""Advantage estimators, gates and filters against loops written from the papers, in python's own arithmetic.

A played batch here is a list of rows; each says its task, its trajectory, which of its tokens are trained on and what
stands on every token. Loops look things up in that list and never in the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, nan, sqrt
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
import torch
from episodes import turn as turn_of
from failing import refused
from torch import Tensor, tensor

from trivium.algorithms import AdvantageInputs, GroupAlgorithm, PolicyObjective, build_algorithm, catalogue
from trivium.algorithms.algorithm import Estimator
from trivium.algorithms.batches import batch_of
from trivium.algorithms.estimator_inputs import advantage_inputs, estimator_column
from trivium.algorithms.estimators.finishing import normalised, whitened
from trivium.algorithms.losses.base import policy_inputs
from trivium.algorithms.metadata import EstimatorMetadata
from trivium.config import AlgorithmConfig, plugin
from trivium.foundation.errors import DataError
from trivium.types import Batch, Experience, Group, Task, Trajectory, Turn, TurnSpan

ESTIMATORS = catalogue("advantages")


@dataclass
class Row:
    """One sequence: its tokens' masks and numbers."""

    task: int
    trajectory: int
    mask: list[bool]
    columns: dict[str, list[float]] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)

    @property
    def trained(self) -> list[int]:
        return [t for t, inside in enumerate(self.mask) if inside]

    @property
    def score(self) -> float:
        return sum(self.rewards)

    def of(self, name: str) -> list[float]:
        """A column's numbers on the trained tokens."""
        return [self.columns[name][t] for t in self.trained]


MASKS = ["0111", "0101", "0110", "0000", "0111", "0011", "0111", "0001"]
TASKS, TRAJECTORIES = [4, 4, 4, 7, 7, 7, 9, 7], [0, 1, 2, 3, 4, 5, 6, 5]
"""Three members, one of them with a hole; three, of which one trained on nothing and one is two rows; one alone."""
SCORES = [1.0, 0.25, 0.5, 2.0, 0.0, 1.5, 0.75, 1.5]
PENALTY = "penalty"
NUMBERS = {"turn": torch.int64, "turn_state": torch.int64}
"""Columns that are no floats."""


def rows(scores: Sequence[float] = SCORES, names: Sequence[str] = (), penalised: bool = False) -> list[Row]:
    """The rows with these rewards on their last trained tokens; columns hold arbitrary log-probabilities."""
    rng = np.random.default_rng(0)
    result: list[Row] = []
    for task, trajectory, mask, score in zip(TASKS, TRAJECTORIES, MASKS, scores, strict=True):
        row = Row(task, trajectory, [bit == "1" for bit in mask], rewards=[0.0] * len(mask))
        if row.trained:
            row.rewards[row.trained[-1]] = score
        row.columns = {name: (-rng.uniform(0.05, 2, len(mask))).tolist() for name in names}
        row.columns[PENALTY] = [0.0] * len(mask)
        if penalised:
            row.columns[PENALTY] = [float(rng.normal()) * inside for inside in row.mask]
        result.append(row)
    return result


def inputs(played: Sequence[Row], *names: str) -> AdvantageInputs:
    """The rows as an estimator sees them."""
    scores = torch.tensor([row.rewards for row in played], dtype=torch.float64)
    penalty = torch.tensor([row.columns[PENALTY] for row in played], dtype=torch.float64)
    return AdvantageInputs(
        scores - penalty,
        torch.tensor([row.mask for row in played]),
        torch.tensor([row.task for row in played]),
        torch.tensor([row.trajectory for row in played]),
        {name: tensor([row.columns[name] for row in played], dtype=NUMBERS.get(name, torch.float64)) for name in names},
        token_level_scores=scores if penalty.any() else None,
    )


def compare(
    found: Tensor, played: Sequence[Row], expected: Callable[[Row, int], float], tolerance: float = 1e-9
) -> None:
    """Each trained token's number; 0 elsewhere."""
    want = [[expected(row, t) if row.mask[t] else 0.0 for t in range(len(row.mask))] for row in played]
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=tolerance, atol=tolerance)


def check(kind: str, played: Sequence[Row], expected: Callable[[Row], float], *names: str, **options: object) -> None:
    """A number for each trajectory, as the advantage and the return of all its tokens."""
    done = ESTIMATORS[kind](inputs(played, *names), **options)
    for found in done:
        compare(found, played, lambda row, t: expected(row))


def mates(row: Row, played: Sequence[Row]) -> dict[int, float]:
    """The reward of each trajectory of a row's task: the mean over its rows."""
    of_task = [other for other in played if other.task == row.task]
    return {
        t: fmean(other.score for other in of_task if other.trajectory == t)
        for t in dict.fromkeys(other.trajectory for other in of_task)
    }


def own(row: Row, played: Sequence[Row]) -> float:
    return mates(row, played)[row.trajectory]


def centred(row: Row, played: Sequence[Row]) -> float:
    """Against the mean of the group; a group of one keeps its reward."""
    group = mates(row, played)
    return own(row, played) - (fmean(group.values()) if len(group) > 1 else 0.0)


def deviation(row: Row, played: Sequence[Row], of: Callable[[list[float]], float]) -> float:
    group = list(mates(row, played).values())
    return of(group) if len(group) > 1 else 1.0


# --------------------------------------------------------------------------- one number per trajectory


def test_grpo_measures_against_the_group_or_against_the_batch() -> None:
    played = rows()
    everybody = [own(row, played) for row in played[:-1]]  # the last row is a second one of its trajectory
    check("grpo", played, lambda row: centred(row, played) / (deviation(row, played, stdev) + 1e-6))
    check("grpo", played, lambda row: centred(row, played) / (stdev(everybody) + 0.5), std_level="batch", epsilon=0.5)


def test_rloo_lets_a_group_of_one_keep_its_reward_or_nothing() -> None:
    played = rows()

    def others(row: Row, lonely: float) -> float:
        rest = [score for who, score in mates(row, played).items() if who != row.trajectory]
        return own(row, played) - fmean(rest) if rest else lonely

    check("rloo", played, lambda row: others(row, 0.75))
    check("rloo", played, lambda row: others(row, 0.0), alone="zero")


def test_rank_penalty_takes_more_from_the_likely() -> None:
    played = rows(names=["rollout_log_prob"])

    def likelihood(who: int) -> float:
        tokens = [value for row in played if row.trajectory == who for value in row.of("rollout_log_prob")]
        return fmean(tokens) if tokens else 0.0

    def penalised(row: Row) -> dict[int, float]:
        group = mates(row, played)
        below = {who: sum(likelihood(other) < likelihood(who) for other in group) for who in group}
        return {who: score * (1 - 0.5 * below[who] / len(group)) for who, score in group.items()}

    def expected(row: Row) -> float:
        group = penalised(row)
        if len(group) == 1:
            return group[row.trajectory] / (1 + 1e-6)
        return (group[row.trajectory] - fmean(group.values())) / (stdev(group.values()) + 1e-6)

    check("grpo_rank_penalty", played, expected, "rollout_log_prob", rank_penalty=0.5)


def test_equally_likely_members_have_one_rank() -> None:
    played = rows(names=["rollout_log_prob"])[:2]
    for row in played:
        row.columns["rollout_log_prob"] = [-1.0] * 4
    check("grpo_rank_penalty", played, lambda row: centred(row, played), "rollout_log_prob", norm_by_std=False)


def test_opo_weighs_replies_by_their_length() -> None:
    played = rows()

    def expected(row: Row) -> float:
        group = mates(row, played)
        length = {who: sum(len(r.trained) for r in played if r.trajectory == who) for who in group}
        baseline = sum(length[who] * score for who, score in group.items()) / sum(length.values())
        return own(row, played) - (baseline if len(group) > 1 else 0.0)

    check("opo", played, expected)


def test_gpg_scales_by_how_many_rewards_say_something() -> None:
    played = rows()  # of seven trajectories one got nothing, and one trained on nothing
    check("gpg", played, lambda row: 7 / 5 * centred(row, played) / 0.5, f_norm=0.5)


def test_pass_at_k_teaches_the_best_by_its_lead() -> None:
    played = rows()

    def lead(row: Row) -> float:
        ranked = sorted(mates(row, played).values(), reverse=True)
        return ranked[0] - ranked[1] if len(ranked) > 1 and own(row, played) == ranked[0] else 0.0

    check("grpo_passk", played, lead, norm_by_std=False)
    check("grpo_passk", played, lambda row: lead(row) / (deviation(row, played, stdev) + 1e-6))
    tied = rows([1.0, 1.0, 0.5, 0.0, 0.0, 0.25, 0.75, 0.25])
    check("grpo_passk", tied, lambda row: 0.25 if row.trajectory == 5 else 0.0, norm_by_std=False)


def test_max_rl_divides_by_the_success_rate() -> None:
    played = rows([1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])

    def expected(row: Row) -> float:
        rate = fmean(mates(row, played).values())
        return (own(row, played) - rate) / rate

    check("max_rl", played, expected)
    check("max_rl", rows([0.0] * 8), lambda row: 0.0)
    with refused(DataError, "max_rl", "-0.5"):
        ESTIMATORS["max_rl"](inputs(rows([-0.5, *SCORES[1:]])))


def test_max_rl_follows_the_gradient_of_the_log_success_rate() -> None:
    """Over all samples of size G, its mean gradient is the first G - 1 terms of that of the log of the success rate."""
    p, size, mean = 0.3, 3, 0.0
    for outcome in range(2**size):
        rewards = [float(outcome >> place & 1) for place in range(size)]
        x = inputs([Row(0, i, [True], {PENALTY: [0.0]}, [r]) for i, r in enumerate(rewards)])
        advantages = ESTIMATORS["max_rl"](x).advantages[:, 0].tolist()
        probability = p ** sum(rewards) * (1 - p) ** (size - sum(rewards))
        # d log P(sample) / dp is 1 / p for a success and -1 / (1 - p) for a failure
        score = [1 / p if reward else -1 / (1 - p) for reward in rewards]
        mean += probability * fmean(a * s for a, s in zip(advantages, score, strict=True))
    assert mean == pytest.approx(sum((1 - p) ** k for k in range(size - 1)))  # 1 / p = sum over all k of (1 - p)^k


def test_cpgd_uses_the_population_deviation() -> None:
    played = rows()
    check("cpgd", played, lambda row: centred(row, played) / (deviation(row, played, pstdev) + 1e-6))
    check("cpgd", played, lambda row: centred(row, played), norm_by_std=False)


def test_opmd_against_the_mean_or_the_soft_maximum() -> None:
    played = rows()

    def soft(row: Row, tau: float) -> float:
        group = list(mates(row, played).values())
        baseline = tau * log(fmean(exp(score / tau) for score in group)) if len(group) > 1 else 0.0
        return own(row, played) - baseline

    check("opmd", played, lambda row: centred(row, played))
    check("opmd", played, lambda row: soft(row, 0.3), baseline="logavgexp", tau=0.3)
    hot = ESTIMATORS["opmd"](inputs(rows([score * 1e6 for score in SCORES])), baseline="logavgexp", tau=1e-3)
    assert torch.isfinite(hot.advantages).all()


def test_asymre_shifts_the_baseline() -> None:
    played = rows()
    check(
        "asymre",
        played,
        lambda row: centred(row, played) + (0.2 if len(mates(row, played)) > 1 else 0.0),
        baseline_shift=-0.2,
    )


def drawn(number: Sequence[float]) -> list[Row]:
    """Five members of one task, one right and four wrong, with these draws."""
    return [
        Row(1, i, [False, True], {"uniform": [u, 0.0], PENALTY: [0.0, 0.0]}, [0.0, 1.0 if i == 2 else 0.05 * i])
        for i, u in enumerate(number)
    ]


def test_rec_keeps_as_many_bad_members_as_good_ones() -> None:
    played = drawn([0.5, 0.1, 0.9, 0.7, 0.3])  # member 1 has the lowest draw of the bad ones
    kept = [0.05, 1.0]
    check(
        "rec",
        played,
        lambda row: row.score - fmean(kept) if row.trajectory in (1, 2) else 0.0,
        "uniform",
        drop="balance",
    )
    check(
        "rec",
        played,
        lambda row: (row.score - fmean(kept)) / (pstdev(kept) + 1e-6) if row.trajectory in (1, 2) else 0.0,
        "uniform",
        drop="balance",
        norm_by_std=True,
    )
    whole = rows(names=["uniform"])
    check(
        "rec",
        whole,
        lambda row: centred(row, whole) / (deviation(row, whole, pstdev) + 1e-6),
        "uniform",
        norm_by_std=True,
    )


def test_reinforce_plus_plus_baseline_whitens_tokens() -> None:
    played = rows()
    tokens = [centred(row, played) for row in played for _ in row.trained]
    check(
        "reinforce_plus_plus_baseline",
        played,
        lambda row: (centred(row, played) - fmean(tokens)) / sqrt(stdev(tokens) ** 2 + 1e-8),
    )


# --------------------------------------------------------------------------- returns


def to_go(row: Row, t: int, numbers: Sequence[float], gamma: float) -> float:
    later = [place for place in row.trained if place >= t]
    return sum(gamma**distance * numbers[place] for distance, place in enumerate(later))


def test_reinforce_plus_plus_whitens_returns() -> None:
    played = rows(penalised=True)
    net = {id(row): [r - p for r, p in zip(row.rewards, row.columns[PENALTY], strict=True)] for row in played}

    def returns(row: Row, t: int) -> float:
        return to_go(row, t, net[id(row)], 0.9)

    tokens = [returns(row, t) for row in played for t in row.trained]
    done = ESTIMATORS["reinforce_plus_plus"](inputs(played), gamma=0.9)
    compare(done.returns, played, returns)
    compare(
        done.advantages,
        played,
        lambda row, t: (returns(row, t) - fmean(tokens)) / sqrt(stdev(tokens) ** 2 + 1e-8),
    )


def test_remax_subtracts_what_a_greedy_reply_earns() -> None:
    played = rows(names=["greedy_reward"])
    done = ESTIMATORS["remax"](inputs(played, "greedy_reward"))
    compare(done.returns, played, lambda row, t: to_go(row, t, row.rewards, 1.0))
    compare(
        done.advantages,
        played,
        lambda row, t: to_go(row, t, row.rewards, 1.0) - row.columns["greedy_reward"][t],
    )


def from_outcome(row: Row, t: int, outcome: float, gamma: float) -> float:
    """The return of an outcome on the last trained token, less the discounted penalty on the way there."""
    numbers = [-penalty for penalty in row.columns[PENALTY]]
    numbers[row.trained[-1]] += outcome
    return to_go(row, t, numbers, gamma)


def test_reinforce_baseline_leaves_the_penalty_where_it_arose() -> None:
    played = rows(penalised=True)
    done = ESTIMATORS["reinforce_baseline"](inputs(played), gamma=0.9)
    for found in done:
        compare(found, played, lambda row, t: from_outcome(row, t, centred(row, played), 0.9))

    def against_others(row: Row, t: int) -> float:
        rest = [score for who, score in mates(row, played).items() if who != row.trajectory]
        return from_outcome(row, t, own(row, played) - (fmean(rest) if rest else 0.0), 1.0)

    tokens = [against_others(row, t) for row in played for t in row.trained]
    white = ESTIMATORS["reinforce_baseline"](inputs(played), baseline="others", whiten=True)
    compare(white.returns, played, against_others)
    compare(
        white.advantages,
        played,
        lambda row, t: (against_others(row, t) - fmean(tokens)) / sqrt(stdev(tokens) ** 2 + 1e-8),
    )


def test_group_norm_is_the_same_in_units_of_the_deviation() -> None:
    played = rows(penalised=True)
    for found in ESTIMATORS["group_norm"](inputs(played), gamma=0.9):
        compare(
            found,
            played,
            lambda row, t: from_outcome(row, t, centred(row, played) / (deviation(row, played, stdev) + 1e-9), 0.9),
        )


# --------------------------------------------------------------------------- positions


def slow_token_baseline(played: Sequence[Row], compact: bool, zero_tail: bool, weighted: bool) -> Callable:
    """B at a place = sum W G / sum W over the replies of the task; a trajectory's rows share its weight."""

    def place(row: Row, t: int) -> int:
        return row.trained.index(t) if compact else t - row.trained[0]

    def weight(row: Row, t: int) -> float:
        several = sum(other.trajectory == row.trajectory for other in played)
        total = 0.0
        for s in row.trained[: row.trained.index(t) + 1]:
            scale = row.columns["rollout_is_weights"][s] ** 2 if weighted else 1.0
            squares = row.columns["sum_pi_squared"][s]
            total += scale * (1 - 2 * exp(row.columns["log_prob"][s]) + squares)
        return total / several

    def length(who: int) -> int:
        return max((place(r, r.trained[-1]) + 1 for r in played if r.trajectory == who and r.trained), default=0)

    def advantage(row: Row, t: int) -> float:
        others = {r.trajectory for r in played if r.task == row.task} - {row.trajectory}
        value = to_go(row, t, row.rewards, 1.0)
        if not others or (zero_tail and place(row, t) >= max(map(length, others))):
            return value
        there = [
            (weight(other, s), to_go(other, s, other.rewards, 1.0))
            for other in played
            if other.task == row.task
            for s in other.trained
            if place(other, s) == place(row, t)
        ]
        return value - sum(w * g for w, g in there) / sum(w for w, _ in there)

    return advantage


def scored(weighted: bool = False) -> list[Row]:
    played = rows(names=["log_prob"])
    rng = np.random.default_rng(1)
    for row in played:
        row.columns["log_prob"] = [-abs(value) for value in row.columns["log_prob"]]
        likely = [exp(value) for value in row.columns["log_prob"]]  # the rest of the vocabulary has 1 - p to share
        row.columns["sum_pi_squared"] = [p**2 + float(rng.uniform(0.1, 1)) * (1 - p) ** 2 for p in likely]
        row.columns["rollout_is_weights"] = rng.uniform(0.5, 2, 4).tolist()
        row.rewards = [r + float(rng.normal()) * inside for r, inside in zip(row.rewards, row.mask, strict=True)]
    return played


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("zero_tail", [False, True])
def test_token_baselines_weigh_returns_by_the_size_of_the_gradient(zero_tail: bool, weighted: bool) -> None:
    played = scored()
    names = ["log_prob", "sum_pi_squared", *(["rollout_is_weights"] if weighted else [])]
    for kind, compact in (("optimal_token_baseline", False), ("tir_optimal_token_baseline", True)):
        done = ESTIMATORS[kind](inputs(played, *names), handle_zero_tail=zero_tail)
        compare(done.advantages, played, slow_token_baseline(played, compact, zero_tail, weighted), 1e-6)
        compare(done.returns, played, lambda row, t: to_go(row, t, row.rewards, 1.0))


# --------------------------------------------------------------------------- turns


TURNS = {0: [0, 0, 1], 1: [0, 1], 2: [0, 1], 4: [0, 1, 2], 6: [0, 0, 1]}
"""Row -> the turn of each of its trained tokens; rows 5 and 7 are turns 0 and 1 of one trajectory."""


def episodes() -> list[Row]:
    played = rows()
    rng = np.random.default_rng(2)
    for number, row in enumerate(played):
        turns = [0, 0] if number == 5 else [1] if number == 7 else TURNS.get(number, [])
        spread = dict(zip(row.trained, turns, strict=True))
        row.columns["turn"] = [spread.get(t, -1) for t in range(4)]
        row.columns["turn_state"] = [-1 if t not in spread else (spread[t] + row.trajectory) % 2 for t in range(4)]
        row.columns["turn_reward"] = [0.0] * 4
        for turn in set(turns):
            last = max(t for t in spread if spread[t] == turn)
            row.columns["turn_reward"][last] = round(float(rng.normal()), 2)
    played[0].columns["turn_state"] = [-1] * 4  # nobody knows the states of this one
    return played


def turns_of(who: int, played: Sequence[Row]) -> dict[int, tuple[float, float]]:
    """Turn -> (what it was paid, its state) of a trajectory."""
    found: dict[int, list[float]] = {}
    for row in played:
        for t in row.trained if row.trajectory == who else []:
            paid = found.setdefault(int(row.columns["turn"][t]), [0.0, 0.0])
            paid[0] += row.columns["turn_reward"][t]
            paid[1] = row.columns["turn_state"][t]
    return {turn: (found[turn][0], found[turn][1]) for turn in sorted(found)}


def test_step_wise_grpo_shares_an_episode_out_among_its_turns() -> None:
    played = episodes()

    def expected(row: Row, share: bool) -> float:
        value = centred(row, played) / (deviation(row, played, stdev) + 1e-6)
        return value / len(turns_of(row.trajectory, played)) if share else value

    check("step_wise_grpo", played, lambda row: expected(row, False), "turn")
    check("step_wise_grpo", played, lambda row: expected(row, True) if row.trained else 0.0, "turn", norm_by_steps=True)


@pytest.mark.parametrize("fnorm", ["none", "std"])
def test_gigpo_compares_turns_that_were_played_in_the_same_state(fnorm: str) -> None:
    played = episodes()
    names, gamma, omega = ("turn", "turn_reward", "turn_state"), 0.9, 0.7
    x = inputs(played, *names)
    task = {row.trajectory: row.task for row in played}
    score = {row.trajectory: own(row, played) for row in played}

    returns: dict[tuple[int, int], float] = {}
    for who in task:
        turns = turns_of(who, played)
        paid = {turn: pay for turn, (pay, _) in turns.items()}
        if turns:
            paid[max(turns)] += score[who] - sum(paid.values())
        for turn in turns:
            later = [later for later in turns if later >= turn]
            returns[who, turn] = sum(gamma**k * paid[other] for k, other in enumerate(later))

    def scale(values: list[float]) -> float:
        return (stdev(values) if len(values) > 1 else 1.0) + 1e-6 if fnorm == "std" else 1.0

    def expected(row: Row, t: int) -> float:
        episode = centred(row, played) / scale(list(mates(row, played).values()))
        mine = int(row.columns["turn"][t])
        state = turns_of(row.trajectory, played)[mine][1]
        same = [
            value
            for (who, turn), value in returns.items()
            if task[who] == row.task and turns_of(who, played)[turn][1] == state
        ]
        if state < 0 or len(same) < 2:
            return episode
        return episode + omega * (returns[row.trajectory, mine] - fmean(same)) / scale(same)

    for found in ESTIMATORS["gigpo"](x, omega=omega, gamma=gamma, fnorm=fnorm):
        compare(found, played, expected)


# --------------------------------------------------------------------------- components


def test_gdpo_judges_each_component_by_itself() -> None:
    played = rows()
    who = [row.trajectory for row in played]
    right = dict(zip(range(7), [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], strict=True))
    style = dict(zip(range(7), [3.0, 90.0, nan, 50.0, 20.0, 10.0, 4.0], strict=True))
    components = {"right": right, "style": style}
    x = replace(
        inputs(played),
        components={name: torch.tensor([of[w] for w in who], dtype=torch.float64) for name, of in components.items()},
    )

    def total(row: Row, weights: dict[str, float], by_std: bool) -> float:
        value = 0.0
        for name, of in components.items():
            group = [of[other] for other in mates(row, played) if of[other] == of[other]]
            mine = of[row.trajectory]
            if mine == mine:
                mean, std = (fmean(group), stdev(group)) if len(group) > 1 else (0.0, 1.0)
                value += weights[name] * (mine - mean) / (std + 1e-6 if by_std else 1.0)
        return value

    for weights, by_std in (({"right": 1.0, "style": 0.1}, True), ({"right": 1.0, "style": 1.0}, False)):
        tokens = [total(row, weights, by_std) for row in played for _ in row.trained]
        given = None if weights["style"] == 1.0 else weights
        for found in ESTIMATORS["gdpo"](x, weights=given, norm_by_std=by_std):
            compare(
                found,
                played,
                lambda row, t, w=weights, s=by_std, all_=tokens: (
                    (total(row, w, s) - fmean(all_)) / sqrt(stdev(all_) ** 2 + 1e-8)
                ),
            )
    with refused(DataError, "style", "algorithm.advantage.weights"):
        ESTIMATORS["gdpo"](x, weights={"right": 1.0, "styel": 1.0})
    with refused(DataError, "rewards"):
        ESTIMATORS["gdpo"](inputs(played))


# --------------------------------------------------------------------------- teachers


def test_a_teachers_opinion_of_each_token() -> None:
    names = ["old_log_prob", "teacher_log_prob"]
    played = rows(names=names)
    x = inputs(played, *names)

    def s(row: Row, t: int, heat: float = 1.0) -> float:
        return row.columns["old_log_prob"][t] / heat

    def q(row: Row, t: int, heat: float = 1.0) -> float:
        return row.columns["teacher_log_prob"][t] / heat

    for found in ESTIMATORS["on_policy_distill"](x, kl_coef=0.3):
        compare(found, played, lambda row, t: 0.3 * (q(row, t) - s(row, t)))

    def integrand(row: Row, t: int, b: float, heat: float) -> float:
        m = log((1 - b) * exp(s(row, t, heat)) + b * exp(q(row, t, heat)))
        return b * (q(row, t, heat) - m) + (1 - b) * (s(row, t, heat) - m)

    for found in ESTIMATORS["jsd"](x, lambda_coef=0.2, kl_coef=0.5, temperature=2.0):
        compare(found, played, lambda row, t: -0.5 * integrand(row, t, 0.2, 2.0))
    compare(ESTIMATORS["jsd"](x, lambda_coef=0.0).advantages, played, lambda row, t: q(row, t) - s(row, t))
    compare(ESTIMATORS["jsd"](x, lambda_coef=1.0).advantages, played, lambda row, t: s(row, t) - q(row, t))


# --------------------------------------------------------------------------- gates and filters


def gate_inputs() -> tuple[list[tuple[int, int]], dict[str, list[list[float]]], Tensor]:
    rng = np.random.default_rng(3)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]]).bool()
    columns = {name: (-rng.uniform(0.05, 3, mask.shape)).tolist() for name in ("log_prob", "mean_discriminant")}
    columns["entropy"] = rng.uniform(0.1, 3, mask.shape).tolist()
    columns["advantages"] = [[-1.0] * 7, [0.0] * 7, [1.0] * 3 + [-0.5] * 4]
    return [(int(i), int(t)) for i, t in mask.nonzero()], columns, mask


def weights_of(kind: str, columns: dict[str, list[list[float]]], mask: Tensor, **options: float) -> list[list[float]]:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    x = policy_inputs(tensors["log_prob"], mask, **{n: t for n, t in tensors.items() if n != "log_prob"})
    return catalogue("gates")[kind](replace(x, entropy=tensors["entropy"]), **options).tolist()


def test_clip_b_shuts_discouraged_tokens_far_below_the_mean() -> None:
    tokens, c, mask = gate_inputs()

    def signal(i: int, t: int) -> float:
        return exp(c["log_prob"][i][t]) * (c["entropy"][i][t] + c["log_prob"][i][t])

    values = [signal(*token) for token in tokens]
    bound = fmean(values) - 0.5 * pstdev(values)
    found = weights_of("clip_b", c, mask, mu=0.5)
    shut = [(i, t) for i, t in tokens if found[i][t] == 0]
    assert shut == [(i, t) for i, t in tokens if c["advantages"][i][t] < 0 and signal(i, t) < bound]
    assert 0 < len(shut) < len(tokens)
    assert {w for row in found for w in row} == {0.0, 1.0}


def test_clip_v_shuts_the_worst_first_and_no_more_than_its_share() -> None:
    tokens, c, mask = gate_inputs()
    c["mean_discriminant"] = [[0.1 * t for t in range(7)] for _ in range(3)]

    def excess(i: int, t: int) -> float:
        lp = c["log_prob"][i][t]
        return c["mean_discriminant"][i][t] - exp(lp) * (c["entropy"][i][t] + lp)

    bound = 0.3 * pstdev([excess(*token) for token in tokens])
    candidates = [(i, t) for i, t in tokens if c["advantages"][i][t] <= 0 and excess(i, t) > bound]
    discouraged = sorted(
        (token for token in candidates if c["advantages"][token[0]][token[1]] < 0), key=lambda o: -excess(*o)
    )
    assert len(discouraged) > 2
    for fraction, room in ((1.0, len(discouraged)), (2.5 / len(tokens), 2), (1e-9, 1)):
        found = weights_of("clip_v", c, mask, mu=0.3, max_fraction=fraction)
        shut = {(i, t) for i, t in tokens if found[i][t] == 0}
        assert shut == set(candidates) - set(discouraged[room:])
    assert {w for row in found for w in row} == {0.0, 1.0}


def test_low_std_refuses_up_to_its_threshold() -> None:
    low_std = catalogue("filters")["low_std"]

    def keeps(*rewards: float, **options: float) -> bool:
        members = tuple(Trajectory(i, rewards={"r": reward}) for i, reward in enumerate(rewards))
        return low_std(Group(0, Task("t", ()), members), **options)

    assert keeps(1.0, 0.0, threshold=0.7)  # 0.7071
    assert not keeps(1.0, 0.0, threshold=0.71)
    assert not keeps(0.5, 0.5)
    assert not keeps(5.0)


# --------------------------------------------------------------------------- afterwards


def test_whitening_and_normalising_are_exact_where_all_are_equal() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]]).bool()
    equal = torch.where(mask, 0.7, torch.nan)
    for values in (whitened(equal, mask), normalised(equal, mask), normalised(equal, mask, axis=1)):
        assert values.eq(0).all()
    lone = torch.tensor([[False, True]])
    assert whitened(torch.tensor([[9.0, 2.0]]), lone).tolist() == [[0.0, 2.0]]
    assert whitened(torch.zeros(0, 0), torch.zeros(0, 0).bool()).shape == (0, 0)
    assert normalised(torch.zeros(0, 0), torch.zeros(0, 0).bool()).shape == (0, 0)


@pytest.mark.parametrize(("said", "clip"), [("none", 0.4), ("mean", None), ("std", 1.0)])
def test_advantages_are_normalised_over_the_batch_and_then_clipped(said: str, clip: float | None) -> None:
    played = rows()
    tokens = [centred(row, played) for row in played for _ in row.trained]

    def expected(row: Row, t: int) -> float:
        value = centred(row, played)
        value -= fmean(tokens) if said != "none" else 0.0
        value /= pstdev(tokens) if said == "std" else 1.0
        return max(-clip, min(clip, value)) if clip else value

    section = plugin("algorithms", AlgorithmConfig)(
        {"kind": "grpo", "advantage": {"norm_by_std": False}, "normalise_advantages": said, "clip_advantages": clip}
    )
    estimator = build_algorithm(section).estimator
    assert estimator is not None
    done, metrics = estimator.advantages(inputs(played))
    compare(done.advantages, played, expected)
    compare(done.returns, played, lambda row, t: centred(row, played))
    if clip is None:
        assert metrics == {}
    else:
        unclipped = [
            (v - (fmean(tokens) if said == "std" else 0)) / (pstdev(tokens) if said == "std" else 1) for v in tokens
        ]
        assert metrics == {"train/advantage_clipped": pytest.approx(fmean(abs(v) > clip for v in unclipped))}


# --------------------------------------------------------------------------- what an algorithm hands over


def turn(prompt: Sequence[int], reply: Sequence[int], reward: float = 0.0, state: str = "") -> Turn:
    return turn_of(prompt, reply, reward=reward, state=state)


def two_groups() -> list[Group]:
    """Trajectories of two turns: the second follows the first in one, rewrites history in the other."""
    follows = (turn([1], [2, 3], 0.5, "start"), turn([1, 2, 3, 9], [4], 0.25, "door"))
    rewrites = (turn([1], [5], -1.0, "start"), turn([8, 8], [6, 7], 0.0, ""))
    again = (turn([1], [2], 2.0, "start"),)
    return [
        Group(
            0,
            Task("a", ()),
            (Trajectory(0, follows, {"e": 0.75}), Trajectory(1, rewrites, {"e": -1.0, "style": 2.0})),
            greedy=Trajectory(2, again, {"e": 0.125}),
        ),
        Group(1, Task("b", ()), (Trajectory(0, again, {"e": 2.0}),), greedy=Trajectory(1, again, {"e": 0.5})),
    ]


def column(name: str, batch: Batch, seed: int = 0) -> list[list[float]]:
    return estimator_column(batch, name, seed).tolist()


def test_turns_reach_the_estimators() -> None:
    batch = batch_of(two_groups())
    assert [len(e) for e in batch.experiences] == [5, 2, 4, 2]
    assert column("turn", batch) == [[-1, 0, 0, -1, 1], [-1, 0, -1, -1, -1], [-1, -1, 1, 1, -1], [-1, 0, -1, -1, -1]]
    assert column("turn_reward", batch) == [[0, 0, 0.5, 0, 0.25], [0, -1, 0, 0, 0], [0] * 5, [0, 2, 0, 0, 0]]
    states = column("turn_state", batch)
    start, door, unknown, elsewhere = states[0][1], states[0][4], states[2][2], states[3][1]
    assert states[0] == [-1, start, start, -1, door]
    assert states[1] == [-1, start, -1, -1, -1]  # the same state of the same task
    assert unknown == -1
    assert len({start, door, elsewhere, -1}) == 4  # another task's state of that name is another state
    assert column("rollout_log_prob", batch)[2] == [0, 0, -0.5, -0.5, 0]
    assert [row[:2] for row in column("greedy_reward", batch)] == [[0.125] * 2] * 3 + [[0.5] * 2]


def test_a_reward_lands_on_the_last_token_that_is_still_trained() -> None:
    batch = batch_of(two_groups()).select([0])
    cut = batch.masked([np.array([True, True, False, True, False])])
    assert column("turn_reward", cut) == [[0, 0.5, 0, 0, 0]]
    assert column("turn", cut) == [[-1, 0, -1, -1, -1]]


def test_draws_belong_to_a_trajectory_and_to_the_runs_seed() -> None:
    batch = batch_of(two_groups())
    some = column("uniform", batch.select([3, 1]))
    everything = column("uniform", batch)
    assert [row[:2] for row in some] == [everything[3][:2], everything[1][:2]]
    assert column("uniform", batch, seed=1)[0] != everything[0]


def test_components_that_a_trajectory_lacks_are_unknown() -> None:
    x = advantage_inputs(batch_of(two_groups()))
    assert x.components["e"].tolist() == [0.75, -1.0, -1.0, 2.0]
    torch.testing.assert_close(x.components["style"], torch.tensor([nan, 2.0, 2.0, nan]).double(), equal_nan=True)


@pytest.mark.parametrize("beta", [1e-3, 0.5, 1e6])
def test_a_star_po_subtracts_the_value_of_the_tempered_problem(beta: float) -> None:
    references = ([1.0, 0.0, 0.0, 0.5], 0.75)  # a number is the value itself
    groups = [
        replace(each, task=Task(each.task.task_id, (), {"reference_rewards": rewards}))
        for each, rewards in zip(two_groups(), references, strict=True)
    ]
    x = advantage_inputs(batch_of(groups))
    soft = 1.0 + beta * log(fmean(exp((q - 1.0) / beta) for q in references[0]))
    assert 0.375 <= soft + 1e-6 <= 1.0 + 1e-6
    rewards = [0.75, 1.0, 1.0, 2.0]  # the second and third row are one trajectory
    for done in ESTIMATORS["a_star_po"](x, beta=beta):
        for row, mask, reward, value in zip(
            done.tolist(), x.response_mask.tolist(), rewards, [soft, soft, soft, 0.75], strict=True
        ):
            assert row == pytest.approx([(reward - value) * inside for inside in mask], rel=1e-6, abs=1e-6)


def test_a_task_without_rewards_of_the_reference_is_an_error() -> None:
    groups = two_groups()
    some = [replace(groups[0], task=Task("t", (), {"reference_rewards": [1.0]})), groups[1]]
    for given in (groups, some):
        with refused(DataError, "reference_rewards", "trivium eval"):
            ESTIMATORS["a_star_po"](advantage_inputs(batch_of(given)))
    bad = [replace(groups[0], task=Task("t", (), {"reference_rewards": [1.0, "high"]}))]
    with refused(DataError, "reference_rewards", "'high'"):
        batch_of(bad)


def test_a_missing_greedy_reply_is_an_error() -> None:
    alone = replace(two_groups()[0], greedy=None)
    with refused(DataError, "greedy"):
        column("greedy_reward", batch_of([alone]))


def algorithm(kind: str, **said: object) -> GroupAlgorithm:
    section = plugin("algorithms", AlgorithmConfig)({"kind": "grpo", "advantage": {"kind": kind}, **said})
    return build_algorithm(section, seed=3)


def test_gigpo_through_an_algorithm() -> None:
    groups = two_groups()
    which = algorithm("gigpo")
    batch, _ = which.advantages(which.batch(which.filter(groups)[0]))
    done = [row.tolist() for row in batch.columns["advantages"]]
    # Episodes: 0.75 against 1. In "start": 0.75 to go against 1; alone behind the door, and in a place nobody knows.
    assert done == [[0, -0.25, -0.25, 0, -0.125], [0, 0.25], [0, 0, 0.125, 0.125]]


def test_a_kl_penalty_is_in_nobodys_baseline() -> None:
    which = algorithm("reinforce_baseline", kl={"coef": 0.1, "place": "reward", "estimator": "k1"})
    batch = which.batch(which.filter(two_groups())[0])
    batch = batch.with_columns(ref_log_prob=[np.full(len(e), -1.0) for e in batch.experiences])
    done = [row.tolist() for row in which.advantages(batch)[0].columns["advantages"]]
    # k1 is 0.5 on every trained token; rewards 0.75 and 1 around 0.875
    expected = [[0, -0.275, -0.225, 0, -0.175], [0, 0.075], [0, 0, 0.025, 0.075]]
    assert done == [pytest.approx(row) for row in expected]


def test_the_weights_of_a_correction_reach_the_token_baselines() -> None:
    estimator = Estimator(ESTIMATORS["optimal_token_baseline"], ESTIMATORS["optimal_token_baseline"].metadata)
    batch = batch_of(two_groups())
    batch = batch.with_columns(
        **{name: [np.full(len(e), -0.5) for e in batch.experiences] for name in ("log_prob", "sum_pi_squared")}
    )
    assert "rollout_is_weights" not in estimator.columns(batch)
    weighted = batch.with_columns(rollout_is_weights=[np.full(len(e), 2.0) for e in batch.experiences])
    assert estimator.columns(weighted)["rollout_is_weights"][0].tolist() == [2.0] * 5


def test_clip_gates_are_decided_before_the_mini_batch_is_cut() -> None:
    section = {"kind": "grpo", "gates": [{"kind": "clip_b", "mu": 0.1, "narrow": True}, {"kind": "clip_v", "mu": 0.1}]}
    objective = build_algorithm(plugin("algorithms", AlgorithmConfig)(section)).objectives[0]
    assert isinstance(objective, PolicyObjective)
    assert objective.looks_at == {"log_prob", "entropy", "mean_discriminant"}
    assert "mean_discriminant" not in objective.needs
    assert "token_weight" in objective.needs


def test_every_estimator_has_a_law_that_names_columns_somebody_can_fill() -> None:
    batch = batch_of(two_groups())
    scores = {"values", "log_prob", "old_log_prob", "sum_pi_squared", "teacher_log_prob"}
    for kind, function in ESTIMATORS.items():
        metadata = function.metadata
        assert isinstance(metadata, EstimatorMetadata), kind
        for name in metadata.needs - scores:
            assert estimator_column(batch, name, 0).shape == (4, 5), (kind, name)


def test_a_span_without_a_trained_token_is_no_turn() -> None:
    e = Experience(
        np.arange(3),
        np.array([False, True, False]),
        np.zeros(3),
        np.zeros(3),
        "g",
        0,
        turns=(TurnSpan(0, 1, 2, 0.5, "s"), TurnSpan(1, 2, 3, 9.0, "s")),
    )
    assert column("turn", Batch((e,))) == [[-1, 0, -1]]
    assert column("turn_reward", Batch((e,))) == [[0, 0.5, 0]]
