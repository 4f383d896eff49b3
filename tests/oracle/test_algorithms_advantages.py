"""Laws that every advantage estimator keeps, under every option, on batches as an algorithm makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from algebra import Variant, number, policy_objective, section, variants
from torch.nn.functional import pad

from trivium.algorithms import AdvantageInputs, Advantages, GroupAlgorithm, catalogue
from trivium.algorithms.algorithm import Estimator
from trivium.algorithms.batches import batch_of
from trivium.algorithms.estimator_inputs import advantage_inputs
from trivium.algorithms.metadata import EstimatorMetadata, resolve_function
from trivium.models.heads.loss import LossDenominators, LossInputs
from trivium.types import SCORES, Batch, Group, StopReason, Task, Trajectory, Turn

ESTIMATORS = catalogue("advantages")
VARIANTS = variants("advantages")
CENTRED = [variant for variant in VARIANTS if ESTIMATORS[variant.kind].metadata.centred]

# --------------------------------------------------------------------------- what was played


def turn(start: int, length: int, seed: int, state: str = "") -> Turn:
    """A reply of some tokens to a prompt of `start` tokens; its numbers depend on the seed alone."""
    rng = np.random.default_rng(seed)
    log_prob = -0.05 - np.abs(rng.normal(size=length))
    reward = 0.25 * (seed % 3) if state else 0.0
    return Turn(
        np.zeros(start), np.arange(length), log_prob, np.zeros(length), StopReason.EOS, "", reward=reward, state=state
    )


def member(index: int, reward: float, seed: int, *, length: int = 2, turns: int = 1, parts: int = 1) -> Trajectory:
    """A trajectory whose every turn but the first follows `parts - 1` rewritten histories or two tokens of a tool."""
    played: list[Turn] = []
    start = 2
    for number_ in range(turns * parts):
        rewritten = number_ and number_ % turns == 0
        start = 2 if rewritten else start
        played.append(turn(start, length, seed + 7 * number_, f"room-{number_}" if turns > 1 else ""))
        start += length + 2
    return Trajectory(index, tuple(_connected(played)), {"exact": reward})


def _connected(turns: Sequence[Turn]) -> list[Turn]:
    """Turns of which each one's prompt holds what came before, where it is long enough to."""
    known = np.zeros(0)
    connected: list[Turn] = []
    for one in turns:
        fresh = np.full(len(one.prompt_tokens), 50 + len(connected))
        prompt = np.concatenate([known, fresh[len(known) :]]) if len(known) < len(fresh) else fresh
        connected.append(replace(one, prompt_tokens=prompt))
        known = np.concatenate([prompt, one.tokens])
    return connected


def group(slot: int, *members: Trajectory, greedy_reward: float = 0.5) -> Group:
    task = Task(f"task-{slot}", (), {"reference_rewards": [1.0, 0.0, 0.25 * slot]})
    return Group(slot, task, members, greedy=Trajectory(99, (turn(2, 1, 5),), {"e": greedy_reward}))


def played(turns: int = 1) -> list[Group]:
    """Groups of uneven size, with replies of uneven length; one trajectory is two rows."""
    return [
        group(0, member(0, 1.0, 1, turns=turns), member(1, 0.0, 2, length=3, turns=turns)),
        group(1, *(member(i, r, 10 + i, length=1 + i, turns=turns) for i, r in enumerate([0.5, 0.1, 2.0]))),
        group(2, member(0, 0.25, 20, parts=2, turns=turns), member(1, 0.75, 21, turns=turns), member(2, 0.25, 22)),
    ]


def estimator(variant: Variant) -> Estimator:
    return Estimator(
        *resolve_function("advantages", section("advantages", variant.kind, **variant.options), EstimatorMetadata)
    )


def scored(batch: Batch, needs: frozenset[str]) -> Batch:
    """The batch with the scores among `needs`; a row's scores depend on who it is, not on where it stands."""
    for name in sorted(needs & set(SCORES.values())):
        rows, part = [], {}
        for e in batch.experiences:
            who = (e.group_id, e.index)
            part[who] = part.get(who, 0) + 1
            seed = sum(map(ord, e.group_id)) + 10 * e.index + 100 * part[who]
            row = number(name, (1, len(e)), seed).numpy()[0].astype(np.float32)
            rows.append(np.where(e.response_mask, row, np.zeros_like(row)))
        batch = batch.with_columns(**{name: rows})
    return batch


def inputs(which: Estimator, groups: Sequence[Group]) -> AdvantageInputs:
    """What the algorithm gives the estimator."""
    return inputs_of(which, scored(batch_of(groups), which.metadata.needs))


def inputs_of(which: Estimator, batch: Batch) -> AdvantageInputs:
    return replace(advantage_inputs(batch), columns=which.columns(batch))


def double(x: AdvantageInputs) -> AdvantageInputs:
    return replace(x, token_level_rewards=x.token_level_rewards.double())


def check_form(done: Advantages, x: AdvantageInputs) -> None:
    for values in done:
        assert values.shape == x.response_mask.shape
        assert values.dtype == x.token_level_rewards.dtype
        assert torch.isfinite(values).all()
        assert values[~x.response_mask].eq(0).all()


# --------------------------------------------------------------------------- form


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("turns", [1, 2])
def test_advantages_are_finite_and_stay_inside_the_mask(variant: Variant, turns: int) -> None:
    which = estimator(variant)
    x = inputs(which, played(turns))
    check_form(which.function(x), x)
    done = which.function(double(x))
    check_form(done, double(x))
    assert done.advantages.abs().sum() > 0


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_empty_rows_singletons_and_an_empty_batch_are_legal(variant: Variant) -> None:
    which = estimator(variant)
    x = inputs(which, [*played(), group(7, member(0, 0.7, 40))])
    mask = x.response_mask.clone()
    mask[1] = False
    hollow = replace(x, response_mask=mask, token_level_rewards=x.token_level_rewards.where(mask, 0.0))
    for here in (x, hollow):
        check_form(which.function(here), here)
    nobody = inputs_of(which, scored(Batch(()), which.metadata.needs))
    check_form(which.function(nobody), nobody)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_padding_and_what_stands_in_it_change_nothing(variant: Variant) -> None:
    which = estimator(variant)
    x = double(inputs(which, played(2)))
    longer = replace(
        x,
        token_level_rewards=pad(x.token_level_rewards, (0, 3)),
        response_mask=pad(x.response_mask, (0, 3)),
        columns={name: pad(column, (0, 3)) for name, column in x.columns.items()},
    )
    rubbish = {
        name: torch.where(longer.response_mask, column, math.nan) if name in SCORES.values() else column
        for name, column in longer.columns.items()
    }
    for one, other in zip(which.function(x), which.function(replace(longer, columns=rubbish)), strict=True):
        torch.testing.assert_close(pad(one, (0, 3)), other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_order_of_rows_does_not_matter(variant: Variant) -> None:
    which = estimator(variant)
    batch = scored(batch_of(played(2)), which.metadata.needs)
    order = np.random.default_rng(0).permutation(len(batch))
    rewritten = [e.group_id == "train/task-2/0" and e.index == 0 for e in batch.experiences]
    order = np.concatenate([np.flatnonzero(rewritten), order[~np.isin(order, np.flatnonzero(rewritten))]])
    straight = which.function(double(inputs_of(which, batch)))
    shuffled = which.function(double(inputs_of(which, batch.select(order))))
    for one, other in zip(straight, shuffled, strict=True):
        torch.testing.assert_close(one[torch.from_numpy(order)], other, rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------- groups


def algorithm(which: Estimator) -> GroupAlgorithm:
    return GroupAlgorithm("law", (policy_objective("ppo"),), which)


EXCEPT = {
    "optimal_token_baseline,handle_zero_tail=True": "where one reply goes on alone it has nobody to be compared with"
}


@pytest.mark.parametrize("variant", [variant for variant in CENTRED if str(variant) not in EXCEPT], ids=str)
def test_equal_rewards_give_advantages_and_gradients_of_exactly_zero(variant: Variant) -> None:
    for size in (2, 8):
        for reward in (0.7, 1e6, 1 / 3, 0.0):
            check_zero(variant, [member(i, reward, i, length=1 + i % 3) for i in range(size)])
    if variant.kind not in ("max_rl",):  # rewards are success rates
        check_zero(variant, [member(i, -0.1, i, length=1 + i % 3) for i in range(7)])


def check_zero(variant: Variant, alike: list[Trajectory]) -> None:
    """Through the algorithm in float32, and through a softmax policy that has moved since."""
    which = algorithm(estimator(variant))
    assert which.estimator is not None
    batch = which.batch([group(0, *alike), group(1, *two_alike())])
    batch = which.advantages(scored(batch, which.estimator.metadata.needs))[0]
    logits = torch.linspace(-1, 1, 8).requires_grad_(True)
    losses: list[torch.Tensor] = []
    for row, e in enumerate(batch.experiences):
        given = {name: torch.tensor(arrays[row])[None] for name, arrays in batch.columns.items()}
        assert given["advantages"].eq(0).all()
        mask = torch.tensor(e.response_mask)[None]
        log_prob = logits.log_softmax(-1)[torch.tensor(e.tokens).long() % 8].unsqueeze(0)
        given["rollout_log_prob"] = given["old_log_prob"]
        done = which.objectives[0].loss(
            LossInputs(mask, torch.zeros(mask.shape), given, log_prob), LossDenominators(16, 8, 3)
        )
        losses.append(done.loss)
    torch.stack(losses).sum().backward()
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def two_alike() -> list[Trajectory]:
    """One trajectory of two rows and one of one, rewarded alike."""
    return [member(0, 0.7, 30, parts=2), member(1, 0.7, 31)]


@pytest.mark.parametrize("kind", [kind for kind, function in ESTIMATORS.items() if not function.metadata.centred])
def test_an_estimator_that_does_not_say_so_is_not_centred(kind: str) -> None:
    which = estimator(Variant(kind))
    groups = [group(k, *(member(i, 0.7 + k, 9 * k + i, length=1 + i, turns=2) for i in range(3))) for k in range(2)]
    assert which.function(inputs(which, groups)).advantages.abs().sum() > 0, "declare it centred"


WHOLE = frozenset({"turn", "turn_reward", "turn_state", *SCORES.values(), "rollout_log_prob"})
"""Columns that see how a trajectory was cut into rows."""


@pytest.mark.parametrize(
    "variant",
    [v for v in VARIANTS if not ESTIMATORS[v.kind].metadata.needs & WHOLE and not ESTIMATORS[v.kind].metadata.whitens],
    ids=str,
)
def test_a_trajectory_counts_once_however_many_rows_it_became(variant: Variant) -> None:
    which = estimator(variant)
    others = [member(1, 0.2, 2, length=4), member(2, 0.9, 3, length=4)]
    alone = inputs(which, [group(0, member(0, 0.7, 1, length=4), *others)])
    split = inputs(which, [group(0, member(0, 0.7, 1, length=2, parts=2), *others)])
    assert len(split.response_mask) == len(alone.response_mask) + 1
    first, second = which.function(double(alone)), which.function(double(split))
    for row in (1, 2):
        mine, theirs = first.advantages[row], second.advantages[row + 1]
        torch.testing.assert_close(mine[alone.response_mask[row]], theirs[split.response_mask[row + 1]])


def over_the_batch(variant: Variant) -> bool:
    """Whether a statistic over all groups is part of it."""
    return ESTIMATORS[variant.kind].metadata.whitens or "batch" in variant.options.values() or variant.kind == "gpg"


@pytest.mark.parametrize("variant", [v for v in CENTRED if not over_the_batch(v)], ids=str)
def test_groups_are_judged_each_by_itself(variant: Variant) -> None:
    which = estimator(variant)
    x, more = (double(inputs(which, groups)) for groups in (played(), [*played(), group(5, *two_alike())]))
    rows, length = x.response_mask.shape
    torch.testing.assert_close(
        which.function(x).advantages, which.function(more).advantages[:rows, :length], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("variant", [variant for variant in CENTRED if str(variant) not in EXCEPT], ids=str)
def test_rewards_that_differ_by_rounding_teach_nothing(variant: Variant) -> None:
    """Equal sums of float32 components, added in another order: no estimator blows their difference up."""
    which = estimator(variant)
    for reward in (0.3, 0.7, 25.0):
        near = float(np.nextafter(np.float32(reward), np.float32(100)))
        members = [member(i, near if i % 2 else reward, i, length=2) for i in range(8)]
        x = inputs(which, [group(0, *members), group(1, member(0, 0.0, 8), member(1, 1.0, 9))])
        of_group = x.group == x.group[0]
        assert which.function(x).advantages[of_group].abs().max() < 1e-3


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if str(variant) != "accept,best=True"], ids=str)
def test_no_estimator_magnifies_rounding_errors(variant: Variant) -> None:
    """`accept` with `best` is left out: it chooses one of the best, which rounding errors may do."""
    which = estimator(variant)
    for reward in (0.3, 0.7, 25.0):
        near = float(np.nextafter(np.float32(reward), np.float32(100)))
        rewards = ([reward] * 8, [reward, near] * 4)
        equal, rounded = (
            which.function(
                inputs(which, [group(n, *(member(i, r, 10 * n + i) for i, r in enumerate(of))) for n in (0, 1)])
            )
            for of in rewards
        )
        assert (equal.advantages - rounded.advantages).abs().max() < 0.02


@pytest.mark.parametrize("variant", [variant for variant in CENTRED if str(variant) not in EXCEPT], ids=str)
def test_one_reward_apart_from_equal_ones_neither_explodes_nor_vanishes(variant: Variant) -> None:
    which = estimator(variant)
    for odd, others in ((0.0, 0.95), (0.95, 0.0)):
        x = inputs(which, [group(0, *(member(i, others if i else odd, i, length=2) for i in range(8)))])
        tie_at_the_top = variant.kind == "grpo_passk" and odd < others
        assert (0.0 if tie_at_the_top else 0.05) <= which.function(x).advantages.abs().max() < 20


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_extreme_rewards_stay_finite(variant: Variant) -> None:
    which = estimator(variant)
    for reward in (1e6, 1e-30):
        members = [member(0, reward, 1), member(1, 0.0, 2), member(2, 0.0, 3)]
        x = inputs(which, [group(0, *members), group(1, member(0, 0.0, 8), member(1, 0.0, 9))])
        check_form(which.function(x), x)
