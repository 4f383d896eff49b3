"""The basic advantage estimators against loops written from the papers, in python's own arithmetic."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import pytest
import torch
from failing import refused
from torch import Tensor

from trivium.algorithms import AdvantageInputs, Advantages, catalogue
from trivium.algorithms.stats import group_statistics, masked_var
from trivium.foundation.errors import DataError

ESTIMATORS = catalogue("advantages")
Estimator = Callable[[AdvantageInputs], Advantages]


def inputs(
    scores: Sequence[float],
    group: Sequence[int],
    trajectory: Sequence[int] | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> AdvantageInputs:
    """Rows of four tokens with their score on the last trained one; the default mask has a hole."""
    chosen = torch.tensor([[0, 1, 0, 1]] * len(scores)).bool() if mask is None else mask
    rewards = torch.zeros(chosen.shape, dtype=dtype)
    for row, score in enumerate(scores):
        trained = chosen[row].nonzero().flatten()
        if len(trained):
            rewards[row, trained[-1]] = score
    rows = torch.tensor(list(range(len(scores)) if trajectory is None else trajectory))
    return AdvantageInputs(rewards, chosen, torch.tensor(list(group)), rows, {"values": torch.zeros(chosen.shape)})


def per_row(done: Advantages, x: AdvantageInputs) -> list[float]:
    """The one number of each row, having checked that it is the same on every trained token and 0 elsewhere."""
    numbers: list[float] = []
    for row, mask in zip(done.advantages, x.response_mask, strict=True):
        assert row[~mask].eq(0).all()
        assert len(set(row[mask].tolist())) <= 1
        numbers.append(float(row[mask][0]) if mask.any() else 0.0)
    return numbers


SCORES, GROUPS = [1.0, 0.0, 0.5, 0.25, 2.0, 0.5, -1.0], [7, 7, 3, 3, 9, 3, 7]  # uneven, unordered, one of one


def members(group: int) -> list[float]:
    return [score for score, other in zip(SCORES, GROUPS, strict=True) if other == group]


def test_accept_imitates_what_reached_the_threshold() -> None:
    x = inputs(SCORES, GROUPS, dtype=torch.float64)
    good = [float(score >= 0.5) for score in SCORES]
    best = [float(score >= 0.5 and score == max(members(group))) for score, group in zip(SCORES, GROUPS, strict=True)]
    done = ESTIMATORS["accept"](x, threshold=0.5)
    assert per_row(done, x) == good
    assert torch.equal(done.returns, done.advantages)
    assert per_row(ESTIMATORS["accept"](x, threshold=0.5, best=True), x) == best == [1, 0, 1, 0, 1, 1, 0]


def slow_gae(
    rewards: Sequence[float], values: Sequence[float], mask: Sequence[bool], gamma: float, lam: float
) -> list[float]:
    """A sum over all later trained tokens, from the definition; nothing recursive."""
    places = [t for t, trained in enumerate(mask) if trained]
    result = [0.0] * len(mask)
    for k, t in enumerate(places):
        for distance, later in enumerate(places[k:]):
            following = values[places[k + distance + 1]] if k + distance + 1 < len(places) else 0.0
            result[t] += (gamma * lam) ** distance * (rewards[later] + gamma * following - values[later])
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_is_the_discounted_sum_of_errors(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0, 0], [0] * 7, [0, 1, 1, 1, 1, 1, 1]]).bool()
    values = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    rewards = torch.randn(mask.shape, generator=generator, dtype=torch.float64).where(mask, 0.0)
    x = AdvantageInputs(rewards, mask, torch.arange(4), torch.arange(4), {"values": values})
    expected = torch.tensor(
        [slow_gae(*(t[row].tolist() for t in (rewards, values, mask)), gamma, lam) for row in range(4)]
    ).double()
    raw = ESTIMATORS["gae"](x, gamma=gamma, lam=lam, whiten=False)
    torch.testing.assert_close(raw.advantages, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(raw.returns, (raw.advantages + values).where(mask, 0.0), rtol=0, atol=1e-12)
    white = ESTIMATORS["gae"](x, gamma=gamma, lam=lam)
    assert float(white.advantages[mask].mean()) == pytest.approx(0, abs=1e-7)
    assert float(white.advantages[mask].std()) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(white.returns, raw.returns, rtol=0, atol=0)


def test_gae_leaves_a_single_token_as_it_is() -> None:
    x = inputs([2.0], [0], mask=torch.tensor([[False, True]]))
    assert float(ESTIMATORS["gae"](x).advantages[0, 1]) == 2.0


def slow_reinforce(x: AdvantageInputs, gamma: float) -> Tensor:
    result = torch.zeros_like(x.token_level_rewards)
    for row, mask in enumerate(x.response_mask.tolist()):
        places = [t for t, trained in enumerate(mask) if trained]
        for k, t in enumerate(places):
            result[row, t] = sum(gamma**n * x.token_level_rewards[row, later] for n, later in enumerate(places[k:]))
    return result


def check_reinforce(estimator: Callable[..., Advantages]) -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    rewards = torch.tensor([[9, 0.5, -1, 9, 2], [9, 0, 0, 9, 1], [9.0] * 5], dtype=torch.float64).where(mask, 0.0)
    x = AdvantageInputs(rewards, mask, torch.arange(3), torch.arange(3))
    for gamma in (1.0, 0.9, 0.0):
        torch.testing.assert_close(estimator(x, gamma=gamma).advantages, slow_reinforce(x, gamma))


def test_reinforce_is_the_return_from_each_token_on() -> None:
    check_reinforce(ESTIMATORS["reinforce"])


def test_group_statistics_are_those_of_the_standard_library() -> None:
    stats = group_statistics(torch.tensor(SCORES).double(), torch.tensor(GROUPS))
    for place, group in enumerate(GROUPS):
        mates = members(group)
        assert float(stats.mean[place]) == pytest.approx(fmean(mates))
        assert float(stats.std[place]) == pytest.approx(stdev(mates) if len(mates) > 1 else 0.0)
        assert int(stats.count[place]) == len(mates)


def test_variance_of_too_few_tokens_is_an_error() -> None:
    with refused(DataError, "1 token"):
        masked_var(torch.ones(1, 2), torch.tensor([[True, False]]))


JUST_SPREAD = (
    "asymre",
    "gigpo",
    "grpo_rank_penalty",
    "opmd",
    "rec",
    "reinforce",
    "step_wise_grpo",
    "grpo",
    "rloo",
    "group_norm",
    "max_rl",
    "jsd",
    "on_policy_distill",
    "reinforce_baseline",
)


@pytest.mark.parametrize("kind", JUST_SPREAD)
def test_returns_are_the_advantages_where_nobody_predicts_them(kind: str) -> None:
    x = inputs([1.0, 0.0, 0.5, 0.25], [7, 7, 3, 3], dtype=torch.float64)
    names = {"turn": 0.0, "turn_reward": 0.0, "turn_state": 0.0, "old_log_prob": -1.0, "teacher_log_prob": -2.0}
    columns = {name: torch.full(x.response_mask.shape, value).double() for name, value in names.items()}
    columns |= {"uniform": torch.full(x.response_mask.shape, 0.5), "rollout_log_prob": columns["old_log_prob"]}
    columns |= {name: columns[name].long() for name in ("turn", "turn_state")}
    done = ESTIMATORS[kind](AdvantageInputs(x.token_level_rewards, x.response_mask, x.group, x.trajectory, columns))
    assert done.returns.abs().sum() > 0
    assert torch.equal(done.returns, done.advantages)
