"""Losses for replies of older policies and of experts, against the papers' equations in python's own arithmetic."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from algebra import HOLES as MASK
from algebra import numbers
from torch import Tensor

from trivium.algorithms import PolicyInputs, PolicyObjective, catalogue, policy_inputs
from trivium.algorithms.losses.base import LOG_RATIO_BOUND
from trivium.algorithms.losses.mixed import mu_schedule
from trivium.algorithms.objective import Term
from trivium.models.heads.loss import LossDenominators, LossInputs

LOSSES = catalogue("policy_losses")
ENTROPIES = catalogue("entropies")
EXPERTS = (1, 4)


class Token(NamedTuple):
    p: float
    """log-probability under the current policy"""
    old: float
    a: float
    row: Sequence[float]
    """the log-ratios of the tokens it was sampled with"""

    def ratio(self, level: str = "token") -> float:
        return math.exp(self.p - self.old if level == "token" else sum(self.row) / len(self.row))


Slow = tuple[float, float, dict[str, float]]
"""(loss, gradient, metrics) of a token."""
EQUATIONS: list[tuple[str, dict[str, Any], Callable[..., Slow]]] = []


def equation(name: str, **options: Any) -> Callable[[Callable[..., Slow]], Callable[..., Slow]]:
    def register(slow: Callable[..., Slow]) -> Callable[..., Slow]:
        EQUATIONS.append((name, options, slow))
        return slow

    return register


def inputs(seed: int, experts: Sequence[int] = (), step: int = 0) -> PolicyInputs:
    """Some ratios near one, some far from it."""
    log_prob = -numbers(seed).abs() - 0.05
    x = policy_inputs(log_prob, MASK, old_log_prob=log_prob + numbers(seed + 1, 0.5), advantages=numbers(seed + 2))
    expert = torch.zeros_like(MASK)
    expert[list(experts)] = MASK[list(experts)]
    return PolicyInputs(x.log_prob.requires_grad_(True), x.response_mask, x.columns, expert, step=step)


def tokens(x: PolicyInputs) -> list[tuple[int, int, Token]]:
    p, old, a = (t.detach().tolist() for t in (x.log_prob, x.old_log_prob, x.advantages))
    trained = MASK.nonzero().tolist()
    return [
        (i, t, Token(p[i][t], old[i][t], a[i][t], [p[i][u] - old[i][u] for j, u in trained if j == i]))
        for i, t in trained
    ]


def assert_slow(name: str, options: dict[str, Any], x: PolicyInputs, slow: Callable[[int, Token], Slow]) -> None:
    """Loss, gradient and metrics of every trained token are what the loop says."""
    found = LOSSES[name](x, **options)
    (gradient,) = torch.autograd.grad(found.loss[MASK].sum(), x.log_prob)
    per_token = found.loss.detach()
    assert gradient[~MASK].eq(0).all()
    for i, t, token in tokens(x):
        loss, slope, metrics = slow(i, token)
        assert float(per_token[i, t]) == pytest.approx(loss, rel=1e-10, abs=1e-12)
        assert float(gradient[i, t]) == pytest.approx(slope, rel=1e-10, abs=1e-12)
        assert found.metrics.keys() == metrics.keys()
        for key, value in metrics.items():
            assert float(found.metrics[key][i, t]) == pytest.approx(float(value), rel=1e-10)


# --------------------------------------------------------------------------- replies of older policies


@equation("opmd")
@equation("opmd", tau=0.0)
@equation("opmd", tau=2.5)
def _opmd(token: Token, *, tau: float = 1.0) -> Slow:
    return -token.a * token.p / (1 + tau), -token.a / (1 + tau), {}


@equation("topr")
@equation("topr", threshold=0.4)
@equation("topr", level="token")
@equation("topr", level="token", threshold=-0.5)
def _topr(token: Token, *, level: str = "sequence", threshold: float = 0.0) -> Slow:
    ratio = math.exp(sum(token.row)) if level == "sequence" else token.ratio()
    weight = 1.0 if token.a > threshold else min(ratio, 1.0)
    return -token.a * weight * token.p, -token.a * weight, {"train/score_weight": weight}


@equation("vespo")
@equation("vespo", k_pos=1.0, lambda_pos=0.5, k_neg=0.0, lambda_neg=4.0)
def _vespo(
    token: Token, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> Slow:
    w = math.exp(sum(token.row))
    k, rate = (k_pos, lambda_pos) if token.a >= 0 else (k_neg, lambda_neg)
    weight = w**k * math.exp(rate * (1 - w))
    return -token.a * weight * token.p, -token.a * weight, {"train/score_weight": weight}


@equation("sppo")
@equation("sppo", epsilon=0.1)
def _sppo(token: Token, *, epsilon: float = 0.3) -> Slow:
    inside = 1 / (1 + epsilon) <= token.ratio() <= 1 + epsilon
    metrics = {"train/clip_fraction": not inside}
    return (-token.a * (token.p - token.old), -token.a, metrics) if inside else (0.0, 0.0, metrics)


@equation("red_weight")
@equation("red_weight", temperature=2.0)
def _red_weight(token: Token, *, temperature: float = 1.0) -> Slow:
    weight = math.exp(token.a / temperature)
    return -token.a * weight * token.p, -token.a * weight, {"train/score_weight": weight}


def counted(ratio: float, a: float, clip: str, low: float, high: float, ring: tuple[float, float]) -> bool:
    """Whether REC lets a token of this ratio and advantage count."""
    within = 1 - low <= ratio <= 1 + high
    if clip == "ring":
        return within or (ratio <= 1 - ring[0] if a > 0 else ratio >= 1 + ring[1])
    if clip == "one_side":
        return ratio <= 1 + high if a > 0 else ratio >= 1 - low
    return clip == "none" or within


@equation("rec")
@equation("rec", clip="none", weight="none")
@equation("rec", clip="none", level="sequence")
@equation("rec", clip="one_side", level="sequence", clip_low=0.05, clip_high=0.1)
@equation("rec", clip="two_side", weight="none")
@equation("rec", clip="two_side", level="sequence", clip_high=0.4)
@equation("rec", clip="ring", ring_low=0.25, ring_high=0.3)
@equation("rec", clip="ring", level="sequence", clip_low=0.01, clip_high=0.01, ring_low=0.1, ring_high=0.1)
def _rec(
    token: Token,
    *,
    clip: str = "one_side",
    weight: str = "importance",
    level: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ring_low: float = 0.6,
    ring_high: float = 2.0,
) -> Slow:
    ratio = token.ratio(level)
    counts = counted(ratio, token.a, clip, clip_low, clip_high, (ring_low, ring_high))
    slope = -token.a * (ratio if weight == "importance" else 1.0) if counts else 0.0
    return slope * token.p, slope, {"train/clip_fraction": not counts}


@equation("rec_regularized")
@equation("rec_regularized", regularizer="k2", strength=0.7)
@equation("rec_regularized", regularizer="k2", clip="two_side", clip_low=0.1, clip_high=0.1)
@equation("rec_regularized", clip="one_side", strength=0.3)
def _rec_regularized(
    token: Token,
    *,
    regularizer: str = "forward_kl",
    strength: float = 0.1,
    clip: str = "none",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Slow:
    loss, slope, metrics = _rec(token, clip=clip, weight="none", clip_low=clip_low, clip_high=clip_high)
    far = token.p - token.old
    pull, pulls = (far**2, 2 * far) if regularizer == "k2" else (-token.p, -1.0)
    return loss + strength * pull, slope + strength * pulls, metrics


@equation("sft_is")
def _sft_is(token: Token) -> Slow:
    p = math.exp(token.p)
    return -p * token.p, -p, {}


@equation("sft_phi")
@equation("sft_phi", cutoff=0.5)
def _sft_phi(token: Token, *, cutoff: float = 1.0) -> Slow:
    p = math.exp(token.p)
    phi = p * (1 - p)
    return -phi * min(token.p, math.log(cutoff)), -phi if p < cutoff else 0.0, {}


@pytest.mark.parametrize(("name", "options", "slow"), EQUATIONS, ids=lambda value: str(value).split(" at ")[0])
@pytest.mark.parametrize("seed", [0, 10, 20])
def test_a_token_is_the_equation(name: str, options: dict[str, Any], slow: Callable[..., Slow], seed: int) -> None:
    assert_slow(name, options, inputs(seed), lambda row, token: slow(token, **options))


def test_the_equations_were_tried_on_both_sides_of_every_decision() -> None:
    for name, options, slow in EQUATIONS:
        if name in ("rec", "sppo") and options.get("clip") != "none":
            seen = {slow(token, **options)[1] == 0 for s in (0, 10, 20) for _, _, token in tokens(inputs(s))}
            assert seen == {True, False}, (name, options)


def test_rec_as_it_stands_has_the_gradient_of_ppo() -> None:
    x = inputs(3)
    losses = (LOSSES["rec"](x).loss, LOSSES["ppo"](x, dual_clip=None).loss)
    rec, ppo = (torch.autograd.grad(loss[MASK].sum(), x.log_prob)[0] for loss in losses)
    torch.testing.assert_close(rec, ppo, rtol=1e-12, atol=1e-14)


def test_far_from_the_old_policy_topr_and_vespo_give_finite_weights() -> None:
    x = inputs(0)
    for far in (-1000.0, 1000.0):
        there = PolicyInputs(x.log_prob, MASK, {**x.columns, "old_log_prob": x.log_prob.detach() - far}, x.expert)
        bad = there.advantages < 0
        topr = LOSSES["topr"](there).metrics["train/score_weight"]
        assert topr[MASK & bad].max() == (1.0 if far > 0 else math.exp(-LOG_RATIO_BOUND))
        assert LOSSES["vespo"](there).metrics["train/score_weight"][MASK].max() < 1e-15


# --------------------------------------------------------------------------- replies of an expert


def surrogate(token: Token, low: float, high: float, dual: float | None) -> Slow:
    """PPO's loss of a token."""
    r = token.ratio()
    clipped = min(max(r, 1 - low), 1 + high)
    loss, slope = max((-token.a * r, -token.a * r), (-token.a * clipped, 0.0 if clipped != r else -token.a * r))
    held = dual is not None and token.a < 0 and loss > -token.a * dual
    if dual is not None and held:
        loss, slope = -token.a * dual, 0.0
    metrics = {"train/clip_fraction": -token.a * clipped > -token.a * r}
    return loss, slope, metrics if dual is None else {**metrics, "train/clip_fraction_lower": held}


def mixed(
    mu: float, phi: bool, *, low: float = 0.2, high: float = 0.2, dual: float | None = 3.0
) -> Callable[..., Slow]:
    def slow(row: int, token: Token) -> Slow:
        loss, slope, metrics = surrogate(token, low, high, dual)
        if row in EXPERTS:
            loss, slope, _ = _sft_phi(token) if phi else (-token.p, -1.0, {})
            metrics = dict.fromkeys(metrics, 0.0)
        share = mu if row in EXPERTS else 1 - mu
        return (
            share * loss,
            share * slope,
            {**metrics, "train/expert_share": mu, "train/expert_fraction": float(row in EXPERTS)},
        )

    return slow


def test_mix_is_the_surrogate_on_sampled_tokens_and_cross_entropy_on_an_experts() -> None:
    for seed in range(3):
        assert_slow("mix", {}, inputs(seed, EXPERTS), mixed(0.1, phi=False))
        options = {"mu": 0.6, "clip_low": 0.1, "clip_high": 0.3, "dual_clip": None}
        assert_slow("mix", options, inputs(seed, EXPERTS), mixed(0.6, phi=False, low=0.1, high=0.3, dual=None))


@pytest.mark.parametrize(("step", "mu"), [(0, 0.0), (1, 0.4), (2, 0.8), (4, 0.45), (6, 0.1), (50, 0.1)])
@pytest.mark.parametrize("phi", [True, False])
def test_mix_chord_follows_its_schedule(step: int, mu: float, phi: bool) -> None:
    schedule = {"mu_peak": 0.8, "mu_valley": 0.1, "mu_warmup_steps": 2, "mu_decay_steps": 4}
    assert_slow(
        "mix_chord", {**schedule, "phi": phi, "dual_clip": 1.2}, inputs(5, EXPERTS, step), mixed(mu, phi, dual=1.2)
    )


def test_without_steps_the_schedule_is_over_at_once() -> None:
    assert mu_schedule(0, 0, 0, 0.9, 0.2) == 0.2
    assert mu_schedule(0, 0, 8, 0.9, 0.2) == pytest.approx(0.9)
    assert mu_schedule(7, 8, 0, 0.9, 0.2) == pytest.approx(0.9 * 7 / 8)
    assert mu_schedule(8, 8, 0, 0.9, 0.2) == 0.2


# --------------------------------------------------------------------------- who averages what


MODES = {
    "token-mean": lambda rows: sum(map(sum, rows)) / sum(map(len, rows)),
    "token-sum": lambda rows: sum(map(sum, rows)),
    "seq-mean-token-sum": lambda rows: sum(map(sum, rows)) / len(rows),
    "seq-mean-token-mean": lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
    "seq-mean-token-sum-norm": lambda rows: sum(map(sum, rows)) / len(rows) / 5,
}


def objective_loss(x: PolicyInputs, which: PolicyObjective, entropy: Tensor) -> float:
    """The loss of an objective on these rows, all there is of a step."""
    rows = [row for row in range(len(MASK)) if bool((x.expert[row]).any())]
    totals = LossDenominators(
        int(MASK.sum()), int(MASK.any(-1).sum()), 5, expert_tokens=int(MASK[rows].sum()), expert_sequences=len(rows)
    )
    version = torch.where(x.expert.any(-1, keepdim=True), -1, 0).expand(MASK.shape)
    columns = {**x.columns, "rollout_log_prob": x.old_log_prob}
    return float(which.loss(LossInputs(MASK, version, columns, x.log_prob.detach(), entropy, step=x.step), totals).loss)


def by_row(values: Tensor, rows: Sequence[int]) -> list[list[float]]:
    return [values[row][MASK[row]].tolist() for row in rows if MASK[row].any()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("experts", [EXPERTS, (), (0, 1, 3, 4)])
def test_each_kind_is_averaged_over_its_own_count(mode: str, experts: tuple[int, ...]) -> None:
    x, entropy = inputs(7, experts), numbers(9).abs()
    term = ENTROPIES["sampled"]
    which = PolicyObjective(LOSSES["mix"], LOSSES["mix"].metadata, mode, entropy=Term(0.3, term, term.metadata))
    loss = LOSSES["mix"](x).loss.detach()
    others = [row for row in range(len(MASK)) if row not in experts]
    parts = [(by_row(loss, experts), 1.0), (by_row(loss, others), 1.0), (by_row(entropy, others), -0.3)]
    expected = sum(weight * MODES[mode](rows) for rows, weight in parts if rows)
    assert objective_loss(x, which, entropy) == pytest.approx(expected, rel=1e-12)


def test_entropy_of_all_tokens_is_averaged_over_all_of_them() -> None:
    x, entropy = inputs(7, EXPERTS), numbers(9).abs()
    for kind in ("exact", "sampled"):
        term = ENTROPIES[kind]
        with_bonus = PolicyObjective(LOSSES["mix"], LOSSES["mix"].metadata, entropy=Term(1.0, term, term.metadata))
        bonus = objective_loss(x, PolicyObjective(LOSSES["mix"], LOSSES["mix"].metadata), entropy) - objective_loss(
            x, with_bonus, entropy
        )
        rows = [row for row in range(len(MASK)) if kind == "exact" or row not in EXPERTS]
        assert bonus == pytest.approx(MODES["token-mean"](by_row(entropy, rows)), rel=1e-10)


def test_an_experts_ratio_is_not_reported_as_drift() -> None:
    x = inputs(7, EXPERTS)
    version = torch.where(x.expert, -1, 0)
    which = PolicyObjective(LOSSES["mix"], LOSSES["mix"].metadata)
    given = LossInputs(MASK, version, {**x.columns, "rollout_log_prob": x.old_log_prob}, x.log_prob, numbers(9))
    drift = (x.old_log_prob - x.log_prob)[MASK & ~x.expert].sum()
    torch.testing.assert_close(which.loss(given, LossDenominators(12, 4, 5)).sums["train/kl"], drift.detach())


# --------------------------------------------------------------------------- LUSPO


@pytest.mark.parametrize("kind", ["gspo", "gspo_sequence"])
def test_luspo_is_gspo_scaled_by_the_length_of_the_reply(kind: str) -> None:
    x = inputs(11)
    advantages = torch.tensor([[0.7], [-1.2], [0.0], [-0.4], [1.1]], dtype=torch.float64).expand(MASK.shape)
    x = PolicyInputs(x.log_prob, MASK, {**x.columns, "advantages": advantages}, x.expert)
    options = {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.25}
    found = PolicyObjective(lambda x: LOSSES[kind](x, **options), LOSSES[kind].metadata, "seq-mean-token-sum")
    expected, rows = 0.0, [row for row in range(len(MASK)) if MASK[row].any()]
    held = []
    for row in rows:
        inside = [token for i, _, token in tokens(x) if i == row]
        s, a, length = inside[0].ratio("sequence"), inside[0].a, len(inside)
        loss = max(-a * s, -a * min(max(s, 0.9), 1.2))
        held += [a < 0 and loss > -a * 1.25] * length
        expected += length * (min(loss, -a * 1.25) if a < 0 else loss) / len(rows)
    assert objective_loss(x, found, numbers(9)) == pytest.approx(expected, rel=1e-12)
    said = LOSSES[kind](x, **options).metrics["train/clip_fraction_lower"][MASK]
    assert said.tolist() == [float(value) for value in held]
