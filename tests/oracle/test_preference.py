"""Losses over preferences and scores: slow loops from the papers, finite differences, laws, traps."""

import math
from itertools import pairwise

import episodes
import numpy as np
import pytest
import torch
from algebra import finite_differences, variants
from example_counts import number_of
from failing import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from preferences import interleaved, on_rows, preference, scoring
from torch import Tensor

from trivium.algorithms import GroupAlgorithm, PairInputs, ScoreInputs, pair_inputs
from trivium.algorithms.batches import batch_of_pairs, pair_of
from trivium.algorithms.preference.losses import (
    dpo,
    hps,
    ipo,
    kto,
    kto_mismatched,
    kto_pair,
    logexp,
    reference_point,
    sigmoid,
)
from trivium.foundation.errors import DataError
from trivium.foundation.metrics import checked
from trivium.types import Failure, Group, Task, Trajectory, Turn

PAIR_LOSSES = {f"{v}": (v.kind, v.options) for v in variants("pair_losses")}
SCORE_LOSSES = {f"{v}": (v.kind, v.options) for v in variants("score_losses")}
OF_KIND = {"dpo": dpo, "ipo": ipo, "kto": kto, "kto_mismatched": kto_mismatched, "kto_pair": kto_pair}
KTO = ("kto", "kto_mismatched")
"""The second is the first where there are no mismatched pairs (tests/unit/algorithms/test_mismatched.py)."""


def sides(count: int = 5, seed: int = 0) -> list[Tensor]:
    """Log-probabilities of replies: policy and reference, chosen and rejected, (P,) each."""
    generator = torch.Generator().manual_seed(seed)
    return [-12 + 2 * torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(4)]


def rows(seed: int = 0, length: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """(log_prob, mask, reference), (B, L) each: holes, rows of every length, a pair without a token, half pairs."""
    mask = torch.tensor(
        [
            [1, 1, 0, 1],
            [1, 0, 0, 0],
            [0, 1, 1, 1],
            [1, 1, 1, 1],
            [0, 0, 0, 0],
            [0, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 1, 0],
        ]
    ).bool()
    generator = torch.Generator().manual_seed(seed)
    log_prob, reference = (-torch.rand(mask.shape, generator=generator).double() - 0.1 for _ in range(2))
    return log_prob, mask, reference


# --------------------------------------------------------------------------- slow loops


def logistic(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def slow_dpo(c, d, beta=0.1, label_smoothing=0.0):
    """Rafailov et al. 2023, eq. 7, with the smoothing of Mitchell 2023."""
    return [
        -(1 - label_smoothing) * math.log(logistic(z)) - label_smoothing * math.log(logistic(-z))
        for z in (beta * (x - y) for x, y in zip(c, d, strict=True))
    ]


def slow_ipo(c, d, beta=0.1):
    """Azar et al. 2024, eq. 17."""
    return [(x - y - 1 / (2 * beta)) ** 2 for x, y in zip(c, d, strict=True)]


def slow_kto(c, d, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    """Ethayarajh et al. 2024, section 4.1: lambda_y - v(x, y), z0 from the replies themselves."""
    z0 = max(0.0, sum([*c, *d]) / len([*c, *d]))
    values = [
        (desirable_weight * logistic(beta * (x - z0)), undesirable_weight * logistic(beta * (z0 - y)))
        for x, y in zip(c, d, strict=True)
    ]
    return [desirable_weight - gain + undesirable_weight - loss for gain, loss in values]


def slow_kto_pair(c, d, beta=0.1):
    """Each side against the mean of the other."""
    mean_c, mean_d = max(0.0, sum(c) / len(c)), max(0.0, sum(d) / len(d))
    return [1 - logistic(beta * (x - mean_d)) + 1 - logistic(beta * (mean_c - y)) for x, y in zip(c, d, strict=True)]


SLOW = {"dpo": slow_dpo, "ipo": slow_ipo, "kto": slow_kto, "kto_mismatched": slow_kto, "kto_pair": slow_kto_pair}


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_over_preferences_is_its_equation(name: str, seed: int) -> None:
    kind, options = PAIR_LOSSES[name]
    given = sides(seed=seed)
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = (side.tolist() for side in given)
    c = [a - b for a, b in zip(policy_chosen, reference_chosen, strict=True)]
    d = [a - b for a, b in zip(policy_rejected, reference_rejected, strict=True)]
    done = OF_KIND[kind](pair_inputs(*given), **options)
    assert done.loss.tolist() == pytest.approx(SLOW[kind](c, d, **options), rel=1e-12)
    beta = options.get("beta", 0.1)
    assert done.chosen_rewards.tolist() == pytest.approx([beta * x for x in c], rel=1e-12)
    assert done.rejected_rewards.tolist() == pytest.approx([beta * y for y in d], rel=1e-12)


@pytest.mark.parametrize("name", SCORE_LOSSES)
def test_a_loss_over_scores_is_its_equation(name: str) -> None:
    kind, options = SCORE_LOSSES[name]
    chosen, rejected = (side + 12 for side in sides()[:2])
    factor = 1.0 if options.get("learned") else options.get("scale", 1.0)
    expected = {
        "sigmoid": lambda s, t: -math.log(logistic(s - t - options.get("margin", 0.0))),
        "logexp": lambda s, t: math.log(1 + math.exp(t - s)),
        "hps": lambda s, t: -math.log(math.exp(factor * s) / (math.exp(factor * s) + math.exp(factor * t))),
    }[kind]
    function = {"sigmoid": sigmoid, "logexp": logexp, "hps": hps}[kind]
    slow = [expected(s, t) for s, t in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    assert function(ScoreInputs(chosen, rejected), **options).tolist() == pytest.approx(slow, rel=1e-9)


def test_known_numbers() -> None:
    """Two pairs with beta times gap 0.1 and -0.2; and one reply each way (the facts sheets of the peers)."""
    zero = torch.zeros(2, dtype=torch.float64)
    gaps = pair_inputs(torch.tensor([1.0, -2.0]).double(), zero, zero, zero)
    assert float(dpo(gaps).loss.mean()) == pytest.approx(0.721268, abs=1e-6)
    one = pair_inputs(*(torch.tensor([v]).double() for v in (-10.0, -12.0, -11.0, -11.0)))
    assert float(dpo(one).loss) == pytest.approx(0.598139, abs=1e-6)
    assert float(dpo(one, label_smoothing=0.1).loss) == pytest.approx(0.6181, abs=1e-4)
    assert float(ipo(one).loss) == pytest.approx(9.0)
    assert float(kto_pair(one).loss) / 2 == pytest.approx(0.4626, abs=1e-4)


def test_known_numbers_of_scores() -> None:
    """LightRFT's losses of c = [.8, .4] and j = [.3, .6], and the same with the scale that its head multiplies by."""
    scores = interleaved(torch.tensor([0.8, 0.4]), torch.tensor([0.3, 0.6]))
    expected = {
        ("sigmoid", ()): 0.636108,
        ("sigmoid", (("margin", 0.1),)): 0.683685,
        ("logexp", ()): 0.636108,
        ("hps", ()): 0.636108,
        ("hps", (("scale", 1 / 0.07),)): 1.4569,
        ("hps", (("scale", 1 / 0.07), ("learned", True))): 0.636108,  # the scores have the factor already
    }
    for (kind, options), value in expected.items():
        loss, _ = on_rows(scoring(kind, **dict(options)), scores, torch.ones_like(scores))
        assert float(loss) == pytest.approx(value, abs=2e-5), (kind, options)


def test_the_reference_point_is_a_floored_mean_without_gradient() -> None:
    ratios = torch.tensor([0.5, 1.5, -0.5], dtype=torch.float64, requires_grad=True)
    assert float(reference_point(ratios)) == 0.5
    assert not reference_point(ratios).requires_grad
    assert float(reference_point(-ratios)) == float(reference_point(ratios[:0])) == 0.0


def test_a_known_reference_point_stands_for_the_estimate() -> None:
    given = sides()
    done = kto(pair_inputs(*given, kl=torch.tensor(0.7).double()), beta=0.5)
    c, d = (given[0] - given[2]).tolist(), (given[1] - given[3]).tolist()
    slow = [2 - logistic(0.5 * (x - 0.7)) - logistic(0.5 * (0.7 - y)) for x, y in zip(c, d, strict=True)]
    assert done.loss.tolist() == pytest.approx(slow)


# --------------------------------------------------------------------------- objectives


def slow_mean(kind: str, options: dict, log_prob: Tensor, mask: Tensor, reference: Tensor) -> float:
    """The loss of a mini-batch: the mean over comparisons with both replies, or over the replies there are."""
    ratio = [
        sum((a - b) for a, b, m in zip(*row, strict=True) if m) if any(row[2]) else None
        for row in zip(log_prob.tolist(), reference.tolist(), mask.tolist(), strict=True)
    ]
    if SLOW[kind] in (slow_dpo, slow_ipo):
        whole = [(c, d) for c, d in zip(ratio[::2], ratio[1::2], strict=True) if c is not None and d is not None]
        return sum(SLOW[kind](*zip(*whole, strict=True), **options)) / len(whole)
    c, d = ([value for value in side if value is not None] for side in (ratio[::2], ratio[1::2]))
    beta = options.get("beta", 0.1)
    if kind in KTO:
        mean_c = mean_d = max(0.0, sum([*c, *d]) / len([*c, *d]))
    else:
        mean_c, mean_d = max(0.0, sum(c) / len(c)), max(0.0, sum(d) / len(d))
    gains = [options.get("desirable_weight", 1.0) * (1 - logistic(beta * (x - mean_d))) for x in c]
    losses = [options.get("undesirable_weight", 1.0) * (1 - logistic(beta * (mean_c - y))) for y in d]
    return sum([*gains, *losses]) / len([*gains, *losses])


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_a_mini_batch_is_the_mean_over_its_pairs_or_replies(name: str) -> None:
    kind, options = PAIR_LOSSES[name]
    log_prob, mask, reference = rows()
    for shift in (0.0, 0.5, -0.5):  # both sides of KTO's floor
        loss, metrics = on_rows(preference(kind, **options), log_prob + shift, mask, reference)
        assert float(loss) == pytest.approx(slow_mean(kind, options, log_prob + shift, mask, reference), rel=1e-6)
    checked(metrics)


@pytest.mark.parametrize("name", PAIR_LOSSES)
@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_the_gradient_is_that_of_the_whole_mini_batch(name: str, shift: float) -> None:
    """A loss that sees every pair is differentiated through every pair, although it is only asked before the cut."""
    kind, options = PAIR_LOSSES[name]
    log_prob, mask, reference = rows()
    log_prob = (log_prob + shift).requires_grad_(True)
    loss, _ = on_rows(preference(kind, **options), log_prob, mask, reference)
    (found,) = torch.autograd.grad(loss, log_prob)
    z0 = slow_reference_point(log_prob.detach(), mask, reference) if kind in KTO else None

    def whole(at: Tensor) -> Tensor:
        """The equation over all rows at once; KTO's z0, which has no gradient, is held where it was."""
        if kind in ("dpo", "ipo"):
            return on_rows(preference(kind, **options), at, mask, reference)[0]
        (c, d), (e, f) = (torch.where(mask, t, 0.0).sum(-1).view(-1, 2).T for t in (at, reference))
        x = PairInputs(c, d, e, f, *mask.any(-1).view(-1, 2).T, z0)
        return OF_KIND[kind](x, **options).loss.sum() / mask.any(-1).sum()

    torch.testing.assert_close(found, finite_differences(whole, log_prob.detach()), rtol=1e-5, atol=1e-8)
    assert found[~mask].eq(0).all()


def slow_reference_point(log_prob: Tensor, mask: Tensor, reference: Tensor) -> Tensor:
    ratios = [float((a - b)[m].sum()) for a, b, m in zip(log_prob, reference, mask, strict=True) if m.any()]
    return torch.tensor(max(0.0, sum(ratios) / len(ratios)), dtype=torch.float64)


@pytest.mark.parametrize("name", SCORE_LOSSES)
def test_a_reward_model_is_judged_at_the_last_trained_token(name: str) -> None:
    kind, options = SCORE_LOSSES[name]
    scores, mask, _ = rows()
    leaf = scores.clone().requires_grad_(True)
    loss, metrics = on_rows(scoring(kind, **options), leaf, mask)
    last = [(0, 3, 1, 0), (2, 3, 3, 3)]  # the two pairs of which both replies are there
    function = {"sigmoid": sigmoid, "logexp": logexp, "hps": hps}[kind]
    pairs = [ScoreInputs(scores[a, i][None], scores[b, j][None]) for (a, i, b, j) in last]
    assert float(loss.detach()) == pytest.approx(sum(float(function(x, **options)) for x in pairs) / 2)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert {(int(r), int(t)) for r, t in gradient.nonzero()} == {(a, i) for r in last for a, i in (r[:2], r[2:])}

    def whole(at: Tensor) -> Tensor:
        return on_rows(scoring(kind, **options), at, mask)[0]

    torch.testing.assert_close(gradient, finite_differences(whole, scores), rtol=1e-5, atol=1e-8)
    gaps = [float(x.chosen - x.rejected) for x in pairs]
    assert checked(metrics)["train/preference_margin"] == pytest.approx(sum(gaps) / 2)
    assert metrics["train/preference_accuracy"] == sum(gap > 0 for gap in gaps) / 2


OBJECTIVES = {
    **{f"pair:{name}": lambda v=v: preference(v[0], **v[1]) for name, v in PAIR_LOSSES.items()},
    **{f"score:{name}": lambda v=v: scoring(v[0], **v[1]) for name, v in SCORE_LOSSES.items()},
}


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=number_of(10))
@given(data=st.data())
def test_cutting_between_pairs_their_order_and_padding_change_nothing(name: str, data: st.DataObject) -> None:
    log_prob, mask, reference = rows(seed=data.draw(st.integers(0, 99)))
    log_prob.requires_grad_(True)
    whole, metrics = on_rows(OBJECTIVES[name](), log_prob, mask, reference)
    order = data.draw(st.permutations(range(len(mask) // 2)))
    at = sorted(data.draw(st.sets(st.integers(1, len(order)))) | {0, len(order)})
    parts = [[row for pair in order[a:b] for row in (2 * pair, 2 * pair + 1)] for a, b in pairwise(at)]
    cut, same = on_rows(
        OBJECTIVES[name](), log_prob, mask, reference, parts=parts, padding=data.draw(st.integers(0, 3))
    )
    gradients = [torch.autograd.grad(loss, log_prob)[0] for loss in (whole, cut)]
    torch.testing.assert_close((cut, gradients[1]), (whole, gradients[0]), rtol=1e-9, atol=1e-12)
    assert same == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_ranks_that_average_gradients_get_the_gradient_of_one_process() -> None:
    log_prob, mask, reference = rows()
    for name in OBJECTIVES:
        alone, _ = on_rows(OBJECTIVES[name](), log_prob, mask, reference)
        ranks, _ = on_rows(
            OBJECTIVES[name](), log_prob, mask, reference, parts=[[0, 1, 4, 5], [2, 3, 6, 7, 8, 9]], dp_size=2
        )
        torch.testing.assert_close(ranks / 2, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_where_policy_is_reference_the_preferred_reply_rises_as_the_other_falls(name: str) -> None:
    """The law of a first update: per pair, the gradient by (chosen, rejected) is -s (1, -1) with the s of the paper."""
    kind, options = PAIR_LOSSES[name]
    log_prob = torch.stack(sides()[:2], 1).reshape(-1, 1).requires_grad_(True)
    objective = preference(kind, **options)
    loss, metrics = on_rows(objective, log_prob, torch.ones_like(log_prob), log_prob.detach())
    (gradient,) = torch.autograd.grad(loss, log_prob)
    beta = options.get("beta", 0.1)
    chosen, rejected = gradient[::2] * 5, gradient[1::2] * 5
    if kind in KTO:  # a mean over 10 replies, sigmoid'(0) = 1/4
        expected = [beta / 8 * options.get(side, 1.0) for side in ("desirable_weight", "undesirable_weight")]
    elif kind == "kto_pair":  # its reference points move along, with the derivative of the floor at its edge: 1
        expected = [beta / 4, beta / 4]
    else:
        smoothing = options.get("label_smoothing", 0.0)
        expected = [beta / 2 * (1 - 2 * smoothing) if kind == "dpo" else 1 / beta] * 2
    torch.testing.assert_close(chosen, torch.full_like(chosen, -expected[0]))
    torch.testing.assert_close(rejected, torch.full_like(rejected, expected[1]))
    assert metrics["train/preference_margin"] == metrics["train/preference_accuracy"] == 0
    assert objective.on_policy.startswith("none: ")


# --------------------------------------------------------------------------- traps


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_finite(name: str, dtype: torch.dtype) -> None:
    mask = torch.ones(8, 2)
    numbers = torch.tensor([1000.0, -1000.0, -1000.0, 1000.0, 1000.0, 1000.0, 0.0, -1000.0], dtype=dtype)
    numbers = numbers.unsqueeze(1).expand(8, 2).clone().requires_grad_(True)
    loss, metrics = on_rows(OBJECTIVES[name](), numbers, mask, torch.zeros(8, 2, dtype=dtype))
    (gradient,) = torch.autograd.grad(loss, numbers)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_outside_the_mask_is_read(name: str) -> None:
    log_prob, mask, reference = rows()
    clean, metrics = on_rows(OBJECTIVES[name](), log_prob, mask, reference)
    dirty = [torch.where(mask, t, math.nan) for t in (log_prob, reference)]
    leaf = dirty[0].requires_grad_(True)
    loss, same = on_rows(OBJECTIVES[name](), leaf, mask, dirty[1])
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert float(loss.detach()) == float(clean)
    assert torch.isfinite(gradient).all()
    assert same == metrics


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_pair_with_an_empty_reply_is_no_comparison(name: str) -> None:
    """It changes nothing where replies are compared; where each reply counts by itself, the one that is there does."""
    log_prob, mask, reference = rows()
    whole = [0, 1, 2, 3]
    with_halves, metrics = on_rows(OBJECTIVES[name](), log_prob, mask, reference)
    without, same = on_rows(OBJECTIVES[name](), log_prob[whole], mask[whole], reference[whole])
    assert metrics == pytest.approx(same)
    assert (float(with_halves) == pytest.approx(float(without))) == ("kto" not in name)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_mini_batch_without_a_trained_token_is_nothing(name: str) -> None:
    log_prob, _, reference = rows()
    log_prob.requires_grad_(True)
    loss, metrics = on_rows(OBJECTIVES[name](), log_prob, torch.zeros_like(log_prob), reference)
    assert float(loss.detach()) == 0
    assert torch.autograd.grad(loss, log_prob)[0].eq(0).all()
    assert set(metrics.values()) == {0.0}


def test_rows_that_are_not_in_pairs_are_refused() -> None:
    for objective in (preference("dpo"), scoring("sigmoid")):
        with refused(DataError, "3 rows"):
            on_rows(objective, torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3, 1))


# --------------------------------------------------------------------------- from groups to pairs


def turn(*tokens: int) -> Turn:
    return episodes.turn([1, 2], tokens, 0.0)


def group(*rewards: float | None, slot: int = 0) -> Group:
    """A group whose members got these rewards; None for one that failed. Member i said token 10 + i."""
    failure = Failure("reward", "ValueError", "no number")
    members = tuple(
        Trajectory(i, (turn(10 + i),), {} if reward is None else {"exact": reward}, failure if reward is None else None)
        for i, reward in enumerate(rewards)
    )
    return Group(slot, Task(f"task-{slot}", ()), members)


ALGORITHM = GroupAlgorithm("dpo", (preference("dpo"),), pairs=True)


def test_a_pair_is_the_best_and_the_worst_living_member() -> None:
    groups = [group(0.5, None, 1.0, 0.0, 1.0, 0.0, slot=0), group(0.7, 0.7, slot=1), group(-1.0, -2.0, slot=2)]
    kept, metrics = ALGORITHM.filter([*groups, group(1.0, None, slot=3), group(None, None, slot=4)])
    assert [g.slot for g in kept] == [0, 2]
    assert checked(metrics)["rollout/refused"] == 3
    assert metrics["rollout/trajectories"] == 4
    batch = ALGORITHM.batch(kept)
    assert [(e.group_id, e.index) for e in batch.experiences] == [
        ("train/task-0/0", 2),
        ("train/task-0/0", 3),
        ("train/task-2/0", 0),
        ("train/task-2/0", 1),
    ]
    assert ALGORITHM.needs == {"ref"}


def test_members_that_said_nothing_are_in_no_pair() -> None:
    silent = Trajectory(0, (), {"exact": 2.0})
    spoke = group(1.0, 0.0).trajectories
    assert pair_of(Group(0, Task("task", ()), (silent, *spoke))) == spoke
    assert pair_of(Group(0, Task("task", ()), (silent, spoke[1]))) is None


def one(label: object, number: int = 0) -> Group:
    task = Task(f"task-{number}", (), {"label": label})
    return Group(number, task, (Trajectory(0, (turn(3),)),))


@pytest.mark.parametrize("kind", ["kto", "kto_pair"])
def test_single_completions_with_labels_are_the_same_as_halves_of_pairs(kind: str) -> None:
    """Slow loop: every desirable completion against none, and every undesirable one."""
    algorithm = GroupAlgorithm("kto", (preference(kind, beta=0.5),), pairs=True)
    kept, metrics = algorithm.filter([one(True, 0), one(False, 1), one(1, 2)])
    assert (len(kept), metrics["rollout/trajectories"]) == (3, 3)
    batch = algorithm.batch(kept)
    assert [bool(e.response_mask.any()) for e in batch.experiences] == [True, False, False, True, True, False]
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    log_prob = -torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)).double()
    reference = log_prob - torch.tensor([0.3, 0, 0, -0.2, 0.9, 0])[:, None].double()
    loss, means = on_rows(preference(kind, beta=0.5), log_prob, mask, reference)
    c, d = [0.9, 2.7], [-0.6]
    if kind in KTO:
        z0 = max(0.0, sum([*c, *d]) / 3)
        expected = [1 - logistic(0.5 * (x - z0)) for x in c] + [1 - logistic(0.5 * (z0 - x)) for x in d]
    else:
        expected = [1 - logistic(0.5 * (x - max(0.0, d[0]))) for x in c]
        expected += [1 - logistic(0.5 * (max(0.0, sum(c) / 2) - x)) for x in d]
    assert float(loss) == pytest.approx(sum(expected) / 3)
    assert means == {
        "train/preference_chosen": pytest.approx(0.5 * 1.8),
        "train/preference_rejected": pytest.approx(0.5 * -0.6),
    }
    cut, cut_means = on_rows(preference(kind, beta=0.5), log_prob, mask, reference, parts=[[0, 1], [2, 3, 4, 5]])
    assert float(cut) == pytest.approx(float(loss))
    assert cut_means == pytest.approx(means)


@pytest.mark.parametrize("label", [None, "yes", 2, [True]])
def test_a_completion_without_a_label_is_refused(label: object) -> None:
    with refused(DataError, "'task-0'", "algorithm.label"):
        batch_of_pairs([one(label)])


def test_a_reply_that_is_several_sequences_is_refused() -> None:
    rewritten = Trajectory(0, (turn(3), turn(4)), {"exact": 1.0})  # the second prompt does not hold the first reply
    with refused(DataError, "trajectory 0", "its history"):
        batch_of_pairs([Group(0, Task("task", ()), (rewritten, group(1.0, 0.0).trajectories[1]))])


def test_interleaving_is_by_pair() -> None:
    assert interleaved(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0])).tolist() == [[1.0], [2.0], [3.0], [4.0]]
