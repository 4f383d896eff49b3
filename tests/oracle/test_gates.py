"""Gates against slow loops, and what shutting a token does to the loss, its mean and its gradient."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from algebra import HOLES as MASK
from algebra import Step, make_step, numbers, policy_objective, run, shut
from torch import Tensor

from trivium.algorithms import PolicyInputs, catalogue, policy_inputs
from trivium.algorithms.objective import Term

GATES = catalogue("gates")


def term(room: str, kind: str, coef: float) -> Term:
    function = catalogue(room)[kind]
    return Term(coef, function, function.metadata)


def inputs(seed: int) -> PolicyInputs:
    """The last row is an expert's."""
    log_prob = -numbers(seed).abs() - 0.05
    advantages = numbers(seed + 2)
    advantages[0, 1] = 0.0
    x = policy_inputs(log_prob, MASK, old_log_prob=log_prob + numbers(seed + 1, 0.6), advantages=advantages)
    expert = MASK.clone()
    expert[:4] = False
    return PolicyInputs(x.log_prob, MASK, x.columns, expert, torch.where(MASK, numbers(seed + 3).abs(), 0.0))


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.3])
def test_sequence_drift_shuts_bad_tokens_of_rows_that_the_policy_left(delta: float) -> None:
    seen = set()
    for seed in range(8):
        x = inputs(seed)
        weight = GATES["sequence_drift"](x, delta=delta)
        for row, t in MASK.nonzero().tolist():
            gone = [float(x.old_log_prob[row, u] - x.log_prob[row, u]) for u in range(6) if MASK[row, u]]
            closed = row != 4 and float(x.advantages[row, t]) < 0 and sum(gone) / len(gone) > delta
            assert float(weight[row, t]) == 1 - closed
            seen.add((closed, row == 4))
    assert seen == {(True, False), (False, False), (False, True)}


@pytest.mark.parametrize("limit", [0.05, 0.2])
def test_probability_difference_shuts_tokens_that_moved_the_way_they_should(limit: float) -> None:
    seen = set()
    for seed in range(8):
        x = inputs(seed)
        weight = GATES["probability_difference"](x, limit=limit)
        for row, t in MASK.nonzero().tolist():
            moved = math.exp(x.log_prob[row, t]) - math.exp(x.old_log_prob[row, t])
            good = float(x.advantages[row, t]) > 0
            closed = row != 4 and (moved > limit if good else -moved > limit)
            assert float(weight[row, t]) == 1 - closed
            seen.add((good, closed))
    assert seen == {(good, closed) for good in (True, False) for closed in (True, False)}


def quantile(values: list[float], q: float) -> float:
    """With linear interpolation between neighbours."""
    ordered, place = sorted(values), q * (len(values) - 1)
    below = min(math.floor(place + 1e-9), len(values) - 1)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + max(place - below, 0.0) * (ordered[above] - ordered[below])


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.3, 0.5, 0.77, 1.0])
def test_top_entropy_keeps_what_lies_at_or_above_the_quantile_of_the_batch(fraction: float) -> None:
    for seed in range(5):
        x = inputs(seed)
        assert x.entropy is not None
        weight = GATES["top_entropy"](x, fraction=fraction)
        sampled = MASK & ~x.expert
        limit = quantile(x.entropy[sampled].tolist(), 1 - fraction)
        assert weight[sampled].tolist() == [float(value >= limit - 1e-12) for value in x.entropy[sampled].tolist()]
        assert weight[x.expert].eq(1).all()
        assert weight[~MASK].eq(0).all()
        assert weight.sum() >= 1


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.5, 0.8, 1.0])
def test_top_entropy_per_sequence_keeps_that_share_of_each_row(fraction: float) -> None:
    x = inputs(3)
    assert x.entropy is not None
    weight = GATES["top_entropy"](x, fraction=fraction, per="sequence")
    for row, kept in zip(range(5), weight, strict=True):
        places = [t for t in range(6) if MASK[row, t]]
        highest = sorted(places, key=lambda t, row=row: -float(x.entropy[row, t]))
        count = max(1, math.floor(fraction * len(places))) if places else 0
        assert kept.nonzero().flatten().tolist() == sorted(highest[:count])


def test_equal_entropies_all_count() -> None:
    x = inputs(0)
    same = PolicyInputs(x.log_prob, MASK, x.columns, x.expert, torch.full(MASK.shape, 0.5).double())
    for per in ("batch", "sequence"):
        assert torch.equal(GATES["top_entropy"](same, fraction=0.2, per=per), MASK.double())


def test_nothing_to_choose_from_chooses_nothing() -> None:
    x = inputs(0)
    nothing = PolicyInputs(x.log_prob, MASK & ~MASK, x.columns, x.expert & ~MASK, x.entropy)
    for per in ("batch", "sequence"):
        assert GATES["top_entropy"](nothing, per=per).eq(0).all()


# --------------------------------------------------------------------------- in an objective


STEP = make_step(MASK)


def weights_of(kind: str, step: Step, **options: object) -> Tensor:
    """The gate on the whole step."""
    x = policy_inputs(step.answers["log_prob"], step.mask, **step.columns)
    x = PolicyInputs(x.log_prob, x.response_mask, x.columns, x.expert, step.answers["entropy"].where(step.mask, 0.0))
    (gate,) = shut([{"kind": kind, **options}])
    return gate.function(x)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sequence_drift", {"delta": 0.0}),
        ("probability_difference", {"limit": 0.05}),
        ("top_entropy", {"fraction": 0.5}),
    ],
)
@pytest.mark.parametrize("narrow", [False, True])
def test_a_closed_token_teaches_nothing_and_counts_unless_narrow(kind: str, options: dict, narrow: bool) -> None:
    weight = weights_of(kind, STEP, **options)
    shut_out = STEP.mask & (weight == 0)
    assert 0 < int(shut_out.sum()) < int(STEP.mask.sum())
    done = run(policy_objective("ppo", "token-mean", gates=[{"kind": kind, "narrow": narrow, **options}]), STEP)
    plain = run(policy_objective("ppo", "token-sum"), STEP)
    counted = int(STEP.mask.sum()) - (int(shut_out.sum()) if narrow else 0)
    expected = torch.where(shut_out, 0.0, plain.gradients["log_prob"]) / counted
    torch.testing.assert_close(done.gradients["log_prob"], expected, rtol=1e-6, atol=1e-9)
    if not narrow:
        assert done.metrics["train/gate_closed"] == pytest.approx(int(shut_out.sum()) / int(STEP.mask.sum()))


def test_a_narrow_gate_leaves_kl_and_entropy_to_every_token() -> None:
    terms = {"kl": term("kl_estimators", "k2", 0.3), "entropy": term("entropies", "exact", 0.2)}
    gates = [{"kind": "top_entropy", "fraction": 0.3, "narrow": True}]
    both = run(policy_objective("ppo", gates=gates, terms=terms), STEP).gradients
    gated = run(policy_objective("ppo", gates=gates), STEP).gradients
    plain, free = (run(policy_objective("ppo", terms=given), STEP).gradients for given in (None, terms))
    for name, gradient in both.items():
        torch.testing.assert_close(gradient - gated[name], free[name] - plain[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["gmpo", "gspo_sequence"])
def test_weights_of_a_loss_per_sequence_enter_by_their_geometric_mean(kind: str) -> None:
    weights = torch.rand(STEP.mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    weighted = replace(STEP, columns={**STEP.columns, "rollout_is_weights": weights})
    done = run(policy_objective(kind, "token-sum", weighted=True), weighted).gradients["log_prob"]
    plain = run(policy_objective(kind, "token-sum"), STEP).gradients["log_prob"]
    for row, mask in enumerate(STEP.mask):
        factor = math.exp(fmean(math.log(w) for w in weights[row][mask].tolist())) if mask.any() else 0.0
        torch.testing.assert_close(done[row], plain[row] * factor, rtol=1e-9, atol=1e-12)


def test_gates_multiply() -> None:
    gates = [{"kind": "sequence_drift", "delta": 0.0}, {"kind": "top_entropy", "fraction": 0.5}]
    both = weights_of("sequence_drift", STEP, delta=0.0) * weights_of("top_entropy", STEP, fraction=0.5)
    done = run(policy_objective("ppo", "token-sum", gates=gates), STEP)
    plain = run(policy_objective("ppo", "token-sum"), STEP).gradients["log_prob"]
    torch.testing.assert_close(done.gradients["log_prob"], plain * both.where(STEP.mask, 0.0), rtol=1e-6, atol=1e-9)


def test_a_row_gate_is_judged_under_the_weights_of_the_update() -> None:
    (gate,) = shut([{"kind": "sequence_drift"}])
    assert not gate.ahead
    (batch,) = shut([{"kind": "top_entropy"}])
    assert batch.ahead
    assert policy_objective("ppo", gates=[{"kind": "top_entropy"}]).looks_at == {"entropy"}
    assert policy_objective("ppo", gates=[{"kind": "sequence_drift", "narrow": True}]).looks_at == {"log_prob"}
    assert policy_objective("ppo", gates=[{"kind": "sequence_drift"}]).looks_at == frozenset()
