"""Policy losses against the papers' equations: loss and gradient of every token in python's own arithmetic."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from algebra import HOLES as MASK
from algebra import numbers
from torch import Tensor

from trivium.algorithms import PerToken, PolicyInputs, catalogue, policy_inputs
from trivium.algorithms.losses.covariance import highest_covariance, some_high_covariance
from trivium.algorithms.losses.trust import heaviest

LOSSES = catalogue("policy_losses")


def inputs(seed: int, **changed: Tensor) -> PolicyInputs:
    """Log-probabilities of current and old policy, some ratios far from one; selected tokens; a random number each."""
    log_prob = -numbers(seed).abs() - 0.05
    columns = {
        "old_log_prob": (log_prob + numbers(seed + 1, 0.6)).clamp(max=-0.01),
        "advantages": numbers(seed + 2),
        "selected": (numbers(seed + 3) > 0.5).double(),
        "uniform": numbers(seed + 4).sigmoid(),
    }
    x = policy_inputs(log_prob, MASK, **{**columns, **changed})
    return PolicyInputs(x.log_prob.requires_grad_(True), x.response_mask, x.columns, x.expert)


Slow = tuple[float, float, Mapping[str, float]]
"""(loss, gradient, metrics) of a token."""
ONE_TOKEN: list[tuple[str, dict[str, Any], Callable[..., Slow]]] = []
"""(loss, options, the equation of one token): f(log_prob, old, advantage, selected, **options)."""


def equation(name: str, **options: Any) -> Callable[[Callable[..., Slow]], Callable[..., Slow]]:
    def register(slow: Callable[..., Slow]) -> Callable[..., Slow]:
        ONE_TOKEN.append((name, options, slow))
        return slow

    return register


@equation("importance_sampling")
def _importance(p: float, old: float, a: float, selected: bool) -> Slow:
    r = math.exp(p - old)
    return -a * r, -a * r, {"train/ratio": r}


@equation("cispo")
@equation("cispo", clip_low=0.3, clip_high=0.2)
@equation("cispo", clip_low=0.3, clip_high=0.5, mask_clip_high=0.1)
@equation("cispo", clip_low=0.9, clip_high=0.5, mask_clip_low=0.2, mask_clip_high=0.6)
def _cispo(
    p: float,
    old: float,
    a: float,
    selected: bool,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    mask_clip_low: float = math.inf,
    mask_clip_high: float = math.inf,
) -> Slow:
    r = math.exp(p - old)
    weight = min(max(r, 1 - clip_low), 1 + clip_high)
    out = (a > 0 and r > 1 + mask_clip_high) or (a < 0 and r < 1 - mask_clip_low)
    metrics = {
        "train/clip_fraction": weight != r,
        "train/clip_fraction_up": weight != r and a > 0,
        "train/left_out": out,
    }
    return (0.0, 0.0, metrics) if out else (-a * weight * p, -a * weight, metrics)


@equation("sapo")
@equation("sapo", tau_pos=2.0, tau_neg=3.0)
def _sapo(p: float, old: float, a: float, selected: bool, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Slow:
    r, tau = math.exp(p - old), tau_pos if a > 0 else tau_neg
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -a * 4 / tau * gate, -a * 4 * gate * (1 - gate) * r, {}


@equation("cpgd")
@equation("cpgd", clip_low=0.1, clip_high=0.4, drift_coef=0.3)
def _cpgd(
    p: float,
    old: float,
    a: float,
    selected: bool,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drift_coef: float = 0.0,
) -> Slow:
    r = math.exp(p - old)
    clipped = min(r, 1 + clip_high) if a > 0 else max(r, 1 - clip_low)
    drift = drift_coef * (r - 1 - math.log(r))
    held = {"train/clip_fraction": clipped != r}
    pull = drift_coef * (r - 1)
    return -a * (old + math.log(clipped)) + drift, (-a if clipped == r else 0.0) + pull, held


@equation("clip_cov")
@equation("clip_cov", clip_low=0.1, clip_high=0.5)
def _clip_cov(p: float, old: float, a: float, selected: bool, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Slow:
    r = math.exp(p - old)
    held = (a > 0 and r > 1 + clip_high) or (a < 0 and r < 1 - clip_low)
    loss = -min(a * r, a * min(max(r, 1 - clip_low), 1 + clip_high))
    metrics = {"train/clip_fraction": held, "train/left_out": selected}
    return (0.0, 0.0, metrics) if selected else (loss, 0.0 if held else -a * r, metrics)


@equation("kl_cov")
@equation("kl_cov", coef=0.7)
def _kl_cov(p: float, old: float, a: float, selected: bool, *, coef: float = 0.1) -> Slow:
    r, distance = math.exp(p - old), abs(p - old)
    penalty = coef if selected else 0.0
    return -a * r + penalty * distance, -a * r + penalty * math.copysign(1, p - old), {"train/log_ratio_abs": distance}


@equation("dppo_tv")
@equation("dppo_tv", tv_low=0.02, tv_high=0.1, max_ratio=1.2)
def _dppo_tv(
    p: float,
    old: float,
    a: float,
    selected: bool,
    *,
    tv_low: float = 0.15,
    tv_high: float = 0.15,
    max_ratio: float = 20.0,
) -> Slow:
    rise = math.exp(p) - math.exp(old)
    return _dppo(p, old, a, rise > tv_high if a > 0 else rise < -tv_low, max_ratio)


@equation("dppo_kl")
@equation("dppo_kl", kl_low=0.005, kl_high=0.1, max_ratio=1.2)
def _dppo_kl(
    p: float,
    old: float,
    a: float,
    selected: bool,
    *,
    kl_low: float = 0.05,
    kl_high: float = 0.05,
    max_ratio: float = 20.0,
) -> Slow:
    now, before = math.exp(p), math.exp(old)
    kl = before * math.log(before / now) + (1 - before) * math.log((1 - before) / (1 - now))
    return _dppo(p, old, a, (now > before and kl > kl_high) if a > 0 else (now < before and kl > kl_low), max_ratio)


def _dppo(p: float, old: float, a: float, left: bool, max_ratio: float) -> Slow:
    r = math.exp(p - old)
    weight = 0.0 if left else min(r, max_ratio)
    return -a * weight * p, -a * weight, {"train/left_out": left, "train/clip_fraction": r > max_ratio and not left}


@equation("prime")
@equation("prime", threshold=0.05, drift_coef=0.2)
def _prime(p: float, old: float, a: float, selected: bool, *, threshold: float = 0.2, drift_coef: float = 1e-3) -> Slow:
    r, rise = math.exp(p - old), math.exp(p) - math.exp(old)
    left = (a > 0 and rise > threshold) or (a <= 0 and rise < -threshold)
    policy = 0.0 if left else -a * r
    return policy + drift_coef * (p - old) ** 2, policy + 2 * drift_coef * (p - old), {"train/left_out": left}


@equation("dro")
@equation("dro", beta=0.8)
def _dro(p: float, old: float, a: float, selected: bool, *, beta: float = 0.1) -> Slow:
    return -(a * p - beta / 2 * (p - old) ** 2), -a + beta * (p - old), {}


@equation("m2po")
def _m2po(p: float, old: float, a: float, selected: bool) -> Slow:
    r = math.exp(p - old)
    return (0.0, 0.0, {"train/left_out": True}) if selected else (-a * r, -a * r, {"train/left_out": False})


def check(x: PolicyInputs, done: PerToken, expected: dict[tuple[int, int], Slow]) -> None:
    """Loss, metrics, and the gradient of the sum over the mask."""
    (gradient,) = torch.autograd.grad(done.loss[MASK].sum(), x.log_prob)
    assert gradient[~MASK].eq(0).all()
    for place, (loss, slope, metrics) in expected.items():
        assert float(done.loss[place].detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12), place
        assert float(gradient[place]) == pytest.approx(slope, rel=1e-9, abs=1e-12), place
        found = {key: float(values[place].detach()) for key, values in done.metrics.items()}
        assert found == pytest.approx({key: float(value) for key, value in metrics.items()}), place


@pytest.mark.parametrize(
    ("name", "options", "slow"), ONE_TOKEN, ids=lambda v: str(v) if isinstance(v, str | dict) else ""
)
def test_a_token_has_the_loss_and_the_gradient_of_the_equation(
    name: str, options: dict[str, Any], slow: Callable[..., Slow]
) -> None:
    seen: set[tuple[Any, ...]] = set()
    for seed in range(0, 50, 10):
        x = inputs(seed)
        expected: dict[tuple[int, int], Slow] = {}
        for row, t in MASK.nonzero().tolist():
            p, old, a = (float(values[row, t].detach()) for values in (x.log_prob, x.old_log_prob, x.advantages))
            expected[row, t] = slow(p, old, a, bool(x.columns["selected"][row, t]), **options)
            seen.add(tuple(value for value in expected[row, t][2].values() if isinstance(value, bool)))
        check(x, LOSSES[name](x, **options), expected)
    flags = max(map(len, seen), default=0)
    common = {name for name in ("cispo", "dppo_tv", "dppo_kl") if not options}  # defaults are wide: little is clipped
    assert len(seen) > 1 or not flags or name in common, "the data never take the other branch"


# --------------------------------------------------------------------------- one ratio for a sequence


@pytest.mark.parametrize("clip", [(3e-4, 4e-4), (0.1, 0.3)])
@pytest.mark.parametrize("name", ["gspo", "gspo_sequence"])
def test_gspo_clips_the_geometric_mean_of_a_sequences_ratios(name: str, clip: tuple[float, float]) -> None:
    low, high = clip
    for seed in range(0, 50, 10):
        x = inputs(seed)
        expected: dict[tuple[int, int], Slow] = {}
        for row in range(len(MASK)):
            tokens = MASK[row].nonzero().flatten().tolist()
            if not tokens:
                continue
            s = math.exp(sum(float((x.log_prob - x.old_log_prob)[row, t].detach()) for t in tokens) / len(tokens))
            slopes: list[float] = []
            for t in tokens:
                a = float(x.advantages[row, t])
                held = (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low)
                loss = -min(a * s, a * min(max(s, 1 - low), 1 + high))
                slopes.append(0.0 if held else -a * s)
                expected[row, t] = (loss, slopes[-1], {"train/clip_fraction": held})
            if name == "gspo_sequence":  # the chain rule: every token moves the mean by 1 / |o|
                mean = sum(slopes) / len(slopes)
                expected |= {(row, t): (expected[row, t][0], mean, expected[row, t][2]) for t in tokens}
        check(x, LOSSES[name](x, clip_low=low, clip_high=high), expected)


def test_both_forms_of_gspo_are_one_where_a_sequence_has_one_advantage() -> None:
    x = inputs(3, advantages=numbers(5)[:, :1].expand(MASK.shape))
    one, other = (
        torch.autograd.grad(LOSSES[name](x, clip_low=0.1, clip_high=0.1).loss[MASK].sum(), x.log_prob)[0]
        for name in ("gspo", "gspo_sequence")
    )
    torch.testing.assert_close(one, other)
    assert one.abs().max() > 0


@pytest.mark.parametrize("clip", [(0.4, 0.4), (0.05, 0.3)])
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(clip: tuple[float, float]) -> None:
    low, high = clip
    for seed in range(0, 50, 10):
        x = inputs(seed)
        expected: dict[tuple[int, int], Slow] = {}
        for row in range(len(MASK)):
            tokens = MASK[row].nonzero().flatten().tolist()
            if not tokens:
                continue
            advantages = {t: float(x.advantages[row, t]) for t in tokens}
            log_ratios = {t: float((x.log_prob - x.old_log_prob)[row, t].detach()) for t in tokens}
            held = {t: min(d, high) if advantages[t] > 0 else max(d, -low) for t, d in log_ratios.items()}
            loss = -sum(advantages.values()) / len(tokens) * math.exp(sum(held.values()) / len(tokens))
            for t, d in log_ratios.items():
                outside = not -low <= d <= high
                metrics = {
                    "train/clip_fraction": held[t] != d,
                    "train/clip_fraction_up": outside and advantages[t] > 0,
                    "train/clip_fraction_down": outside and advantages[t] < 0,
                }
                # n tokens with the sequence's loss, each log-probability a 1 / n part of it
                expected[row, t] = (loss, loss if held[t] == d else 0.0, metrics)
        check(x, LOSSES["gmpo"](x, clip_low=low, clip_high=high), expected)


# --------------------------------------------------------------------------- what is chosen over a mini-batch


def places(chosen: Tensor) -> set[tuple[int, int]]:
    return {(row, t) for row, t in chosen.nonzero().tolist()}


def slow_covariances(x: PolicyInputs) -> dict[tuple[int, int], float]:
    where = sorted(places(MASK))
    log_prob, advantage = ([float(v[at].detach()) for at in where] for v in (x.log_prob, x.advantages))
    mean_p, mean_a = sum(log_prob) / len(where), sum(advantage) / len(where)
    return {at: (a - mean_a) * (p - mean_p) for at, p, a in zip(where, log_prob, advantage, strict=True)}


def reordered(x: PolicyInputs, order: list[int]) -> PolicyInputs:
    columns = {name: values[order] for name, values in x.columns.items()}
    return PolicyInputs(x.log_prob[order], x.response_mask[order], columns, x.expert[order])


@pytest.mark.parametrize("ratio", [1e-4, 0.2, 0.5, 1.0])
def test_kl_cov_chooses_the_highest_covariances(ratio: float) -> None:
    for seed in range(5):
        x = inputs(seed)
        covariances = slow_covariances(x)
        count = max(int(ratio * len(covariances)), 1)
        expected = sorted(covariances, key=lambda at: -covariances[at])[:count]
        assert places(highest_covariance(x, ratio=ratio)) == set(expected)


def test_among_equal_covariances_the_random_number_decides_and_not_the_row() -> None:
    x = inputs(0, advantages=torch.ones(MASK.shape).double())
    chosen = highest_covariance(x, ratio=0.3)
    uniform = x.columns["uniform"]
    expected = sorted(places(MASK), key=lambda at: float(uniform[at]))[: int(0.3 * int(MASK.sum()))]
    assert places(chosen) == set(expected)
    order = [3, 1, 4, 0, 2]
    assert torch.equal(highest_covariance(reordered(x, order), ratio=0.3), chosen[order])


def test_clip_cov_chooses_at_random_within_the_bounds_of_the_covariance() -> None:
    bounds = {"cov_low": 0.1, "cov_high": 0.6, "clip_low": 0.1, "clip_high": 0.1}
    for seed in range(5):
        x = inputs(seed)
        candidates: set[tuple[int, int]] = set()
        for at, covariance in slow_covariances(x).items():
            r = math.exp(float((x.log_prob - x.old_log_prob)[at].detach()))
            a = float(x.advantages[at])
            held = (a > 0 and r > 1.1) or (a < 0 and r < 0.9)
            if 0.1 < covariance < 0.6 and not held:
                candidates.add(at)
        assert candidates
        assert places(some_high_covariance(x, ratio=1.0, **bounds)) == candidates
        one = some_high_covariance(x, ratio=1e-4, **bounds)
        assert places(one) == {min(candidates, key=lambda at: float(x.columns["uniform"][at]))}
        order = [3, 1, 4, 0, 2]
        assert torch.equal(some_high_covariance(reordered(x, order), ratio=1e-4, **bounds), one[order])


def test_clip_cov_chooses_other_tokens_for_other_random_numbers() -> None:
    bounds = {"ratio": 0.2, "cov_low": -1.0, "cov_high": 5.0}
    chosen = [places(some_high_covariance(inputs(0, uniform=numbers(seed).sigmoid()), **bounds)) for seed in range(8)]
    assert {len(places) for places in chosen} == {int(0.2 * int(MASK.sum()))}
    assert len(set(map(frozenset, chosen))) > 1


def slow_heaviest(x: PolicyInputs, bound: float) -> set[tuple[int, int]]:
    """Takes away the heaviest token that counts, one by one, until the mean of the others is within the bound."""
    left = {at: float((x.log_prob - x.old_log_prob)[at].detach()) ** 2 for at in places(MASK)}
    pushed = {at for at in left if float((x.advantages * (x.log_prob - x.old_log_prob))[at].detach()) > 0}
    taken: set[tuple[int, int]] = set()
    while sum(left.values()) / len(left) > bound:
        heavy = [at for at in left if at in pushed and left[at] > bound]
        if not heavy:
            break
        taken.add(max(heavy, key=lambda at: left[at]))
        left.pop(max(heavy, key=lambda at: left[at]))
    return taken


@pytest.mark.parametrize("bound", [1e-6, 0.04, 0.15, 0.3, 100.0])
def test_m2po_leaves_out_the_heaviest_tokens_one_by_one(bound: float) -> None:
    counts: set[int] = set()
    for seed in range(20):
        x = inputs(seed)
        chosen = heaviest(x, m2=bound)
        assert places(chosen) == slow_heaviest(x, bound)
        counts.add(int(chosen.sum()))
        order = [3, 1, 4, 0, 2]
        assert torch.equal(heaviest(reordered(x, order), m2=bound), chosen[order])
    assert (counts == {0}) == (bound == 100.0), "the data never take the other branch"


def test_m2po_on_an_example() -> None:
    log_ratio = torch.tensor([[0.0, 1.0, -0.6, 0.5, -0.1, 0.3]]).double()
    advantages = torch.tensor([[9.0, 1.0, 1.0, 1.0, -1.0, -1.0]]).double()
    x = PolicyInputs(
        log_ratio,
        torch.tensor([[0, 1, 1, 1, 1, 1]]).bool(),
        {"advantages": advantages, "old_log_prob": torch.zeros(1, 6).double(), "uniform": torch.zeros(1, 6).double()},
        torch.zeros(1, 6).bool(),
    )
    # squares 1, .36, .25, .01, .09; the second and the last move against their advantage and stay
    assert places(heaviest(x, m2=0.4)) == set()  # the mean is .342
    assert places(heaviest(x, m2=0.3)) == {(0, 1)}  # .1775 without the heaviest
    assert places(heaviest(x, m2=0.17)) == {(0, 1), (0, 3)}  # .1533 without the two
    assert places(heaviest(x, m2=0.001)) == {(0, 1), (0, 3), (0, 4)}  # no choice is enough


def test_on_policy_m2po_leaves_nothing_out() -> None:
    x = inputs(0)
    x = inputs(0, old_log_prob=x.log_prob.detach())
    assert not heaviest(x, m2=1e-9).any()


# --------------------------------------------------------------------------- extremes


OWN = sorted({name for name, _, _ in ONE_TOKEN} | {"gspo", "gspo_sequence", "gmpo"})


@pytest.mark.parametrize("far", [-1000.0, 1000.0])
@pytest.mark.parametrize("name", OWN)
def test_log_ratios_beyond_reason_give_finite_losses_and_gradients(name: str, far: float) -> None:
    for sign in (-1.0, 1.0):
        log_prob = (-numbers(1).abs() if far < 0 else -numbers(1).abs() * 1e-3).float().requires_grad_(True)
        columns = {
            "old_log_prob": log_prob.detach() - far,
            "advantages": torch.full(MASK.shape, sign),
            "selected": torch.zeros(MASK.shape),
            "uniform": torch.zeros(MASK.shape),
        }
        done = LOSSES[name](PolicyInputs(log_prob, MASK, columns, torch.zeros_like(MASK)))
        (gradient,) = torch.autograd.grad(done.loss[MASK].sum(), log_prob)
        assert torch.isfinite(done.loss[MASK]).all()
        assert torch.isfinite(gradient).all()
        assert all(torch.isfinite(values[MASK]).all() for values in done.metrics.values())


def test_a_probability_above_one_by_rounding_is_one() -> None:
    """A log-probability a little above zero must not make the binary KL a NaN that keeps every token."""
    log_prob = torch.tensor([[0.0, 1e-4]]).double()
    columns = {"old_log_prob": torch.tensor([[0.0, -3.0]]).double(), "advantages": torch.ones(1, 2).double()}
    x = PolicyInputs(log_prob, torch.tensor([[False, True]]), columns, torch.zeros(1, 2).bool())
    assert LOSSES["dppo_kl"](x).metrics["train/left_out"].tolist() == [[0.0, 1.0]]
