"""Functions of users that are not what their place asks for: each mistake has a name, a place and a remedy."""

import sys
from typing import Annotated

import pytest
import torch
from failing import refused
from pydantic import Field

from trivium.algorithms import (
    AdvantageInputs,
    PerToken,
    PolicyObjective,
    advantage,
    aggregation,
    gate,
    group_filter,
    policy_inputs,
    policy_loss,
)
from trivium.algorithms.algorithm import Estimator
from trivium.algorithms.filters import Filter
from trivium.algorithms.objective import TokenWeight, aggregated
from trivium.foundation.errors import ConfigError, DataError
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.types import Group, Task, Trajectory

WORDS = {"formula": "-A log_prob", "source": "a test"}
MASK = torch.ones(2, 3).bool()
TOTALS = LossDenominators(tokens=6, sequences=2, max_response_length=3)


def minimised(loss, gates=()) -> None:
    columns = {"advantages": torch.ones(2, 3), "rollout_log_prob": torch.zeros(2, 3)}
    objective = PolicyObjective(loss, loss.metadata, token_weights=tuple(gates))
    objective.loss(LossInputs(MASK, torch.zeros(2, 3), columns, torch.zeros(2, 3)), TOTALS)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (lambda x: PerToken((-x.advantages * x.log_prob).mean()), "tensor ()"),
        (lambda x: PerToken((-x.advantages * x.log_prob).mean(-1, keepdim=True)), "tensor (2, 1)"),
        (lambda x: -x.advantages * x.log_prob, "Tensor"),
        (lambda x: PerToken(-x.advantages * x.old_log_prob), "old_log_prob"),
    ],
)
def test_a_loss_that_averages_or_forgets(given, found: str) -> None:
    @policy_loss(on_policy="plain", needs={"advantages"}, **WORDS)
    def mine(x):
        """A loss."""
        return given(x)

    with refused(DataError, found):
        minimised(mine)


def test_a_gate_of_the_wrong_shape_is_named() -> None:
    @policy_loss(on_policy="plain", needs={"advantages"}, **WORDS)
    def fine(x):
        """A loss."""
        return PerToken(-x.advantages * x.log_prob)

    @gate(**WORDS)
    def by_row(x):
        """A gate."""
        return torch.ones(len(x.log_prob))

    minimised(fine)
    with refused(DataError, "'by_row'"):
        minimised(fine, [TokenWeight(by_row, by_row.metadata)])


def test_an_estimator_of_the_wrong_kind_is_named() -> None:
    @advantage(**WORDS)
    def bare(x):
        """An estimator."""
        return x.token_level_rewards

    x = AdvantageInputs(torch.zeros(2, 3), MASK, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    with refused(DataError, "'bare'"):
        Estimator(bare, bare.metadata).advantages(x)


def test_an_aggregation_gives_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    @aggregation(**WORDS)
    def rows(loss, mask, counts):
        """Not a mean."""
        return loss.sum(-1)

    monkeypatch.setattr(sys.modules["trivium.algorithms.aggregation"], "token_mean", rows)
    with refused(DataError, "token-mean"):
        aggregated(torch.ones(2, 3), MASK, "token-mean", TOTALS)


def test_a_filter_says_yes_or_no() -> None:
    @group_filter(**WORDS)
    def forgetful(group):
        """A filter."""
        len(group.trajectories)

    with refused(DataError, "forgetful"):
        Filter("forgetful", forgetful, forgetful.metadata).passes(Group(0, Task("a", ()), (Trajectory(0),)))


def test_mistakes_in_a_signature_are_told_where_they_are_made() -> None:
    decorate = policy_loss(on_policy="plain", **WORDS)

    def by_position(x, bound: Annotated[float, Field(description="a bound")] = 2.0):
        """A loss."""

    def untyped(x, *, bound=2.0):
        """A loss."""

    with refused(ConfigError, "by_position", "x, bound"):
        decorate(by_position)
    with refused(ConfigError, "'bound'", "no type"):
        decorate(untyped)
    with refused(ConfigError, "'advantage'", "'advantages'"):
        policy_loss(on_policy="plain", needs={"advantage"}, **WORDS)(lambda x: x)


def test_inputs_for_a_direct_call_zero_what_is_masked() -> None:
    x = policy_inputs(torch.full((1, 2), torch.nan), torch.tensor([[0, 0]]), advantages=torch.ones(1, 2))
    assert x.log_prob.eq(0).all()
    assert x.advantages.eq(0).all()
