"""The basic objectives against the papers' equations, token by token, in python's own arithmetic."""

import math
from dataclasses import replace

import pytest
import torch
from algebra import finite_differences
from failing import refused
from torch import Tensor

from trivium.algorithms import PolicyInputs, PolicyObjective, ValueObjective, catalogue, compute_policy_loss
from trivium.algorithms.objective import Term
from trivium.foundation.errors import ConfigError
from trivium.models.heads.loss import LossDenominators, LossInputs

LOSSES = catalogue("policy_losses")
KL = catalogue("kl_estimators")
ENTROPY = catalogue("entropies")["exact"]
MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
TOTALS = LossDenominators(tokens=6, sequences=2, max_response_length=3)


def random(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def columns(log_prob: Tensor) -> dict[str, Tensor]:
    """Everything a loss could ask for; old log-probabilities around the current ones, some ratios far from 1."""
    old = log_prob.detach() + random(2, 0.5)
    return {"advantages": random(3), "old_log_prob": old, "rollout_log_prob": old, "ref_log_prob": random(4)}


def objective(name: str, **settings: object) -> PolicyObjective:
    return PolicyObjective(LOSSES[name], LOSSES[name].metadata, **settings)  # pyright: ignore[reportArgumentType]


def kl_term(coef: float, name: str = "low_var_kl") -> Term:
    return Term(coef, KL[name], KL[name].metadata)


def entropy_term(coef: float) -> Term:
    return Term(coef, ENTROPY, ENTROPY.metadata)


def loss_of(which: PolicyObjective, log_prob: Tensor, given: dict[str, Tensor]) -> Tensor:
    return which.loss(LossInputs(MASK, torch.zeros(MASK.shape), given, log_prob), TOTALS).loss


def test_ppo_is_the_equation() -> None:
    log_prob = random(1)
    given = columns(log_prob)
    found = LOSSES["ppo"](PolicyInputs(log_prob, MASK, given, ~MASK & MASK), clip_low=0.1, clip_high=0.3, dual_clip=1.5)
    for row, column in MASK.nonzero().tolist():
        advantage = float(given["advantages"][row, column])
        ratio = math.exp(float(log_prob[row, column] - given["old_log_prob"][row, column]))
        surrogate = min(ratio * advantage, min(max(ratio, 0.9), 1.3) * advantage)
        if advantage < 0:
            surrogate = max(surrogate, 1.5 * advantage)
        assert float(found.loss[row, column]) == pytest.approx(-surrogate, rel=1e-12)


def test_clip_metrics_count_the_tokens_that_clipping_decided() -> None:
    old = torch.zeros(1, 4)
    log_prob = torch.tensor([[0.5, -0.5, 0.0, 3.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    _, clipped, kl, held = compute_policy_loss(old, log_prob, advantages, torch.ones(1, 4), cliprange=0.2)
    assert float(clipped) == pytest.approx(2 / 4)
    assert float(held) == pytest.approx(1 / 4)
    assert float(kl) == pytest.approx(-3.0 / 4)


def test_compute_policy_loss_wants_a_clip_range() -> None:
    given = (torch.zeros(1, 2),) * 3
    with refused(ConfigError, "cliprange", "None"):
        compute_policy_loss(*given, torch.ones(1, 2))
    with refused(ConfigError, "clip_ratio_c 1.0"):
        compute_policy_loss(*given, torch.ones(1, 2), cliprange=0.2, clip_ratio_c=1.0)


def test_entropy_bonus_and_kl_penalty_enter_with_their_coefficients() -> None:
    log_prob, entropy = random(1), random(5).abs().where(MASK, 0.0)
    given = columns(log_prob)
    inputs = LossInputs(MASK, torch.zeros(MASK.shape), given, log_prob, entropy)
    plain = objective("ppo").loss(inputs, TOTALS)
    both = objective("ppo", entropy=entropy_term(0.2), kl=kl_term(0.5, "k2")).loss(inputs, TOTALS)
    k2 = ((log_prob - given["ref_log_prob"]) ** 2 / 2)[MASK].sum()
    assert objective("ppo", entropy=entropy_term(0.2), kl=kl_term(0.5)).needs >= {"entropy", "ref_log_prob"}
    torch.testing.assert_close(both.loss - plain.loss, (0.5 * k2 - 0.2 * entropy.sum()) / TOTALS.tokens)
    torch.testing.assert_close(both.sums["train/ref_kl"], k2)


def test_mismatch_compares_engine_and_trainer_where_an_engine_sampled() -> None:
    log_prob = random(1).where(MASK, 0.0)
    given = columns(log_prob) | {"rollout_log_prob": log_prob.clone()}
    given["rollout_log_prob"][0, 1] += 0.25
    given["rollout_log_prob"][1, 1] += 9.0  # an expert's token
    version = torch.zeros(MASK.shape, dtype=torch.int32)
    version[1, 1] = -1
    done = objective("ppo").loss(LossInputs(MASK, version, given, log_prob), TOTALS)
    assert float(done.maxima["mismatch/log_prob_max"]) == pytest.approx(0.25)
    assert float(done.sums["mismatch/kl"]) == pytest.approx(math.exp(-0.25) + 0.25 - 1)


def test_sft_is_the_cross_entropy_of_the_expert_tokens() -> None:
    log_prob = random(1)
    totals = replace(TOTALS, expert_tokens=6, expert_sequences=2)
    done = objective("sft").loss(LossInputs(MASK, torch.full(MASK.shape, -1), {}, log_prob), totals)
    torch.testing.assert_close(done.loss, -log_prob[MASK].mean())
    assert not done.maxima


def test_value_loss_is_the_equation_and_its_gradient() -> None:
    old, returns, values = random(1), random(2), random(3)
    which = ValueObjective(clip=0.3)
    given = {"values": old, "returns": returns, "rollout_log_prob": old}

    def loss(at: Tensor) -> Tensor:
        return which.loss(LossInputs(MASK, torch.zeros(MASK.shape), given, values=at), TOTALS).loss

    expected, clipped = 0.0, 0
    for row, column in MASK.nonzero().tolist():
        v, v_old, target = (float(t[row, column]) for t in (values, old, returns))
        held = min(max(v, v_old - 0.3), v_old + 0.3)
        expected += max((v - target) ** 2, (held - target) ** 2) / 2 / TOTALS.tokens
        clipped += (held - target) ** 2 > (v - target) ** 2
    assert float(loss(values)) == pytest.approx(expected, rel=1e-12)
    leaf = values.clone().requires_grad_(True)
    torch.testing.assert_close(
        torch.autograd.grad(loss(leaf), leaf)[0], finite_differences(loss, values), rtol=1e-6, atol=1e-8
    )
    done = which.loss(LossInputs(MASK, torch.zeros(MASK.shape), given, values=values), TOTALS)
    assert int(done.sums["train/value_clip_fraction"]) == clipped > 0


def test_importance_weights_multiply_the_policy_loss() -> None:
    log_prob, weights = random(1), random(6).abs()
    given = columns(log_prob) | {"rollout_is_weights": weights}
    per_token = LOSSES["ppo"](PolicyInputs(log_prob, MASK, given, ~MASK & MASK)).loss
    found = loss_of(objective("ppo", weighted=True), log_prob, given)
    torch.testing.assert_close(found, (per_token * weights)[MASK].sum() / TOTALS.tokens)
